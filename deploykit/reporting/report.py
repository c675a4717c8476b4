"""Hold all measurements of a run as data, and write and read its report files.

`report.json` is the source of `report.md` and `report.html`. Nothing reads a clock, so the same
report gives the same bytes.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

from deploykit.core.errors import BadInput
from deploykit.core.evidence import Gate, Interval
from deploykit.core.files import StrPath, read_json, write_together
from deploykit.core.json_value import Record, from_json, json_value
from deploykit.engines.devices import Conditions
from deploykit.evaluation.statistics import PROCESS_SPREAD, ratio
from deploykit.reporting.html import report_html, report_page
from deploykit.reporting.machine_load import Outside
from deploykit.reporting.markdown import markdown
from deploykit.reporting.points import (
    BestCpu,
    CpuSearch,
    LayerTimes,
    LoadResult,
    Point,
    ScenarioResult,
    crossover,
)

_MOST_ITEMS = 100_000  # longest list
_MAY_BE_INFINITE = {"max_ms"}  # if calls had no answer; written as null
VERSION = 2  # of the format; version 1, with fewer keys, is still read


@dataclass(frozen=True)
class Accuracy(Record):
    """A score on `n` samples, a fraction; `drop` against the reference, None for itself.

    `label`: of the setups that it is of, or how their labels begin; "": all of that precision.
    """

    precision: str
    metric: str
    n: int
    value: Interval
    drop: Interval | None
    label: str = ""


@dataclass(frozen=True)
class Step(Record):
    """A step of a longer run, such as the demo's, and how long it took."""

    name: str
    seconds: float


@dataclass(frozen=True)
class NotMeasured(Record):
    """`what` could not be measured, and `why`: "GPU", "no NVIDIA GPU on this machine"."""

    what: str
    why: str


@dataclass(frozen=True)
class PredictedPoint(Record):
    """The time that `plan` predicts for a point, and the measured one: the median of its calls.

    `error`: predicted by measured, less 1. `basis`: where the prediction's figures are from.
    """

    label: str
    batch: int
    predicted_ms: float
    measured_ms: float
    error: float
    basis: str


@dataclass(frozen=True)
class PointEnergy(Record):
    """Device energy of one inference: not that at the wall. `source`: what it was read from.

    `joules`: all that the device took meanwhile, by the inferences completed; `above_idle`: less
    what it takes at rest, `idle_w`.
    """

    label: str
    batch: int
    joules: float
    above_idle: float
    idle_w: float
    source: str


@dataclass(frozen=True)
class PeakMemory(Record):
    """The largest resident set of a process that opened this setup alone and called it at `batch`.

    With the processes of its sessions, and with Python and the libraries. Not a GPU's memory.
    """

    label: str
    batch: int
    peak_bytes: int


@dataclass(frozen=True)
class Speedup(Record):
    """How many times the baseline's throughput a setup has, at the same batch and scenario.

    The intervals of all speed-ups of a report hold together, in 95 % of all cases.
    """

    label: str
    scenario: str
    batch: int
    ratio: Interval


@dataclass(frozen=True)
class Crossover(Record):
    """The batch from which a setup is ahead of the baseline and stays ahead; None: none measured.

    `by`: "throughput" or "p50".
    """

    label: str
    baseline: str
    scenario: str
    by: str
    batch: int | None


