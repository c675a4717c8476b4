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
    editor, types = Editor(source), source.element_types
    nodes: list[onnx.NodeProto] = []
    twins: dict[str, str] = {}  # a half tensor -> its twin in float32, which all nodes read

    def twin(name: str) -> str:
        if types.get(name) not in _HALVES:
            return name
        if name not in twins and name in editor.constants:
            twins[name] = editor.store(f"{name}_float32", editor.array(name).astype(np.float32))
        elif name not in twins:
            twins[name] = editor.fresh(f"{name}_float32")
            nodes.append(editor.node("Cast", [name], twins[name], to=_FLOAT))
        return twins[name]

    for node in editor.graph.node:
        casts = []
        if not any(subgraphs(node)):
            node.input[:] = [twin(name) for name in node.input]
            for place, name in enumerate(node.output):
                if types.get(name) in _HALVES:
                    node.output[place] = editor.fresh(f"{name}_unrounded")
                    casts.append(editor.node("Cast", [node.output[place]], name, to=types[name]))
            for attribute in node.attribute:
                _widen(attribute)
        nodes += [node, *casts]
    return editor.finish(nodes)


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
