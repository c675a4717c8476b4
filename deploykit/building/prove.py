"""Build a TensorRT engine with its proof, and check before whether it can be built here."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from deploykit.building import tensorrt
from deploykit.building.builder import (
    BuildJob,
    BuildResult,
    check_samples,
    count_precisions,
    note_dla,
)
from deploykit.core.artefact import Artefact, Manifest, write_manifest
from deploykit.core.errors import DeploykitError, GateFailed, Unsupported
from deploykit.core.evidence import BuildRecord, Evidence, PrecisionReadBack
from deploykit.core.extras import install_hint, installed
from deploykit.core.files import sha256
from deploykit.core.machine import this_machine, tool_versions
from deploykit.core.precision import max_engine_error, narrowest
from deploykit.core.profile import Profile, fits, with_gpu
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import load
from deploykit.engines.tensorrt import inspector
from deploykit.engines.tensorrt.compatibility import record_build
from deploykit.evaluation import golden, verify
from deploykit.evaluation.artefacts import Made, Progress, carry_task, keep, reject, span
from deploykit.evaluation.feeds import feeds_at_sizes
from deploykit.graph.graph import Graph
from deploykit.quantization.job import evaluate_engine, prepare
from deploykit.quantization.quantize import keep_if_passed, write_quantized

_NOT_RECORDED = (
    "the engine brings code along, and the cache folder cannot record that it was built here: "
    "opening it needs --trust"
)


def build_plan(job: BuildJob, on_progress: Progress) -> Made:
    """Build a TensorRT engine; a graph of lower precision passes its gate on the CPU before."""
    source, request, graph_file, notes = job.source, job.request, job.source, list[str]()
    if job.samples is not None:
        options = tensorrt.options_of(job.target, job.shapes, source)
        check_samples(Graph.open(source.path).inputs, job.samples, options)
    if job.quantizes:
        step, typed = span(on_progress, 0.0, 0.6), job.tmp.with_name("typed.onnx")
        plain = prepare(source, request, step)
        quantized = write_quantized(plain, typed, job.place.with_suffix(".onnx"), step)
        if quantized.evaluation and not quantized.evaluation.passed:
            keep_if_passed(typed, quantized, request.to)  # raises
        if quantized.search:
            if quantized.search.interrupted:
                raise KeyboardInterrupt
            notes.append(quantized.search.why)
        if quantized.evaluation:
            cost = quantized.evaluation
            notes.append(f"against {cost.parity.a}: {cost.describe()}")
        notes += quantized.notes
        graph_file = Artefact.from_manifest(typed, quantized.manifest)
    step = span(on_progress, 0.0 if graph_file is source else 0.6, 0.8)
    step("building", 0.0)
    built = tensorrt.build_engine(graph_file, job.tmp, job.target, job.shapes, step)
    on_progress("comparing with the model", 0.8)
    made = prove_plan(built, graph_file, job)
    return replace(made, notes=(*notes, *made.notes))


def prove_plan(built: BuildResult, graph_file: Artefact, job: BuildJob) -> Made:
    """Prove the plan that was built from `graph_file`, made from the job's source, and keep it.

    Raises GateFailed when too much runs in more bits than asked, the outputs differ, or accuracy on
    labelled data drops; the engine is then kept as NAME.rejected.trt.
    """
    name = job.place.name
    manifest = _manifest(built, graph_file, job)
    recorded = record_build(manifest)
    evidence, why = _prove(manifest, graph_file, job)
    read = evidence.precision
    on_dla = note_dla(read.layers if read else None, job.shapes.dla, name)
    if read is not None and read.known:
        manifest = replace(manifest, precision=count_precisions(read.layers or ()))
    manifest = replace(manifest, evidence=evidence)
    if read is not None and not why and (read.wider or not read.known):
        why = read.why if read.known else f"not verified: {read.why}"
    notes = (*built.notes, *on_dla, *[why] * bool(why), *[_NOT_RECORDED] * (not recorded))
    made = Made(job.place, manifest, notes)
    if evidence.wrong:
        made = reject(job.tmp, made)
        raise GateFailed(
            f"{name}: {evidence.wrong}; the engine is kept as {made.path}",
            hint="a `precision` that the target has kernels for; or find the node that differs: "
            "deploykit compare",
            result=made,
        )
    return keep(job.tmp, made)


def _manifest(built: BuildResult, graph_file: Artefact, job: BuildJob) -> Manifest:
    """Return the manifest of a plan that has not run yet, and golden samples next to it."""
    graph, tmp, shapes = Graph.open(graph_file.path), job.tmp, job.shapes
    samples, given = golden.carry(graph_file, tmp), job.samples
    if samples is None:  # at a small batch and the optimum of the other axes
        options = tensorrt.options_of(job.target, shapes, graph_file)
        rows = min(max(golden.SAMPLES, options.batch.minimum), options.batch.maximum)
        names = {axis for spec in graph.inputs for axis in spec.shape if isinstance(axis, str)}
        sizes = {n: options.axes[n].optimum if n in options.axes else rows for n in names}
        feeds = given.rows(slice(rows)) if given else random_feeds(graph.inputs, sizes)
        samples = verify.record_on_cpu(graph_file, tmp, feeds)
    if samples is not None:
        bound = max(samples.max_error, max_engine_error(graph.precision))
        samples = replace(samples, max_error=bound)
    before = graph_file.manifest.evidence if graph_file.manifest else None
    quantized, calib = before.quantize if before else None, job.request.calib
    return Manifest(
        format="tensorrt",
        inputs=graph.inputs,
        outputs=graph.outputs,
        precision=graph.precision,
        sha256=sha256(tmp),
        made_from=tuple(dict.fromkeys((job.source.sha256, graph_file.sha256))),
        made_with=tool_versions("tensorrt", "onnx"),
        built_on={
            **built.built_on,
            "model": job.source.name,
            "precision": quantized.to if quantized else narrowest(graph.precision),
            **({"calib": calib.name} if calib else {}),
        },
        evidence=Evidence(
            precision=PrecisionReadBack(None, seen=0.0, asked=verify.asked_of(graph)),
            build=BuildRecord(
                job.target.name, built.flags_used, shapes.version_compatible, built.plugins
            ),
            source_graph=before,
            golden=samples,
        ),
        task=carry_task(job.source, tmp),
    )


def _prove(manifest: Manifest, graph_file: Artefact, job: BuildJob) -> tuple[Evidence, str]:
    """Run the staged engine and add to its evidence; the reason where it cannot run here."""
    tmp, source, request, name = job.tmp, job.source, job.request, job.place.name
    write_manifest(tmp, manifest)  # an engine is opened with its manifest only
    evidence, parity, why = manifest.evidence, None, ""
    read = evidence.precision
    try:
        # trusted: it was built just now
        staged, device = Artefact.from_manifest(tmp, manifest), f"cuda:{job.shapes.device}"
        with load(staged, device, trust=True) as opened:
            engine: Any = opened
            parity, why = verify.prove_engine(
                engine, tmp, manifest, graph_file.path, name, job.samples
            )
            if read is not None:
                read = verify.read_engine(engine, read)
            with contextlib.suppress(DeploykitError):  # a figure for information: no reason to fail
                times = engine.layer_times_ms(feeds_at_sizes(engine.inputs, engine.limits)[-1])
                if read is not None and read.layers is not None:
                    read = replace(read, time_shares=inspector.shares(read.layers, times))
            evaluation = None
            if request.data is not None and parity is not None and parity.passed:
                with load(source, "cpu") as model:
                    evaluation = evaluate_engine(model, engine, request, source, name)
            evidence = replace(evidence, parity=parity, precision=read, accuracy=evaluation)
            if parity is not None and parity.passed:
                proof = golden.prove_batch(engine, tmp, evidence.golden)
                evidence = replace(evidence, batching=proof)
    except Unsupported as exc:
        why = exc.message
    if parity is None:
        why = f"the engine was not run here, so it is not verified: {why}"
    return evidence, why


def check_here(target: Profile, model: Artefact, gpu: int = 0) -> None:
    """Raise Unsupported unless GPU number `gpu` is the target's and TensorRT is installed."""
    machine = with_gpu(this_machine(), gpu)
    here = machine.gpus[0].name if machine.gpus else machine.l4t and (machine.board or "a Jetson")
    hint = (
        f"see whether it could be built: deploykit build {model} --profile {target.name} --check; "
        f"for this machine's CPU: deploykit build {model} --profile cpu"
    )
    # as `choose_profile`; a profile that names neither board nor GPU fits any, and so does a
    # Jetson's in a container, which does not show its device tree
    unknown = bool(target.boards and machine.l4t and not machine.board_ids)
    anywhere = not (target.boards or target.gpu_names)
    if not here or not (unknown or anywhere or fits(target, machine)):
        raise Unsupported(
            f"profile '{target.name}' is not this machine, which has "
            f"{here or f'no NVIDIA GPU cuda:{gpu}'}: a TensorRT engine is built on its target",
            hint=hint,
        )
    if not installed("tensorrt"):
        raise Unsupported(
            f"profile '{target.name}' needs TensorRT, which is not installed here",
            hint=install_hint("tensorrt"),
        )
