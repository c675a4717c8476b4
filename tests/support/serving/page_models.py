"""Small ONNX models whose answers tell what the page has sent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
HOSTILE = "<img src=x onerror=alert(1)>"


def bands(path: Path) -> Path:
    """Take image [N,1,28,28] -> bands [N,7]: the ink in each four of its columns."""
    weights = np.repeat(np.eye(7, dtype=np.float32), 4, axis=0)
    nodes = [
        helper.make_node("ReduceSum", ["image", "axes"], ["columns"], keepdims=0),
        helper.make_node("MatMul", ["columns", "weights"], ["bands"]),
    ]
    constants = {"axes": np.array([1, 2], np.int64), "weights": weights}
    inputs = {"image": (TensorProto.FLOAT, ["N", 1, 28, 28])}
    return _save(path, nodes, inputs, {"bands": (TensorProto.FLOAT, ["N", 7])}, constants)


def colours(path: Path) -> Path:
    """Take photo uint8 [N,24,32,3] -> the mean red, green and blue of its upper half [N,3]."""
    nodes = [
        helper.make_node("Slice", ["photo", "zero", "half", "axis"], ["upper"]),
        helper.make_node("Cast", ["upper"], ["values"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["values"], [HOSTILE], axes=[1, 2], keepdims=0),
    ]
    constants = {
        "zero": np.array([0], np.int64),
        "half": np.array([12], np.int64),
        "axis": np.array([1], np.int64),
    }
    inputs = {"photo": (TensorProto.UINT8, ["N", 24, 32, 3])}
    return _save(path, nodes, inputs, {HOSTILE: (TensorProto.FLOAT, ["N", 3])}, constants)


def sums(path: Path) -> Path:
    """Take a float32 [N,2] and b int64 [N,2] -> their sum in float64, and b as it came."""
    nodes = [
        helper.make_node("Cast", ["a"], ["wide_a"], to=TensorProto.DOUBLE),
        helper.make_node("Cast", ["b"], ["wide_b"], to=TensorProto.DOUBLE),
        helper.make_node("Add", ["wide_a", "wide_b"], ["sum"]),
        helper.make_node("Identity", ["b"], ["same"]),
    ]
    inputs = {"a": (TensorProto.FLOAT, ["N", 2]), "b": (TensorProto.INT64, ["N", 2])}
    outputs = {"sum": (TensorProto.DOUBLE, ["N", 2]), "same": (TensorProto.INT64, ["N", 2])}
    return _save(path, nodes, inputs, outputs, {})


def _save(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[str | int]]],
    outputs: dict[str, tuple[int, list[str | int]]],
    constants: dict[str, np.ndarray],
) -> Path:
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
        [helper.make_tensor_value_info(name, *spec) for name, spec in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path
