"""Time engines against each other in a closed loop, over batch sizes.

Per batch size the setups take turns in rounds, forwards and backwards, so that drift of clocks and
other load on the machine affects all of them; every two rounds in another order, so that none has
always the same one before it. A closed loop is right for throughput, and blind to stalls.
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
from deploykit.core.tensors import batch_axes
from deploykit.measure.histogram import CallHistogram
from deploykit.measure.latency import Latency
from deploykit.measure.outside import Watch, Window, marks
from deploykit.measure.statistics import FEWEST_DEPENDENT, Interval, throughput
from deploykit.measure.timing.closed_loop import Block, Clock, run_block
from deploykit.measure.timing.warm_up import Warmth, rose, warm_up
from deploykit.runtimes.engine import Arrays, Engine, check_feeds

CLOSED_LOOP = "closed-loop"
_ROUNDS, _ROUND_S = 60, 0.05  # the most, and the shortest
_FEW_ROUNDS = 5  # where calls are long: settling after each switch would take most of the time
_SETTLE_SHARE, _SETTLE_MAX_S = 0.1, 0.5  # of a block

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Setup:
    """One column of a comparison. `engines` opens one Engine; `sessions` of them run at once.

    `in_flight`: calls of the one engine at a time; more than one is another scenario. `threads`:
    CPU threads of each engine, None where that means nothing. `device`: "" for the engine's own.
    `file`, `sha256`: of the artefact. `settings`: of the CPU, as text. `batches`: the only sizes
    to time it at; () for all. `processes`: each session has a process of its own. `entry`: names
    what is timed, over all its setups.
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
    processes: bool = False
    entry: str = ""

    @property
    def scenario(self) -> str:
        more = f", {self.in_flight} calls in flight" if self.in_flight > 1 else ""
        return f"{CLOSED_LOOP}{more}"


@dataclass(frozen=True)
class Timing:
    """`seconds` per point in at most `rounds`, after `warmup_s`, three times that if needed."""

    warmup_s: float = 10.0
    seconds: float = 60.0
    rounds: int = _ROUNDS

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise BadInput(f"`seconds` must be above 0, got {self.seconds}")
        if not (math.isfinite(self.warmup_s) and self.warmup_s >= 0):
            raise BadInput(f"`warmup_s` must be 0 or more, got {self.warmup_s}")
        if self.rounds < 2:
            raise BadInput(f"`rounds` must be 2 or more for an interval, got {self.rounds}")

    def rounds_for(self, longest_s: float) -> int:
        """For calls of up to `longest_s`: rounds of 0.05 s or longer, with time for two calls.

        20, which show whether rounds depend on each other, may be shorter; else there are five.
        """
        few = 2 * longest_s * FEWEST_DEPENDENT > self.seconds
        fit = max(FEWEST_DEPENDENT, int(self.seconds / max(2 * longest_s, _ROUND_S)))
        return min(self.rounds, _FEW_ROUNDS if few else fit)


