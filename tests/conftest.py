"""Fixtures for every test: one engine per runtime, all of the same model, y = 2x + 1.

A runtime that this machine lacks is skipped with its reason; `pytest -ra` (our default) prints it.
"""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.engine import Engine
from deploykit.runtimes.fake import FakeEngine

# A shell starts background jobs with SIGINT ignored, and children inherit that; here it must work.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

WIDTH = 4
AFFINE_INPUT = TensorSpec("x", "float32", ("N", WIDTH))
AFFINE_OUTPUT = TensorSpec("y", "float32", ("N", WIDTH))

_AFFINE_TORCH = """
import torch

class Affine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("shift", torch.tensor(1.0))

    def forward(self, x):
        return x * self.scale + self.shift
"""


def affine_model() -> onnx.ModelProto:
    """The model y = 2x + 1 on float32[N,4], as ONNX."""
    shape = ["N", WIDTH]
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "two"], ["m"]),
            helper.make_node("Add", ["m", "one"], ["y"]),
        ],
        "affine",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
        [
            onnx.numpy_helper.from_array(np.array(2, np.float32), "two"),
            onnx.numpy_helper.from_array(np.array(1, np.float32), "one"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.fixture
def affine_onnx(tmp_path: Path) -> Path:
    """The file of `affine_model`."""
    path = tmp_path / "affine.onnx"
    path.write_bytes(affine_model().SerializeToString())
    return path


def _fake(folder: Path) -> Engine:
    return FakeEngine(width=WIDTH)


def _onnxruntime(folder: Path, device: str = "cpu") -> Engine:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    from deploykit.runtimes.onnxruntime import open_engine

    path = folder / "affine.onnx"
    path.write_bytes(affine_model().SerializeToString())
    return open_engine(path, device)


def _onnxruntime_cuda(folder: Path) -> Engine:
    ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA provider")
    return _onnxruntime(folder, "cuda")


def _torch(folder: Path) -> Engine:
    """A deploykit checkpoint whose architecture is a file, as with `--arch ./affine.py:Affine`."""
    pytest.importorskip("torch", reason="torch is not installed")
    from deploykit.core.resources import import_object
    from deploykit.runtimes.torch import TorchEngine, load_module, save_checkpoint

    (folder / "affine.py").write_text(_AFFINE_TORCH, encoding="utf-8")
    arch = f"{folder / 'affine.py'}:Affine"
    build = import_object(arch)
    assert callable(build)
    path = folder / "affine.pt"
    save_checkpoint(path, build(), "affine", [AFFINE_INPUT], [AFFINE_OUTPUT])
    return TorchEngine(load_module(path, arch=arch), path.name, "cpu", None)


def _tensorrt(folder: Path) -> Engine:
    if importlib.util.find_spec("tensorrt") is None:
        pytest.skip("tensorrt is not installed")
    pytest.skip("this version of deploykit has no TensorRT runtime")


OPENERS: dict[str, Callable[[Path], Engine]] = {
    "fake": _fake,
    "onnxruntime-cpu": _onnxruntime,
    "onnxruntime-cuda": _onnxruntime_cuda,
    "torch": _torch,
    "tensorrt": _tensorrt,
}
_MARKS = {
    "onnxruntime-cuda": [pytest.mark.gpu],
    "torch": [pytest.mark.torch],
    "tensorrt": [pytest.mark.gpu],
}


@pytest.fixture(params=[pytest.param(name, marks=_MARKS.get(name, [])) for name in OPENERS])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """The model y = 2x + 1 on x float32[N,4], in each runtime."""
    with OPENERS[request.param](tmp_path) as opened:
        yield opened


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files anew, for review"
    )
