"""The life of a server of TensorRT engines: a replaced file, and SIGTERM while the GPU is busy.

The GPU, CUDA and TensorRT are stand-ins, all above them is real; see `gpu_machine`.
"""

from __future__ import annotations

import shutil
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import deploykit as dk
from deploykit.building.builder import Shapes
from deploykit.core.files import sha256
from deploykit.serving.models.reload import Reloader
from tests.support.runtimes.gpu_machine import LAYERS, gpu_machine, plan
from tests.support.serving.faults import Process, answer, request, until

pytest.importorskip("onnxruntime")
SCRIPT = Path(__file__).resolve().parents[1] / "support" / "serving" / "serve_tensorrt.py"
WEIGHTS = 1 << 20


def test_sigterm_while_the_gpu_is_busy_answers_what_was_accepted(
    tmp_path: Path, affine_onnx: Path
) -> None:
    shutil.copyfile(affine_onnx, tmp_path / "m.onnx")
    command, env = [sys.executable, str(SCRIPT)], {"GPU_TAKES_S": "0.1"}
    options = "--max-batch", "2"
    with Process(tmp_path, *options, command=command, engine="m=m.trt", env=env) as server:
        (tmp_path / "hold").touch()
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(server.infer, float(n)) for n in range(8)]
            until(lambda: server.gauge("deploykit_requests_in_flight") >= 4)
            server.popen.send_signal(signal.SIGTERM)
            (tmp_path / "hold").unlink()
            answers = [each.result() for each in asked]
        right = [answers[n] == (200, [2.0 * n + 1]) for n in range(8)]
        assert sum(right) >= 4
        assert all(right[n] or answers[n][0] == 503 for n in range(8)), answers
        assert server.wait() == 0
        assert server.log_lines()[-1] == "held: {}"


class Machine:
    """A GPU, and m.trt that was built and proven on it."""

    def __init__(self, engine: Path, graph: Path, does: Any) -> None:
        self.engine, self._graph, self._does = engine, graph, does
        self.cuda, self.nv = does.seen["cuda"], does.seen["nv"]

    def build(self, batch: str) -> None:
        sizes = [int(size) for size in batch.split(",")]
        self._does.plan = plan((sizes[0], sizes[1], sizes[2]), layers=LAYERS, weights=WEIGHTS)
        dk.build(self._graph, "l4", out=self.engine, shapes=Shapes(batch=batch))


@pytest.fixture
def machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, affine_onnx: Path
) -> Iterator[Machine]:
    monkeypatch.setitem(Reloader.__init__.__kwdefaults__, "poll_s", 0.05)
    with gpu_machine(tmp_path, monkeypatch) as does:
        found = Machine(tmp_path / "m.trt", affine_onnx, does)
        found.build("1,4,4")
        yield found
        until(lambda: found.cuda.held() == {})


def read(url: str, body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as reply:
        content: bytes = reply.read()
        return content


def computes(server: dk.RunningServer) -> bool:
    reply = read(f"{server.url}/v2/models/m/infer", request(3.0, 4.0))
    return bool(answer(200, reply) == [7.0, 9.0])


def test_a_rebuilt_engine_is_served_and_the_old_one_gives_its_memory_back(machine: Machine) -> None:
    with dk.serve({"m": machine.engine}, grpc_port=None) as server:
        machine.build("1,2,8")
        now = sha256(machine.engine).encode()
        until(lambda: now in read(f"{server.url}/docs"))
        assert computes(server)
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
        assert computes(server)
        assert before in read(f"{server.url}/docs")
        assert machine.cuda.library_bytes == WEIGHTS
        machine.cuda.total_bytes = total
