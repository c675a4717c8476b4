"""Opening an artefact by its content, and the check of feeds before a runtime sees them."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from deploykit.core.errors import BadInput, DeploykitError, NotFound, Unsupported
from deploykit.core.machine import Gpu, this_machine
from deploykit.engines import engine as runtimes
from deploykit.engines.engine import load
from tests.support.installed import needs
from tests.support.onnx_zoo import linear, save
from tests.support.serving.running import WAIT_S

BARE = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"device": name}, "`device`: unknown value") for name in ("gpu", "cuda:x", "", "cpu\n")),
        ({"threads": 0}, "`threads` must be 1 or more"),
        ({"cuda_graphs": [4, 0]}, "`cuda_graphs` are batch sizes of 1 or more"),
    ],
)
def test_a_wrong_option_is_refused(affine_onnx: Path, options: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load(str(affine_onnx), **options)


def test_a_missing_file_and_bare_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"m\.file: no such file"):
        load(tmp_path / "m.file")
    bare = tmp_path / "m.safetensors"
    bare.write_bytes(len(BARE).to_bytes(8, "little") + BARE + bytes(4))
    with pytest.raises(BadInput, match="not say what the model"):
        load(bare)


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


def test_a_mask_that_onnx_runtime_does_not_broadcast_is_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    head = '<ir_version: 10, opset_import: ["" : 23]> g '
    sizes = "(float[N,1,T,4] x, float[N,1,1,T] mask) => (float[N,1,T,4] y)"
    model = onnx.parser.parse_model(f"{head}{sizes} {{ [a] y = Attention(x, x, x, mask) }}")
    onnx.save(model, tmp_path / "m.onnx")
    feeds = {"x": np.ones((1, 1, 3, 4), np.float32), "mask": np.zeros((1, 1, 1, 3), np.float32)}
    refused = pytest.raises((BadInput, Unsupported))  # before 1.24: Unsupported
    with load(tmp_path / "m.onnx", "cpu") as engine, refused as caught:
        engine(feeds)
    why = "inconsistent q_sequence_length (between attn_mask and Q)"
    assert caught.value.message.startswith(f"{tmp_path / 'm.onnx'}: ONNX Runtime ")
    assert caught.value.message.endswith(f": node 'a' (Attention): {why}")
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
