"""Build for a runtime that opens the result here, such as ONNX Runtime, and prove the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api import batching, golden, verify
from deploykit.api.artefacts import (
    Made,
    Progress,
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
from deploykit.api.quantize import keep_if_passed
from deploykit.builders.builder import Shapes, find_builder
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.evidence import BuildRecord, Evaluation, Evidence
from deploykit.core.precision import CALIBRATED
from deploykit.core.profile import Profile
from deploykit.core.runtime import RUNTIMES

if TYPE_CHECKING:
    import numpy as np

    from deploykit.onnx_graph.graph import Graph

_MOVED = (
    "the INT8 pairs, placed for TensorRT, were placed for ONNX Runtime with the ranges that the "
    "graph records or that follow from its scales"
)
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
        if before.search and before.search.interrupted:
            raise KeyboardInterrupt
    else:
        graph = _place_pairs(Graph.open(source.path), target, tmp)
    step = span(on_progress, 0.6 if job else 0.0, 0.8)
    step("building", 0.0)
    builder, runtime = find_builder(target.runtime), RUNTIMES[target.runtime]
    built = builder(Artefact.open(graph.path), tmp, target, shapes, step)
    kind = runtime.opens[0]
    result = Graph.open(tmp) if kind == "onnx" else graph
    if graph.path == source.path and _few_integers(graph, result):
        graph = _place_pairs(graph, target, tmp, foreign=True)
        built = builder(Artefact.open(graph.path), tmp, target, shapes, step)
        result = Graph.open(tmp)
    _check_integers(source, target, graph, result, here=job is not None)
    on_progress("comparing with the model", 0.8)
    evidence = _prove(source, job, request, target, graph, tmp, place.name, max_error)
    notes = list(evidence.notes)
    if before is not None:
        notes = [*([before.search.why] if before.search else []), *before.notes, *notes]
    evidence = replace(evidence, build=BuildRecord(target.name), source_graph=before)
    manifest = onnx_manifest(
        result,
        (source.sha256,),
        tools=runtime.packages[:1],
        evidence=evidence,
        built_on=dict(built.built_on),
    )
    if kind != "onnx":
        manifest = replace(manifest, format=kind, sha256=Artefact(tmp).sha256, evidence=evidence)
    notes += _precision_notes(graph.precision, result.precision, request.to)
    made = Made(place, manifest, tuple(notes))
    if made.parity and not made.parity.passed:
        return keep_if_equal(tmp, made, made.parity)
    return keep_if_passed(tmp, made, request.to)


def _place_pairs(graph: Graph, target: Profile, tmp: Path, *, foreign: bool = False) -> Graph:
    """The graph with its INT8 pairs where the runtime has kernels, next to `tmp` if they moved."""
    from deploykit.quantization.moving import move_foreign_pairs, move_pairs

    if not RUNTIMES[target.runtime].scales_outputs:
        return graph
    moved = (move_foreign_pairs if foreign else move_pairs)(graph, target.runtime)
    return moved.save(tmp.with_name("placed.onnx")) if moved else graph


def _few_integers(graph: Graph, built: Graph) -> bool:
    """Whether less than half of the INT8 nodes run as such."""
    return 2 * built.precision.get("int8", 0) < graph.precision.get("int8", 0)


def _prove(
    source: Artefact,
    job: Job | None,
    request: QuantizeRequest,
    target: Profile,
    graph: Graph,
    tmp: Path,
    name: str,
    max_error: float,
) -> Evidence:
    """Compare the built `tmp` with the `graph` it was built from, and evaluate it against `source`.

    Each is opened once, and two at a time.
    """
    from deploykit.measure.evaluate.feeds import feeds_at_sizes
    from deploykit.measure.evaluate.parity import compare_engines
    from deploykit.runtimes.engine import load

    moved = job is None and graph.path != source.path
    evaluation: Evaluation | None = None
    samples = None
    with load(tmp, RUNTIMES[target.runtime].usable("cpu")) as engine, ExitStack() as stack:
        reference = stack.enter_context(load(graph.path, "cpu"))
        feeds: Sequence[Mapping[str, np.ndarray]] = feeds_at_sizes(engine.inputs)
        most = rows_that_fit(feeds, graph.path)
        feeds, notes = first_rows(feeds, most), [*rows_note(most)]
        title = f"{source.name} in {request.to}" if job else source.name
        parity = compare_engines(reference, engine, feeds, max_error=max_error, names=(title, name))
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
        proof = batching.prove(engine, tmp, samples, most)
        notes += batching.notes(engine, proof)
    if moved:
        notes += [_MOVED] if evaluation else [_MOVED, _NOT_CHECKED]
    return Evidence(
        parity=parity, accuracy=evaluation, golden=samples, batching=proof, notes=tuple(notes)
    )


def _check_integers(
    model: Artefact, target: Profile, graph: Graph, built: Graph, *, here: bool
) -> None:
    """Raise BadInput where ONNX Runtime runs hardly an INT8 node as such: slower than float32."""
    asked, few = graph.precision, graph.path == model.path and _few_integers(graph, built)
    if not asked.get("int8") or (built.precision.get("int8") and not few):
        return
    if here:  # quantized by this build: to do so again changes nothing
        raise BadInput(
            f"{model}: ONNX Runtime runs none of its {asked['int8']} INT8 nodes in integers",
            hint="build it without `precision`: float32 is faster than that",
        )
    halves = sorted({"float16", "bfloat16"} & set(asked))
    source = next(verify.find_sources(model.path, model.manifest), None) if model.manifest else None
    again = f"{source or 'FLOAT32.onnx'} --profile {target.name} --precision int8 --calib FILE.npz"
    raise BadInput(
        f"{model}: ONNX Runtime runs {built.precision.get('int8', 'none')} of its {asked['int8']} "
        "INT8 nodes in integers: their pairs are placed for TensorRT, and "
        + (f"it computes in {halves[0]} between" if halves else "no ranges follow to move them"),
        hint=f"deploykit build {again}",
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
