"""The columns of a benchmark: which artefacts are timed, on which device, in how many sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from deploykit.core.artefact import Artefact, ArtefactLike, wrong_format
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.machine import Machine
from deploykit.core.precision import narrowest
from deploykit.core.runtime import BUILT, RUNTIMES, function

if TYPE_CHECKING:
    from deploykit.measure.report.report import NotMeasured
    from deploykit.measure.timing.cpu_search import CpuSearch, CpuSettings
    from deploykit.measure.timing.sweep import Setup
    from deploykit.runtimes.engine import Engine

BASELINE = "fp32 CPU"  # ONNX Runtime, the fastest settings of one session
_NEAR = 0.25  # below the fastest rate of a search, whose windows are short
SEARCHED = ("onnxruntime", "openvino", "torch")  # whose settings of the CPU are chosen by a search


def _say_nothing(note: str) -> None: ...


@dataclass(frozen=True)
class Opener:
    """Opens an artefact; a copy in another process leaves the notes to this one."""

    artefact: Artefact
    trust: bool
    note: Callable[[str], None]

    def __call__(self, device: str = "cpu") -> Engine:
        from deploykit.api.open import open_proven

        return open_proven(
            self.artefact, device, trust=self.trust, overlap=False, on_note=self.note
        )[0]

    def __reduce__(self) -> tuple[type[Opener], tuple[Artefact, bool, Callable[[str], None]]]:
        return Opener, (self.artefact, self.trust, _say_nothing)


@dataclass(frozen=True)
class Entry:
    """One artefact in one runtime. `precision`: "fp32", "fp16", "int8", ...

    `rival`: the label of one that nobody asked for, which may be faster on this CPU, else "".
    """

    artefact: Artefact
    precision: str
    built_on: Mapping[str, str]
    open: Callable[..., Engine]  # (device)
    runtime: str
    rival: str = ""

    @property
    def key(self) -> str:
        return f"{self.artefact.sha256} {self.runtime} {self.precision}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.artefact.name,
            "sha256": self.artefact.sha256,
            "precision": self.precision,
            "format": self.artefact.format,
            "bytes": self.artefact.facts["bytes"],
            "built_on": dict(self.built_on),
        }


def open_entry(artefact: Artefact, trust: bool, note: Callable[[str], None]) -> Entry:
    """Of an .onnx file or a built engine; BadInput for any other format."""
    from deploykit.onnx_graph.graph import Graph

    if not artefact.runtime.builder and not _is_module(artefact):
        raise wrong_format(artefact, artefact.format, f"an {' or '.join(BUILT)} file")
    built_on: Mapping[str, str] = {}
    if artefact.format == "onnx":
        precision = narrowest(Graph.open(artefact.path).precision)
    elif artefact.runtime.name == "torch":
        precision = "fp32"
    else:
        manifest = artefact.manifest
        built_on = manifest.built_on if manifest else {}
        counted = narrowest(manifest.precision) if manifest else "unknown"
        precision = built_on.get("precision", counted)
    opener = Opener(artefact, trust, note)
    return Entry(artefact, precision, built_on, opener, artefact.runtime.name)


def _is_module(artefact: Artefact) -> bool:
    """Whether a PyTorch file says how to run it."""
    if artefact.format != "torch":
        return False
    from deploykit.runtimes.torch.engine import describes_itself

    return describes_itself(artefact.path)


def open_entries(
    sources: Sequence[ArtefactLike],
    baseline: ArtefactLike | None,
    trust: bool,
    note: Callable[[str], None],
) -> tuple[Entry, ...]:
    """Each file once, the baseline first: the given one, or as `_find_baseline`."""
    found = [open_entry(Artefact.open(source), trust, note) for source in sources]
    if baseline:
        reference = open_entry(Artefact.open(baseline), trust, note)
    else:
        reference = _find_baseline(found[0], trust, note)
    if reference.artefact.format != "onnx" or reference.precision != "fp32":
        raise BadInput(
            f"{reference.artefact}: is {reference.precision} in {reference.artefact.format}; the "
            "baseline is a float32 model in ONNX",
            hint="`baseline`: the .onnx file that the engine was made from",
        )
    others = {item.artefact.path.resolve(): item for item in found}
    others.pop(reference.artefact.path.resolve(), None)
    return (reference, *others.values())


def _find_baseline(first: Entry, trust: bool, note: Callable[[str], None]) -> Entry:
    """`first`, or the float32 model next to it that an engine was made from."""
    from deploykit.api.verify import find_sources

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


@dataclass(frozen=True)
class Columns:
    """The setups to time, what was tried to choose those on the CPU, and what was not."""

    setups: list[Setup]
    searches: list[CpuSearch]
    gaps: list[NotMeasured]


def choose_columns(
    reference: Entry,
    every: Sequence[Entry],
    machine: Machine,
    device: str,
    batches: Sequence[int],
    search: Callable[[Entry, int], CpuSearch | None],
) -> Columns:
    """The baseline in one session and in its fastest, and each other artefact in the same ways.

    `search` tries settings of the CPU on an artefact at a batch size, None where it cannot. An
    artefact that is faster in other settings than the baseline's has a column more; one that does
    not run on CPUs has its own, on its GPU; one in another runtime the settings of its own. Rivals,
    the last of `every`, have a column where the search found them near the fastest or faster.
    """
    from deploykit.measure.report.report import NotMeasured
    from deploykit.measure.timing.cpu_search import CpuSettings

    gpu, why = _gpu(reference, machine, device)
    gaps = [] if gpu else [NotMeasured("GPU", why)]
    searches: list[CpuSearch] = []
    setups: list[Setup] = []
    alike: dict[int, list[CpuSettings]] = {}
    for item in every:
        runtime, stem = item.artefact.runtime, item.artefact.path.stem
        if not runtime.on_cpu:
            setup = _setup(item, f"{stem}, {runtime.title}", device)
            setups += _ways(setup, batches) if runtime.overlaps else [setup]
            continue
        if item.runtime not in SEARCHED:  # its settings are not ours to try
            setups.append(_setup(item, stem, "cpu"))
            continue
        own: dict[int, CpuSettings] = {}
        behind: list[int] = []
        for batch in batches:
            found = search(item, batch)
            if found:
                searches.append(found)
                own[batch] = found.fastest
            if found and item.rival and _behind(found, searches):
                behind.append(batch)
                del own[batch]
            if item is reference:
                best = (found.fastest_of_one, found.fastest) if found else (CpuSettings(),)
                alike[batch] = list(dict.fromkeys(best))
        if behind:
            sizes = ", ".join(map(str, behind))
            what = f"{item.rival} on the CPU at batch {sizes}"
            gaps.append(NotMeasured(what, "far slower than others in the search"))
        if item.runtime != reference.runtime:
            label = item.rival or f"{stem} in {runtime.title}"
            setups += _placed(item, _by_settings(label, own))
            setups += [] if own or item.rival else [_setup(item, label, "cpu")]
            continue
        setups += _on_cpu(item, BASELINE if item is reference else stem, alike, own)
        if gpu and "cuda" in runtime.devices:
            setups.append(_setup(item, f"{stem}, GPU", gpu))
    return Columns(setups, searches, gaps)


def _behind(found: CpuSearch, every: Sequence[CpuSearch]) -> bool:
    """Whether it lost the search at its batch size by more than noise explains."""
    rates = [each.trials[0].throughput_per_s for each in every if each.batch == found.batch]
    return found.trials[0].throughput_per_s < (1 - _NEAR) * max(rates)


def _on_cpu(
    item: Entry,
    label: str,
    alike: Mapping[int, Sequence[CpuSettings]],
    own: Mapping[int, CpuSettings],
) -> list[Setup]:
    """In the baseline's settings at each batch size, and in those of its own that are others."""
    counts = {each.sessions for found in alike.values() for each in found[1:]}
    many = f"{label}, {counts.pop()} sessions" if len(counts) == 1 else f"{label}, several sessions"
    found: dict[tuple[str, CpuSettings], list[int]] = {}
    for batch, (one, *several) in alike.items():
        found.setdefault((label, one), []).append(batch)
        for each in several:
            found.setdefault((many, each), []).append(batch)
        if batch in own and own[batch] not in alike[batch]:
            found.setdefault((f"{label}, own settings", own[batch]), []).append(batch)
    return _placed(item, found)


