"""Write an ONNX file that names OpenVINO as its runtime, and read back what its layers run in.

OpenVINO compiles for the CPU that it finds, each time a file is opened: the file holds the graph.
"""

from __future__ import annotations

from pathlib import Path

from deploykit.building.builder import BuildResult, Shapes
from deploykit.core.artefact import Artefact
from deploykit.core.errors import Unsupported
from deploykit.core.profile import Profile
from deploykit.core.runtime import RUNTIMES
from deploykit.engines.openvino import open_engine
from deploykit.graph.graph import Graph
from deploykit.graph.storage import MAX_BYTES

_PRODUCER = RUNTIMES["openvino"].magic[1][2:].decode()


def build_engine(
    model: Artefact, out: Path, target: Profile, _shapes: Shapes, _on_progress: object
) -> BuildResult:
    """Mark the graph and compile it once. Raises Unsupported, also for more than a file holds."""
    graph = Graph.open(model.path)
    marked = type(graph.model)()
    marked.CopyFrom(graph.model)
    marked.producer_name = _PRODUCER
    Graph(marked, graph.path).save(out)
    if (data := out.with_name(f"{out.name}.data")).exists():
        data.unlink()
        raise Unsupported(
            f"{model}: does not fit into one ONNX file, which holds at most {MAX_BYTES:,} bytes",
            hint="a lower precision is smaller (quantize)",
        )
    with open_engine(out, "cpu") as engine:
        return BuildResult(
            {"runtime": engine.runtime, "device": "cpu", "profile": target.name},
            layers=engine.layers,
            notes=engine.notes,
        )
