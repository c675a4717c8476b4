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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

from deploykit.core.errors import BadInput, GateFailed
from deploykit.core.evidence import Gate, Interval
from deploykit.core.files import StrPath, read_json, write_together
from deploykit.core.json_value import Record, from_json, json_value
from deploykit.core.runtime import RUNTIMES
from deploykit.engines.devices import Conditions
from deploykit.evaluation.statistics import PRACTICAL, PROCESS_SPREAD, CallHistogram, Latency, ratio
from deploykit.reporting.machine_load import Outside
from deploykit.reporting.page import load_html, markdown, report_html, report_page

CLOSED_LOOP = "closed-loop"


@dataclass(frozen=True)
class Point(Record):
    """The measurement of one setup at one batch size.

    `latency`: of single calls over all rounds (`samples` of them). `throughput_per_s`: rows per
    second, with an interval over the rounds. `round_rates`: rows per second of each, in order.
    `duration_s`: the timed seconds. `note`: a caveat, or "". `histogram`: every call. `shapes`: of
    the inputs of one call, by name. `marks`: why nothing is concluded from this point. `processes`:
    how many fresh ones timed it, a share of the rounds each; where there are several, `round_rates`
    and the intervals are over them. `settings`: of the CPU, as found by a search: "2 sessions of 1
    thread". `compute`: latency without copies to the GPU and back; None on a CPU, and where the
    engine does not tell. `options`: of its session, as the runtime names them.
    """

    label: str
    precision: str
    device: str
    runtime: str
    scenario: str
    batch: int
    sessions: int
    threads: int | None
    samples: int
    rounds: int
    duration_s: float
    latency: Latency
    throughput_per_s: Interval
    round_rates: tuple[float, ...]
    note: str = ""
    histogram: CallHistogram | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    processes: int = 1
    settings: str = ""
    compute: Latency | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ScenarioResult(Record):
    """One setup in one scenario.

    `value`: in single-stream and multi-stream the percentile `metric` in ms, with 99 % confidence
    no less than the true one; offline samples per second; in server the highest Poisson rate,
    queries per second, at which that bound of p99 is within `slo_ms`. None where it is not
    known: `why`.
    `needs`: the queries that the rule of early stopping asks for, if there were fewer.
    `latency`: of each query, in server from the time at which it was due. `batch`: samples of a
    query, offline of a call.
    """

    scenario: str
    label: str
    precision: str
    device: str
    runtime: str
    settings: str
    batch: int
    metric: str
    value: float | None
    queries: int
    duration_s: float
    latency: Latency | None
    slo_ms: float | None = None
    needs: int | None = None
    why: str = ""


LayerKey = tuple[str, str, str]  # name, operator, number


@dataclass(frozen=True)
class LayerTime(Record):
    """A node as the runtime runs it, which may be several of the file's, and `ms` of a call.

    `gflops`, `precision`: in reports of earlier versions.
    """

    name: str
    op: str
    ms: float
    gflops: float | None = None
    precision: str = ""


@dataclass(frozen=True)
class LayerTimes(Record):
    """`layers`: those that take most, of `count`, which take `sum_ms` together.

    `call_ms` without and `profiled_ms` with the profiler. Each, as each layer's `ms`, is the mean
    of the middle half of its values in `calls` calls. `ceilings`: in reports of earlier versions.
    """

    label: str
    batch: int
    runtime: str
    calls: int
    call_ms: float
    profiled_ms: float
    sum_ms: float
    count: int
    layers: tuple[LayerTime, ...]
    ceilings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CpuSettings(Record):
    """`sessions` at once, in processes of their own or in one, each with `threads`.

    `spinning`: threads that wait for work keep their core busy; None where that cannot be chosen.
    """

    sessions: int = 1
    threads: int = 1
    spinning: bool | None = False
    processes: bool = False

    def __str__(self) -> str:
        plural = "es" if self.processes else "s"
        what = ("process" if self.processes else "session") + plural * (self.sessions > 1)
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        chosen = self.threads > 1 and self.spinning is not None
        spinning = f", spinning {'on' if self.spinning else 'off'}" if chosen else ""
        return f"{self.sessions} {what} of {threads}{spinning}"


