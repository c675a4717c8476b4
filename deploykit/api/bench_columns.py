"""The columns of a benchmark: which artefacts are timed, on which device, in how many sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from deploykit.core.artefact import Artefact, ArtefactLike, wrong_format
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.machine import Machine, default_threads
from deploykit.core.precision import narrowest
from deploykit.core.runtime import BUILT

if TYPE_CHECKING:
    from deploykit.measure.report.report import NotMeasured
    from deploykit.measure.timing.sweep import Setup
    from deploykit.runtimes.engine import Engine

BASELINE = "fp32 CPU"  # ONNX Runtime, one session on all physical cores


@dataclass(frozen=True)
class Entry:
    """One artefact of the report. `precision`: "fp32", "fp16", "int8", ..."""

    artefact: Artefact
    precision: str
    built_on: Mapping[str, str]
    open: Callable[..., Engine]  # (device, threads)

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.artefact.name,
            "sha256": self.artefact.sha256,
            "precision": self.precision,
            "format": self.artefact.format,
            "built_on": dict(self.built_on),
        }


def open_entry(artefact: Artefact, trust: bool, note: Callable[[str], None]) -> Entry:
    """Of an .onnx file or a built engine; BadInput for any other format."""
    from deploykit.api.open import open_proven
    from deploykit.onnx_graph.graph import Graph

    def open_it(device: str = "cpu", threads: int | None = None) -> Engine:
        return open_proven(
            artefact, device, threads=threads, trust=trust, overlap=False, on_note=note
        )[0]

    if not artefact.runtime.builder:
        raise wrong_format(artefact, artefact.format, f"an {' or '.join(BUILT)} file")
    built_on: Mapping[str, str] = {}
    if artefact.format == "onnx":
        precision = narrowest(Graph.open(artefact.path).precision)
    else:
        manifest = artefact.manifest
        built_on = manifest.built_on if manifest else {}
        counted = narrowest(manifest.precision) if manifest else "unknown"
        precision = built_on.get("precision", counted)
    return Entry(artefact, precision, built_on, open_it)


def find_baseline(
    given: ArtefactLike | None, first: Entry, trust: bool, note: Callable[[str], None]
) -> Entry:
    """The one given, else `first`, or the float32 model next to it that an engine was made from."""
    from deploykit.api.verify import find_sources

    if given:
        return open_entry(Artefact.open(given), trust, note)
    if first.artefact.format == "onnx":
        return first
    manifest = first.artefact.manifest
    for path in find_sources(first.artefact.path, manifest) if manifest else ():
        found = open_entry(Artefact.open(path), trust, note)
        if found.precision == "fp32":
            return found
    raise BadInput(
        f"{first.artefact}: the float32 model that it was made from is not next to it",
        hint="`baseline`: the .onnx file that all are compared with",
    )


def check_baseline(found: Entry) -> Entry:
    """`found`, which must be a float32 model in ONNX; else BadInput."""
    if found.artefact.format != "onnx" or found.precision != "fp32":
        raise BadInput(
            f"{found.artefact}: is {found.precision} in {found.artefact.format}; the baseline is a "
            "float32 model in ONNX",
            hint="`baseline`: the .onnx file that the engine was made from",
        )
    return found


def choose_setups(
    reference: Entry,
    every: Sequence[Entry],
    machine: Machine,
    device: str,
    batches: Sequence[int],
) -> tuple[list[Setup], list[NotMeasured]]:
    """The columns: the baseline, each artefact on the CPU in two ways, and on the GPU there is.

    One that does not run on CPUs has its own, on its GPU.
    """
    from deploykit.measure.report.report import NotMeasured

    cores = default_threads()
    gpu, why = _gpu(reference, machine, device)
    setups = []
    for item in every:
        runtime, stem = item.artefact.runtime, item.artefact.path.stem
        if not runtime.on_cpu:
            setup = _setup(item, f"{stem}, {runtime.title}", device, 1, None)
            setups += _ways(setup, batches) if runtime.overlaps else [setup]
            continue
        label = BASELINE if item is reference else stem
        setups.append(_setup(item, label, "cpu", 1, cores))
        if cores > 1:
            setups.append(_setup(item, f"{label}, {cores} sessions", "cpu", cores, 1))
        if gpu and "cuda" in runtime.devices:
            setups.append(_setup(item, f"{stem}, GPU", gpu, 1, None))
    return setups, [] if gpu else [NotMeasured("GPU", why)]


def _ways(plain: Setup, batches: Sequence[int]) -> list[Setup]:
    """With and without CUDA graphs, with one call and with two in flight; the weights once."""
    opened: list[Engine] = []

    def way(slots: int, graphs: Sequence[int]) -> Engine:
        shared = opened[0].share(slots=slots, graphs=graphs) if opened else None
        opened.append(shared or plain.engines())
        return opened[-1]

    return [
        replace(
            plain,
            label=plain.label + ", CUDA graphs" * bool(graphs) + ", overlap" * (slots > 1),
            engines=partial(way, slots, graphs),
            in_flight=slots,
        )
        for slots in (1, 2)
        for graphs in ((), tuple(batches))
    ]


def _gpu(reference: Entry, machine: Machine, device: str) -> tuple[str, str]:
    """The GPU to measure on, or "" and why there is none.

    With "auto" one that cannot be used is left out and the report says why; one that was asked for
    by name raises Unsupported.
    """
    from deploykit.runtimes.onnxruntime.engine import providers

    if device == "cpu":
        return "", "the CPU was asked for (`device`)"
    if device == "auto" and not machine.gpus and machine.l4t is None:
        return "", "no NVIDIA GPU on this machine"
    if device == "auto" and "CUDAExecutionProvider" not in providers():
        return "", "the installed onnxruntime has no CUDA provider"
    chosen = "cuda" if device == "auto" else device
    try:
        reference.open(chosen).close()
    except Unsupported as exc:
        if device != "auto":
            raise
        return "", exc.message
    return chosen, ""


def _setup(item: Entry, label: str, device: str, sessions: int, threads: int | None) -> Setup:
    from deploykit.measure.timing.sweep import Setup

    return Setup(
        label=label,
        engines=lambda: item.open(device, threads),
        sessions=sessions,
        threads=threads,
        precision=item.precision,
        file=item.artefact.name,
        sha256=item.artefact.sha256,
    )
