"""Build a model for a hardware profile, and prove that what was built computes the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from deploykit.building.builder import BuildJob, Shapes, find_builder
from deploykit.building.runtime import build_for_runtime
from deploykit.building.tensorrt import prove as build_tensorrt
from deploykit.building.tensorrt.build import BuildCheck
from deploykit.building.tensorrt.options import (
    check_options,
    check_samples,
    parse_axis,
    parse_batch,
)
from deploykit.core.artefact import Artefact, ArtefactLike, wrong_format
from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.files import StrPath
from deploykit.core.profile import choose_profile, load_profile
from deploykit.core.runtime import RUNTIMES
from deploykit.engines.data.samples import read_samples
from deploykit.evaluation.artefacts import (
    Made,
    Progress,
    destination,
    named_files,
    no_progress,
    span,
    stage,
)
from deploykit.graph.graph import Graph
from deploykit.quantization.job import QuantizeRequest, prepare
from deploykit.quantization.quantize import (
    TARGETS,
    check_quantize_options,
    keep_if_passed,
    write_quantized,
)

BUILD_MAX_ERROR = 1e-3  # fused float16 and INT8 kernels round at other places than the graph


@contextlib.contextmanager
def _own_names() -> Iterator[None]:
    """Make errors of a quantization name the parameters of `build`."""
    try:
        yield
    except DeploykitError as exc:
        exc.message = exc.message.replace("`to`", "`precision`")
        exc.hint = exc.hint and exc.hint.replace("`to`", "`precision`").replace(
            "`runtime`", "a `profile` that runs"
        )
        exc.args = (exc.message,)
        raise


@_own_names()
def build(
    model: ArtefactLike,
    profile: str = "auto",
    *,
    precision: str | None = None,
    calib: StrPath | None = None,
    data: StrPath | None = None,
    metric: str | None = None,
    max_drop: float | None = None,
    max_error: float = BUILD_MAX_ERROR,
    shapes: Shapes | None = None,
    out: StrPath | None = None,
    force: bool = False,
    on_progress: Progress = no_progress,
) -> Made:
    """Build `model` for a hardware profile; with `precision`, quantise it first.

    `calib`, `data`, `metric`, `max_drop`, `force`: as in `quantize`; without `precision`, `calib`
    finds the ranges that an INT8 graph lacks when its pairs are moved for a CPU. The file is
    compared on `data`, or `calib`. `shapes`: the sizes that a TensorRT engine is built for; another
    file is compared at these, if there are no samples. Raises GateFailed when the built file
    differs from its source by more than `max_error` (an engine: see `prove_plan`) or runs layers in
    more bits than asked, or when the quantised graph fails its evaluation; Unsupported for a target
    that cannot be built for here.
    """
    shapes = shapes or Shapes()
    auto = profile == "auto"
    target, why = choose_profile(shapes.device) if auto else (load_profile(profile), "")
    source = _open(model)
    request = QuantizeRequest(
        to=precision or "fp32",
        runtime=target.runtime,
        target=target,
        calib=Path(calib) if calib else None,
        data=Path(data) if data else None,
        metric=metric,
        max_drop=max_drop,
    )
    plans = target.runtime == "tensorrt"
    if plans:
        check_options(build_tensorrt.options_of(target, shapes, source))
        build_tensorrt.check_here(target, source, shapes.device)
    else:
        shapes.refuse(target)
        axes = {name: each.optimum for name, each in map(parse_axis, shapes.axes)}
        batch = parse_batch(shapes.batch).optimum if shapes.batch else None
        request = replace(request, batch=batch, axis=axes)
    if request.to not in ("fp32", *TARGETS):
        raise BadInput(
            f"`precision` {request.to} is unknown", hint="one of: fp32, " + ", ".join(TARGETS)
        )
    if request.to != "fp32":
        check_quantize_options(request)
    elif request.calib is not None and not RUNTIMES[target.runtime].scales_outputs:
        raise BadInput("`calib` has no effect without `precision`", hint="`precision` int8")
    place = destination(
        source,
        out,
        RUNTIMES[target.runtime].suffix.format(profile=target.name),
        (calib, data, *shapes.plugins, *named_files(metric, profile)),
        kind=RUNTIMES[target.runtime].opens[0],
        force=force,
    )
    with stage(place) as tmp:
        samples, given = None, request.data or request.calib
        if given and (plans or request.to == "fp32"):  # else a quantization reads them
            samples = read_samples(given, Graph.open(source.path).inputs, task=source.task)
        job = BuildJob(source, target, request, shapes, tmp, place, max_error, samples)
        made = (_build_plan if plans else build_for_runtime)(job, on_progress)
    chosen = (f"profile auto: {target.name} ({why})",) if why else ()
    return replace(made, notes=(*chosen, *made.notes))


def _build_plan(job: BuildJob, on_progress: Progress) -> Made:
    """Build a TensorRT engine; a graph of lower precision passes its gate on the CPU before."""
    source, request, graph_file, notes = job.source, job.request, job.source, list[str]()
    if job.samples is not None:
        options = build_tensorrt.options_of(job.target, job.shapes, source)
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
    builder = find_builder(job.target.runtime)
    built = builder(graph_file, job.tmp, job.target, job.shapes, step)
    on_progress("comparing with the model", 0.8)
    made = build_tensorrt.prove_plan(built, graph_file, job)
    return replace(made, notes=(*notes, *made.notes))


def check_build(
    model: ArtefactLike,
    profile: str,
    *,
    shapes: Shapes | None = None,
    on_progress: Progress | None = None,
) -> BuildCheck:
    """Parse and build `model` for a target with whatever NVIDIA builder is here; keep nothing.

    Raises MissingExtra where there is none, BadInput for a profile that needs none.
    """
    target = load_profile(profile)
    source = _open(model)
    if target.runtime != "tensorrt":
        raise BadInput(f"profile '{target.name}' does not run TensorRT: there is nothing to check")
    return build_tensorrt.check_engine(source, target, shapes or Shapes(), on_progress)


def _open(model: ArtefactLike) -> Artefact:
    source = Artefact.open(model)
    if source.format != "onnx":
        raise wrong_format(source, source.format, "an ONNX file")
    return source
