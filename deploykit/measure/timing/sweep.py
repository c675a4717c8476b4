"""Time engines against each other in a closed loop, over batch sizes.

Per batch size the setups take turns in rounds, A B C, C B A, …: drift of clocks and other load on
the machine affects all of them, and the `ratio` of two points' `round_rates` is paired. A closed
loop sends the next call when the last has been answered: right for throughput, blind to stalls.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.json_value import Record
from deploykit.measure.histogram import CallHistogram
from deploykit.measure.latency import Latency
from deploykit.measure.statistics import FEWEST_DEPENDENT, Interval, throughput
from deploykit.measure.timing.closed_loop import Block, Clock, run_block
from deploykit.measure.timing.warm_up import Warmth, rose, warm_up
from deploykit.runtimes.engine import Arrays, Engine, check_feeds

CLOSED_LOOP = "closed-loop"
_FEW_ROUNDS = 5  # where calls are long: settling after each switch would take most of the time
_SETTLE_SHARE, _SETTLE_MAX_S = 0.1, 0.5  # of a block

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Setup:
    """One column of a comparison. `engines` opens one Engine; `sessions` of them run at once.

    `in_flight`: calls of the one engine at a time; more than one is another scenario.
    `threads`: CPU threads of each engine, None where that means nothing. `device`: "" for the
    engine's own. `file` and `sha256` name the artefact in the report. `settings`: those of
    the CPU, as text. `batches`: the only sizes to time it at; () for all.
    """

    label: str
    engines: Callable[[], Engine]
    sessions: int = 1
    threads: int | None = None
    precision: str = ""
    device: str = ""
    file: str = ""
    sha256: str = ""
    in_flight: int = 1
    settings: str = ""
    batches: tuple[int, ...] = ()

    @property
    def scenario(self) -> str:
        more = f", {self.in_flight} calls in flight" if self.in_flight > 1 else ""
        return f"{CLOSED_LOOP}{more}"


@dataclass(frozen=True)
class Timing:
    """`seconds` are timed per point, over all `rounds`, after a warm-up of about `warmup_s`.

    Calls that still speed up are warmed up for three times that. At batches where a call of any
    setup is longer than half a round, there are five rounds.
    """

    warmup_s: float = 10.0
    seconds: float = 60.0
    rounds: int = FEWEST_DEPENDENT

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise BadInput(f"`seconds` must be above 0, got {self.seconds}")
        if not (math.isfinite(self.warmup_s) and self.warmup_s >= 0):
            raise BadInput(f"`warmup_s` must be 0 or more, got {self.warmup_s}")
        if self.rounds < 2:
            raise BadInput(f"`rounds` must be 2 or more for an interval, got {self.rounds}")


@dataclass(frozen=True)
class Point(Record):
    """What was measured of one setup at one batch size.

    `latency` is of single calls over all rounds (`samples` of them), `throughput_per_s` rows per
    second with its interval over the rounds, `round_rates` the rows per second of each round in
    order. `duration_s`: the timed seconds. `note`: a caveat, or "". `histogram`: every call.
    `shapes`: of the inputs of one call, by name. `marks`: why nothing is concluded from this point.
    `processes`: how many fresh processes timed it, a share of the rounds each; where there are
    several, `round_rates` and the intervals are over the processes. `settings`: of the CPU, chosen
    by a search: "2 sessions of 1 thread". `compute`: latency without the copies to the GPU and
    back; None on a CPU, and where the engine does not tell.
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


def sweep(
    setups: Sequence[Setup],
    batches: Sequence[int],
    timing: Timing,
    feeds: Callable[[int], Arrays],
    on_progress: Progress | None = None,
    *,
    clock: Clock = time.perf_counter_ns,
) -> list[Point]:
    """Time every setup at every batch size; the points come by batch, then in the setups' order.

    `feeds(batch)` gives the inputs of one call, `batch` rows; all setups get the same arrays, made
    before it is timed. A setup is left out at batches above its engine's `max_batch`.
    `on_progress(what, share)` is called before each step, and with 1.0 at the end. `clock`: a
    monotonic one, in nanoseconds. All engines are open at once and closed at the end.

    Raises BadInput on options that make no sense, or when no engine takes any of the batches.
    """
    _check_options(setups, batches)
    with contextlib.ExitStack() as stack:
        columns = [_open(setup, stack) for setup in setups]
        plan = [(batch, [column for column in columns if column.takes(batch)]) for batch in batches]
        if not any(fitting for _, fitting in plan):
            raise BadInput(
                f"no engine takes a batch of {min(batches)}",
                hint=f"the largest is {max(column.max_batch or 0 for column in columns)}",
            )
        steps = sum(len(fitting) for _, fitting in plan)
        progress = _Steps(on_progress, total_s=steps * (timing.warmup_s + timing.seconds))
        points = []
        for batch, fitting in plan:
            if fitting:
                inputs = _check_inputs(feeds(batch), batch, fitting)
                points += _time_batch(fitting, batch, inputs, timing, progress, clock)
        if on_progress is not None:
            on_progress("done", 1.0)
    return points


