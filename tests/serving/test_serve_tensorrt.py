"""Serving a TensorRT engine: shared weights, CUDA graphs, batches in flight, memory at the start.

The GPU, CUDA and TensorRT are stand-ins, all above them is real; see `gpu_machine`.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.building.builder import Shapes
from deploykit.core.errors import OutOfMemory
from deploykit.serving.options import ServeOptions
from tests.support.runtimes.gpu_machine import LAYERS, gpu_machine, plan

pytest.importorskip("onnxruntime")
WEIGHTS, CONTEXT = 1 << 20, 1 << 10


class Machine:
    """A GPU and an engine of y = 2x + 1 that was built and proven on it, for batches of 1 to 20."""

    def __init__(self, seen: dict[str, Any], engine: Path) -> None:
        self.cuda, self.nv, self.engine = seen["cuda"], seen["nv"], engine


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, affine_onnx: Path
) -> Iterator[Machine]:
    content = plan((1, 8, 20), layers=LAYERS, weights=WEIGHTS, context=CONTEXT)
    with gpu_machine(tmp_path, monkeypatch, content=content) as does:
        made = dk.build(affine_onnx, "l4", shapes=Shapes(batch="1,8,20"))
        found = Machine(does.seen, made.path)
        assert found.cuda.held() == {}
        yield found
        assert found.cuda.held() == {}


def ask(url: str, x: np.ndarray) -> np.ndarray:
    item = {"name": "x", "datatype": "FP32", "shape": x.shape, "data": x.ravel().tolist()}
    body = json.dumps({"inputs": [item]}).encode()
    request = urllib.request.Request(f"{url}/v2/models/m/infer", body)
    with urllib.request.urlopen(request, timeout=60) as reply:
        (output,) = json.loads(reply.read())["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


@pytest.mark.parametrize("instances", [1, 2, 3])
def test_every_number_of_engines_gives_the_right_answers(machine: Machine, instances: int) -> None:
    cuda, slots = machine.cuda, instances * 2
    options = {"instances": instances, "reload": False}
    with dk.serve({"m": str(machine.engine)}, grpc_port=None, **options) as server:
        assert len(cuda.streams) == slots
        contexts = len(machine.nv.contexts)
        assert cuda.library_bytes == WEIGHTS + contexts * CONTEXT  # the weights once
        assert contexts == slots * 7  # of 1, 2, 4, 8, 16, 20 and other rows
        cuda.total_bytes = cuda.used_bytes  # no call takes memory any more
        before = cuda.count.copy()

        def client(number: int) -> bool:
            for n in range(5):
                x = np.arange(4 * (1 + (number + n) % 6), dtype=np.float32).reshape(-1, 4) + n
                if not np.array_equal(ask(server.url, x), 2 * x + 1):
                    return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(client, range(8)))
        assert cuda.count["pin"] == before["pin"]
        assert cuda.count["launch"] > before["launch"]
        assert cuda.count["enqueue"] == before["enqueue"]
        cuda.total_bytes = 1 << 30
    assert server.close() == 0


@pytest.mark.parametrize("left", [2 * CONTEXT, 16 * CONTEXT], ids=["slot", "graphs"])
def test_memory_that_does_not_suffice_is_refused_when_the_server_starts(
    machine: Machine, left: int
) -> None:
    machine.cuda.total_bytes = WEIGHTS + CONTEXT + left
    with pytest.raises(OutOfMemory, match="free of") as caught:
        dk.serve({"m": str(machine.engine)}, instances=2, grpc_port=None)
    assert caught.value.exit_code == 3
    assert "`instances`" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("max_batch", "sizes"),
    [(1, (1,)), (32, (1, 2, 4, 8, 16, 32)), (20, (1, 2, 4, 8, 16, 20))],
)
def test_sizes_of_the_graphs(max_batch: int, sizes: tuple[int, ...]) -> None:
    assert ServeOptions(max_batch=max_batch).graph_sizes == sizes
