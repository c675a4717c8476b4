"""Costs of graphs written for one test each, and the peaks of a made-up target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from deploykit.graph.cost import NodeCost
from tests.support.graphs.protos import node_costs
from tests.support.onnx_zoo import Shape

PEAKS = {"fp32": 1e12, "fp16": 4e12, "int8": 8e12}


def costs(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Shape],
    outputs: Sequence[str],
    weights: Mapping[str, np.ndarray] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, NodeCost]:
    """Costs by node name of a model whose output shapes are left to inference."""
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()]
    ends = [helper.make_empty_tensor_value_info(name) for name in outputs]
    stored = [onnx.numpy_helper.from_array(array, n) for n, array in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "g", values, ends, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return {cost.name: cost for cost in node_costs(model, sizes or {})}
