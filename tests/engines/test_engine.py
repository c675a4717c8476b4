"""Opening an artefact by its content, and the check of feeds before a runtime sees them."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from deploykit.core.errors import BadInput, DeploykitError, NotFound, Unsupported
from deploykit.core.machine import Gpu, this_machine
from deploykit.core.tensors import TensorSpec
from deploykit.engines import engine as runtimes
from deploykit.engines.engine import FeedCheck, check_feeds, load
from tests.support.installed import needs
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.gpu_machine import PROFILE, Opened, X, Y
from tests.support.serving.running import WAIT_S

ROW = TensorSpec("a", "float32", ("N", 4))
BARE = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


def zeros(*shape: int, kind: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, kind)


def test_content_decides_not_the_name(affine_onnx: Path) -> None:
    pytest.importorskip("onnxruntime")
    renamed = affine_onnx.rename(affine_onnx.with_suffix(".trt"))
    with load(renamed, "cpu") as engine:
        assert engine.runtime.startswith("onnxruntime")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"device": name}, "`device`: unknown value")
            for name in ("gpu", "cuda:", "cuda:x", "CPU", "", "cpu\n")
        ),
        ({"threads": 0}, "`threads` must be 1 or more"),
        ({"cuda_graphs": [4, 0]}, "`cuda_graphs` are batch sizes of 1 or more"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused(
    affine_onnx: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        load(str(affine_onnx), **options)


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (None, NotFound, r"m\.file: no such file"),
        (len(BARE).to_bytes(8, "little") + BARE + bytes(4), BadInput, "not say what the model"),
    ],
    ids=["missing", "bare weights"],
)
def test_a_missing_file_and_bare_weights_are_refused(
    tmp_path: Path, content: bytes | None, error: type[Exception], says: str
) -> None:
    path = tmp_path / "m.file"
    if content is not None:
        path = path.with_suffix(".safetensors")
        path.write_bytes(content)
    with pytest.raises(error, match=says):
        load(path)


def test_a_tensorrt_engine_without_a_gpu_gives_no_hint_to_install_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.trt"
    path.write_bytes(b"ftrt" + bytes(60))
    here = replace(this_machine(), gpus=(), l4t=None)
    monkeypatch.setattr(runtimes, "this_machine", lambda: here)
    monkeypatch.setattr(runtimes, "installed", lambda _: False)
    with pytest.raises(Unsupported, match="this machine has no NVIDIA GPU") as caught:
        load(path)
    assert caught.value.exit_code == 3
    assert "pip install" not in (caught.value.hint or "")
    gpu = Gpu("NVIDIA L4", 24_000_000_000, "580.0", "8.9")
    monkeypatch.setattr(runtimes, "this_machine", lambda: replace(here, gpus=(gpu,)))
    with pytest.raises(DeploykitError) as caught_too:
        load(path)
    assert "no NVIDIA GPU" not in caught_too.value.message


def test_a_repeated_shape_is_known_as_such_and_not_checked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []

    def counting(*arguments: Any) -> None:
        looked.append(1)
        check_feeds(*arguments)

    monkeypatch.setattr("deploykit.engines.engine.check_feeds", counting)
    check = FeedCheck((ROW,), "m")
    assert [check({"a": zeros(n, 4)}) for n in (3, 3, 5, 5, 3, 3)] == [False, True] * 3
    assert len(looked) == 2


def test_a_mask_that_onnx_runtime_does_not_broadcast_is_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    head = '<ir_version: 10, opset_import: ["" : 23]> g '
    sizes = "(float[N,1,T,4] x, float[N,1,1,T] mask) => (float[N,1,T,4] y)"
    model = onnx.parser.parse_model(f"{head}{sizes} {{ [a] y = Attention(x, x, x, mask) }}")
    onnx.save(model, tmp_path / "m.onnx")
    feeds = {"x": np.ones((1, 1, 3, 4), np.float32), "mask": zeros(1, 1, 1, 3)}
    refused = pytest.raises((BadInput, Unsupported))  # before 1.24: Unsupported
    with load(tmp_path / "m.onnx", "cpu") as engine, refused as caught:
        engine(feeds)
    why = "inconsistent q_sequence_length (between attn_mask and Q)"
    assert caught.value.message.startswith(f"{tmp_path / 'm.onnx'}: ONNX Runtime ")
    assert caught.value.message.endswith(f": node 'a' (Attention): {why}")
    assert "Expand before the Attention" in (caught.value.hint or "")
    assert capfd.readouterr().err == ""


# an engine that a program keeps: threads share it, and a forked process has to open its own


TORCH = """
import torch
from deploykit.engines.torch.engine import TorchEngine
from deploykit.engines.torch.loaded import Loaded
class Half(torch.nn.Module):
    def forward(self, x): return (torch.relu(x),)
specs = [(dk.TensorSpec(name, "float32", ("N", 4)),) for name in "xy"]
engine = TorchEngine(Loaded(Half(), *specs, "checkpoint"), "m", "cpu", 1)
"""
OPENVINO = """
built = dk.build(sys.argv[1], profile="cpu-openvino", out=sys.argv[2])
engine = dk.load(built.path)
"""
SERVER = """
server = dk.serve(sys.argv[1], http_port=0, grpc_port=None)
engine = lambda _: server.wait()
"""
OPENED = {
    "onnxruntime": "engine = dk.load(sys.argv[1])",
    "openvino": OPENVINO,
    "torch": TORCH,
    "server": SERVER,
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
