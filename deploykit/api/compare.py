"""Look into artefacts, compare them, and run one over a data set."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api import golden
from deploykit.api.artefacts import Progress, parity_sizes
from deploykit.api.open import open_proven
from deploykit.core.artefact import read_manifest, sniff
from deploykit.core.errors import BadInput, GateFailed
from deploykit.core.files import check_writable, sha256
from deploykit.core.manifest import Manifest
from deploykit.core.precision import names_of
from deploykit.core.profile import load_profile, profile_names
from deploykit.core.tensors import TensorSpec

if TYPE_CHECKING:
    import numpy as np

    from deploykit.measure.evaluate.divergence import Divergence, Run, Tap
    from deploykit.measure.evaluate.parity import Parity
    from deploykit.measure.statistics import Interval
    from deploykit.onnx_graph.graph import Graph
    from deploykit.runtimes.engine import Arrays


@dataclass(frozen=True)
class Compared:
    """Parity of two artefacts, and where two ONNX graphs that differ first do so."""

    parity: Parity
    divergence: Divergence | None = None

    def to_dict(self) -> dict[str, Any]:
        found = self.divergence.to_dict() if self.divergence else None
        return {**self.parity.to_dict(), "divergence": found}

    def raise_if_over(self) -> None:
        """Raise GateFailed naming the worst row, and the first node that differs."""
        try:
            self.parity.raise_if_over()
        except GateFailed as exc:
            if self.divergence is None:
                raise
            raise GateFailed(exc.message, hint=self.divergence.text) from None


def compare(
    a: Path,
    b: Path | None = None,
    *,
    data: Path | None = None,
    max_error: float | None = None,
    device: str = "cpu",
) -> Compared:
    """Run two artefacts on the same inputs, the samples of `data` or seeded random ones.

    Without `b`, `a` runs on the golden samples beside it and is held to what PyTorch answered;
    the bound is then the manifest's, else 0.001. A TensorRT engine runs on its GPU, even where
    `device` is "cpu", and random inputs are of sizes that it takes.
    """
    from deploykit.measure.evaluate.parity import compare_engines
    from deploykit.runtimes.data.samples import random_feeds, read_samples
    from deploykit.runtimes.engine import load

    if b is None:
        if data is not None:
            raise BadInput("--data goes with two files; one alone replays its golden samples")
        with load(a, _place(a, device)) as engine:
            recorded, golden_feeds, found = golden.open_recorded(a, engine.inputs, engine.outputs)
            bound = found.max_error if max_error is None else max_error
            names = (f"{found.reference}, recorded", a.name)
            return Compared(
                compare_engines(recorded, engine, [golden_feeds], max_error=bound, names=names)
            )
    bound = golden.MAX_ERROR if max_error is None else max_error
    with load(a, _place(a, device)) as first, load(b, _place(b, device)) as second:
        if data is not None:
            samples = read_samples(data, first.inputs)
            size, used = samples.batching(32, (*first.inputs, *second.inputs))
            feeds = list(samples.first(used).batches(size))
        else:
            limits = {**first.limits, **second.limits}
            sizes = parity_sizes(first.inputs, limits)
            feeds = [random_feeds(first.inputs, each, seed) for seed, each in enumerate(sizes)]
        parity = compare_engines(first, second, feeds, max_error=bound, names=(a.name, b.name))
    kinds = {sniff(a), sniff(b)}
    diverging = None
    if kinds == {"onnx"} and not parity.passed:
        diverging = _diverging(a, b, feeds, bound)
    return Compared(parity, diverging)


def _place(path: Path, device: str) -> str:
    return "auto" if device == "cpu" and sniff(path) == "tensorrt" else device


def _diverging(
    a: Path, b: Path, feeds: Sequence[Mapping[str, np.ndarray]], max_error: float
) -> Divergence | None:
    """The first node whose tensor differs; None where the graphs share no names to go by."""
    from deploykit.measure.evaluate.divergence import first_divergence
    from deploykit.onnx_graph import probes
    from deploykit.onnx_graph.graph import Graph

    graphs = Graph.open(a), Graph.open(b)
    pairs = probes.shared(*graphs)
    with tempfile.TemporaryDirectory() as folder:
        left, right = (_tap(graph, Path(folder) / f"{n}.onnx") for n, graph in enumerate(graphs))
        try:
            return first_divergence(left, right, pairs, feeds[:1], max_error=max_error)
        except BadInput:
            return None


def _tap(graph: Graph, path: Path) -> Tap:
    """Run a graph as it is written and give the tensors asked for, however they are shown."""
    from deploykit.onnx_graph import probes
    from deploykit.runtimes.onnxruntime.engine import open_as_written

    def tap(names: Sequence[str]) -> Run:
        tapped, shown = probes.expose(graph, names)
        tapped.save(path)
        engine = open_as_written(path)

        def run(feeds: Arrays) -> list[np.ndarray]:
            values = engine(feeds)
            return [values[name] for name in shown]

        return run

    return tap


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
    trust: bool = False,
    on_progress: Progress | None = None,
) -> Predicted:
    """Run every sample of an .npz or a folder through `engine` into an .npz of outputs by name.

    `trust`: see `open_proven`.
    """
    import numpy as np

    from deploykit.measure.evaluate.accuracy import top1
    from deploykit.measure.statistics import proportion
    from deploykit.runtimes.data.samples import read_samples, write_npz

    if batch < 1:
        raise BadInput(f"--batch {batch}: 1 or more is needed")
    check_writable(out)
    (proven,) = open_proven(engine, device, trust=trust)
    with proven as opened:
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
        from deploykit.onnx_graph.graph import Graph
        from deploykit.quantization import cost

        graph = Graph.open(path)
        summary = graph.summary
        details = summary.to_dict()
        for key in ("inputs", "outputs", "precision"):
            details.pop(key)
        details["mix"] = cost.mix(graph, {}).to_dict()
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
    if kind in ("torch", "safetensors"):
        from deploykit.runtimes.torch.engine import look

        inputs, outputs, details = look(path)
        fits = ("torch",)
        return Inspection(path, kind, size, digest, inputs, outputs, {}, details, fits, manifest)
    if manifest is None:
        raise BadInput(
            f"{path}: is a TensorRT engine without a manifest, so nothing tells what it is",
            hint="deploykit build writes one beside every engine",
        )
    evidence = manifest.evidence
    read, built = evidence.precision, evidence.build
    shown = {
        "verified": evidence.verified,
        "flags": list(built.flags) if built else None,
        "shares": read.shares if read else None,
        "time_shares": read.time_shares if read else None,
    }
    return Inspection(
        path,
        kind,
        size,
        digest,
        manifest.inputs,
        manifest.outputs,
        manifest.precision,
        {key: value for key, value in shown.items() if value is not None},
        tuple(filter(None, [manifest.built_on.get("profile")])),
        manifest,
    )


def _targets(precision: Mapping[str, int], opset: Mapping[str, int]) -> tuple[str, ...]:
    """Profiles that offer every precision of the graph.

    A graph with operators of another domain than ONNX's own runs on ONNX Runtime alone.
    """
    needed = names_of(precision)
    standard = set(opset) <= {"", "ai.onnx"}
    profiles = [load_profile(name) for name in profile_names()]
    return tuple(
        profile.name
        for profile in profiles
        if needed <= set(profile.precisions) and (standard or profile.runtime == "onnxruntime")
    )
