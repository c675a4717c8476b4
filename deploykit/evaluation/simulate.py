"""Make a CPU compute as a GPU does in half precision: round every half tensor, compute in float32.

A GPU's matrix units take half inputs and add up in float32: each result is rounded to its type, and
overflows to infinity. ONNX Runtime's own CPU kernels for float16 hide both: what they lack they
compute in float32, through a whole chain of nodes without rounding. For bfloat16 it has hardly any.
"""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from deploykit.core.artefact import Artefact
from deploykit.core.extras import installed
from deploykit.core.precision import ALL, HALVES
from deploykit.core.runtime import RUNTIMES
from deploykit.engines.engine import Engine, OpenEngine, load
from deploykit.graph.edit import Editor
from deploykit.graph.graph import Graph
from deploykit.graph.parse import dtype_name, subgraphs

_FLOAT = TensorProto.FLOAT
_HALVES = frozenset(TensorProto.DataType.Value(each.onnx_type) for each in HALVES)


def simulate(source: Graph) -> Graph:
    """Return the graph with Casts to the half type and back after each node that makes it.

    Inputs and outputs keep their names and types, and so do half tensors between, which hold the
    rounded values. Nodes with bodies (If, Loop, Scan) stay as they are. ONNX Runtime 1.20 and newer
    keep these pairs of casts at every level of optimisation; run it at ORT_DISABLE_ALL all the
    same, since a fused node rounds less often. `source` is left as it is.
    """
    return _Writer(Editor(source), source.element_types).write()


class _Writer:
    """A half tensor keeps its name; its float32 twin is `NAME_float32`, which all nodes read."""

    def __init__(self, editor: Editor, types: dict[str, int]) -> None:
        self.editor = editor
        self.types = types
        self.twins: dict[str, str] = {}
        self.nodes: list[onnx.NodeProto] = []

    def write(self) -> Graph:
        for node in self.editor.graph.node:
            if any(True for _ in subgraphs(node)):
                self.nodes.append(node)
            else:
                self._add(node)
        return self.editor.finish(self.nodes)

    def _add(self, node: onnx.NodeProto) -> None:
        for place, name in enumerate(node.input):
            if self._half(name):
                node.input[place] = self._twin(name)
        made = {place: name for place, name in enumerate(node.output) if self._half(name)}
        for place, name in made.items():
            node.output[place] = self.editor.fresh(f"{name}_unrounded")
        for attribute in node.attribute:
            _widen(attribute)
        self.nodes.append(node)
        for place, name in made.items():
            kind = self.types[name]
            self.nodes.append(self.editor.node("Cast", [node.output[place]], name, to=kind))

    def _half(self, name: str) -> bool:
        return self.types.get(name) in _HALVES

    def _twin(self, name: str) -> str:
        if name not in self.twins:
            if name in self.editor.constants:
                values = self.editor.array(name).astype(np.float32)
                self.twins[name] = self.editor.store(f"{name}_float32", values)
            else:
                self.twins[name] = self.editor.fresh(f"{name}_float32")
                cast = self.editor.node("Cast", [name], self.twins[name], to=_FLOAT)
                self.nodes.append(cast)
        return self.twins[name]


def _widen(attribute: onnx.AttributeProto) -> None:
    """Replace half types in attributes: Cast's `to`, `dtype`, the value of a Constant."""
    if attribute.name in ("to", "dtype", "output_dtype") and attribute.i in _HALVES:
        attribute.i = _FLOAT
    elif attribute.HasField("t") and attribute.t.data_type in _HALVES:
        values = numpy_helper.to_array(attribute.t).astype(np.float32)
        attribute.t.CopyFrom(numpy_helper.from_array(values, attribute.t.name))


def runs_graphs(runtime: str) -> bool:
    """Return whether `runtime` opens ONNX files on this machine's CPU."""
    found = RUNTIMES[runtime]
    return "onnx" in found.opens and all(map(installed, found.modules))


def open_graph(runtime: str, graph: Graph, folder: Path) -> Engine:
    """Open a graph in its own runtime if that opens graphs here, else as `open_rounded` does."""
    if not runs_graphs(runtime):
        return open_rounded(graph, folder)
    open_engine: OpenEngine = resolve_name(RUNTIMES[runtime].engine)
    return open_engine(Artefact(graph.path), "cpu", None, False)


def open_rounded(graph: Graph, folder: Path) -> Engine:
    """Open a graph in ONNX Runtime, its half tensors rounded to their type as on a GPU."""
    from deploykit.engines.onnxruntime.engine import open_as_written

    rounded = round_halves(graph)
    if rounded is graph:
        return load(graph.path, "cpu")
    return open_as_written(rounded.save(folder / "rounded.onnx", temporary=True).path)


def round_halves(graph: Graph) -> Graph:
    """Return a graph that rounds half tensors on a CPU too; `graph` itself where it has none."""
    types = {dtype_name(kind) for kind in graph.element_types.values()}
    return simulate(graph) if any(each.simulated and each.dtype in types for each in ALL) else graph
