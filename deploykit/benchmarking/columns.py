"""Choose the columns of a benchmark: artefacts, their devices and fastest CPU settings."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from deploykit.benchmarking.timing import Clock, ProcessEngine, Setup, run_block
from deploykit.core.artefact import Artefact, ArtefactLike, wrong_format
from deploykit.core.errors import BadInput, DeploykitError, OutOfMemory, Unsupported
from deploykit.core.extras import install_hint, installed
from deploykit.core.machine import Machine
from deploykit.core.precision import narrowest
from deploykit.core.runtime import ALL, BUILT, RUNTIMES
from deploykit.engines.engine import Arrays, Engine, load
from deploykit.evaluation.artefacts import find_sources
from deploykit.evaluation.verify import open_proven
from deploykit.graph.graph import Graph
from deploykit.quantization.half_precision import to_half
from deploykit.reporting.report import (
    CLOSED_LOOP,
    BestCpu,
    CpuSearch,
    CpuSettings,
    CpuTrial,
    NotMeasured,
    Point,
    runtime_of,
)

BASELINE = "fp32 CPU"  # ONNX Runtime, one session in its fastest settings
SEARCHED = ("onnxruntime", "openvino", "torch")  # runtimes whose CPU settings are searched
_NEAR = 0.25  # allowed share below the fastest rate: a search's windows are short
_HALF = "bf16"
_RIVALS = ("fp32", _HALF, "int8")  # precisions of rivals, where the CPU has them
ON_GPU_ALONE = "the GPU was asked for (`device`)"
Note = Callable[[str], None]


def _ignore(note: str) -> None: ...


@dataclass(frozen=True)
class Entry:
    """One artefact in one runtime. `precision`: "fp32", "fp16", "int8", ...

    `label`: the label of its columns, or its beginning. `rival`: not requested, but it may be
    faster on this CPU. `against`: given to compare the others with. `options`: what its runtime
    needs to open it. `opened_as_built`: opened as its format says, with its proof.
    """

    artefact: Artefact
    precision: str
    runtime: str
    label: str = ""
    rival: bool = False
    against: bool = False
    built_on: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    opened_as_built: bool = True
    trust: bool = False
    on_note: Note = _ignore

    @property
    def on_cpu(self) -> bool:
        return self.artefact.runtime.on_cpu

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "on_note": _ignore}  # a copy in another process must not repeat notes

    def open(self, device: str = "cpu") -> Engine:
        """Open the artefact with the default settings of its runtime."""
        if not self.opened_as_built:
            return self.open_session(None, device)
        one = partial(load, overlap=False)
        return open_proven(
            self.artefact, device, trust=self.trust, open_engine=one, on_note=self.on_note
        )[0]

    def open_session(self, settings: CpuSettings | None, device: str = "cpu") -> Engine:
        """Open one session in this process; with the default threads if `settings` is None."""
        options = dict(self.options)
        if self.runtime == "onnxruntime" and settings is not None:
            options["spinning"] = bool(settings.spinning)
        if self.runtime == "torch":
            options["bf16"] = self.precision == _HALF
        open_engine = resolve_name(RUNTIMES[self.runtime].engine)
        threads = settings and settings.threads
        engine: Engine = open_engine(self.artefact, device, threads, **options)
        return engine

    def open_on_cpu(self, settings: CpuSettings) -> Engine:
        """Open one session, in a separate process if the settings ask for it."""
        opener = partial(self.open_session, settings)
        return ProcessEngine(opener) if settings.processes else opener()

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.artefact.name,
            "sha256": self.artefact.sha256,
            "precision": self.precision,
            "format": self.artefact.format,
            "bytes": self.artefact.facts["bytes"],
            "built_on": dict(self.built_on),
        }


def open_entry(
    source: ArtefactLike, trust: bool = False, on_note: Note = _ignore, arch: str | None = None
) -> Entry:
    """Return the entry of a file; `arch` builds the module of weights only. Raises BadInput."""
    artefact = Artefact.open(source)
    entry = Entry(artefact, "fp32", artefact.runtime.name, trust=trust, on_note=on_note)
    if artefact.format == "onnx":
        return replace(entry, precision=narrowest(Graph.open(artefact.path).precision))
    if artefact.runtime.name == "torch":
        from deploykit.engines.torch.engine import describes_itself  # needs torch

        if not describes_itself(artefact.path):  # weights only
            if arch is None:
                raise wrong_format(artefact, artefact.format, f"an {' or '.join(BUILT)} file")
            return replace(entry, options={"arch": arch}, opened_as_built=False)
        return entry
    manifest = artefact.manifest
    built_on = manifest.built_on if manifest else {}
    counted = narrowest(manifest.precision) if manifest else "unknown"
    return replace(entry, precision=built_on.get("precision", counted), built_on=built_on)


def open_entries(
    engines: Sequence[ArtefactLike],
    against: Sequence[ArtefactLike] = (),
    *,
    trust: bool = False,
    on_note: Note = _ignore,
    arch: str | None = None,
) -> list[Entry]:
    """Return an entry for each distinct file, the baseline first.

    The baseline is the float32 model of `against`, else the first engine, or the float32 model next
    to it that it was made from. `arch` builds the module for a file that holds only weights; its
    inputs are the baseline's.
    """
    if not engines:
        raise BadInput("`engines` names no file to time")
    entries = [open_entry(each, trust, on_note, arch) for each in engines]
    others = [replace(open_entry(each, trust, on_note), against=True) for each in against]
    if arch and not any(entry.options for entry in entries):
        raise BadInput(f"`arch` {arch}: none of the engines is a file of weights only")
    baseline = next((each for each in others if _is_float32(each)), None)
    baseline = replace(baseline or _find_baseline(entries[0]), label=BASELINE, against=False)
    bare = {"inputs": Graph.open(baseline.artefact.path).inputs} if arch else {}
    entries = [replace(e, options={**e.options, **bare}) if e.options else e for e in entries]
    distinct = {each.artefact.path.resolve(): each for each in (*others, *entries)}
    distinct.pop(baseline.artefact.path.resolve(), None)
    return [baseline, *_label([*distinct.values()], baseline)]


def _is_float32(entry: Entry) -> bool:
    return entry.artefact.format == "onnx" and entry.precision == "fp32"


def _find_baseline(first: Entry) -> Entry:
    """Return `first`, or the float32 model next to it that it was made from."""
    if _is_float32(first):
        return first
    manifest = first.artefact.manifest
    for path in find_sources(first.artefact.path, manifest) if manifest else ():
        found = open_entry(path, first.trust, first.on_note)
        if _is_float32(found):
            return found
    raise BadInput(
        f"{first.artefact}: is {first.precision} in {first.artefact.format}, and the float32 model "
        "that it was made from is not next to it",
        hint="`against`: the float32 .onnx file that all are compared with",
    )


def _label(entries: Sequence[Entry], baseline: Entry) -> list[Entry]:
    """Give each entry a unique label: its stem, or as much of its path as tells it from others."""
    names = []
    for entry in entries:
        runtime, path = entry.artefact.runtime, entry.artefact.path.resolve()
        where = f" in {runtime.title}" if entry.runtime != baseline.runtime else ""
        where = where if runtime.on_cpu else f", {runtime.title}"
        ends = ["/".join(path.parts[-n:]) for n in range(1, len(path.parts) + 1)]
        own = [end + where for end in dict.fromkeys([path.stem, *ends])]
        names.append([name for name in own if not name.startswith(f"{BASELINE}, ")])
    taken = Counter([BASELINE, *(name for own in names for name in own)])
    free = [next(name for name in own if taken[name] == 1) for own in names]
    return [replace(entry, label=label) for entry, label in zip(entries, free, strict=True)]


def make_columns(
    entries: Sequence[Entry],
    searches: Mapping[tuple[str, int], CpuSearch],
    batches: Sequence[int],
    device: str,
    gpu: str = "",
    on_gpu: Sequence[Entry] = (),
) -> tuple[list[Setup], list[NotMeasured]]:
    """Return the setups to time, and the entries without a setup.

    The baseline, the first of `entries`, gets its fastest single session and its fastest settings.
    Other artefacts get the same settings, and a further column if they are faster in others. One
    that does not run on CPUs gets columns on its GPU; one in another runtime uses its own
    settings. A rival gets a column if its search was near the fastest. `searches` is keyed by
    label and batch. `on_gpu` are timed on `gpu` too.
    """
    setups, gaps = list[Setup](), list[NotMeasured]()
    fastest: dict[int, float] = defaultdict(float)
    for search in searches.values():
        fastest[search.batch] = max(fastest[search.batch], search.trials[0].throughput_per_s)
    alike: dict[int, list[CpuSettings]] = {}
    for entry in entries:
        if not entry.on_cpu:
            setup = _setup(entry, entry.label, device)
            overlaps = entry.artefact.runtime.overlaps
            setups += with_graphs(setup, batches) if overlaps else [setup]
            continue
        if gpu and on_gpu_alone(entry, device):
            gaps.append(NotMeasured(f"{entry.artefact.name} on the CPU", ON_GPU_ALONE))
            continue
        found = {n: searches[entry.label, n] for n in batches if (entry.label, n) in searches}
        if entry is entries[0]:
            for batch in batches:
                best = [found[batch].fastest_of_one, found[batch].fastest] if batch in found else []
                alike[batch] = list(dict.fromkeys(best or [CpuSettings()]))
        behind = [  # slower than noise explains
            batch
            for batch, search in found.items()
            if entry.rival and search.trials[0].throughput_per_s < (1 - _NEAR) * fastest[batch]
        ]
        if behind:
            what = f"{entry.label} on the CPU at batch {', '.join(map(str, behind))}"
            gaps.append(NotMeasured(what, "far slower than others in the search"))
        own = {batch: s.fastest for batch, s in found.items() if batch not in behind}
        if entry.runtime == entries[0].runtime:
            setups += _like_the_baseline(entry, alike, own)
        else:
            setups += _place(entry, [(entry.label, each, batch) for batch, each in own.items()])
            setups += [] if own or entry.rival else [_setup(entry, entry.label, "cpu")]
    for entry in on_gpu:
        name = entry.artefact.path.stem if entry is entries[0] else entry.label
        setups.append(_setup(entry, f"{name}, GPU", gpu))
    return setups, gaps


def on_gpu_alone(entry: Entry, device: str) -> bool:
    """Return whether to time it only on the requested GPU: a CPU never runs it fastest."""
    return device.startswith("cuda") and (entry.precision == "fp16" or entry.runtime == "torch")


def _like_the_baseline(
    entry: Entry, alike: Mapping[int, Sequence[CpuSettings]], own: Mapping[int, CpuSettings]
) -> list[Setup]:
    """Return setups in the baseline's settings per batch size, and in its own if these differ."""
    counts = {each.sessions for found in alike.values() for each in found[1:]}
    several = f"{counts.pop()} sessions" if len(counts) == 1 else "several sessions"
    placed = []
    for batch, (one, *more) in alike.items():
        placed += [(entry.label, one, batch)]
        placed += [(f"{entry.label}, {several}", each, batch) for each in more]
        if batch in own and own[batch] not in alike[batch]:
            placed.append((f"{entry.label}, own settings", own[batch], batch))
    return _place(entry, placed)