@dataclass(frozen=True)
class Report(Record):
    """All of a run. `created`: ISO 8601. `command`: what repeats it. `baseline`: a point's label.

    `machine`: Machine.to_dict(). `artefacts`: {"file", "sha256", "precision", "format",
    "built_on"}. `parity`: Parity.to_dict() of each comparison. `quick`: points were timed for less
    than 60 s. `verdict`: sentences, the most important first.
    `wrong`: labels of setups whose outputs failed their gate; no ratio is derived from them.
    `throttled`: why the GPU was throttled during the run; nothing is derived from the points then.
    `conditions`: power mode, clocks, power and heat of each GPU while it was measured. `best_cpu`:
    by batch size, with its settings. `cpu_search`: which settings of the CPU were tried.
    `outside`: the load of other processes. `invalid`: why the whole run is not valid, and the
    remedy; nothing is derived from it. `asked`:
    labels of the setups of the engines that the run is about, the others are there to compare.
    `slo_ms`: the latency that was wanted at p99.
    `predicted`: what `plan` says of the points. `roofline`: {"ceilings": {"gflops", "gbytes_per_s",
    "memory_gbytes_per_s"}, "points": [{"label", "batch", "intensity", "gflops"}]}, as measured; the
    ceilings are the highest that a probe or a point reached; `gpu_roofline`: that of a GPU.
    `energy`: of an inference; without a meter the reason is in `not_measured`.
    `provenance`: commits, host, clocks, CPUs and variables, as `core.provenance` reads them.
    `scenarios`: those of MLPerf that were asked for. `memory`: of each setup, where fresh processes
    were timed. `price`: of an hour of the machine, in reports of earlier versions. `layers`: of
    engines, where that was asked for. `against`: labels of the setups of engines that were given to
    compare the others with.
    """

    title: str
    created: str
    command: str
    quick: bool = False
    baseline: str = ""
    verdict: tuple[str, ...] = ()
    gates: tuple[Gate, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    artefacts: tuple[Mapping[str, Any], ...] = ()
    accuracy: tuple[Accuracy, ...] = ()
    parity: tuple[Mapping[str, Any], ...] = ()
    points: tuple[Point, ...] = ()
    wrong: tuple[str, ...] = ()
    serving: tuple[LoadResult, ...] = ()
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()
    throttled: tuple[str, ...] = ()
    conditions: tuple[Conditions, ...] = ()
    outside: Outside | None = None
    invalid: tuple[str, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()
    best_cpu: tuple[BestCpu, ...] = ()
    cpu_search: tuple[CpuSearch, ...] = ()
    asked: tuple[str, ...] = ()
    slo_ms: float | None = None
    predicted: tuple[PredictedPoint, ...] = ()
    roofline: Mapping[str, Any] = field(default_factory=dict)
    gpu_roofline: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    energy: tuple[PointEnergy, ...] = ()
    scenarios: tuple[ScenarioResult, ...] = ()
    memory: tuple[PeakMemory, ...] = ()
    price: float | None = None
    layers: tuple[LayerTimes, ...] = ()
    against: tuple[str, ...] = ()

    shown: ClassVar[tuple[str, ...]] = ("speedups", "crossovers")

    @property
    def speedups(self) -> tuple[Speedup, ...]:
        pairs = _pairs(self.usable, self.baseline)
        return tuple(Speedup(a.label, a.scenario, a.batch, self.speedup(a, b)) for a, b in pairs)

    @property
    def crossovers(self) -> tuple[Crossover, ...]:
        """The batch from which each other setup stays ahead of the baseline, if it ever does."""
        found, pairs = [], _pairs(self.usable, self.baseline)
        for scenario, label in dict.fromkeys((p.scenario, p.label) for p, _ in pairs):
            own = [(a, b) for a, b in pairs if (a.scenario, a.label) == (scenario, label)]
            for by in ("throughput", "p50"):
                batch = crossover([a for a, _ in own], [b for _, b in own], by)
                found.append(Crossover(label, self.baseline, scenario, by, batch))
        return tuple(found)

    @property
    def usable(self) -> tuple[Point, ...]:
        """The points that conclusions may be derived from."""
        if self.throttled or self.invalid:
            return ()
        return tuple(p for p in self.points if p.label not in self.wrong and not p.marks)

    def speedup(self, candidate: Point, reference: Point) -> Interval:
        """Return `speedup`, whose interval holds together with all others of the report."""
        return speedup(candidate, reference, max(1, len(_pairs(self.usable, self.baseline))))

    def __post_init__(self) -> None:
        if self.slo_ms is not None and not 0 < self.slo_ms < math.inf:
            raise BadInput(f"`slo_ms` must be a number above 0, got {self.slo_ms}")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `report.json`."""
        return {"report": VERSION, **_without_folders(json_value(self, *self.shown))}

    def _repr_html_(self) -> str:
        return report_html(self.to_dict())


def speedup(candidate: Point, reference: Point, tests: int = 1) -> Interval:
    """Return candidate's throughput divided by reference's, paired by process or by round.

    With one process the spread between processes is not measured, so it is assumed for each side.
    `tests`: the number of ratios whose intervals hold together. Raises BadInput for points with
    different scenarios, batches or numbers of rounds.
    """
    for what in ("scenario", "batch", "rounds"):
        a, b = getattr(candidate, what), getattr(reference, what)
        if a != b:
            raise BadInput(
                f"{candidate.label} and {reference.label} cannot be compared: {what} {a} and {b}",
                hint="measure both in one run, at the same batch sizes",
            )
    assumed = PROCESS_SPREAD * math.sqrt(2) if candidate.processes == 1 else 0.0
    rates = candidate.round_rates, reference.round_rates
    return ratio(*rates, tests=tests, assumed=assumed)


def _pairs(points: Sequence[Point], baseline: str) -> list[tuple[Point, Point]]:
    references = {(p.scenario, p.batch, p.rounds): p for p in points if p.label == baseline}
    keys = [(p, (p.scenario, p.batch, p.rounds)) for p in points if p.label != baseline]
    return [(point, references[key]) for point, key in keys if key in references]


def write(report: Report, folder: Path) -> Path:
    """Write report.json, report.md and report.html; return the path of the last.

    All are complete before the first replaces an earlier file; the JSON is last. Raises BadInput
    when `folder` cannot be written to, Unsupported when the disk is full.
    """
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    files = {"html": report_page(document), "md": markdown(document)}
    # a list of numbers goes on one line; a line break in JSON is never inside a string
    files["json"] = re.sub(
        r"\[\n[-+\d.eE,\s]+\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text
    )
    write_together(folder, {f"report.{end}": each for end, each in files.items()})
    return folder / "report.html"


# "/layer1/conv" is a node's name, "/sys/…" what figures are read from, and "host/v2" a URL
_ROOTS = {"home", "root", "tmp", "var", "opt", "usr", "mnt", "media", "srv", "Users", "etc"}
_ROOTS |= {Path(each).parts[1] for each in (__file__, sys.prefix)} | {"data", "workspace"}
_FOLDERS = re.compile(
    rf"(?:file://|(?<![\w./~-]))/(?:{'|'.join(sorted(_ROOTS))})/(?:[\w.@+~-]+/)*"
    r"|\b[A-Za-z]:\\(?:[^\\/:\s]+\\)*"
)
_ANY_FOLDER = re.compile(
    r"(?<=')/(?:[^/']+/)*|(?:(?<![^\s=,])|file://)/(?:[^/'\s,]+/)*"
)  # in a command


def _without_folders(value: Any, key: str = "") -> Any:
    """Return a document that may be shared: the folders before a file's name are this machine's."""
    if isinstance(value, str):
        text = _ANY_FOLDER.sub("", value) if key == "command" else value
        return _FOLDERS.sub("", text)
    if isinstance(value, dict):
        return {name: _without_folders(each, name) for name, each in value.items()}
    return [_without_folders(each, key) for each in value] if isinstance(value, list) else value


def is_report(source: object) -> bool:
    """Return whether a path is a .json file, or a folder with a report in it."""
    if not isinstance(source, (str, os.PathLike)):
        return False
    path = Path(os.fsdecode(source))
    return path.suffix == ".json" or (path / "report.json").is_file()


def read(source: StrPath) -> Report:
    """Read a `report.json`, or the one in a folder. Raises NotFound or BadInput."""
    path = Path(source)
    path = path / "report.json" if path.is_dir() else path
    values = read_json(path)
    version = values.get("report") if isinstance(values, dict) else None
    if not isinstance(version, int) or version < 1 or isinstance(version, bool):
        raise BadInput(f"{path}: is not a deploykit report")
    if version > VERSION:
        raise BadInput(
            f"{path}: is a report of version {version}; this deploykit reads up to {VERSION}",
            hint="install a newer deploykit: pip install -U deploykit",
        )
    _check_numbers(values, str(path))  # integers may be too large for a float
    report: Report = from_json(Report, values, str(path))
    _check_numbers(report, str(path))
    return report


def _check_numbers(value: object, where: str) -> None:
    """Raise BadInput naming the key for huge or infinite numbers, NaN, and long lists."""
    items: Iterable[tuple[str | int, object]] = ()
    if is_dataclass(value):
        items = vars(value).items()
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (tuple, list)):
        items = enumerate(value)
    for key, each in items:
        at = f"{where}[{key}]" if isinstance(key, int) else f"{where}: '{key}'"
        if isinstance(each, int) and abs(each) >> 63:
            raise BadInput(f"{at} must be below 2^63")
        if isinstance(each, float) and not (math.isfinite(each) or key in _MAY_BE_INFINITE):
            raise BadInput(f"{at} must be a finite number")
        if isinstance(each, (tuple, list)) and len(each) > _MOST_ITEMS:
            raise BadInput(f"{at} has more than {_MOST_ITEMS:,} items")
        _check_numbers(each, at)
