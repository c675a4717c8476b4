"""Data that fit a zoo graph, its quantized form, and what to look for in that."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from deploykit.building.onnxruntime import build
from deploykit.engines.data.samples import Samples, random_feeds
from deploykit.engines.engine import load
from deploykit.quantization.qdq import Calibration, Range
from tests.support.graphs.protos import calibrate, specs, to_pairs
from tests.support.onnx_zoo import conv_relu, int64_ids, linear, mnist_like, save


def feeds(model: onnx.ModelProto, count: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    return random_feeds(specs(model)[0], {"N": count}, seed)


def samples(model: onnx.ModelProto, count: int = 16, seed: int = 0) -> Samples:
    return Samples(feeds(model, count, seed), None, "data.npz")


def calibration(ranges: Mapping[str, Range]) -> Calibration:
    return Calibration(ranges, ranges, 16, "minmax")


def sqnr_db(wanted: np.ndarray, got: np.ndarray) -> float:
    """Signal to quantization noise, in decibels: 10 more is a third of the error."""
    return float(10 * np.log10(np.sum(wanted**2) / np.sum((wanted - got) ** 2)))


def in_true_halves(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs by numpy's float16, which overflows as a GPU does; ONNX Runtime on a CPU hides it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return [np.asarray(value) for value in ReferenceEvaluator(model).run(None, inputs)]


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