def _place(entry: Entry, placed: Sequence[tuple[str, CpuSettings, int]]) -> list[Setup]:
    """Return a setup for each label and settings, at its batch sizes."""
    batches: dict[tuple[str, CpuSettings], list[int]] = defaultdict(list)
    for label, settings, batch in placed:
        batches[label, settings].append(batch)
    return [
        replace(
            _setup(entry, label, "cpu"),
            engines=partial(entry.open_on_cpu, settings),
            sessions=settings.sessions,
            threads=settings.threads,
            settings=str(settings),
            processes=settings.processes,
            batches=tuple(sizes),
        )
        for (label, settings), sizes in sorted(batches.items(), key=lambda pair: pair[0][0])
    ]


def _setup(entry: Entry, label: str, device: str) -> Setup:
    return Setup(
        label=label,
        engines=partial(entry.open, device),
        precision=entry.precision,
        file=entry.artefact.name,
        sha256=entry.artefact.sha256,
        entry=entry.label,
    )


def with_graphs(plain: Setup, batches: Sequence[int]) -> list[Setup]:
    """Return variants with and without CUDA graphs, with one or two calls; they share weights."""
    opened: list[Engine] = []  # pickled together, so that a process's setups share it
    return [
        replace(
            plain,
            label=plain.label + ", CUDA graphs" * bool(graphs) + ", overlap" * (slots > 1),
            engines=partial(_open_shared, opened, plain, slots, graphs),
            in_flight=slots,
        )
        for slots in (1, 2)
        for graphs in ((), tuple(batches))
    ]