def crossover(
    points_a: Sequence[Point], points_b: Sequence[Point], by: str = "throughput"
) -> int | None:
    """The smallest batch measured on both from which a is ahead of b and stays ahead; None: never.

    Ahead: the 95 % intervals do not touch, by "throughput" or by "p50" latency. Nothing is
    interpolated. Raises BadInput when no batch was measured on both, or one twice on one side.
    """
    side_a, side_b = _by_batch(points_a), _by_batch(points_b)
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
    """The point of highest throughput, or by "p50" of lowest median latency; the first of equals.

    Raises BadInput when there is none, or none with enough samples for a median.
    """
    figures = [(figure.value, point) for point in points if (figure := _figure(point, by))]
    if not figures:
        raise BadInput(f"no point has a {by} figure")
    choose = min if by == "p50" else max
    return choose(figures, key=lambda pair: pair[0])[1]


def _figure(point: Point, by: str) -> Interval | None:
    if by not in ("throughput", "p50"):
        raise BadInput(f"points compare by 'throughput' or 'p50', not by '{by}'")
    return point.throughput_per_s if by == "throughput" else point.latency.p50_ms


def _ahead(a: Point, b: Point, by: str) -> bool:
    ours, theirs = _figure(a, by), _figure(b, by)
    if ours is None or theirs is None:
        return False
    return ours.low > theirs.high if by == "throughput" else ours.high < theirs.low


def _by_batch(points: Sequence[Point]) -> dict[int, Point]:
    found: dict[int, Point] = {}
    for point in points:
        if point.batch in found:
            raise BadInput(f"batch {point.batch} is there twice on one side of a crossover")
        found[point.batch] = point
    return found


def _check_options(setups: Sequence[Setup], batches: Sequence[int]) -> None:
    if not batches or min(batches) < 1 or len(set(batches)) != len(batches):
        raise BadInput(f"`batches` must be different sizes of 1 or more, got {list(batches)}")
    for batch in batches:
        labels = [each.label for each in setups if batch in (each.batches or batches)]
        if len(set(labels)) != max(1, len(labels)):
            raise BadInput(f"setups need different labels, and there must be one or more: {labels}")
    for setup in setups:
        if setup.sessions < 1:
            raise BadInput(f"{setup.label}: `sessions` must be 1 or more, got {setup.sessions}")
        if setup.in_flight > 1 and setup.sessions > 1:
            raise BadInput(f"{setup.label}: several sessions have one call in flight each")


@dataclass(frozen=True)
class _Column:
    """A setup whose engines are open."""

    setup: Setup
    engines: list[Engine]

    @property
    def max_batch(self) -> int | None:
        return self.engines[0].max_batch

    def run(
        self, feeds: Arrays, batch: int, length_s: float, clock: Clock, settle_s: float = 0.0
    ) -> Block:
        in_flight = self.setup.in_flight
        return run_block(
            self.engines, feeds, batch, length_s, clock, settle_s=settle_s, in_flight=in_flight
        )

    def takes(self, batch: int) -> bool:
        only = self.setup.batches
        return (self.max_batch is None or batch <= self.max_batch) and batch in (only or [batch])


def _open(setup: Setup, stack: contextlib.ExitStack) -> _Column:
    return _Column(setup, [stack.enter_context(setup.engines()) for _ in range(setup.sessions)])


