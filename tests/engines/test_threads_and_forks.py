"""An engine that a program keeps: threads share it, and a forked process has to open its own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from deploykit.engines.engine import CallGuard
from tests.support.installed import needs
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.tensorrt_opened import PROFILE, Opened, X, Y
from tests.support.serving.running import WAIT_S

OPENED = {
    "onnxruntime": "engine = dk.load(sys.argv[1])",
    "openvino": """
built = dk.build(sys.argv[1], profile="cpu-openvino", out=sys.argv[2])
engine = dk.load(built.path)
""",
    "torch": """
import torch
from deploykit.engines.torch.engine import TorchEngine
from deploykit.engines.torch.loaded import load_live
spec = dk.TensorSpec("x", "float32", ("N", 4))
engine = TorchEngine(load_live(torch.nn.ReLU(), [spec]), "m", "cpu", 1)
""",
    "server": """
server = dk.serve(sys.argv[1], http_port=0, grpc_port=None)
engine = lambda _: server.wait()
""",
}
FORK = """
import os, signal, sys
import numpy as np
import deploykit as dk
{opened}
x = {{"x": np.ones((2, 4), np.float32)}}
{first}
if os.fork() == 0:
    signal.alarm(20)
    try:
        engine(x)
    except dk.Unsupported as exc:
        print(exc.message, exc.hint, flush=True)
    os._exit(0)
os.wait()
{first}
{last}
"""


@pytest.mark.parametrize("kind", OPENED)
@pytest.mark.skipif(sys.platform == "win32", reason="it cannot fork")
def test_a_forked_process_is_refused_and_its_parent_goes_on(tmp_path: Path, kind: str) -> None:
    needs("onnxruntime" if kind == "server" else kind)
    first, last = ("", "server.close()") if kind == "server" else ("engine(x)", "")
    script = FORK.format(opened=OPENED[kind], first=first, last=last)
    path = save(linear(), tmp_path / "m.onnx")
    command = [sys.executable, "-c", script, path, tmp_path / "o.onnx"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S)
    assert done.returncode == 0, done.stderr
    words = "before this process was forked.*after the fork"
    assert re.search("belongs to the process" if kind == "server" else words, done.stdout)


def test_calls_of_several_threads_take_turns_on_a_gpu() -> None:
    opened = Opened((X, Y), (PROFILE,), slots=1)
    inputs = [np.full((1 + n % 4, 4), n, np.float32) for n in range(200)]
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda x: opened.engine({"x": x}), inputs)
        for x, found in zip(inputs, answers, strict=True):
            np.testing.assert_array_equal(found["y"], 2 * x + 1)


def test_a_guard_lets_one_thread_in() -> None:
    guard, inside, most = CallGuard("m"), [0], [0]

    def call(_: int) -> None:
        with guard:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            threading.Event().wait(0.001)
            inside[0] -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(20)))
    assert most == [1]
