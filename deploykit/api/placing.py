"""Place the INT8 pairs of a graph where the runtime of a build has kernels for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api import verify
from deploykit.api.calibration import calibration_record
from deploykit.api.evaluate import QuantizeRequest
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.profile import Profile
from deploykit.core.runtime import RUNTIMES

if TYPE_CHECKING:
    from deploykit.core.evidence import CalibrationRecord
    from deploykit.onnx_graph.graph import Graph
    from deploykit.quantization.calibrate import Range
    from deploykit.quantization.moving import Moved

_FOLLOW = (
    "the INT8 pairs, placed for TensorRT, were placed for the CPU with the ranges that the "
    "graph records or that follow from its scales"
)
_MEASURED = (
    "the INT8 pairs were placed for the CPU; ranges that the graph does not hold are those of "
    "the calibration data"
)
_PRODUCTS = frozenset(("Conv", "Gemm", "MatMul"))
# operator in integers -> the place of its weights
_KERNELS = {"QLinearConv": 3, "QLinearMatMul": 3, "QGemm": 3, "MatMulIntegerToFloat": 1}


@dataclass(frozen=True)
class Placed:
    """The graph to build from, notes on its pairs, and the data that gave them ranges."""

    graph: Graph
    notes: tuple[str, ...] = ()
    calibration: CalibrationRecord | None = None


def place_for_target(
    source: Artefact, request: QuantizeRequest, target: Profile, tmp: Path
) -> Placed:
    """The graph of `source`; with its pairs at other places where it or `calib` has the ranges.

    Raises BadInput for `calib` with a graph that has no INT8 pairs, or whose pairs cannot be moved.
    """
    from deploykit.onnx_graph.graph import Graph
    from deploykit.quantization.moving import move_pairs

    graph = Graph.open(source.path)
    if request.calib is not None:
        return _place_by_data(source, graph, request, target, tmp)
    moved = move_pairs(graph, target.runtime) if RUNTIMES[target.runtime].scales_outputs else None
    return Placed(moved.save(_move_file(tmp)), (_FOLLOW,)) if moved else Placed(graph)


def place_if_better(
    source: Artefact,
    target: Profile,
    placed: Placed,
    built: Graph,
    build: Callable[[Graph, Path], Graph],
) -> tuple[Placed, Graph]:
    """A foreign graph with its pairs moved, and built anew, where more of it runs in integers."""
    from deploykit.onnx_graph.graph import Graph
    from deploykit.quantization.moving import move_foreign_pairs

    few = _few(placed.graph, built)
    if not few and _kernels(built) >= _products(placed.graph):
        return placed, built
    moved = move_foreign_pairs(placed.graph, target.runtime)
    if moved is None:
        return placed, built
    graph, trial = moved.graph.save(_move_file(built.path)), built.path.with_name("trial.onnx")
    if _kernels(build(graph, trial)) <= _kernels(built) and not few:
        return placed, built
    trial.replace(built.path)
    better = Placed(graph, (_FOLLOW, *_unknown(source, target, moved)))
    return better, Graph.open(built.path)


def _place_by_data(
    source: Artefact, graph: Graph, request: QuantizeRequest, target: Profile, tmp: Path
) -> Placed:
    from deploykit.quantization.calibrate import METHODS, Calibration, calibrate
    from deploykit.quantization.moving import move_foreign_pairs
    from deploykit.runtimes.data.checks import check_calibration
    from deploykit.runtimes.data.samples import read_samples

    if request.calib is None or "int8" not in graph.precision or not _products(graph):
        raise BadInput(
            f"{source}: `calib` has no effect: the graph has no INT8 pairs to place",
            hint="leave it out" if "int8" in graph.precision else "`precision` int8 quantizes it",
        )
    samples = read_samples(request.calib, graph.inputs, task=source.task)
    doubts = tuple(check_calibration(samples, graph.inputs))
    found: list[Calibration] = []

    def measure(plain: Graph) -> Mapping[str, Range]:
        found.append(calibrate(plain, samples))
        return found[0].clipped

    moved = move_foreign_pairs(graph, target.runtime, measure)
    if moved is None:
        raise _stuck(source, target, graph, "`calib` cannot help: ")
    record = calibration_record(request, found[0], METHODS[0], doubts)
    return Placed(moved.graph.save(_move_file(tmp)), (_MEASURED, *doubts), record)


def check_integers(
    source: Artefact, target: Profile, graph: Graph, built: Graph, *, here: bool
) -> None:
    """Raise BadInput where ONNX Runtime runs hardly an INT8 node as such: slower than float32.

    `here`: this build wrote the pairs.
    """
    kind = "int8" if graph.precision.get("int8") else "int16"
    asked, runs = graph.precision.get(kind, 0), built.precision.get(kind, 0)
    if not asked or (runs and not (graph.path == source.path and _few(graph, built))):
        return
    if here:  # to quantize again would change nothing
        raise BadInput(
            f"{source}: ONNX Runtime runs none of its {asked} INT8 nodes in integers",
            hint="build it without `precision`: float32 is faster than that",
        )
    start = f"ONNX Runtime runs {runs or 'none'} of its {asked} {kind.upper()} nodes in integers: "
    raise _stuck(source, target, graph, start)


def _stuck(source: Artefact, target: Profile, graph: Graph, start: str) -> BadInput:
    """The error for pairs that cannot be moved."""
    halves = sorted({"float16", "bfloat16"} & set(graph.precision))
    why = "its pairs are placed for TensorRT, and no ranges follow to move them"
    if halves:
        why = f"its pairs are placed for TensorRT, and it computes in {halves[0]} between"
    elif "int16" in graph.precision:
        why = "it has no kernels for 16 bits"
    found = verify.find_sources(source.path, source.manifest) if source.manifest else iter(())
    again = f"{next(found, None) or 'FLOAT32.onnx'} --profile {target.name}"
    return BadInput(
        f"{source}: {start}{why}",
        hint=f"deploykit build {again} --precision int8 --calib FILE.npz",
    )


def _unknown(source: Artefact, target: Profile, moved: Moved) -> tuple[str, ...]:
    if not moved.unknown:
        return ()
    count = len(moved.unknown)
    note = (
        f"{count} tensor{'s' * (count > 1)} that INT8 needs a range for stayed in float32, as no "
        f"range follows from the file's scales ({', '.join(moved.unknown[:3])}); data give it: "
        f"deploykit build {source} --profile {target.name} --calib FILE.npz"
    )
    return (note,)


def _few(graph: Graph, built: Graph) -> bool:
    """Whether less than half of the INT8 nodes run as such."""
    return 2 * built.precision.get("int8", 0) < graph.precision.get("int8", 0)


def _products(graph: Graph) -> int:
    """Convolutions and matrix products of a dequantized activation with weights."""
    nodes, stored = graph.model.graph.node, graph.initializers
    pairs = {node.output[0]: node for node in nodes if node.op_type == "DequantizeLinear"}
    activations = {name for name, node in pairs.items() if node.input[0] not in stored}
    return sum(
        node.op_type in _PRODUCTS
        and node.input[0] in activations
        and node.input[1] not in activations
        for node in nodes
    )


def _kernels(built: Graph) -> int:
    """Those that run in integers."""
    places = ((node, _KERNELS.get(node.op_type)) for node in built.model.graph.node)
    return sum(
        place is not None and node.input[place] in built.initializers for node, place in places
    )


def _move_file(tmp: Path) -> Path:
    return tmp.with_name("placed.onnx")
