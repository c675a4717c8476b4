"""Call one or several engines in a closed loop for a set time, and time every call.

The garbage collector is off meanwhile; the caller passes the clock.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.subprocesses import Child, run_apart
from deploykit.core.tensors import batch_places
from deploykit.engines.engine import Arrays, Engine, check_feeds
from deploykit.evaluation.artefacts import Progress, no_progress, span
from deploykit.evaluation.statistics import FEWEST_DEPENDENT, CallHistogram, Latency, throughput
from deploykit.reporting.machine_load import Watch, Window, marks
from deploykit.reporting.report import CLOSED_LOOP, Point

Clock = Callable[[], int]  # nanoseconds, monotonic

_POLL_S = 0.5  # interval of checks for Ctrl-C
_T = TypeVar("_T")


@dataclass(frozen=True)
class Block:
    """Nanoseconds of each call, shape (calls,), the total rows, and rows per second."""

    calls_ns: np.ndarray
    rows: int
    rate: float

    @property
    def seconds(self) -> float:
        return self.rows / self.rate


def run_block(
    engines: Sequence[Engine],
    feeds: Arrays,
    batch: int,
    length_s: float,
    clock: Clock,
    *,
    settle_s: float = 0.0,
    in_flight: int = 1,
) -> Block:
    """Call each engine in a loop for `length_s`, all at once if there are several.

    With `in_flight` above 1 one engine has that many calls of `submit` at a time, each timed from
    start to end; calls that are still running at the end of the block do not count.

    A call that has begun is finished, so there is at least one. `settle_s`: an untimed start of at
    least one call, 0 for none. The rate is the sum of the sessions' rates, each up to the end of
    its last call. Sessions keep calling until the last one ends, so that the load stays full.
    """
    length_ns, settle_ns = round(length_s * 1e9), round(settle_s * 1e9)
    with no_garbage_collection():
        if in_flight > 1:
            if settle_ns:
                _loop_overlapping(engines[0], feeds, settle_ns, clock, in_flight)
            return _loop_overlapping(engines[0], feeds, length_ns, clock, in_flight, batch)
        sessions = _run_together(engines, feeds, settle_ns, length_ns, clock)
    calls_ns = [np.frombuffer(calls, dtype=np.int64) for calls in sessions]
    return Block(
        calls_ns=np.concatenate(calls_ns),
        rows=batch * sum(len(calls) for calls in calls_ns),
        rate=sum(batch * len(calls) / (max(1, int(calls.sum())) / 1e9) for calls in calls_ns),
    )


def closed_loop(
    engine: Engine, feeds: Arrays, length_ns: int, clock: Clock, stop: Callable[[], bool] = bool
) -> array[int]:
    """Return the nanoseconds of each call, from the end of the last: they sum to the time.

    An engine with its own `run_loop`, in another process, runs the loop there.
    """
    run_loop: Callable[..., array[int]] | None = getattr(engine, "run_loop", None)
    if run_loop is not None:
        return run_loop(feeds, length_ns, stop)
    calls = array("q")
    last = clock()
    end = last + length_ns
    while True:
        engine(feeds)
        now = clock()
        calls.append(now - last)
        last = now
        if now >= end or stop():
            return calls


def _loop_overlapping(
    engine: Engine, feeds: Arrays, length_ns: int, clock: Clock, in_flight: int, batch: int = 1
) -> Block:
    calls, waiting = array("q"), deque((clock(), engine.submit(feeds)) for _ in range(in_flight))
    begun = waiting[0][0]
    while True:
        started, call = waiting.popleft()
        call.result()
        now = clock()
        calls.append(now - started)
        if now - begun >= length_ns:
            break
        waiting.append((now, engine.submit(feeds)))
    for _, call in waiting:
        call.result()
    rows = batch * len(calls)
    return Block(np.frombuffer(calls, dtype=np.int64), rows, rows / (max(1, now - begun) / 1e9))


def _run_together(
    engines: Sequence[Engine], feeds: Arrays, settle_ns: int, length_ns: int, clock: Clock
) -> list[array[int]]:
    """Run each engine's loops, and further calls until all are as far."""
    settled, finished = list[Engine](), list[Engine]()

    def session(engine: Engine, stop: threading.Event) -> array[int]:
        def keep_up(done: list[Engine]) -> None:
            done.append(engine)
            while len(done) < len(engines) and not stop.is_set():
                engine(feeds)

        if settle_ns:
            closed_loop(engine, feeds, settle_ns, clock, stop.is_set)
            keep_up(settled)
        calls = closed_loop(engine, feeds, length_ns, clock, stop.is_set)
        keep_up(finished)
        return calls

    return in_threads(engines, session)


