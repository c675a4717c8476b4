"""Define the rows of a report: measurements of setups, their CPU settings, and load tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from deploykit.core.errors import BadInput, GateFailed
from deploykit.core.evidence import Interval
from deploykit.core.json_value import Record
from deploykit.core.runtime import RUNTIMES
from deploykit.evaluation.statistics import PRACTICAL, PROCESS_SPREAD, CallHistogram, Latency
from deploykit.reporting.html import load_html
from deploykit.reporting.machine_load import Outside

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
    spread of processes. Nothing is interpolated. Raises BadInput when no batch was measured on
    both.
    """
    side_a, side_b = ({point.batch: point for point in side} for side in (points_a, points_b))
    common = sorted(side_a.keys() & side_b.keys(), reverse=True)
    if not common:
        raise BadInput("no batch size was measured on both sides, so there is no crossover")
    found = None
    for batch in common:
        if not _ahead(side_a[batch], side_b[batch], by):
            break
        found = batch
    return found


def best(points: Sequence[Point], by: str = "throughput") -> Point:
    """Return the point with the highest throughput or, by "p50", the lowest median latency.

    Raises BadInput when there is none, or none with enough samples for a median.
    """
    figures = [(figure.value, point) for point in points if (figure := _figure(point, by))]
    if not figures:
        raise BadInput(f"no point has a {by} figure")
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