@dataclass(frozen=True)
class Point(Record):
    """What was measured of one setup at one batch size.

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


def sweep(
    setups: Sequence[Setup],
    batches: Sequence[int],
    timing: Timing,
    feeds: Callable[[int], Arrays],
    on_progress: Progress | None = None,
    *,
    clock: Clock = time.perf_counter_ns,
    watch: Watch | None = None,
) -> list[Point]:
    """Time every setup at every batch size in this process: `time_setups`, as points."""
    found = time_setups(setups, batches, timing, feeds, on_progress, clock=clock, watch=watch)
    return [make_point([each]) for each in found]


def time_setups(
    setups: Sequence[Setup],
    batches: Sequence[int],
    timing: Timing,
    feeds: Callable[[int], Arrays],
    on_progress: Progress | None = None,
    *,
    clock: Clock = time.perf_counter_ns,
    watch: Watch | None = None,
    number: int = 0,
) -> list[Measured]:
    """Time every setup at every batch size; they come by batch, then in the setups' order.

    `feeds(batch)`: the inputs of one call, `batch` rows, made once for all setups. A setup is left
    out at batches above its engine's `max_batch`. `on_progress(what, share)` is called before each
    step, and with 1.0 at the end. `clock`: monotonic, in nanoseconds. `watch` has a window for each
    block, and marks points that other processes disturbed. `number`: of this process, each of which
    opens, warms up and times the setups in another order. All engines are open at once.

    Raises BadInput on options that make no sense, or when no engine takes any of the batches.
    """
    _check_options(setups, batches)
    with contextlib.ExitStack() as stack:
        opened = {at: _open(setups[at], stack) for at in order(len(setups), number)}
        columns = [opened[at] for at in range(len(setups))]
        if watch is not None:
            watch.know_children()
        plan = [(batch, [column for column in columns if column.takes(batch)]) for batch in batches]
        if not any(fitting for _, fitting in plan):
            raise BadInput(
                f"no engine takes a batch of {min(batches)}",
                hint=f"the largest is {max(column.max_batch or 0 for column in columns)}",
            )
        steps = sum(len(fitting) for _, fitting in plan)
        progress = _Steps(on_progress, total_s=steps * (timing.warmup_s + timing.seconds))
        measured = []
        for batch, fitting in plan:
            if fitting:
                turns = _Turns(fitting, batch, timing, progress, clock, watch, number)
                measured += turns.run(_check_inputs(feeds(batch), batch, fitting))
        if on_progress is not None:
            on_progress("done", 1.0)
    return measured


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
        check_feeds(inputs, feeds, label)
        axes = batch_axes(inputs)
        if not axes and inputs and inputs[0].shape and inputs[0].shape[0] != batch:
            raise BadInput(
                f"{label}: cannot run batch {batch}: its input is fixed, {inputs[0]}",
                hint=f"`batches` {inputs[0].shape[0]}, or export with a dynamic batch",
            )
        rows = [
            size
            for spec in inputs
            for axis, size in zip(spec.shape, feeds[spec.name].shape, strict=True)
            if axis in axes
        ]
        if set(rows) - {batch}:
            raise BadInput(f"the inputs made for batch {batch} hold {rows[0]} rows")
    return feeds


def order(count: int, turn: int) -> list[int]:
    """In which order `count` setups take turn number `turn`.

    The next turn goes backwards, and the two after it begin with the next setup, of the rows of
    Williams' design (Australian J. Sci. Res. A 2, 1949): over `count` pairs of turns each setup is
    at each place, and after each other one, equally often.
    """
    zigzag = [at // 2 if at % 2 == 0 else count - 1 - at // 2 for at in range(count)]
    return [(at + turn // 2) % count for at in zigzag][:: -1 if turn % 2 else 1]


@dataclass
class _Steps:
    """Turns steps of known length into a share of the whole."""

    on_progress: Progress | None
    total_s: float
    done_s: float = 0.0

    def begin(self, what: str, length_s: float) -> None:
        if self.on_progress is not None:
            self.on_progress(what, min(1.0, self.done_s / self.total_s))
        self.done_s += length_s


@dataclass
class Measured:
    """What one process measured of one setup at one batch size; `shapes`: of its inputs."""

    setup: Setup
    batch: int
    device: str
    runtime: str
    options: Mapping[str, str]
    warmth: Warmth
    shapes: Mapping[str, tuple[int, ...]]
    blocks: list[Block] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    bound_cores: float = math.inf  # of other processes, past which they disturb


@dataclass(frozen=True)
class _Turns:
    """The setups that fit a batch size, which are timed in turns."""

    columns: Sequence[_Column]
    batch: int
    timing: Timing
    progress: _Steps
    clock: Clock
    watch: Watch | None
    number: int

    def run(self, feeds: Arrays) -> list[Measured]:
        timing, columns = self.timing, self.columns
        first = [columns[at] for at in order(len(columns), self.number)]
        found = {column.setup.label: self._warm_up(column, feeds) for column in first}
        rounds = timing.rounds_for(max(each.warmth.call_s for each in found.values()))
        block_s = timing.seconds / rounds
        settle_s = min(block_s * _SETTLE_SHARE, _SETTLE_MAX_S)  # caches and clocks
        for number in range(rounds):
            for at in order(len(columns), self.number * rounds + number):
                column = columns[at]
                label = column.setup.label
                self.progress.begin(f"{label}, batch {self.batch}: round {number + 1}", block_s)
                if self.watch is not None:
                    self.watch.begin()
                block = column.run(feeds, self.batch, block_s, self.clock, settle_s)
                found[label].blocks.append(block)
                if self.watch is not None:
                    found[label].windows.append(self.watch.close())
        for column in columns:
            more_s = max(block_s, timing.seconds / FEWEST_DEPENDENT)
            found[column.setup.label].compute_s += _compute_s(column, feeds, more_s, self.clock)
        return [found[column.setup.label] for column in columns]

    def _warm_up(self, column: _Column, feeds: Arrays) -> Measured:
        setup, engine, limit_s = column.setup, column.engines[0], self.timing.warmup_s
        self.progress.begin(f"{setup.label}, batch {self.batch}: warm-up", limit_s)
        return Measured(
            setup=setup,
            batch=self.batch,
            device=setup.device or engine.device,
            runtime=engine.runtime,
            options=dict(engine.options),
            warmth=warm_up(partial(column.run, feeds, self.batch, clock=self.clock), limit_s),
            shapes={name: array.shape for name, array in feeds.items()},
            bound_cores=self.watch.bound if self.watch is not None else math.inf,
        )


def _compute_s(column: _Column, feeds: Arrays, length_s: float, clock: Clock) -> list[float]:
    """Of further calls, less the copies; none where the engine does not tell of any."""
    engine = column.engines[0]
    calls_s: list[float] = []
    if not sum(engine.last_copies_us) or column.setup.in_flight > 1:
        return calls_s
    end = clock() + round(length_s * 1e9)
    while not calls_s or clock() < end:
        begun = clock()
        engine(feeds)
        calls_s.append((clock() - begun) / 1e9 - sum(engine.last_copies_us) / 1e6)
    return calls_s


def make_point(parts: Sequence[Measured]) -> Point:
    """Of what one process, or several in order of time, measured of one setup at one batch size.

    Intervals are over processes, or over all their blocks where a drift makes these wider.
    """
    setup, blocks = parts[0].setup, [block for part in parts for block in part.blocks]
    groups = [[block] for block in blocks] if len(parts) == 1 else [part.blocks for part in parts]
    rows = [sum(block.rows for block in group) for group in groups]
    seconds = [sum(block.seconds for block in group) for group in groups]
    calls_s = [np.concatenate([block.calls_ns for block in group]) / 1e9 for group in groups]
    rates = tuple(amount / length for amount, length in zip(rows, seconds, strict=True))
    by_block = throughput([each.rows for each in blocks], [each.seconds for each in blocks])
    compute_s = [part.compute_s for part in parts if part.compute_s]
    why = [part.warmth.mark for part in parts] + [rose(rates) if len(parts) == 1 else ""]
    why += marks([window for part in parts for window in part.windows], parts[0].bound_cores)
    return Point(
        label=setup.label,
        precision=setup.precision,
        device=parts[0].device,
        runtime=parts[0].runtime,
        scenario=setup.scenario,
        batch=parts[0].batch,
        sessions=setup.sessions,
        threads=setup.threads,
        samples=sum(map(len, calls_s)),
        rounds=len(blocks),
        duration_s=sum(seconds),
        latency=Latency.of(*calls_s, short_s=[block.calls_ns / 1e9 for block in blocks]),
        throughput_per_s=max(throughput(rows, seconds), by_block, key=lambda each: each.high),
        round_rates=rates,
        note="; ".join(dict.fromkeys(part.warmth.note for part in parts if part.warmth.note)),
        histogram=CallHistogram.of(np.concatenate(calls_s)),
        shapes=parts[0].shapes,
        marks=tuple(dict.fromkeys(filter(None, why))),
        processes=len(parts),
        settings=setup.settings,
        compute=Latency.of(*compute_s) if compute_s else None,
        options=parts[0].options,
    )
