"""The writers and readers of graphs, for tests that make and look at ONNX protobufs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from deploykit.engines.data.samples import Samples
from deploykit.evaluation import divergence as probes
from deploykit.graph import cost, preflight
from deploykit.graph.edit import Editor
from deploykit.graph.graph import Graph
from deploykit.graph.storage import MAX_BYTES, load_data
from deploykit.quantization import half_precision, qdq, weights
from deploykit.quantization.calibrate import calibrate as calibrate_graph
from deploykit.quantization.qdq import Calibration

Model = onnx.ModelProto


def to_proto(graph: Graph) -> Model:
    """A copy with all weights in memory."""
    model = Model()
    model.CopyFrom(graph.model)
    for tensor in model.graph.initializer:
        load_data(tensor, graph.path.parent)
    return model


def load_graph(path: Path) -> Model:
    return to_proto(Graph.open(path))


def save_graph(model: Model, out: Path, *, limit_bytes: int = MAX_BYTES) -> Graph:
    return Graph(model).save(out, limit_bytes=limit_bytes)


def calibrate(path: Path, samples: Samples, **options: Any) -> Calibration:
    return calibrate_graph(Graph.open(path), samples, **options)


def _reader(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a Graph as one of a protobuf."""
    return lambda model, *args, **options: function(Graph(model), *args, **options)


def _writer(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same where the result is a graph, or begins with one."""

    def write(model: Model, *args: Any, **options: Any) -> Any:
        found = function(Graph(model), *args, **options)
        return to_proto(found) if isinstance(found, Graph) else (to_proto(found[0]), *found[1:])

    return write


specs = _reader(lambda graph: (graph.inputs, graph.outputs))
summarise = _reader(lambda graph: graph.summary)
element_types = _reader(lambda graph: graph.element_types)
edit = _reader(Editor)
node_costs = _reader(cost.node_costs)
mix = _reader(cost.mix)
unsupported = _reader(preflight.unsupported)
quantizable = _reader(lambda graph: qdq.quantizable(graph, "tensorrt"))
to_half = _writer(half_precision.to_half)
to_pairs = _writer(qdq.to_pairs)
to_weight_only = _writer(weights.to_weight_only)
simulate = _writer(half_precision.simulate)
expose = _writer(probes.expose)


def shared(a: Model, b: Model) -> dict[str, tuple[str, onnx.NodeProto]]:
    return probes.shared(Graph(a), Graph(b))
