"""Look into artefacts, compare them, and run one over a data set."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api.staging import PARITY_BATCHES, Progress
from deploykit.core.artefact import Manifest, read_manifest, sniff
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.files import check_writable, sha256
from deploykit.core.profile import load_profile, profile_names
from deploykit.core.tensors import BATCH, TensorSpec

if TYPE_CHECKING:
    from deploykit.measure.parity import Parity
    from deploykit.measure.stats import Interval


def compare(
    a: Path,
    b: Path,
    *,
    data: Path | None = None,
    max_error: float = 1e-3,
    device: str = "cpu",
) -> Parity:
    """Run two artefacts on the same inputs, the samples of `data` or seeded random ones."""
    from deploykit.measure.parity import compare_engines
    from deploykit.runtimes.data import random_feeds, read_samples
    from deploykit.runtimes.engine import load

    with load(a, device) as first, load(b, device) as second:
        if data is not None:
            feeds = list(read_samples(data, first.inputs).batches(32))
        else:
            feeds = [random_feeds(first.inputs, {BATCH: n}, n) for n in PARITY_BATCHES]
        return compare_engines(first, second, feeds, max_error=max_error, names=(a.name, b.name))


@dataclass(frozen=True)
class Predicted:
    """What `predict` wrote; `accuracy` is None where the data have no labels."""

    path: Path
    samples: int
    seconds: float
    device: str
    accuracy: Interval | None

    def to_dict(self) -> dict[str, Any]:
        accuracy = self.accuracy.to_dict() if self.accuracy else None
        return {**vars(self), "path": str(self.path), "accuracy": accuracy}


def predict(
    engine: Path,
    data: Path,
    out: Path,
    *,
    batch: int = 32,
    device: str = "auto",
    on_progress: Progress | None = None,
) -> Predicted:
    """Run every sample of an .npz through `engine` into an .npz of outputs by name."""
    import numpy as np

    from deploykit.measure.accuracy import top1
    from deploykit.measure.stats import proportion
    from deploykit.runtimes.data import read_samples, write_npz
    from deploykit.runtimes.engine import load

    if batch < 1:
        raise BadInput(f"--batch {batch}: 1 or more is needed")
    check_writable(out)
    with load(engine, device) as opened:
        samples = read_samples(data, opened.inputs)
        size = batch if opened.inputs[0].batched else 1
        parts: dict[str, list[Any]] = {spec.name: [] for spec in opened.outputs}
        started = time.perf_counter()
        for number, feeds in enumerate(samples.batches(size), 1):
            for name, values in opened(feeds).items():
                parts[name].append(values)
            if on_progress is not None:
                done = min(number * size, len(samples))
                on_progress(f"{done}/{len(samples)} samples", done / len(samples))
        seconds = time.perf_counter() - started
        outputs = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        write_npz(out, outputs)
        accuracy = None
        if samples.labels is not None and samples.labels.dtype.kind in "iu":
            scores = top1(outputs[opened.outputs[0].name], samples.labels, str(data))
            accuracy = proportion(round(scores.sum()), len(scores))
        return Predicted(out, len(samples), seconds, opened.device, accuracy)


@dataclass(frozen=True)
class Inspection:
    """What is in an artefact. `details` depends on the format.

    `fits`: the profiles that offer its precisions; it was not tried there.
    """

    path: Path
    format: str
    size_bytes: int
    sha256: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: Mapping[str, int]
    details: Mapping[str, Any]
    fits: tuple[str, ...]
    manifest: Manifest | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "format": self.format,
            "size_bytes": self.size_bytes,
            "sha256": self.sha256,
            "inputs": [spec.to_dict() for spec in self.inputs],
            "outputs": [spec.to_dict() for spec in self.outputs],
            "precision": dict(self.precision),
            "details": dict(self.details),
            "fits": list(self.fits),
            "manifest": self.manifest.to_dict() if self.manifest else None,
        }


def inspect(path: Path) -> Inspection:
    """Look into any artefact; a manifest beside it is read, and checked against the file."""
    kind = sniff(path)
    manifest = read_manifest(path)
    digest, size = sha256(path), path.stat().st_size
    if kind == "onnx":
        from deploykit.transforms import graph

        summary = graph.summarise(graph.load_graph(path))
        details = summary.to_dict()
        for key in ("inputs", "outputs", "precision"):
            details.pop(key)
        return Inspection(
            path,
            kind,
            size,
            digest,
            summary.inputs,
            summary.outputs,
            summary.precision,
            details,
            _targets(summary.precision, summary.opset),
            manifest,
        )
    if kind == "torch":
        from deploykit.runtimes.torch import load_module, parameters

        loaded = load_module(path)
        details = {"recipe": loaded.recipe, **parameters(loaded.module)}
        return Inspection(
            path,
            kind,
            size,
            digest,
            loaded.inputs,
            loaded.outputs,
            {},
            details,
            ("torch",),
            manifest,
        )
    raise Unsupported(f"{path}: {kind} files are not read by this version of deploykit")


_NEEDS = {"float16": "fp16", "bfloat16": "bf16", "int8": "int8", "float8e4m3fn": "fp8"}


def _targets(precision: Mapping[str, int], opset: Mapping[str, int]) -> tuple[str, ...]:
    """Profiles that offer every precision of the graph.

    A graph with operators of another domain than ONNX's own runs on ONNX Runtime alone.
    """
    needed = {_NEEDS[name] for name in precision if name in _NEEDS}
    standard = set(opset) <= {"", "ai.onnx"}
    profiles = [load_profile(name) for name in profile_names()]
    return tuple(
        profile.name
        for profile in profiles
        if needed <= set(profile.precisions) and (standard or profile.runtime == "onnxruntime")
    )
