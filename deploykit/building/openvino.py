"""Write an ONNX file that names OpenVINO as its runtime, and read back what its layers run in.

OpenVINO compiles for the CPU that it finds, each time a file is opened: the file holds the graph.
"""

from __future__ import annotations

from pathlib import Path

from deploykit.building.builder import BuildResult, Shapes, check_one_file
from deploykit.core.artefact import Artefact
from deploykit.core.profile import Profile
from deploykit.core.runtime import RUNTIMES
from deploykit.engines.openvino import open_engine
from deploykit.graph.graph import Graph

_PRODUCER = RUNTIMES["openvino"].magic[1][2:].decode()


def build_engine(
    model: Artefact, out: Path, target: Profile, _shapes: Shapes, _on_progress: object
) -> BuildResult:
    """Mark the graph and compile it once. Raises Unsupported, also for more than a file holds."""
    check_one_file(model.path)
    graph = Graph.open(model.path)
    marked = type(graph.model)()
    marked.CopyFrom(graph.model)
    marked.producer_name = _PRODUCER
    Graph(marked, graph.path).save(out)
    with open_engine(out, "cpu") as engine:
        return BuildResult(
            {"runtime": engine.runtime, "device": "cpu", "profile": target.name},
            layers=engine.layers,
            notes=engine.notes,
        )
