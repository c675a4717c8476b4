"""The columns of a benchmark: which artefacts are timed, on which device, in how many sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from deploykit.benchmarking.processes import ProcessEngine
from deploykit.benchmarking.timing import Setup
from deploykit.core.artefact import Artefact, ArtefactLike, wrong_format
from deploykit.core.errors import BadInput, DeploykitError, Unsupported
from deploykit.core.extras import install_hint, installed
from deploykit.core.machine import Machine
from deploykit.core.precision import narrowest
from deploykit.core.runtime import ALL, BUILT, RUNTIMES, Runtime
from deploykit.engines.engine import Engine
from deploykit.evaluation.verify import find_sources, open_proven
from deploykit.reporting.points import CpuSearch, CpuSettings
from deploykit.reporting.report import NotMeasured

# The columns of a TensorRT engine: CUDA graphs, and calls in flight, on the same weights.


def with_graphs(plain: Setup, batches: Sequence[int]) -> list[Setup]:
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

        return open_proven(
            self.artefact, device, trust=self.trust, overlap=False, on_note=self.note
        )[0]

    def __reduce__(self) -> tuple[type[Opener], tuple[Artefact, bool, Callable[[str], None]]]:
        return Opener, (self.artefact, self.trust, _say_nothing)


@dataclass(frozen=True)
class Entry:
    """One artefact in one runtime. `precision`: "fp32", "fp16", "int8", ...

    `rival`: the label of one that nobody asked for, which may be faster on this CPU, else "".
    `options`: what its runtime needs besides to open it. `label`: of its columns, or their start.
    """

    artefact: Artefact
    precision: str
    built_on: Mapping[str, str]
    open: Callable[..., Engine]  # (device)
    runtime: str
    rival: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

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


def open_entry(
    artefact: Artefact,
    trust: bool,
    note: Callable[[str], None],
    bare: Mapping[str, Any] = MappingProxyType({}),
) -> Entry:
    """Of an .onnx file, a built engine or a module; BadInput for any other format.

    `bare`: "arch" and "inputs" of a file that holds only weights.
    """
    from deploykit.graph.graph import Graph

    if not artefact.runtime.builder and not _is_module(artefact):
        if not bare or artefact.runtime.name != "torch":
            raise wrong_format(artefact, artefact.format, f"an {' or '.join(BUILT)} file")
        open_it = partial(open_session, "torch", artefact, "fp32", None, bare)
        return Entry(artefact, "fp32", {}, open_it, "torch", options=bare)
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
    from deploykit.engines.torch.engine import describes_itself

    return describes_itself(artefact.path)


def open_entries(
    sources: Sequence[ArtefactLike],
    baseline: ArtefactLike | None,
    trust: bool,
    note: Callable[[str], None],
    arch: str | None = None,
) -> tuple[Entry, ...]:
    """Each file once, the baseline first: the given one, or as `_find_baseline`.

    `arch` builds the module of bare weights, whose inputs are the baseline's.
    """
    from deploykit.graph.graph import Graph

    if not sources:
        raise BadInput("`engines` names no file to time")
    artefacts = [Artefact.open(source) for source in sources]
    if baseline:
        reference = open_entry(Artefact.open(baseline), trust, note)
    else:
        reference = _find_baseline(open_entry(artefacts[0], trust, note), trust, note)
    if reference.artefact.format != "onnx" or reference.precision != "fp32":
        raise BadInput(
            f"{reference.artefact}: is {reference.precision} in {reference.artefact.format}; the "
            "baseline is a float32 model in ONNX",
            hint="`baseline`: the .onnx file that the engine was made from",
        )
    bare = {"arch": arch, "inputs": Graph.open(reference.artefact.path).inputs} if arch else {}
    found = [open_entry(each, trust, note, bare) for each in artefacts]
    if arch and not any(item.options for item in found):
        raise BadInput(f"`arch` {arch}: none of the engines is a file of weights only")
    others = {item.artefact.path.resolve(): item for item in found}
    others.pop(reference.artefact.path.resolve(), None)
    return (replace(reference, label=BASELINE), *_labelled([*others.values()], reference))


def _labelled(found: Sequence[Entry], reference: Entry) -> list[Entry]:
    """Each with a label of its own: its stem, or as much of its path as tells it from others."""
    names = [_names(item, reference) for item in found]
    taken = Counter([BASELINE, *(name for each in names for name in each)])
    free = [next(name for name in each if taken[name] == 1) for each in names]
    return [replace(item, label=label) for item, label in zip(found, free, strict=True)]


def _names(item: Entry, reference: Entry) -> list[str]:
    """What its columns may be called, the shortest first; no name reads as one of the baseline."""
    runtime, path = item.artefact.runtime, item.artefact.path.resolve()
    where = f" in {runtime.title}" if item.runtime != reference.runtime else ""
    where = where if runtime.on_cpu else f", {runtime.title}"
    ends = ["/".join(path.parts[-n:]) for n in range(1, len(path.parts) + 1)]
    names = [end + where for end in dict.fromkeys([path.stem, *ends])]
    return [name for name in names if not name.startswith(f"{BASELINE}, ")]


def _find_baseline(first: Entry, trust: bool, note: Callable[[str], None]) -> Entry:
    """`first`, or the float32 model next to it that an engine was made from."""

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
    gpu: str = ""  # on which columns of ONNX Runtime and PyTorch are


def choose_columns(
    reference: Entry,
    every: Sequence[Entry],
    machine: Machine,
    device: str,
    batches: Sequence[int],
    search: Callable[[Entry, int], CpuSearch | None],
    admit: Callable[[Entry, list[NotMeasured], str], bool] = lambda *_: True,
) -> Columns:
    """The baseline in one session and in its fastest, and each other artefact in the same ways.

    `search` tries settings of the CPU on an artefact at a batch size, None where it cannot. An
    artefact that is faster in other settings than the baseline's has a column more; one that does
    not run on CPUs has its own, on its GPU; one in another runtime the settings of its own. Rivals,
    the last of `every`, have a column where the search found them near the fastest or faster.
    `admit` says whether the outputs on a GPU are right, which then is a column.
    """

    gpu, why = _gpu(reference, machine, device)
    gaps = [] if gpu else [NotMeasured("GPU", why)]
    searches, setups, on_gpu = list["CpuSearch"](), list["Setup"](), list["Setup"]()
    alike: dict[int, list[CpuSettings]] = {}
    for item in every:
        runtime, label = item.artefact.runtime, item.label
        if not runtime.on_cpu:
            setup = _setup(item, label, device)
            setups += with_graphs(setup, batches) if runtime.overlaps else [setup]
            continue
        if gpu and not item.rival and "cuda" in runtime.devices and admit(item, gaps, gpu):
            name = item.artefact.path.stem if item is reference else label
            on_gpu.append(_setup(item, f"{name}, GPU", gpu))
        if gpu and on_gpu_alone(item, device):
            gaps.append(NotMeasured(f"{item.artefact.name} on the CPU", _ON_GPU_ALONE))
            continue
        if item.runtime not in SEARCHED:  # its settings are not ours to try
            setups.append(_setup(item, label, "cpu"))
            continue
        own, behind = dict[int, CpuSettings](), list[int]()
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
            what = f"{item.rival} on the CPU at batch {', '.join(map(str, behind))}"
            gaps.append(NotMeasured(what, "far slower than others in the search"))
        if item.runtime == reference.runtime:
            setups += _on_cpu(item, label, alike, own)
        else:
            setups += _placed(item, _by_settings(label, own))
            setups += [] if own or item.rival else [_setup(item, label, "cpu")]
    return Columns([*setups, *on_gpu], searches, gaps, gpu)


def on_gpu_alone(item: Entry, device: str) -> bool:
    """Where a GPU is asked for, what is never the fastest on a CPU is not searched for there."""
    return device.startswith("cuda") and (item.precision == "fp16" or item.runtime == "torch")


_ON_GPU_ALONE = "the GPU was asked for (`device`)"


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

    what = item.runtime, item.artefact, item.precision, settings, item.options
    open_it = partial(open_session, *what)
    return ProcessEngine(open_it) if settings.processes else open_it()


def open_session(
    runtime: str,
    artefact: Artefact,
    precision: str,
    settings: CpuSettings | None,
    more: Mapping[str, Any],
    device: str = "cpu",
) -> Engine:
    """In this process. `settings`: of the CPU, None for one session with the usual threads."""
    options = dict(more)
    if runtime == "onnxruntime" and settings is not None:
        options["spinning"] = bool(settings.spinning)
    if runtime == "torch":
        options["bf16"] = precision == "bf16"
    open_engine = resolve_name(RUNTIMES[runtime].engine)
    engine: Engine = open_engine(artefact, device, settings and settings.threads, **options)
    return engine


def _gpu(reference: Entry, machine: Machine, device: str) -> tuple[str, str]:
    """The GPU to measure on, or "" and why there is none.

    With "auto" one that cannot be used is left out and the report says why; one that was asked for
    by name raises Unsupported.
    """
    from deploykit.engines.onnxruntime.engine import providers

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

    return Setup(
        label=label,
        engines=partial(item.open, device),
        precision=item.precision,
        file=item.artefact.name,
        sha256=item.artefact.sha256,
        entry=item.key,
    )


# What else may be fastest on this CPU: other runtimes that are installed, and bfloat16.
#
# A rival is timed only if its outputs are right; nobody asked for it, so its failure fails
# nothing.

_HALF = "bf16"
_RUNS = ("fp32", _HALF, "int8")  # what rivals compute in where the CPU can


def find_rivals(
    every: Sequence[Entry], machine: Machine, folder: Path
) -> tuple[list[Entry], list[NotMeasured]]:
    """The rivals of these entries, and what was not tried, with the reason.

    `folder` is for the float32 model in bfloat16, and has to live as long as they are used.
    """

    graphs = [e for e in every if e.artefact.format == "onnx" and e.precision in _RUNS]
    graphs = [*{each.artefact.sha256: each for each in reversed(graphs)}.values()][::-1]
    gaps: dict[str, str] = {}
    found: list[Entry] = []
    for runtime in ALL:
        if "onnx" not in runtime.opens or runtime.opens[0] == "onnx" or not runtime.on_cpu:
            continue
        if not all(map(installed, runtime.modules)):
            gaps[runtime.title] = f"not installed: {install_hint(runtime.modules[0])}"
            continue
        found += [_rival(runtime, each, each.artefact, each.precision) for each in graphs]
        if "avx512_bf16" not in machine.cpu_features:
            gaps[f"{runtime.title} {_HALF}"] = "this CPU has no instructions for it"
        elif every[0].precision == "fp32" and not any(e.precision == _HALF for e in graphs):
            try:
                rounded = _rounded(every[0].artefact, folder)
                found.append(_rival(runtime, every[0], rounded, _HALF))
            except DeploykitError as exc:
                gaps[f"{runtime.title} {_HALF}"] = exc.message
    modules = [each for each in every if each.runtime == "torch"]
    torch = RUNTIMES["torch"]
    found += [_rival(torch, each, each.artefact, _HALF) for each in modules]
    if not modules:
        gaps["PyTorch"] = "no module was given: add the checkpoint that the model was exported from"
    if not any(item.precision == "int8" and item.artefact.runtime.on_cpu for item in every):
        gaps["INT8"] = "no INT8 file was given; `deploykit quantize --to int8` makes one"
    alike = Counter(each.rival for each in found)
    names = [each.rival + f" of {each.label}" * (alike[each.rival] > 1) for each in found]
    found = [replace(each, rival=n, label=n) for each, n in zip(found, names, strict=True)]
    return found, [NotMeasured(f"{what} on the CPU", why) for what, why in gaps.items()]


def _rival(runtime: Runtime, of: Entry, artefact: Artefact, precision: str) -> Entry:
    """Of the entry `of`, whose name is its label until all are known."""
    opener = partial(open_session, runtime.name, artefact, precision, None, of.options)
    label = artefact.path.stem if of.label == BASELINE else of.label
    rival = f"{runtime.title} {precision}"
    return Entry(artefact, precision, {}, opener, runtime.name, rival, of.options, label)


def _rounded(artefact: Artefact, folder: Path) -> Artefact:
    """The graph in bfloat16, as `quantize` writes it."""
    from deploykit.graph.graph import Graph
    from deploykit.quantization.convert import convert

    path = folder / f"{artefact.path.stem}.{_HALF}.onnx"
    graph, _ = convert(Graph.open(artefact.path), _HALF, None, runtime="openvino")
    graph.save(path, temporary=True)
    return Artefact(path)
