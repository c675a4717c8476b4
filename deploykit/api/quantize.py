"""Put a lower precision into an ONNX graph, and judge what it costs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api import golden
from deploykit.api.artefacts import Made, Progress, keep, onnx_manifest, reject, staged
from deploykit.api.evaluate import (
    Job,
    axis_sizes,
    batch_that_fits,
    judged,
    opened,
    typed_graph,
)
from deploykit.core.errors import BadInput, GateFailed
from deploykit.core.evidence import (
    CalibrationRecord,
    Evaluation,
    Evidence,
    GoldenSamples,
    QuantizeRecord,
)
from deploykit.core.files import check_writable, sha256
from deploykit.core.precision import (
    BY_NAME,
    CALIBRATED,
    CAST,
    HARDWARE,
    OTHER_NODES,
    QUANTIZED,
    RUNTIMES,
)
from deploykit.core.profile import Profile, load_profile

if TYPE_CHECKING:
    from deploykit.onnx_graph.graph import Graph
    from deploykit.runtimes.data.samples import Samples

TARGETS = (*QUANTIZED, "auto")
DEFAULT_METRIC = "top1"
_FEW_AGREE = 0.9


def quantize(
    model: Path,
    to: str,
    out: Path | None = None,
    *,
    calib: Path | None = None,
    data: Path | None = None,
    metric: str | None = None,
    max_drop: float | None = None,
    min_sqnr_db: float | None = None,
    rest: str = "fp32",
    calibrator: str | None = None,
    runtime: str | None = None,
    profile: str | None = None,
    budget_s: float = 600.0,
    on_progress: Progress | None = None,
) -> Made:
    """Put `to` (one of QUANTIZED, or "auto") into the graph, and gate what it costs.

    `calib`: inputs, an .npz or a folder; needed for int8, fp8 and auto, and used by fp16's range
    guard. `data`: labelled inputs; then the upper end of the 95 % interval of the drop in `metric`
    ("top1" where None, "perplexity" or `pkg.mod:callable`) must stay within `max_drop` (a fraction:
    0.01, the default, is one percentage point). Without labels a `metric` is BadInput, every output
    must keep a signal-to-noise ratio of `min_sqnr_db` (15 where None), and with `max_drop` the
    share of samples whose largest output moves is gated. `rest`: what the nodes around int8,
    fp8 or stored weights compute in. `runtime`: what will run the file, "tensorrt" or
    "onnxruntime": they want INT8's Q/DQ pairs at other places; None takes the profile's, or
    TensorRT. `profile`: the target; its precisions are checked and `auto` predicts costs for it.
    `budget_s`: seconds that `auto` may search. Raises GateFailed; the file is then kept as
    NAME.rejected.onnx.
    """
    target = load_profile(profile) if profile else None
    runtime = runtime or (target.runtime if target else "tensorrt")
    _check_options(to, rest, runtime, max_drop, calib, target)
    out = out or model.with_suffix(f".{to}.onnx")
    check_writable(out)
    if out.resolve() == model.resolve():
        raise BadInput(f"{out}: is the model itself", hint="choose another -o")
    from deploykit.api import auto_precision
    from deploykit.measure.evaluate.metrics import find_metric
    from deploykit.onnx_graph.graph import Graph
    from deploykit.quantization import calibrate
    from deploykit.runtimes.data.checks import check_calibration, overlap
    from deploykit.runtimes.data.samples import read_samples

    source = Graph.open(model)
    inputs = source.inputs
    calibration_set = read_samples(calib, inputs) if calib else None
    test_set = read_samples(data, inputs) if data else None
    labelled = test_set is not None and test_set.labels is not None
    score = find_metric(metric or DEFAULT_METRIC)
    if metric is not None and not labelled:
        raise BadInput(
            f"--metric {metric}: needs labels" + (f", {data} has none" if data else ""),
            hint="--data FILE.npz with an array named 'labels'",
        )
    doubts = tuple(check_calibration(calibration_set, inputs)) if calibration_set else ()
    notes = list(doubts)
    if calibration_set and test_set and (shared := overlap(calibration_set, test_set)):
        notes.append(
            f"{shared} of the {len(test_set)} samples of {data} are also in {calib}: figures on "
            "samples that set the scales flatter"
        )
    if to == "auto" and labelled and test_set is not None:
        _check_enough(test_set, metric or DEFAULT_METRIC, max_drop)
    # scales want outliers left out, the range guard of float16 wants them in: it reads `ranges`
    method = calibrator or (calibrate.DEFAULT_METHOD if to in (*CALIBRATED, "auto") else "minmax")
    job = Job(
        source,
        calibration_set,
        test_set,
        score if labelled else None,
        max_drop,
        min_sqnr_db,
        runtime,
        calibrate.calibrate(source, calibration_set, method=method) if calibration_set else None,
    )
    with staged(out) as tmp:
        search = None
        sizes = axis_sizes(test_set or calibration_set, inputs, 1)
        job = replace(job, batch_size=batch_that_fits(source, sizes))
        if to == "auto":
            typed, search, judgement, more = auto_precision.searched(
                job, tmp, target, budget_s, on_progress
            )
        else:
            typed, more = typed_graph(job, to, rest)
            typed = typed.save(tmp)
            judgement = judged(job, typed, out.name)
        carried = _replayed(job, typed)
        notes += more
        notes += _unmeasured(job, judgement)
        evidence = Evidence(
            parity=judgement.parity,
            accuracy=judgement,
            quantize=QuantizeRecord(to, rest, runtime),
            calibration=_calibration(calibration_set, calib, method, doubts),
            search=search,
            golden=carried,
            notes=tuple(notes),
        )
        sources = [sha256(path) for path in (model, calib, data) if path and path.is_file()]
        manifest = onnx_manifest(typed, sources, tools=("onnx", "onnxruntime"), evidence=evidence)
        made = Made(out, manifest, tuple(notes))
        if judgement.passed:
            return keep(tmp, made)
        made = reject(tmp, made)
        raise GateFailed(
            f"{out.name}: {judgement.describe()}: {judgement.why}; the file is kept as {made.path}",
            hint="more labelled samples narrow the interval"
            if to == "auto"
            else "--to auto leaves the nodes that do the harm wide",
            result=made,
        )


def _calibration(
    samples: Samples | None, calib: Path | None, method: str, doubts: Sequence[str]
) -> CalibrationRecord | None:
    if samples is None or calib is None:
        return None
    digest = sha256(calib) if calib.is_file() else ""
    return CalibrationRecord(not doubts, "; ".join(doubts), method, len(samples), digest)


def _replayed(job: Job, typed: Graph) -> GoldenSamples | None:
    """Golden samples for the typed file, with a bound that fits its precision.

    On real samples the answers are the float32 graph's: random ones, which `export` may have
    recorded, lie outside the range that INT8 and FP8 were scaled for. Without any: the model's own.
    """
    from deploykit.measure.evaluate.parity import compare_engines
    from deploykit.runtimes.engine import load

    samples = job.test or job.calib
    with (
        tempfile.TemporaryDirectory(dir=typed.path.parent, prefix=".replayed.") as folder,
        opened(job, typed, Path(folder)) as candidate,
        load(job.source.path, "cpu") as reference,
    ):
        if samples is None:
            found = golden.carry(job.source.path, typed.path)
        else:
            size, _ = samples.batching(golden.SAMPLES, reference.inputs)
            found = golden.record(reference, next(samples.batches(size)), typed.path)
        if found is None:
            return None
        recorded, feeds = golden.recorded(found, typed.path, candidate.inputs, candidate.outputs)
        return golden.loosened(found, compare_engines(recorded, candidate, [feeds]))


def _check_enough(test_set: Samples, metric: str, max_drop: float | None) -> None:
    """Raise BadInput where not even equal answers could pass: a search would be for nothing."""
    from deploykit.measure.evaluate.evaluation import MAX_DROP
    from deploykit.measure.statistics import samples_to_show_no_drop

    max_drop = MAX_DROP if max_drop is None else max_drop
    fewest = samples_to_show_no_drop(max_drop)
    if metric == DEFAULT_METRIC and len(test_set) < fewest:
        raise BadInput(
            f"{test_set.where}: {len(test_set)} samples cannot show a drop within "
            f"{max_drop * 100:g} pp even where there is none, {fewest} are needed",
            hint="give more labelled samples, or a larger --max-drop",
        )


def _unmeasured(job: Job, judgement: Evaluation) -> list[str]:
    """What a gate without labels cannot tell."""
    if job.metric is not None:
        return []
    known = job.test or job.calib
    on = known.where if known else "random inputs"
    notes = [
        f"accuracy not measured: no labelled data (--data FILE.npz); agreement and SQNR are of {on}"
    ]
    agreement = judgement.agreement
    if agreement is not None and agreement.value < _FEW_AGREE:
        notes.append(
            f"{(1 - agreement.value) * 100:.1f} % of the samples get another answer: measure on "
            "labelled data before you rely on it"
        )
    return notes


def _check_options(
    to: str,
    rest: str,
    runtime: str,
    max_drop: float | None,
    calib: Path | None,
    target: Profile | None,
) -> None:
    """Raise BadInput for options that contradict each other, before any work."""
    if to not in TARGETS:
        raise BadInput(f"--to {to}: is not offered", hint="one of: " + ", ".join(TARGETS))
    if rest not in OTHER_NODES:
        raise BadInput(f"--rest {rest}: is not offered", hint="one of: " + ", ".join(OTHER_NODES))
    if runtime not in RUNTIMES:
        raise BadInput(f"--runtime '{runtime}': unknown", hint="one of: " + ", ".join(RUNTIMES))
    around = to != "auto" and BY_NAME[to].writer != CAST and runtime == "tensorrt"
    if rest != "fp32" and not around:
        raise BadInput(
            f"--rest fp16: goes with int8, fp8 and weight-only precisions for TensorRT, not with "
            f"--to {to} --runtime {runtime}"
        )
    if max_drop is not None and not 0 < max_drop <= 1:
        raise BadInput(f"--max-drop {max_drop}: a fraction above 0, at most 1, is needed")
    if to in (*CALIBRATED, "auto") and calib is None:
        raise BadInput(
            f"--to {to} needs calibration data", hint="--calib FILE.npz or a folder, 100 samples"
        )
    if target and to in HARDWARE and to not in target.precisions:
        raise BadInput(
            f"--to {to}: profile '{target.name}' does not run it",
            hint="it runs: " + ", ".join(target.precisions),
        )
