"""The writers and readers of graphs, for tests that make and look at ONNX protobufs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from deploykit.core.profile import Profile
from deploykit.core.tensors import TensorSpec
from deploykit.engines.data.samples import Samples
from deploykit.evaluation import divergence as probes
from deploykit.evaluation import simulate as simulation
from deploykit.graph import cost, preflight
from deploykit.graph.edit import Editor
from deploykit.graph.graph import Graph, Summary
from deploykit.graph.storage import MAX_BYTES, load_data
from deploykit.quantization import half_precision, qdq, weights
from deploykit.quantization.calibrate import Calibration
from deploykit.quantization.calibrate import calibrate as calibrate_graph

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


def specs(model: Model) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    graph = Graph(model)
    return graph.inputs, graph.outputs


def summarise(model: Model) -> Summary:
    return Graph(model).summary


def element_types(model: Model) -> dict[str, int]:
    return Graph(model).element_types


def edit(model: Model) -> Editor:
    return Editor(Graph(model))


def calibrate(path: Path, samples: Samples, **options: Any) -> Calibration:
    return calibrate_graph(Graph.open(path), samples, **options)


def to_half(model: Model, *args: Any, **options: Any) -> tuple[Model, tuple[str, ...]]:
    half, kept = half_precision.to_half(Graph(model), *args, **options)
    return to_proto(half), kept


def to_pairs(model: Model, *args: Any, **options: Any) -> Model:
    return to_proto(qdq.to_pairs(Graph(model), *args, **options))


def to_weight_only(model: Model, *args: Any, **options: Any) -> Model:
    return to_proto(weights.to_weight_only(Graph(model), *args, **options))


def simulate(model: Model) -> Model:
    return to_proto(simulation.simulate(Graph(model)))


def quantizable(model: Model) -> tuple[str, ...]:
    return qdq.quantizable(Graph(model), "tensorrt")


def expose(model: Model, names: Sequence[str]) -> tuple[Model, list[str]]:
    graph, shown = probes.expose(Graph(model), names)
    return to_proto(graph), shown


def shared(a: Model, b: Model) -> tuple[probes.Pair, ...]:
    return probes.shared(Graph(a), Graph(b))


def node_costs(model: Model, sizes: Mapping[str, int]) -> tuple[cost.NodeCost, ...]:
    return cost.node_costs(Graph(model), sizes)


def mix(model: Model, sizes: Mapping[str, int]) -> cost.Mix:
    return cost.mix(Graph(model), sizes)


def unsupported(model: Model, profile: Profile) -> tuple[preflight.Problem, ...]:
    return preflight.unsupported(Graph(model), profile)