def _open_shared(opened: list[Engine], plain: Setup, slots: int, graphs: Sequence[int]) -> Engine:
    shared = opened[0].share(slots=slots, graphs=graphs) if opened else None
    opened.append(shared or plain.engines())
    return opened[-1]


def find_gpu(baseline: Entry, machine: Machine, device: str) -> tuple[str, str]:
    """Return the GPU to measure on, or "" and why. Raises Unsupported for one asked for by name."""
    from deploykit.engines.onnxruntime.engine import providers

    if device == "cpu":
        return "", "the CPU was asked for (`device`)"
    if device == "auto" and not machine.gpus and machine.l4t is None:
        return "", "no NVIDIA GPU on this machine"
    if device == "auto" and "CUDAExecutionProvider" not in providers():
        return "", "the installed onnxruntime has no CUDA provider"
    chosen = "cuda" if device == "auto" else device
    try:
        baseline.open(chosen).close()
    except Unsupported as exc:
        if device != "auto":
            raise
        return "", exc.message
    return chosen, ""


def find_rivals(
    entries: Sequence[Entry], machine: Machine, folder: Path
) -> tuple[list[Entry], list[NotMeasured]]:
    """Return other runtimes and bfloat16 (written to `folder`) to try on this CPU, and the gaps."""
    graphs = [e for e in entries if e.artefact.format == "onnx" and e.precision in _RIVALS]
    graphs = [*{each.artefact.sha256: each for each in reversed(graphs)}.values()][::-1]
    gaps: dict[str, str] = {}
    found: list[Entry] = []
    for runtime in ALL:
        if "onnx" not in runtime.opens or runtime.opens[0] == "onnx" or not runtime.on_cpu:
            continue
        if not all(map(installed, runtime.modules)):
            gaps[runtime.title] = f"not installed: {install_hint(runtime.modules[0])}"
            continue
        found += [_rival(each, runtime.name, each.precision) for each in graphs]
        if "avx512_bf16" not in machine.cpu_features:
            gaps[f"{runtime.title} {_HALF}"] = "this CPU has no instructions for it"
        elif entries[0].precision == "fp32" and not any(e.precision == _HALF for e in graphs):
            plain = entries[0].artefact.path
            path = folder / f"{plain.stem}.{_HALF}.onnx"
            try:
                graph, _ = to_half(Graph.open(plain), _HALF, runtime="openvino")
                graph.save(path, temporary=True)
                rounded = replace(entries[0], artefact=Artefact(path))
                found.append(_rival(rounded, runtime.name, _HALF))
            except DeploykitError as exc:
                gaps[f"{runtime.title} {_HALF}"] = exc.message
    modules = [each for each in entries if each.runtime == "torch"]
    found += [_rival(each, "torch", _HALF) for each in modules]
    if not modules:
        gaps["PyTorch"] = "no module was given: add the checkpoint that the model was exported from"
    if not any(entry.precision == "int8" and entry.on_cpu for entry in entries):
        gaps["INT8"] = "no INT8 file was given; `deploykit quantize --to int8` makes one"
    names = [f"{RUNTIMES[each.runtime].title} {each.precision}" for each in found]
    alike = Counter(names)
    files = [e.artefact.path.stem if e.label == BASELINE else e.label for e in found]
    found = [
        replace(each, label=name + f" of {of}" * (alike[name] > 1))
        for each, name, of in zip(found, names, files, strict=True)
    ]
    return found, [NotMeasured(f"{what} on the CPU", why) for what, why in gaps.items()]