def in_threads(
    engines: Sequence[Engine], work: Callable[[Engine, threading.Event], _T]
) -> list[_T]:
    """Return what `work` returns for each engine, in threads if there are several.

    The first failure stops all and is raised.
    """
    stop = threading.Event()
    if len(engines) == 1:
        return [work(engines[0], stop)]

    def run(engine: Engine) -> _T:
        try:
            return work(engine, stop)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(len(engines), thread_name_prefix="deploykit-session") as pool:
        try:
            futures = [pool.submit(run, engine) for engine in engines]
            while wait(futures, timeout=_POLL_S).not_done:
                pass  # without a timeout a signal just before the wait would be missed
        except BaseException:
            stop.set()
            raise
        return [future.result() for future in futures]


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector; with torch, collecting first would take 0.3 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# A session in a process of its own waits for no other one's interpreter lock. The child opens the
# engine and runs the timed loop, so that no call crosses a pipe.

_STOP_POLL_S = 0.2  # interval of checks whether to stop
_ABOUT = ("inputs", "outputs", "device", "runtime")


class ProcessEngine(Engine):
    """The engine that `opener` opens in a child process; the first use waits until it is open."""

    def __init__(self, opener: Callable[[], Engine]) -> None:
        self._sent: Arrays | None = None
        self._child = Child("a session", _serve, opener)

    def __getattr__(self, name: str) -> Any:
        if name not in _ABOUT:
            raise AttributeError(name)
        vars(self).update(self._child.receive())
        return vars(self)[name]

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        self._ask(feeds, None)
        outputs: dict[str, np.ndarray] = self._child.receive()
        return outputs

    def run_loop(self, feeds: Arrays, length_ns: int, stop: Callable[[], bool]) -> array[int]:
        """Run `closed_loop` in the child, on the child's own clock, until `stop` returns True."""
        self._ask(feeds, length_ns)
        while not self._child.poll(_STOP_POLL_S):
            if stop():
                self.close()
                return array("q")
        calls: array[int] = self._child.receive()
        return calls

    def close(self) -> None:
        self._child.close()

    def _ask(self, feeds: Arrays, length_ns: int | None) -> None:
        self.inputs  # noqa: B018 - waits until the engine is open
        self._child.send((None if feeds is self._sent else dict(feeds), length_ns))
        self._sent = feeds


def _serve(pipe: Connection[Any, Any], opener: Callable[[], Engine]) -> None:
    """Run the child. It ends with its parent, whose end of the pipe closes then."""
    feeds: Arrays = {}
    with contextlib.suppress(EOFError), opener() as engine, no_garbage_collection():
        about = {name: getattr(engine, name) for name in _ABOUT}
        pipe.send({**about, "options": dict(engine.options)})
        while True:
            new, length_ns = pipe.recv()
            feeds = feeds if new is None else new
            if length_ns is None:
                pipe.send(engine(feeds))
            else:
                pipe.send(closed_loop(engine, feeds, length_ns, time.perf_counter_ns))


_WINDOWS = 10  # per limit
_LAST, _STABLE = 4, 1.10  # windows that must agree within 10 %, as in perf_analyzer
_RISEN, _SURE = 0.05, 6.0  # smallest rise over the rounds: a share, standard errors


def _warm_up(run: Callable[[float], Block], limit_s: float) -> tuple[str, float]:
    """Run windows of some seconds until four agree within 10 %, or `limit_s` has passed.

    Return a caveat, or "", and the longest call of the last window in seconds, 0 without any.
    """
    if limit_s == 0:
        return "no warm-up", 0.0
    rates: list[float] = []
    spent_s = 0.0
    while True:
        block = run(limit_s / _WINDOWS)
        spent_s += block.seconds
        rates.append(block.rate)
        call_s, last = float(block.calls_ns.max()) / 1e9, rates[-_LAST:]
        if len(last) == _LAST and max(last) <= _STABLE * min(last):
            return "", call_s
        if spent_s >= limit_s:
            return f"not yet steady after {limit_s:.3g} s of warm-up", call_s