@dataclass(frozen=True)
class CpuTrial(Record):
    """Rows per second in windows of a search: they choose what is timed and are no result."""

    settings: CpuSettings
    throughput_per_s: float


@dataclass(frozen=True)
class CpuSearch(Record):
    """The settings tried on a file at a batch size: the finalists first, the fastest before all.

    `runtime`: of the table of runtimes.
    """

    file: str
    batch: int
    trials: tuple[CpuTrial, ...]
    runtime: str = "onnxruntime"

    @property
    def fastest(self) -> CpuSettings:
        return self.trials[0].settings

    @property
    def fastest_of_one(self) -> CpuSettings:
        return next(each.settings for each in self.trials if each.settings.sessions == 1)


@dataclass(frozen=True)
class BestCpu(Record):
    """The fastest column on the CPU at a batch size, of those whose outputs are right."""

    batch: int
    label: str
    precision: str
    runtime: str
    settings: str
    throughput_per_s: Interval
    why: str


@dataclass(frozen=True)
class LoadResult(Record):
    """Result of a load test. Counts are of requests that were open in the measured time.

    `latency` is of successes and, as infinitely late, of what failed or expired: in the open loop
    from the intended time to the answer, in the closed loop from the sending. Refusals are apart.
    `lag_p99_ms`: how late the generator was itself in sending (open loop) or reading. `behind`:
    share of a connection's time that the generator took. `limits`: why the figures describe the
    generator, not the server; `generator_limited` where there is any. `sustained`: whether the
    server kept up with an open loop. `server`: what it says of itself, with the model's file and
    hash; `options`: the model's, as it is served. `outside`: the load of other processes on this
    machine, the generator's and those of a server here left out; `marks`: why there is no verdict
    for it.
    """

    url: str
    model: str
    mode: str  # "closed" | "open"
    concurrency: int | None
    rate_per_s: float | None  # requested
    batch: int
    seed: int
    warmup_s: float
    duration_s: float
    achieved_per_s: Interval  # requests answered with success
    latency: Latency | None  # None: no good answer
    sent: int
    ok: int
    refused: int  # 503, 429
    expired: int  # 504
    failed: int  # any other status, a wrong answer, a broken connection, no answer
    lag_p99_ms: float | None
    client_busy: float  # share of one core that the generator used
    generator_limited: bool
    same_machine: bool
    errors: Mapping[str, int] = field(default_factory=dict)  # the first few messages: counts
    unsent: int = 0  # due when every connection that the generator may open was in use
    limits: tuple[str, ...] = ()
    behind: float = 0.0
    sustained: bool | None = None
    notes: tuple[str, ...] = ()
    connections: int = 0  # open at once, at most
    processes: int = 1
    protocol: str = "http"
    capacity_per_s: float | None = None  # of the closed loop that chose the rate
    slo_ms: float | None = None
    goodput_per_s: Interval | None = None  # answered with success `slo_ms`
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # inputs of a request
    sends: str = ""  # what requests hold that are not tensors
    server: Mapping[str, str] = field(default_factory=dict)  # what it says of itself
    options: Mapping[str, Any] = field(default_factory=dict)
    outside: Outside | None = None
    marks: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()  # conditions by which the run fails, with the figures

    shown: ClassVar[tuple[str, ...]] = ("first_error",)

    @property
    def first_error(self) -> str | None:
        return next(iter(self.errors), None)

    def raise_if_unmet(self) -> None:
        """Raises GateFailed where the run fails by one of its conditions."""
        if self.unmet:
            raise GateFailed("; ".join(self.unmet))

    def _repr_html_(self) -> str:
        return load_html(self.to_dict())


def runtime_of(point: Point) -> str:
    """Name runtime and precision: "OpenVINO int8"."""
    name = point.runtime.partition(" ")[0]
    return f"{RUNTIMES[name].title if name in RUNTIMES else name} {point.precision}"


# Choose the fastest point, and find the batch from which one setup is ahead of another.