def _rival(of: Entry, runtime: str, precision: str) -> Entry:
    other = replace(of, precision=precision, runtime=runtime, rival=True, against=False)
    return replace(other, built_on={}, opened_as_built=False)


# The search for the fastest CPU settings, on the inputs of the run: each choice is timed for one
# window; the best with one session and with several (these also as processes) then take turns.

_FINALISTS = 2  # with one session, and with several
_ROUNDS = 3
_SETTLE = 0.25  # untimed start, as a share of a window
_PROCESSES_FROM_S = 0.05  # shorter windows take less time than a process start


def best_cpu(points: Sequence[Point], wrong: Collection[str]) -> tuple[BestCpu, ...]:
    """Return the fastest per batch size, without the labels in `wrong`, whose outputs are wrong."""
    usable = [
        point
        for point in points
        if point.device == "cpu" and point.scenario == CLOSED_LOOP and point.label not in wrong
    ]
    found = []
    for batch in dict.fromkeys(point.batch for point in usable):
        rivals = [point for point in usable if point.batch == batch]
        best = max(rivals, key=lambda point: point.throughput_per_s.value)
        names = ", ".join(dict.fromkeys(map(runtime_of, rivals)))
        why = f"the fastest of {len(rivals)} columns on the CPU ({names})"
        fastest = (best.label, best.precision, best.runtime, best.settings, best.throughput_per_s)
        found.append(BestCpu(batch, *fastest, why))
    return tuple(found)