def rose(rates: Sequence[float]) -> str:
    """Return why these rates of rounds, in time order, are not steady, or "".

    They rise by 5 % or more on a line that noise does not explain. Fewer than five prove nothing.
    """
    n = len(rates)
    if n < 5:
        return ""
    (slope, _), covariance = np.polyfit(range(n), np.log(rates), 1, cov=True)
    risen = math.expm1(slope * (n - 1))
    if risen < _RISEN or slope < _SURE * math.sqrt(covariance[0, 0]):
        return ""
    return f"calls still sped up, by {risen:.0%} over the rounds: a longer run is needed"


# Per batch size the setups take turns in rounds, forwards and backwards, so that clock drift and
# other load affect all of them. The order changes every two rounds, so that none always follows the
# same one. A closed loop suits throughput, and is blind to stalls.

FULL_S = 60.0  # per point
PROCESSES = 10  # even, for the order; five would make joint intervals of ratios too wide
_ROUNDS, _ROUND_S = 60, 0.05  # maximum number, minimum length
_FEW_ROUNDS = 5  # for long calls: settling after each switch would take most of the time
_SETTLE_SHARE, _SETTLE_MAX_S = 0.1, 0.5  # share of a block


@dataclass(frozen=True)
class Setup:
    """One column of a comparison. `engines` opens an Engine; `sessions` of them run at once.

    `in_flight`: concurrent calls of one engine; more than one is another scenario. `threads`: CPU
    threads of each engine, None if not applicable. `file`, `sha256`: the artefact's. `settings`:
    the CPU settings as a string. `batches`: the only sizes to time; () for all. `processes`: each
    session runs in a separate process. `entry`: the label of the entry, shared by all its setups.
    """

    label: str
    engines: Callable[[], Engine]
    sessions: int = 1
    threads: int | None = None
    precision: str = ""
    file: str = ""
    sha256: str = ""
    in_flight: int = 1
    settings: str = ""
    batches: tuple[int, ...] = ()
    processes: bool = False
    entry: str = ""

    def made(self, point: Point) -> bool:
        """Return whether calls of this setup, one at a time, are what a point shows."""
        batches = self.batches or (point.batch,)
        return (self.label, self.in_flight) == (point.label, 1) and point.batch in batches

    def open(self, stack: contextlib.ExitStack) -> list[Engine]:
        return [stack.enter_context(self.engines()) for _ in range(self.sessions)]

    def takes(self, batch: int, max_batch: int | None) -> bool:
        return batch <= (max_batch or batch) and batch in (self.batches or (batch,))

    @property
    def scenario(self) -> str:
        more = f", {self.in_flight} calls in flight" if self.in_flight > 1 else ""
        return f"{CLOSED_LOOP}{more}"


@dataclass(frozen=True)
class Timing:
    """`seconds` per point in at most `rounds`, after at most `warmup_s`."""

    warmup_s: float = 10.0
    seconds: float = FULL_S
    rounds: int = _ROUNDS

    @classmethod
    def lasting(cls, seconds: float) -> Timing:
        """Return the timing for `seconds` per point, with at most 10 s of warm-up."""
        return cls(min(10.0, seconds * 2 / 3) if seconds > 0 else 0.0, seconds)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise BadInput(f"`seconds` must be above 0, got {self.seconds}")

    def rounds_for(self, longest_s: float) -> int:
        """Return how many rounds calls of up to `longest_s` need: 20 or more, else 5."""
        few = 2 * longest_s * FEWEST_DEPENDENT > self.seconds
        fit = max(FEWEST_DEPENDENT, int(self.seconds / max(2 * longest_s, _ROUND_S)))
        return min(self.rounds, _FEW_ROUNDS if few else fit)


Column = tuple[Setup, Sequence[Engine]]  # a setup and its open engines


def _check_inputs(feeds: Arrays, batch: int, columns: Sequence[Column]) -> Arrays:
    for setup, engines in columns:
        label, inputs = setup.label, engines[0].inputs
        check_feeds(inputs, feeds, label)
        places = batch_places(inputs)
        if not places and inputs and inputs[0].shape and inputs[0].shape[0] != batch:
            raise BadInput(
                f"{label}: cannot run batch {batch}: its input is fixed, {inputs[0]}",
                hint=f"`batches` {inputs[0].shape[0]}, or export with a dynamic batch",
            )
        if wrong := {feeds[name].shape[place] for name, place in places.items()} - {batch}:
            raise BadInput(f"the inputs made for batch {batch} hold {wrong.pop()} rows")
    return feeds


