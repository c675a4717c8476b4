"""Quantized graphs of the zoo and what to look for in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from deploykit.building.onnxruntime import build
from deploykit.engines.engine import load
from deploykit.quantization.calibrate import Calibration
from tests.support.graphs.data import samples, sqnr_db
from tests.support.graphs.protos import calibrate, to_pairs
from tests.support.onnx_zoo import conv_relu, int64_ids, linear, mnist_like, save

ZOO = [linear, conv_relu, int64_ids, mnist_like]


Make = Callable[[], onnx.ModelProto]


def quantized(
    model: onnx.ModelProto, tmp_path: Path, runtime: str = "tensorrt"
) -> tuple[onnx.ModelProto, Calibration]:
    path = save(model, tmp_path / "float.onnx")
    found = calibrate(path, samples(model, 256), method="minmax")
    return to_pairs(model, found, runtime=runtime), found


def stored(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def with_weight(model: onnx.ModelProto, name: str, array: np.ndarray) -> onnx.ModelProto:
    (tensor,) = (t for t in model.graph.initializer if t.name == name)
    tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), name))
    return model


def pairs(model: onnx.ModelProto, kind: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == kind]


def run(model: onnx.ModelProto, inputs: dict[str, np.ndarray], path: Path) -> np.ndarray:
    with load(save(model, path), "cpu") as engine:
        return next(iter(engine(inputs).values()))


def quality_db(
    model: onnx.ModelProto, other: onnx.ModelProto, inputs: dict[str, np.ndarray], tmp_path: Path
) -> float:
    wanted = run(model, inputs, tmp_path / "wanted.onnx")
    return sqnr_db(wanted, run(other, inputs, tmp_path / "got.onnx"))


def optimised(model: onnx.ModelProto, tmp_path: Path) -> list[str]:
    """The operators of what ONNX Runtime makes of it, in order."""
    build(save(model, tmp_path / "optimise.onnx"), tmp_path / "optimised.onnx")
    return [node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node]


def writer_of(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if name in node.output)
