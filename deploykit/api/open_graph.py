"""Open an ONNX graph that is being converted as its runtime will compute it."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from deploykit.core.artefact import Artefact
from deploykit.core.extras import installed
from deploykit.core.precision import ALL
from deploykit.core.runtime import RUNTIMES

if TYPE_CHECKING:
    from deploykit.onnx_graph.graph import Graph
    from deploykit.runtimes.engine import Engine, OpenEngine


def runs_graphs(runtime: str) -> bool:
    """Whether `runtime`, of the table, opens ONNX files on this machine's CPU."""
    found = RUNTIMES[runtime]
    return "onnx" in found.opens and all(map(installed, found.modules))


def open_graph(runtime: str, graph: Graph, folder: Path) -> Engine:
    """By the runtime itself where it opens graphs here, else as `open_rounded` does."""
    if not runs_graphs(runtime):
        return open_rounded(graph, folder)
    open_engine: OpenEngine = resolve_name(RUNTIMES[runtime].engine)
    return open_engine(Artefact(graph.path), "cpu", None, False)


def open_rounded(graph: Graph, folder: Path) -> Engine:
    """In ONNX Runtime, every float16 and bfloat16 tensor rounded to its type, as a GPU does."""
    from deploykit.onnx_graph.graph import dtype_name
    from deploykit.quantization import simulate
    from deploykit.runtimes.engine import load
    from deploykit.runtimes.onnxruntime.engine import open_as_written

    types = {dtype_name(kind) for kind in graph.element_types.values()}
    if not any(each.simulated and each.dtype in types for each in ALL):
        return load(graph.path, "cpu")
    rounded = simulate.simulate(graph).save(folder / "rounded.onnx", temporary=True)
    return open_as_written(rounded.path)
