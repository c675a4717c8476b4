"""Put a lower precision into an ONNX graph, and judge what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api.staging import PARITY_BATCHES, Made, keep, onnx_manifest, reject, staged
from deploykit.core.errors import BadInput, GateFailed
from deploykit.core.files import check_writable, sha256
from deploykit.core.tensors import BATCH

if TYPE_CHECKING:
    import onnx

    from deploykit.measure.parity import Parity
    from deploykit.measure.stats import Drop
    from deploykit.runtimes.data import Samples

PRECISIONS = ("fp16", "int8")


def quantize(
    model: Path,
    to: str,
    out: Path | None = None,
    *,
    calib: Path | None = None,
    data: Path | None = None,
    max_drop: float = 0.01,
    runtime: str = "tensorrt",
) -> Made:
    """Put `to` ("fp16" or "int8") into the graph.

    `runtime`: what will run it, "tensorrt" or "onnxruntime": they want INT8's Q/DQ pairs at other
    places. Either file is right on both; on the other one it may not be faster than float32.
    `calib`: .npz with inputs, needed for int8. `data`: labelled .npz; then the upper end of the
    drop's 95 % interval must stay under `max_drop` (a fraction: 0.01 is one percentage point).
    """
    if to not in PRECISIONS:
        raise BadInput(f"--to {to}: is not offered", hint="one of: " + ", ".join(PRECISIONS))
    if not 0 < max_drop <= 1:
        raise BadInput(f"--max-drop {max_drop}: a fraction above 0, at most 1, is needed")
    out = out or model.with_suffix(f".{to}.onnx")
    check_writable(out)
    from deploykit.runtimes.data import read_samples
    from deploykit.transforms import graph

    source = graph.load_graph(model)
    inputs, _ = graph.specs(source)
    if to == "int8" and calib is None:
        raise BadInput(
            "--to int8 needs calibration data", hint="--calib FILE.npz, some 100 samples"
        )
    calibration_set = read_samples(calib, inputs) if calib else None
    test_set = read_samples(data, inputs, labelled=True) if data else None
    typed, notes = _typed(source, model, to, calibration_set, runtime)
    with staged(out) as tmp:
        graph.save_graph(typed, tmp)
        parity, drop = _judged(model, tmp, out.name, calibration_set, test_set)
        checks: dict[str, Any] = {
            "parity": parity.to_dict(),
            "accuracy": drop.to_dict() if drop else None,
            "max_drop": max_drop if drop else None,
            "notes": list(notes),
        }
        if drop is None:
            notes = (*notes, "accuracy not measured: no labelled data (--data FILE.npz)")
        sources = [sha256(path) for path in (model, calib) if path is not None]
        manifest = onnx_manifest(tmp, sources, tools=("onnx", "onnxruntime"), checks=checks)
        made = Made(out, manifest, parity=parity, drop=drop, notes=notes)
        if drop is None or drop.drop.high <= max_drop:
            return keep(tmp, made)
        made = reject(tmp, made)
        raise GateFailed(
            f"{out.name}: {drop.describe()}: the upper end {drop.drop.high * 100:.2f} pp is above "
            f"--max-drop {max_drop * 100:g} pp; the file is kept as {made.path}",
            hint="more labelled samples narrow the interval; --to fp16 loses less",
            result=made,
        )


def _typed(
    source: onnx.ModelProto, model: Path, to: str, calibration_set: Samples | None, runtime: str
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The model in precision `to`, and notes on what was left as it was."""
    from deploykit.transforms import calibrate, halves, qdq

    found = calibrate.calibrate(model, calibration_set) if calibration_set else None
    if to == "int8" and found is not None:
        return qdq.to_int8(source, found, runtime=runtime), ()
    typed, wide = halves.to_fp16(source, found.ranges if found else None)
    notes = []
    if found is None:
        notes.append("activations not checked for float16 overflow: no calibration data (--calib)")
    if wide:
        notes.append(f"kept in float32, too close to float16's limit: {', '.join(wide)}")
    return typed, tuple(notes)


def _judged(
    model: Path, typed: Path, name: str, calibration_set: Samples | None, test_set: Samples | None
) -> tuple[Parity, Drop | None]:
    """Parity and, on labelled data, the paired drop of `typed` against the float32 `model`."""
    from deploykit.measure.accuracy import TOP1, top1_scores
    from deploykit.measure.parity import compare_engines
    from deploykit.measure.stats import paired_drop
    from deploykit.runtimes.data import random_feeds
    from deploykit.runtimes.engine import load

    with load(model, "cpu") as reference, load(typed, "cpu") as candidate:
        known = test_set or calibration_set
        feeds = (
            list(known.batches(32 if reference.inputs[0].batched else 1))
            if known
            else [random_feeds(reference.inputs, {BATCH: n}, n) for n in PARITY_BATCHES]
        )
        parity = compare_engines(reference, candidate, feeds, names=(model.name, name))
        if test_set is None:
            return parity, None
        scores = [top1_scores(engine, test_set) for engine in (reference, candidate)]
        return parity, paired_drop(scores[0], scores[1], TOP1)