def _by_settings(
    label: str, own: Mapping[int, CpuSettings]
) -> dict[tuple[str, CpuSettings], list[int]]:
    found: dict[tuple[str, CpuSettings], list[int]] = {}
    for batch, settings in own.items():
        found.setdefault((label, settings), []).append(batch)
    return found


def _placed(item: Entry, found: Mapping[tuple[str, CpuSettings], Sequence[int]]) -> list[Setup]:
    """A setup for each label and settings, at its batch sizes."""
    return [
        replace(
            _setup(item, name, "cpu"),
            engines=partial(open_on_cpu, item, settings),
            sessions=settings.sessions,
            threads=settings.threads,
            settings=str(settings),
            processes=settings.processes,
            batches=tuple(batches),
        )
        for (name, settings), batches in sorted(found.items(), key=lambda each: each[0][0])
    ]


def open_on_cpu(item: Entry, settings: CpuSettings) -> Engine:
    """One of its sessions."""
    from deploykit.measure.timing.processes import ProcessEngine

    open_it = partial(open_session, item.runtime, item.artefact, item.precision, settings)
    return ProcessEngine(open_it) if settings.processes else open_it()


def open_session(
    runtime: str, artefact: Artefact, precision: str, settings: CpuSettings | None, _: str = "cpu"
) -> Engine:
    """In this process. `settings`: of the CPU, None for one session with the usual threads."""
    options: dict[str, Any] = {}
    if runtime == "onnxruntime" and settings is not None:
        options["spinning"] = bool(settings.spinning)
    if runtime == "torch":
        options["bf16"] = precision == "bf16"
    open_engine = function(RUNTIMES[runtime].engine)
    engine: Engine = open_engine(artefact, "cpu", settings and settings.threads, **options)
    return engine


def _ways(plain: Setup, batches: Sequence[int]) -> list[Setup]:
    """With and without CUDA graphs, with one call and with two in flight; the weights once."""
    shared = _Shared(plain)
    return [
        replace(
            plain,
            label=plain.label + ", CUDA graphs" * bool(graphs) + ", overlap" * (slots > 1),
            engines=partial(shared.open, slots, graphs),
            in_flight=slots,
        )
        for slots in (1, 2)
        for graphs in ((), tuple(batches))
    ]


class _Shared:
    """Engines on the weights of the first one that was opened."""

    def __init__(self, plain: Setup) -> None:
        self._plain = plain
        self._opened: list[Engine] = []

    def open(self, slots: int, graphs: Sequence[int]) -> Engine:
        shared = self._opened[0].share(slots=slots, graphs=graphs) if self._opened else None
        self._opened.append(shared or self._plain.engines())
        return self._opened[-1]


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


def _setup(item: Entry, label: str, device: str) -> Setup:
    from deploykit.measure.timing.sweep import Setup

    return Setup(
        label=label,
        engines=partial(item.open, device),
        precision=item.precision,
        file=item.artefact.name,
        sha256=item.artefact.sha256,
        entry=item.key,
    )
