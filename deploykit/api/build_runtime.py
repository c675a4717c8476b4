"""Build for a runtime that opens the result here, such as ONNX Runtime, and prove the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api import batching, golden, placing
from deploykit.api.artefacts import (
    Made,
    Progress,
    carry_task,
    keep_if_equal,
    onnx_manifest,
    span,
)
from deploykit.api.evaluate import (
    Job,
    QuantizeRequest,
    accuracy_notes,
    evaluate_engine,
    evaluate_engines,
    golden_samples,
    prepare,
    write_graph,
)
from deploykit.api.feeds import first_rows, rows_note, rows_that_fit
from deploykit.api.open_graph import open_rounded
from deploykit.api.placing import Placed
from deploykit.api.quantize import keep_if_passed
from deploykit.builders.builder import BuildResult, Shapes, find_builder
from deploykit.core.artefact import Artefact
from deploykit.core.evidence import (
    BuildRecord,
    Evaluation,
    Evidence,
    Layer,
    PrecisionReadBack,
)
from deploykit.core.manifest import Manifest
from deploykit.core.precision import CALIBRATED, FLOATS, max_engine_error
from deploykit.core.profile import Profile
from deploykit.core.runtime import RUNTIMES

if TYPE_CHECKING:
    import numpy as np

    from deploykit.onnx_graph.graph import Graph
    from deploykit.runtimes.engine import Engine
    from deploykit.runtimes.rows import JoinedRun

_NOT_CHECKED = (
    "the accuracy of this graph was not checked: give labelled data (`data`), or quantize the "
    "float32 model for this profile"
)


def build_for_runtime(
    source: Artefact,
    request: QuantizeRequest,
    target: Profile,
    shapes: Shapes,
    tmp: Path,
    place: Path,
    max_error: float,
    on_progress: Progress,
) -> Made:
    """Build `source` into `tmp`, prove what was built and keep it at `place`.

    Its accuracy is measured once, on the file that is kept: after a change of precision always,
    else where `request` has labelled data.
    """
    from deploykit.onnx_graph.graph import Graph

    job, before = None, None
    if request.to != "fp32":
        step = span(on_progress, 0.0, 0.6)
        job = prepare(source, request, step)
        graph, before = write_graph(job, tmp.with_name("typed.onnx"), place.name, step)
        placed = Placed(graph)
        if before.search and before.search.interrupted:
            raise KeyboardInterrupt
    else:
        placed = placing.place_for_target(source, request, target, tmp)
    step = span(on_progress, 0.6 if job else 0.0, 0.8)
    step("building", 0.0)
    builder, runtime = find_builder(target.runtime), RUNTIMES[target.runtime]
    kind, built = runtime.opens[0], list[BuildResult]()

    def build(graph: Graph, out: Path) -> Graph:
        built.append(builder(Artefact.open(graph.path), out, target, shapes, step))
        return Graph.open(out) if kind == "onnx" else graph

    result = build(placed.graph, tmp)
    if placed.graph.path == source.path and kind == "onnx":
        placed, result = placing.place_if_better(source, target, placed, result, build)
    graph = placed.graph
    placing.check_integers(source, target, graph, result, here=job is not None)
    on_progress("comparing with the model", 0.8)
    evidence = _prove(source, job, request, target, placed, tmp, place.name, max_error)
    evidence = replace(evidence, build=BuildRecord(target.name), source_graph=before)
    searched = [before.search.why] if before and before.search else []
    notes = [*searched, *(before.notes if before else ()), *evidence.notes, *built[-1].notes]
    evidence = replace(evidence, precision=_read_back(built[-1].layers, graph.precision))
    notes += evidence.precision.wider if evidence.precision else ()
    manifest = _manifest(source, target, result, tmp, evidence, built[-1])
    notes += _precision_notes(graph.precision, result.precision, request.to)
    made = Made(place, manifest, tuple(notes))
    if made.parity and not made.parity.passed:
        return keep_if_equal(tmp, made, made.parity)
    return keep_if_passed(tmp, made, request.to)


def _manifest(
    source: Artefact,
    target: Profile,
    result: Graph,
    tmp: Path,
    evidence: Evidence,
    built: BuildResult,
) -> Manifest:
    """Of the built file `tmp`; `result`: its graph."""
    runtime = RUNTIMES[target.runtime]
    manifest = onnx_manifest(
        result,
        (source.sha256,),
        tools=runtime.packages[:1],
        evidence=evidence,
        built_on={**built.built_on, "model": source.name},
    )
    manifest = replace(manifest, task=carry_task(source, tmp))
    if runtime.opens[0] != "onnx":
        sha256 = Artefact(tmp).sha256
        manifest = replace(manifest, format=runtime.opens[0], sha256=sha256, evidence=evidence)
    if built.layers is not None:
        counts = Counter(layer.precision for layer in built.layers if layer.precision)
        manifest = replace(manifest, precision=dict(counts))
    return manifest


def _prove(
    source: Artefact,
    job: Job | None,
    request: QuantizeRequest,
    target: Profile,
    placed: Placed,
    tmp: Path,
    name: str,
    max_error: float,
) -> Evidence:
    """Compare the built `tmp` with the graph `placed`, and evaluate it against `source`.

    Each is opened once, and two at a time.
    """
    from deploykit.measure.evaluate.feeds import feeds_at_sizes
    from deploykit.measure.evaluate.parity import compare_engines
    from deploykit.runtimes.engine import load

    graph = placed.graph
    moved, bound = job is None and graph.path != source.path, _bound(graph, target, max_error)
    evaluation: Evaluation | None = None
    samples = None
    with load(tmp, RUNTIMES[target.runtime].usable("cpu")) as engine, ExitStack() as stack:
        reference = stack.enter_context(_open_reference(graph, target, tmp.parent))
        feeds: Sequence[Mapping[str, np.ndarray]] = feeds_at_sizes(engine.inputs)
        most = rows_that_fit(feeds, graph.path)
        feeds, notes = first_rows(feeds, most), [*placed.notes, *rows_note(most)]
        title = f"{source.name} in {request.to}" if job else source.name
        joined: list[JoinedRun] = []
        keep, names = batching.keep_runs(engine, feeds, joined), (title, name)
        parity = compare_engines(
            reference, engine, feeds, max_error=bound, names=names, each=keep, random=True
        )
        if not parity.passed:
            return Evidence(parity=parity)
        if job or (moved and request.data):
            stack.close()
            reference = stack.enter_context(load(source, "cpu"))
        if job:
            evaluation = evaluate_engines(job, reference, engine, name)
            samples = golden_samples(job, tmp, reference, engine)
            notes += accuracy_notes(job, evaluation)
        else:
            evaluation = evaluate_engine(reference, engine, request, (source.name, name))
            samples = golden.carry(source, tmp)
            if samples is not None and moved:  # recorded with the pairs at other places
                samples = golden.loosen(samples, tmp, engine)
        proof = batching.prove_batch(engine, tmp, samples, most, joined)
        notes += batching.notes(engine, proof)
    if moved and not evaluation:
        notes.append(_NOT_CHECKED)
    return Evidence(
        parity=parity,
        accuracy=evaluation,
        calibration=placed.calibration,
        golden=samples,
        batching=proof,
        notes=tuple(notes),
    )


def _bound(graph: Graph, target: Profile, max_error: float) -> float:
    """Of the error; another runtime rounds narrow types at other places than the reference."""
    narrow = set(graph.precision) - {"float32"}
    if not narrow or RUNTIMES[target.runtime].opens[0] == "onnx":
        return max_error
    return max(max_error, max_engine_error(narrow))


def _open_reference(graph: Graph, target: Profile, folder: Path) -> Engine:
    """ONNX Runtime on `graph`; with bfloat16 rounded, which its CPU provider lacks."""
    from deploykit.runtimes.engine import load

    if target.runtime != "onnxruntime" and "bfloat16" in graph.precision:
        return open_rounded(graph, folder)
    return load(graph.path, "cpu")


def _read_back(
    layers: Sequence[Layer] | None, asked: Mapping[str, int]
) -> PrecisionReadBack | None:
    """What the layers run in; `wider` names each precision of the graph that none of them does."""
    if layers is None:
        return None
    executed = Counter(layer.precision for layer in layers if layer.precision)
    runs = ", ".join(executed)
    wider = tuple(
        f"{name}: {count} nodes in the graph, no layer of the engine: they run in {runs} here"
        for name, count in asked.items()
        if name in FLOATS | {"int8"} and name not in executed
    )
    shares = {name: count / executed.total() for name, count in sorted(executed.items())}
    return PrecisionReadBack(
        tuple(layers),
        wider,
        shares,
        seen=1.0,
        wider_share=float(bool(wider)),
        allow_wider=True,  # the CPU that it runs on decides, which may be another
    )


def _precision_notes(
    asked: Mapping[str, int], built: Mapping[str, int], done: str
) -> tuple[str, ...]:
    """A note for each precision of which the built engine has fewer nodes than the graph.

    `done`: the precision that this build wrote, which is not recommended once more.
    """
    advice = " (INT8 for this target: build the float32 model with `precision` int8)"
    return tuple(
        f"{name}: {count} nodes in the graph, {built.get(name, 0)} in the built engine: the others "
        f"run in float32 here{advice if done not in CALIBRATED else ''}"
        for name, count in asked.items()
        if name != "float32" and "float32" in built and built.get(name, 0) < count
    )