def choices(cores: Collection[int], runtime: str = "onnxruntime") -> list[CpuSettings]:
    """Return settings that fill each number of cores, and one session with fewer threads.

    Only ONNX Runtime's threads may spin, and torch has one pool of them per process.
    """
    spins, found = runtime == "onnxruntime", dict[CpuSettings, None]()
    for total in cores:
        for size in (each for each in range(1, total + 1) if total % each == 0):
            for sessions, threads in ((1, size), (size, total // size)):
                # one thread never waits
                for spinning in (False, True)[: min(threads, 2)] if spins else (None,):
                    found[CpuSettings(sessions, threads, spinning, runtime == "torch")] = None
    return list(found)


def search_cpu(
    candidates: Sequence[CpuSettings],
    open_session: Callable[[CpuSettings], Engine],
    feeds: Arrays,
    batch: int,
    window_s: float,
    *,
    clock: Clock = time.perf_counter_ns,
) -> tuple[CpuTrial, ...]:
    """Measure rows per second of `candidates`, and of the best in processes, best first."""

    def race(runners: Sequence[CpuSettings], rounds: int = 1) -> dict[CpuSettings, float]:
        """Time the engines in turns; return each one's median rows per second."""
        rates: dict[CpuSettings, list[float]] = {each: [] for each in runners}
        with contextlib.ExitStack() as stack:
            engines = {
                each: [stack.enter_context(open_session(each)) for _ in range(each.sessions)]
                for each in runners
            }
            settle_s = window_s * _SETTLE
            for number in range(rounds):
                for each in runners if number % 2 == 0 else reversed(runners):
                    block = run_block(
                        engines[each], feeds, batch, window_s, clock, settle_s=settle_s
                    )
                    rates[each].append(block.rate)
        return {each: statistics.median(found) for each, found in rates.items()}

    first: dict[CpuSettings, float] = {}
    no_memory = None
    for each in candidates:
        try:
            first |= race([each])
        except OutOfMemory as exc:
            no_memory = exc
    if not first:
        raise no_memory or ValueError("no candidates")
    several = _ranked(first, lambda each: each.sessions > 1)[:_FINALISTS]
    apart = [replace(each, processes=True) for each in several[: window_s >= _PROCESSES_FROM_S]]
    alone = _ranked(first, lambda each: each.sessions == 1)[:_FINALISTS]
    final = list(dict.fromkeys((*alone, *several, *apart)))
    with contextlib.suppress(OutOfMemory):
        last = race(final, _ROUNDS)
        lost = _ranked(first, lambda each: each not in last)
        return tuple(CpuTrial(each, (first | last)[each]) for each in (*_ranked(last), *lost))
    return tuple(CpuTrial(each, first[each]) for each in _ranked(first))


def _ranked(
    rates: Mapping[CpuSettings, float], which: Callable[[CpuSettings], bool] = lambda _: True
) -> list[CpuSettings]:
    return sorted(filter(which, rates), key=lambda each: -rates[each])
