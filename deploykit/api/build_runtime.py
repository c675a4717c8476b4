"""Build for a runtime that opens the result here, such as ONNX Runtime, and prove the result."""

from __future__ import annotations

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
from deploykit.api.placing import Placed
from deploykit.api.quantize import keep_if_passed
from deploykit.builders.builder import Shapes, find_builder
from deploykit.core.artefact import Artefact
from deploykit.core.evidence import BuildRecord, Evaluation, Evidence
from deploykit.core.precision import CALIBRATED
from deploykit.core.profile import Profile
from deploykit.core.runtime import RUNTIMES

if TYPE_CHECKING:
    import numpy as np

    from deploykit.onnx_graph.graph import Graph
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
    kind, built_on = runtime.opens[0], dict[str, str]()

    def build(graph: Graph, out: Path) -> Graph:
        built_on.update(builder(Artefact.open(graph.path), out, target, shapes, step).built_on)
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
    notes = [*searched, *(before.notes if before else ()), *evidence.notes]
    tools = runtime.packages[:1]
    manifest = onnx_manifest(
        result, (source.sha256,), tools=tools, evidence=evidence, built_on=built_on
    )
    manifest = replace(manifest, task=carry_task(source, tmp))
    if kind != "onnx":
        manifest = replace(manifest, format=kind, sha256=Artefact(tmp).sha256, evidence=evidence)
    notes += _precision_notes(graph.precision, result.precision, request.to)
    made = Made(place, manifest, tuple(notes))
    if made.parity and not made.parity.passed:
        return keep_if_equal(tmp, made, made.parity)
    return keep_if_passed(tmp, made, request.to)


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
    moved = job is None and graph.path != source.path
    evaluation: Evaluation | None = None
    samples = None
    with load(tmp, RUNTIMES[target.runtime].usable("cpu")) as engine, ExitStack() as stack:
        reference = stack.enter_context(load(graph.path, "cpu"))
        feeds: Sequence[Mapping[str, np.ndarray]] = feeds_at_sizes(engine.inputs)
        most = rows_that_fit(feeds, graph.path)
        feeds, notes = first_rows(feeds, most), [*placed.notes, *rows_note(most)]
        title = f"{source.name} in {request.to}" if job else source.name
        joined: list[JoinedRun] = []
        keep, names = batching.keep_runs(engine, feeds, joined), (title, name)
        parity = compare_engines(
            reference, engine, feeds, max_error=max_error, names=names, each=keep, random=True
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
