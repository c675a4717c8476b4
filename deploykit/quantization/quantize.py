"""Put a lower precision into an ONNX graph, and measure what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from deploykit.core.arguments import checked
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput, GateFailed
from deploykit.core.evidence import Evidence
from deploykit.core.files import StrPath, sha256
from deploykit.core.precision import (
    BY_NAME,
    CALIBRATED,
    CAST,
    HARDWARE,
    OTHER_NODES,
    QUANTIZED,
    hardware,
)
from deploykit.core.profile import load_profile
from deploykit.core.runtime import RUNTIMES, TARGET_RUNTIMES
from deploykit.evaluation.accuracy import MORE_SAMPLES, NOTHING_FOUND
from deploykit.evaluation.artefacts import (
    Made,
    Progress,
    carry_task,
    destination,
    keep,
    named_files,
    no_progress,
    onnx_manifest,
    reject,
    stage,
)
from deploykit.evaluation.parity import DRAW_NONE, DRAWS_NUMBERS
from deploykit.graph.graph import Graph
from deploykit.quantization.job import (
    Job,
    QuantizeRequest,
    accuracy_notes,
    evaluate_engines,
    golden_samples,
    open_both,
    prepare,
)

TARGETS = (*QUANTIZED, "auto")


@checked
def quantize(
    model: ArtefactLike,
    to: str,
    out: StrPath | None = None,
    *,
    calib: StrPath | None = None,
    data: StrPath | None = None,
    metric: str | None = None,
    max_drop: float | None = None,
    batch: int | None = None,
    axis: Mapping[str, int] | None = None,
    other_nodes: str = "fp32",
    runtime: str | None = None,
    profile: str | None = None,
    force: bool = False,
    on_progress: Progress = no_progress,
) -> Made:
    """Put precision `to` into the graph, and evaluate the result.

    Args:
        model: the float32 graph.
        to: "fp16", "bf16", "int8", "fp8", "int8-weight-only", ... or "auto", which searches for the
            fastest that keeps the accuracy, for at most 10 minutes.
        out: the file to write [next to the model].
        calib: inputs, an .npz or a folder; needed for int8, fp8 and auto, and used by fp16's range
            guard. Calibrator and SmoothQuant are chosen by what they lose on these inputs.
        data: labelled inputs. Without labels every output must keep a signal-to-noise ratio of
            15 dB, and with `max_drop` the share of samples whose answer changes is bounded too.
        metric: "top1" where None, "perplexity" or `pkg.mod:callable`; BadInput without labels.
        max_drop: bound for the upper end of the 95 % interval of the drop in `metric`, a fraction:
            0.01, the default, is one percentage point.
        batch: samples per call [32, or what fits]; without data, rows of the random inputs.
        axis: sizes of the random inputs' other dynamic axes by name, where there is no data; by
            default several at which the model runs.
        other_nodes: the precision of the nodes around int8, fp8 or stored weights: "fp32", "fp16".
        runtime: what will run the file, "tensorrt" or "onnxruntime", which need INT8's Q/DQ pairs
            at different places; None takes the profile's, or TensorRT.
        profile: the target; its precisions are checked, and `auto` predicts costs for it.
        force: replace a file that deploykit did not write.
        on_progress: called with the step, and the share done.

    Raises:
        GateFailed: the accuracy is too low; the file is then kept as NAME.rejected.onnx.
    """
    source = Artefact.open(model)
    target = load_profile(profile) if profile is not None else None
    own = BY_NAME[to].runtime if to in BY_NAME else ""
    request = QuantizeRequest(
        to=to,
        other_nodes=other_nodes,
        runtime=runtime or (target.runtime if target else own or "tensorrt"),
        target=target,
        calib=Path(calib) if calib else None,
        data=Path(data) if data else None,
        metric=metric,
        max_drop=max_drop,
        batch=batch,
        axis=axis,
    )
    check_quantize_options(request)
    read = (calib, data, *named_files(metric, profile))
    place = destination(source, out, f".{to}.onnx", read, force=force)
    job = prepare(source, request, on_progress)
    with stage(place) as tmp:
        return keep_if_passed(tmp, write_quantized(job, tmp, place, on_progress), to)


def check_quantize_options(request: QuantizeRequest) -> None:
    """Raise BadInput for options that contradict each other, before any work."""
    to, other, runtime, target = request.to, request.other_nodes, request.runtime, request.target
    for name, value, known in (
        ("to", to, TARGETS),
        ("other_nodes", other, OTHER_NODES),
        ("runtime", runtime, TARGET_RUNTIMES),
    ):
        if value not in known:
            raise BadInput(f"`{name}` '{value}' is unknown", hint="one of: " + ", ".join(known))
    if other != "fp32" and (to == "auto" or BY_NAME[to].writer == CAST or RUNTIMES[runtime].on_cpu):
        raise BadInput(
            f"`other_nodes` {other}: goes with int8, fp8 and weight-only precisions for GPUs, "
            f"not with {to} for {runtime}"
        )
    if request.batch is not None and request.batch < 1:
        raise BadInput(f"`batch` must be 1 or more, got {request.batch}")
    if request.max_drop is not None and not 0 < request.max_drop <= 1:
        raise BadInput(f"`max_drop` must be a fraction above 0, at most 1, got {request.max_drop}")
    if to in (*CALIBRATED, "auto") and request.calib is None:
        raise BadInput(
            f"`calib` is missing: {to} needs calibration data",
            hint="an .npz of the inputs or a folder, some 100 samples",
        )
    if to == "auto":
        return
    only, computes_in = BY_NAME[to].runtime, hardware(to)
    if only and runtime != only:
        raise BadInput(
            f"{to} runs only on {only}, not on {runtime}", hint=f"a target that runs {only}"
        )
    if target and computes_in in HARDWARE and computes_in not in target.precisions:
        raise BadInput(
            f"`profile` {target.name} does not run {to}",
            hint="it runs: " + ", ".join(target.precisions),
        )


def write_graph(job: Job, tmp: Path, name: str, on_progress: Progress) -> tuple[Graph, Evidence]:
    """Write the graph in the requested precision to `tmp`; return it with its evidence.

    Only `auto` has evaluated it by then. `name`: what tables and errors call the file.
    """
    to = job.request.to
    if to == "auto":
        from deploykit.quantization.search import search_precision

        return search_precision(job, tmp, name, on_progress)
    if to in CALIBRATED:
        on_progress("choosing the calibrator", 0.2)
    scales = job.scales_for(to, tmp.parent)
    on_progress(f"converting to {to}", 0.3)
    converted, notes = job.convert(scales, to, job.request.other_nodes)
    return converted.save(tmp), job.evidence(scales, notes)


def write_quantized(job: Job, tmp: Path, place: Path, on_progress: Progress) -> Made:
    """Write the graph in the requested precision to `tmp`, with the manifest it has at `place`."""
    graph, evidence = write_graph(job, tmp, place.name, on_progress)
    to = BY_NAME.get(job.request.to)
    if to is not None and to.writer == CAST and to.dtype not in graph.precision:
        kinds = ", ".join([*graph.summary.operators][:5])
        why = f"it has {kinds}; 8-bit nodes, bodies of If and Loop and indices stay as they are"
        kept = (note for note in evidence.notes if note.startswith("kept in float32"))
        raise BadInput(
            f"{job.model}: no node of it would compute in {to.dtype}", hint=next(kept, why)
        )
    on_progress("measuring accuracy", 0.5)
    with open_both(job, graph) as (reference, candidate):
        feeds, feeds_notes = ([], ()) if job.samples else job.feeds(reference, candidate)
        found = evidence.accuracy or evaluate_engines(
            job, reference, candidate, place.name, graph, feeds
        )
        samples = golden_samples(job, tmp, reference, candidate)
    notes = (*evidence.notes, *feeds_notes, *accuracy_notes(job, found))
    evidence = replace(evidence, parity=found.parity, accuracy=found, golden=samples, notes=notes)
    data = job.request.data
    hashes = (
        job.model.sha256,
        evidence.calibration.data_sha256 if evidence.calibration else "",
        sha256(data) if data and data.is_file() else "",
    )
    manifest = onnx_manifest(
        graph,
        tuple(filter(None, hashes)),
        tools=("onnx", "onnxruntime"),
        evidence=evidence,
        task=carry_task(job.model, graph.path),
    )
    return Made(place, manifest, notes)


def keep_if_passed(tmp: Path, made: Made, to: str) -> Made:
    """Keep the staged file; raise GateFailed and keep it as rejected where its accuracy failed."""
    evaluation = made.evaluation
    if evaluation is None or evaluation.passed:
        return keep(tmp, made)
    name, made = made.path.name, reject(tmp, made)
    half = "fp16" in (to, made.evidence.quantize and made.evidence.quantize.other_nodes)
    rows = [row for row in evaluation.parity.rows if row.floating and row.problem]
    if DRAWS_NUMBERS in evaluation.why:
        hints = [DRAW_NONE]
    elif rows and all(row.places_match for row in rows):
        hints = ["give `calib` or `data` on which the float32 model itself is finite"]
    elif NOTHING_FOUND in evaluation.why:
        hints = ["give `calib` or `data` on which the model finds something"]
    else:
        hints = list[str]()
        if MORE_SAMPLES in evaluation.why:
            hints = ["more samples narrow the interval"]
        elif made.evidence.calibration:
            hints = ["calibrate on more samples, of all kinds"]
        elif half:
            hints = ["give `calib`: nodes that overflow float16 on these inputs stay in float32"]
        elif evaluation.samples is None:
            hints = ["real inputs may lose less than random ones: give `data`"]
        if half and rows:
            hints.append("bf16 has the range of float32")
        if to != "auto":
            hints.append("precision 'auto' keeps the most sensitive nodes in float32")
    raise GateFailed(
        f"{name}: {evaluation.describe()}: {evaluation.why}; the file is kept as {made.path}",
        hint="; ".join(hints) or None,
        result=made,
    )