def _check_inputs(feeds: Arrays, batch: int, columns: Sequence[_Column]) -> Arrays:
    for column in columns:
        label, inputs = column.setup.label, column.engines[0].inputs
        rows = check_feeds(inputs, feeds, label)
        if rows is None and inputs and inputs[0].shape and inputs[0].shape[0] != batch:
            raise BadInput(
                f"{label}: cannot run batch {batch}: its input is fixed, {inputs[0]}",
                hint=f"time it at batch {inputs[0].shape[0]}, or export with a dynamic batch",
            )
        if rows not in (None, batch):
            raise BadInput(f"the inputs made for batch {batch} hold {rows} rows")
    return feeds


@dataclass
class _Steps:
    """Turns steps of known length into a share of the whole."""

    on_progress: Progress | None
    total_s: float
    done_s: float = 0.0

    def begin(self, what: str, length_s: float) -> None:
        """Called before a step of `length_s`."""
        if self.on_progress is not None:
            self.on_progress(what, min(1.0, self.done_s / self.total_s))
        self.done_s += length_s


@dataclass
class _Record:
    """The blocks of one column at one batch size."""

    warmth: Warmth
    blocks: list[Block] = field(default_factory=list)
    compute: Latency | None = None


def _time_batch(
    columns: Sequence[_Column],
    batch: int,
    feeds: Arrays,
    timing: Timing,
    progress: _Steps,
    clock: Clock,
) -> list[Point]:
    records: dict[str, _Record] = {}
    for column in columns:
        label = column.setup.label
        progress.begin(f"{label}, batch {batch}: warm-up", timing.warmup_s)
        run = partial(column.run, feeds, batch, clock=clock)
        records[label] = _Record(warm_up(run, timing.warmup_s))
    rounds = timing.rounds
    longest_s = max(record.warmth.call_s for record in records.values())
    if longest_s > timing.seconds / rounds / 2:
        rounds = min(rounds, _FEW_ROUNDS)
    block_s = timing.seconds / rounds
    settle_s = min(
        block_s * _SETTLE_SHARE, _SETTLE_MAX_S
    )  # to refill caches and settle clocks after another engine
    for number in range(rounds):
        for column in columns if number % 2 == 0 else reversed(columns):
            label = column.setup.label
            progress.begin(f"{label}, batch {batch}: round {number + 1}", block_s)
            block = column.run(feeds, batch, block_s, clock, settle_s)
            records[label].blocks.append(block)
    shapes = {name: array.shape for name, array in feeds.items()}
    for column in columns:
        records[column.setup.label].compute = _compute(column, feeds, block_s, clock)
    return [_point(column, batch, shapes, records[column.setup.label]) for column in columns]


def _compute(column: _Column, feeds: Arrays, length_s: float, clock: Clock) -> Latency | None:
    """Latency less the copies, of further calls; None where the engine does not tell of any."""
    engine = column.engines[0]
    if not sum(engine.last_copies_us) or column.setup.in_flight > 1:
        return None
    calls_s: list[float] = []
    end = clock() + round(length_s * 1e9)
    while not calls_s or clock() < end:
        begun = clock()
        engine(feeds)
        calls_s.append((clock() - begun) / 1e9 - sum(engine.last_copies_us) / 1e6)
    return Latency.of(calls_s)


def _point(
    column: _Column, batch: int, shapes: Mapping[str, tuple[int, ...]], record: _Record
) -> Point:
    setup, blocks = column.setup, record.blocks
    rates = tuple(block.rate for block in blocks)
    return Point(
        label=setup.label,
        precision=setup.precision,
        device=setup.device or column.engines[0].device,
        runtime=column.engines[0].runtime,
        scenario=setup.scenario,
        batch=batch,
        sessions=setup.sessions,
        threads=setup.threads,
        samples=sum(len(block.calls_ns) for block in blocks),
        rounds=len(blocks),
        duration_s=sum(block.seconds for block in blocks),
        latency=Latency.of(*(block.calls_ns / 1e9 for block in blocks)),
        throughput_per_s=throughput(
            [block.rows for block in blocks], [block.seconds for block in blocks]
        ),
        round_rates=rates,
        note=record.warmth.note,
        histogram=CallHistogram.of(np.concatenate([block.calls_ns for block in blocks]) / 1e9),
        shapes=shapes,
        marks=tuple(mark for mark in (record.warmth.mark, rose(rates)) if mark),
        settings=setup.settings,
        compute=record.compute,
    )