def order(count: int, turn: int) -> list[int]:
    """Return the order in which `count` setups take turn number `turn`.

    The orders are the rows of Williams' design (Australian J. Sci. Res. A 2, 1949), each forwards
    and then backwards: over `count` pairs of turns each setup is at each place, and after each
    other one, equally often.
    """
    zigzag = [at // 2 if at % 2 == 0 else count - 1 - at // 2 for at in range(count)]
    return [(at + turn // 2) % count for at in zigzag][:: -1 if turn % 2 else 1]


@dataclass
class Measured:
    """One process's measurements of a setup at a batch size; `shapes` are those of the inputs."""

    setup: Setup
    batch: int
    device: str
    runtime: str
    options: Mapping[str, str]
    note: str
    shapes: Mapping[str, tuple[int, ...]]
    blocks: list[Block] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    bound_cores: float = math.inf  # load of other processes that disturbs


@dataclass
class Turns:
    """Times setups in turns in this process.

    `clock`: monotonic, in nanoseconds. `watch` records a window per block; points that other
    processes disturbed are marked. `number`: the number of this process; each opens, warms up and
    times in another order.
    """

    timing: Timing
    on_progress: Progress = no_progress
    clock: Clock = time.perf_counter_ns
    watch: Watch = field(default_factory=Watch)
    number: int = 0
    _total_s: float = field(default=0.0, init=False)
    _done_s: float = field(default=0.0, init=False)

    def measure(
        self, setups: Sequence[Setup], batches: Sequence[int], feeds: Callable[[int], Arrays]
    ) -> list[Measured]:
        """Time every setup at every batch size; points are ordered by batch, then as the setups.

        All engines are open at once. A setup is left out at batches above its engine's `max_batch`.
        `feeds` makes the inputs of one call with that many rows, once for all setups. Raises
        BadInput on invalid batch sizes, or when no engine takes any of them.
        """
        if not batches or min(batches) < 1 or len(set(batches)) != len(batches):
            raise BadInput(f"`batches` must be different sizes of 1 or more, got {list(batches)}")
        measured: list[Measured] = []
        with contextlib.ExitStack() as stack:
            opened = {at: setups[at].open(stack) for at in order(len(setups), self.number)}
            columns = [(setup, opened[at]) for at, setup in enumerate(setups)]
            self.watch.know_children()
            plan = {
                batch: [each for each in columns if each[0].takes(batch, each[1][0].max_batch)]
                for batch in batches
            }
            steps = sum(map(len, plan.values()))
            if not steps:
                largest = max(engines[0].max_batch or 0 for _, engines in columns)
                raise BadInput(
                    f"no engine takes a batch of {min(batches)}", hint=f"the largest is {largest}"
                )
            self._done_s, self._total_s = 0.0, steps * (self.timing.warmup_s + self.timing.seconds)
            for batch, fitting in plan.items():
                if fitting:
                    measured += self._run(
                        fitting, batch, _check_inputs(feeds(batch), batch, fitting)
                    )
        self.on_progress("done", 1.0)
        return measured

    def _run(self, columns: Sequence[Column], batch: int, feeds: Arrays) -> list[Measured]:
        timing, clock = self.timing, self.clock
        found: dict[str, Measured] = {}
        longest_s = settle_s = 0.0
        runs = [
            partial(run_block, engines, feeds, batch, clock=clock, in_flight=setup.in_flight)
            for setup, engines in columns
        ]
        for at in order(len(columns), self.number):
            setup, (engine, *_) = columns[at]
            self._begin(f"{setup.label}, batch {batch}: warm-up", timing.warmup_s)
            note, call_s = _warm_up(runs[at], timing.warmup_s)
            longest_s = max(longest_s, call_s)
            found[setup.label] = Measured(
                setup=setup,
                batch=batch,
                device=engine.device,
                runtime=engine.runtime,
                options=dict(engine.options),
                note=note,
                shapes={name: array.shape for name, array in feeds.items()},
                bound_cores=self.watch.bound,
            )
        rounds = timing.rounds_for(longest_s)
        block_s = timing.seconds / rounds
        if len(columns) > 1:  # the last column's caches and clocks
            settle_s = min(block_s * _SETTLE_SHARE, _SETTLE_MAX_S)
        for number in range(rounds):
            for at in order(len(columns), self.number * rounds + number):
                one = found[columns[at][0].label]
                self._begin(f"{one.setup.label}, batch {batch}: round {number + 1}", block_s)
                self.watch.begin()
                one.blocks.append(runs[at](block_s, settle_s=settle_s))
                one.windows.append(self.watch.close())
        for setup, (engine, *_) in columns:
            more_s = max(block_s, timing.seconds / FEWEST_DEPENDENT)
            if setup.in_flight == 1:
                found[setup.label].compute_s += _compute_s(engine, feeds, more_s, clock)
        return [found[setup.label] for setup, _ in columns]

    def _begin(self, what: str, length_s: float) -> None:
        self.on_progress(what, min(1.0, self._done_s / self._total_s))
        self._done_s += length_s


def _compute_s(engine: Engine, feeds: Arrays, length_s: float, clock: Clock) -> list[float]:
    """Time further calls without their copies; return [] if the engine reports no copies."""
    calls_s: list[float] = []
    if not sum(engine.last_copies_us):
        return calls_s
    end = clock() + round(length_s * 1e9)
    while not calls_s or clock() < end:
        begun = clock()
        engine(feeds)
        calls_s.append((clock() - begun) / 1e9 - sum(engine.last_copies_us) / 1e6)
    return calls_s


def make_point(parts: Sequence[Measured]) -> Point:
    """Return the point of one or several processes, over which the intervals are, or wider."""
    setup, blocks = parts[0].setup, [block for part in parts for block in part.blocks]
    groups = [[block] for block in blocks] if len(parts) == 1 else [part.blocks for part in parts]
    rows = [sum(block.rows for block in group) for group in groups]
    seconds = [sum(block.seconds for block in group) for group in groups]
    calls_s = [np.concatenate([block.calls_ns for block in group]) / 1e9 for group in groups]
    rates = tuple(amount / length for amount, length in zip(rows, seconds, strict=True))
    by_block = throughput([each.rows for each in blocks], [each.seconds for each in blocks])
    compute_s = [part.compute_s for part in parts if part.compute_s]
    each = (rose([block.rate for block in part.blocks]) for part in parts)
    rises = [risen for risen in each if risen]
    why = rises if 2 * len(rises) > len(parts) else []
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
        note="; ".join(dict.fromkeys(part.note for part in parts if part.note)),
        histogram=CallHistogram.of(np.concatenate(calls_s)),
        shapes=parts[0].shapes,
        marks=tuple(dict.fromkeys(why)),
        processes=len(parts),
        settings=setup.settings,
        compute=Latency.of(*compute_s) if compute_s else None,
        options=parts[0].options,
    )


# The memory layout of a process and the first cores of its threads change its speed by about 1 %
# for its lifetime, which no number of rounds in one process shows.


def sweep(
    setups: Sequence[Setup],
    batches: Sequence[int],
    timing: Timing,
    feeds: Callable[[int], Arrays],
    on_progress: Progress = no_progress,
    *,
    processes: int = 1,
    watch: Watch | None = None,
) -> list[Point]:
    """Time every setup at every batch size, see `Turns`: here, or divided among `processes`.

    Fresh processes get `setups` and `feeds` pickled.
    """
    watch = watch or Watch()
    if processes == 1:
        found = Turns(timing, on_progress, watch=watch).measure(setups, batches, feeds)
        return [make_point([each]) for each in found]
    share = replace(
        timing, seconds=timing.seconds / processes, rounds=max(2, timing.rounds // processes)
    )
    parts: dict[tuple[int, str], list[Measured]] = {}
    for number in range(processes):
        turns = Turns(share, watch=replace(watch, own=(os.getpid(),), windows=[]), number=number)
        found, windows = run_apart(
            "bench: a process that measures",
            _time_here,
            turns,
            setups,
            batches,
            feeds,
            on_progress=span(on_progress, number / processes, (number + 1) / processes),
        )
        watch.windows += windows
        for each in found:
            parts.setdefault((each.batch, each.setup.label), []).append(each)
    return [make_point(part) for part in parts.values()]


def _time_here(
    turns: Turns,
    setups: Sequence[Setup],
    batches: Sequence[int],
    feeds: Callable[[int], Arrays],
    on_progress: Progress,
) -> tuple[list[Measured], list[Window]]:
    """Time in this child process, whose parent's processes are the run's own."""
    turns.on_progress = on_progress
    found = turns.measure(setups, batches, feeds)
    for each in found:
        each.setup = replace(each.setup, engines=_closed)  # engines cannot be pickled
    return found, turns.watch.windows


def _closed() -> Engine:
    raise BadInput("the engine was open in another process")
