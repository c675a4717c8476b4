"""Serving a TensorRT engine: shared weights, CUDA graphs, memory, a replaced file.

The GPU, CUDA and TensorRT are stand-ins, all above them is real; see `gpu_machine`.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import deploykit as dk
from deploykit.building.builder import Shapes
from deploykit.core.errors import OutOfMemory
from deploykit.core.files import sha256
from deploykit.serving.models.reload import Reloader
from tests.support.runtimes.gpu_machine import LAYERS, gpu_machine, plan
from tests.support.serving.faults import answer, request, until

pytest.importorskip("onnxruntime")
WEIGHTS, CONTEXT = 1 << 20, 1 << 10


class Machine:
    """A GPU, and m.trt of y = 2x + 1 that was built and proven on it."""

    def __init__(self, engine: Path, graph: Path, does: Any, context: int) -> None:
        self.engine, self._graph, self._does, self._context = engine, graph, does, context
        self.cuda, self.nv = does.seen["cuda"], does.seen["nv"]

    def build(self, batch: str) -> None:
        low, usual, high = (int(size) for size in batch.split(","))
        sizes = {"weights": WEIGHTS, "context": self._context}
        self._does.plan = plan((low, usual, high), layers=LAYERS, **sizes)
        dk.build(self._graph, "l4", out=self.engine, shapes=Shapes(batch=batch))


@pytest.fixture(params=["1,4,4"])
def machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    affine_onnx: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Machine]:
    """Built for the batches of the parameter, with contexts of CONTEXT bytes if there is one."""
    monkeypatch.setitem(Reloader.__init__.__kwdefaults__, "poll_s", 0.05)
    with gpu_machine(tmp_path, monkeypatch) as does:
        context = 0 if request.param == "1,4,4" else CONTEXT
        found = Machine(tmp_path / "m.trt", affine_onnx, does, context)
        found.build(request.param)
        assert found.cuda.held() == {}
        yield found
        until(lambda: found.cuda.held() == {})


to_20 = pytest.mark.parametrize("machine", ["1,8,20"], indirect=True)


def read(url: str, body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as reply:
        content: bytes = reply.read()
        return content


def computes(server: dk.RunningServer, *values: float) -> bool:
    reply = read(f"{server.url}/v2/models/m/infer", request(*values))
    return bool(answer(200, reply) == [2 * value + 1 for value in values])


@to_20
@pytest.mark.parametrize("instances", [1, 3])
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
            return all(computes(server, *range(n, n + 1 + (number + n) % 6)) for n in range(5))

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(client, range(8)))
        assert cuda.count["pin"] == before["pin"]
        assert cuda.count["launch"] > before["launch"]
        assert cuda.count["enqueue"] == before["enqueue"]
        cuda.total_bytes = 1 << 30
    assert server.close() == 0


@to_20
@pytest.mark.parametrize("left", [2 * CONTEXT, 16 * CONTEXT], ids=["slot", "graphs"])
def test_memory_that_does_not_suffice_is_refused_when_the_server_starts(
    machine: Machine, left: int
) -> None:
    machine.cuda.total_bytes = WEIGHTS + CONTEXT + left
    with pytest.raises(OutOfMemory, match="free of") as caught:
        dk.serve({"m": str(machine.engine)}, instances=2, grpc_port=None)
    assert caught.value.exit_code == 3
    assert "`instances`" in str(caught.value.hint)


def test_a_rebuilt_engine_is_served_and_the_old_one_gives_its_memory_back(machine: Machine) -> None:
    with dk.serve({"m": machine.engine}, grpc_port=None) as server:
        machine.build("1,2,8")
        now = sha256(machine.engine).encode()
        until(lambda: now in read(f"{server.url}/v2/models/m"))
        assert computes(server, 3.0, 4.0)
        until(lambda: machine.cuda.library_bytes == WEIGHTS)


def cut(machine: Machine) -> None:
    whole = machine.engine.read_bytes()
    machine.engine.write_bytes(whole[: len(whole) // 2])


def too_large(machine: Machine) -> None:
    machine.build("1,2,8")
    machine.cuda.total_bytes = machine.cuda.used_bytes + WEIGHTS // 2


def refused_by_tensorrt(machine: Machine) -> None:
    machine.build("1,2,8")
    machine.nv.fail["deserialize_cuda_engine"] = "Serialization assertion failed."


@pytest.mark.parametrize(
    ("replace", "why"),
    [
        (cut, "SHA-256 differs"),
        (too_large, "out of memory"),
        (refused_by_tensorrt, "Serialization assertion failed"),
        (lambda machine: machine.build("1,2,2"), "batches of 2 at most"),
    ],
    ids=["cut", "too-large", "refused", "smaller-batches"],
)
def test_an_engine_that_cannot_be_used_leaves_the_old_one_in_use(
    machine: Machine,
    replace: Callable[[Machine], None],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with dk.serve({"m": machine.engine}, grpc_port=None) as server:
        before, total = sha256(machine.engine).encode(), machine.cuda.total_bytes
        replace(machine)
        until(lambda: why in caplog.text)
        assert computes(server, 3.0, 4.0)
        assert before in read(f"{server.url}/v2/models/m")
        assert machine.cuda.library_bytes == WEIGHTS
        machine.cuda.total_bytes = total