def crossover(
    points_a: Sequence[Point], points_b: Sequence[Point], by: str = "throughput"
) -> int | None:
    """Return the smallest common batch from which a stays ahead of b; None if there is none.

    a is ahead if the 95 % intervals of "throughput" or "p50" latency do not touch, and the figures
    differ by more than is practically equal and, for points timed in one process, by more than the
    spread of processes. Nothing is interpolated.
    """
    side_a, side_b = ({point.batch: point for point in side} for side in (points_a, points_b))
    common = sorted(side_a.keys() & side_b.keys(), reverse=True)
    ahead = takewhile(lambda batch: _ahead(side_a[batch], side_b[batch], by), common)
    return min(ahead, default=None)


def best(points: Sequence[Point], by: str = "throughput") -> Point:
    """Return the point with the highest throughput or, by "p50", the lowest median latency."""
    figures = [(figure.value, point) for point in points if (figure := _figure(point, by))]
    choose = min if by == "p50" else max
    return choose(figures, key=lambda pair: pair[0])[1]


def _figure(point: Point, by: str) -> Interval | None:
    return point.throughput_per_s if by == "throughput" else point.latency.p50_ms


def _ahead(a: Point, b: Point, by: str) -> bool:
    ours, theirs = _figure(a, by), _figure(b, by)
    if ours is None or theirs is None:
        return False
    if by == "p50":
        ours, theirs = theirs, ours
    alone = sum(point.processes == 1 for point in (a, b))
    least = max(PRACTICAL, 1.96 * PROCESS_SPREAD * math.sqrt(alone))  # standard deviations
    return ours.low > theirs.high and ours.value >= theirs.value * (1 + least)


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
    def _pairs(self) -> list[tuple[Point, Point]]:
        """The usable points, each with the baseline's at the same scenario, batch and rounds."""
        keys = [(each, (each.scenario, each.batch, each.rounds)) for each in self.usable]
        references = {key: each for each, key in keys if each.label == self.baseline}
        others = [pair for pair in keys if pair[0].label != self.baseline]
        return [(each, references[key]) for each, key in others if key in references]

    @property
    def speedups(self) -> tuple[Speedup, ...]:
        return tuple(
            Speedup(a.label, a.scenario, a.batch, self.speedup(a, b)) for a, b in self._pairs
        )

    @property
    def crossovers(self) -> tuple[Crossover, ...]:
        """The batch from which each other setup stays ahead of the baseline, if it ever does."""
        found, pairs = [], self._pairs
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
        """Return candidate's throughput divided by reference's, paired by process or by round.

        The interval holds together with all others of the report. With one process the spread
        between processes is not measured, so it is assumed for each side. Raises BadInput for
        points with different scenarios, batches or numbers of rounds.
        """
        for what in ("scenario", "batch", "rounds"):
            a, b = getattr(candidate, what), getattr(reference, what)
            if a != b:
                raise BadInput(
                    f"{candidate.label} and {reference.label} cannot be compared: {what} {a} and "
                    f"{b}",
                    hint="measure both in one run, at the same batch sizes",
                )
        assumed = PROCESS_SPREAD * math.sqrt(2) if candidate.processes == 1 else 0.0
        rates = candidate.round_rates, reference.round_rates
        return ratio(*rates, tests=max(1, len(self._pairs)), assumed=assumed)

    def __post_init__(self) -> None:
        if self.slo_ms is not None and not 0 < self.slo_ms < math.inf:
            raise BadInput(f"`slo_ms` must be a number above 0, got {self.slo_ms}")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `report.json`."""
        return {"report": VERSION, **_without_folders(json_value(self, *self.shown))}

    def _repr_html_(self) -> str:
        return report_html(self.to_dict())


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
    value = vars(value) if is_dataclass(value) else value
    value = dict(enumerate(value)) if isinstance(value, (tuple, list)) else value
    for key, each in value.items() if isinstance(value, Mapping) else ():
        at = f"{where}[{key}]" if isinstance(key, int) else f"{where}: '{key}'"
        if isinstance(each, int) and abs(each) >> 63:
            raise BadInput(f"{at} must be below 2^63")
        if isinstance(each, float) and not (math.isfinite(each) or key in _MAY_BE_INFINITE):
            raise BadInput(f"{at} must be a finite number")
        if isinstance(each, (tuple, list)) and len(each) > _MOST_ITEMS:
            raise BadInput(f"{at} has more than {_MOST_ITEMS:,} items")
        _check_numbers(each, at)
