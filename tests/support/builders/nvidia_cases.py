"""The models, options and marks shared by the tests that ask the builder that is here."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploykit.building.tensorrt.build import BuildCheck, check
from deploykit.building.tensorrt.options import AxisRange, Options
from deploykit.core.profile import load_profile
from tests.support.onnx_zoo import save
from tests.support.runtimes import fake_tensorrt

BATCH = AxisRange(1, 4, 8)
ask = pytest.mark.nvidia
needs = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt") is None, reason="tensorrt is not installed"
)
INT8 = TensorProto.INT8


def options(workspace_bytes: int = 1 << 30, batch: AxisRange = BATCH, **more: Any) -> Options:
    l4 = replace(load_profile("l4"), workspace_bytes=workspace_bytes)
    return fake_tensorrt.options(l4, batch, **more)


def checked(model: onnx.ModelProto, tmp_path: Path, **more: Any) -> BuildCheck:
    return check(save(model, tmp_path / "m.onnx"), options(**more))


def raw(
    nodes: list[onnx.NodeProto],
    weights: dict[str, np.ndarray] | None = None,
    *,
    kind: int = TensorProto.FLOAT,
    domain: str = "",
) -> onnx.ModelProto:
    """From x [N,4] to y of one kind; not checked, as refused graphs are what is wanted."""
    shape = ["N", 4]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", 18)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def quantized(zero: np.ndarray, stored: np.ndarray | None = None) -> onnx.ModelProto:
    """A pair on x with zero point `zero`, or `stored` dequantized and added to x."""
    weights = {"s": np.array(0.1, np.float32), "z": zero}
    if stored is None:
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q"),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], name="dq"),
        ]
        return raw(nodes, weights)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["f"], name="bias_dq"),
        helper.make_node("Add", ["x", "f"], ["y"], name="add"),
    ]
    return raw(nodes, {**weights, "w": stored})


def foreign() -> onnx.ModelProto:
    return raw([helper.make_node("Magic", ["x"], ["y"], name="m", domain="acme")], domain="acme")
