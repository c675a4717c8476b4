"""Put load on a running Open Inference Protocol server, and time its answers.

Closed loop: a number of connections, each sends when its last request is answered. Open loop: a
rate, with send times drawn beforehand; latency counts from the intended time, so that a stall of
the server is part of it (no coordinated omission). By default an open loop at half of what a short
closed loop finds to be the server's capacity.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import resource
import select
import signal
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.subprocesses import run_apart
from deploykit.engines.data.samples import read_samples
from deploykit.loadtest.bodies import Bodies, BodyCheck, choose_bodies
from deploykit.loadtest.check import AnswerCheck, short_bound
from deploykit.loadtest.client import Client, Report
from deploykit.loadtest.questions import Stage, answer_or, time_by_stage
from deploykit.loadtest.result import Load, RunRecord, SendPlan, mean_answer_ms, summarise
from deploykit.loadtest.target import (
    RemoteModel,
    find_model,
    make_feeds,
    make_requests,
    probe,
    read_expected,
)
from deploykit.reporting.load_result import LoadResult
from deploykit.reporting.machine_load import Watch, marks, sum_up

# Share a load among processes of its own, which begin at once, and join what they recorded.
#
# A process of its own, even a single one, keeps the generator apart from whatever else its caller
# does: a progress bar that is drawn, a garbage collector, other threads.

_HEAD_START_S = 0.02  # from the last process that is ready to the first request
_POLL_S = 0.5  # between two checks for Ctrl-C
_PATIENCE_S = 60.0  # until the processes are ready
_COUNT = re.compile(r"[\d,]+")
_TIME = struct.Struct("d")


def share(plan: SendPlan, processes: int) -> list[SendPlan]:
    """A plan for each process: every n-th of the times, and as equal a number of connections."""
    plans = []
    for number in range(processes):
        more = number < plan.connections % processes
        plans.append(
            replace(
                plan,
                connections=plan.connections // processes + more,
                due_s=None if plan.due_s is None else plan.due_s[number::processes],
            )
        )
    return plans


def run_processes(plans: Sequence[SendPlan], on_progress: Report | None = None) -> list[RunRecord]:
    """Carry out each plan in a process. KeyboardInterrupt ends all of them, and has no result."""
    stop = threading.Event()
    messages = [""] * len(plans)

    def report(number: int, message: str, part: float) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        messages[number] = message
        if on_progress is not None and number == len(plans) - 1:
            on_progress(_joined(messages), part)

    (ready, signal_ready), (start, begin) = _pipe(), _pipe()
    inherit = signal_ready.fileno(), start.fileno()
    # the threads, which pass descriptors on, end before these are closed and their numbers reused
    with _default_ctrl_c(), ready, signal_ready, start, ThreadPoolExecutor(len(plans)) as pool:
        try:
            runs = [
                pool.submit(
                    run_apart,
                    "the load generator",
                    run_plan,
                    plan,
                    *inherit,
                    on_progress=partial(report, number),
                    inherit=inherit,
                )
                for number, plan in enumerate(plans)
            ]
            _start_together(runs, ready, begin)
            while wait(runs, _POLL_S).not_done:
                pass  # without a timeout a Ctrl-C just before the wait would go unnoticed
            return [run.result() for run in runs]
        except BaseException:
            stop.set()  # each ends at its next report of progress
            raise
        finally:
            begin.close()  # those that wait for the start read its end


def run_plan(plan: SendPlan, ready: int, start: int, on_progress: Report | None) -> RunRecord:
    """Carry out a plan in this process; `on_progress` last, as `run_apart` gives it.

    A byte is written to the pipe `ready`, then the run's start on `time.perf_counter` is read from
    the pipe `start`: several processes begin at once. Where that ends instead, nothing is sent.
    """
    client = Client(plan, on_progress)
    gc.collect()
    gc.disable()  # the generator's pauses are no latency
    os.write(ready, b".")
    begins = os.read(start, _TIME.size)
    return client.run(*_TIME.unpack(begins)) if begins else client.outcome


def _start_together(runs: Sequence[Future[RunRecord]], ready: FileIO, begin: FileIO) -> None:
    """When every process is ready, tell all of them the time at which they begin.

    Closes `begin`, also where one has failed: its error is raised with its result.
    """
    waiting, until_s = len(runs), time.monotonic() + _PATIENCE_S
    with begin:
        while waiting and not any(run.done() for run in runs):
            if time.monotonic() > until_s:
                raise DeploykitError(f"the load generator did not start within {_PATIENCE_S:g} s")
            if select.select([ready], [], [], 0.05)[0]:
                waiting -= len(ready.read(waiting))
        if not waiting:
            begin.write(_TIME.pack(time.perf_counter() + _HEAD_START_S) * len(runs))


def _pipe() -> tuple[FileIO, FileIO]:
    """The end to read and the end to write."""
    reads, writes = os.pipe()
    return FileIO(reads, "r"), FileIO(writes, "w")


def _joined(messages: Sequence[str]) -> str:
    """The requests of all processes together; the percentiles of the last."""
    counts = [int(match[0].replace(",", "")) for each in messages if (match := _COUNT.match(each))]
    return _COUNT.sub(f"{sum(counts):,}", messages[-1], count=1)


@contextlib.contextmanager
def _default_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, whatever it does otherwise, unless it is ignored."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (
        None,
        signal.SIG_IGN,
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# Find the processes of a server on this machine, whose work is no outside load.

_LISTENS = "0A"  # of a socket, in /proc/net/tcp


def server_processes(remote: RemoteModel, proc: Path | None = None) -> tuple[int, ...]:
    """Those that listen at its port; none for a server elsewhere, or of another user."""
    proc = proc or Path(os.environ.get("HOST_PROC", "/proc"))
    sockets = set(_listening(proc, remote.port)) if remote.loopback else set[str]()
    return tuple(_owners(proc, sockets)) if sockets else ()


def _listening(proc: Path, port: int) -> Iterator[str]:
    """The links that a process has to sockets that listen at `port`."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError, UnicodeError):
            for line in (proc / "net" / name).read_text(encoding="utf-8").splitlines()[1:]:
                fields = line.split()
                listens = len(fields) > 9 and fields[3] == _LISTENS
                if listens and fields[1].rpartition(":")[2] == f"{port:04X}":
                    yield f"socket:[{fields[9]}]"


def _owners(proc: Path, sockets: set[str]) -> Iterator[int]:
    for process in proc.iterdir():
        if process.name.isdecimal():
            with suppress(OSError):  # it has ended, or is another user's
                if any(_link(each) in sockets for each in (process / "fd").iterdir()):
                    yield int(process.name)


def _link(path: Path) -> str:
    with suppress(OSError):
        return str(path.readlink())
    return ""


MAX_SENDS = 5_000_000  # requests of one open loop
MAX_CONNECTIONS = 1024
MAX_PROCESSES = 64
MAX_ERROR = 1e-3  # of an expected answer, as of golden samples
_AROUND_S = 0.5  # in which the machine is watched before and after
CAPACITY_CONNECTIONS, CAPACITY_S, CAPACITY_SHARE = 32, 2.0, 0.5  # of the closed loop before


def run_load(
    url: str,
    *,
    model: str | None = None,
    concurrency: int | None = None,
    rate: float | None = None,
    duration_s: float = 10.0,
    warmup_s: float = 1.0,
    seed: int = 0,
    batch: int = 1,
    data: Path | None = None,
    bodies: Callable[[], Bodies] | None = None,
    expect: Path | None = None,
    max_error: float = MAX_ERROR,
    axes: Mapping[str, int] | None = None,
    processes: int = 1,
    slo_ms: float | None = None,
    drain_s: float = 5.0,
    on_progress: Report | None = None,
) -> LoadResult:
    """Load `model` at `url` for `warmup_s` + `duration_s`, then wait up to `drain_s` for answers.

    `bodies` reads what to send in place of tensors. Others as in
    `deploykit.loadtest.load`; an open loop is Poisson, drawn from `seed`. Raises
    BadInput (no such server, not this protocol, contradictory options, a request that the server
    calls wrong) or NotFound (no such model).
    """
    _check_options(concurrency, rate, duration_s, warmup_s, batch, processes, slo_ms)
    if data is not None and expect is not None:
        raise BadInput("`data` and `expect` exclude each other", hint="`expect` has inputs, too")
    if not 0 <= max_error < math.inf:
        raise BadInput(f"`max_error` must be 0 or more, got {max_error:g}")
    remote = find_model(url, model)
    found = choose_bodies(remote, bodies, data)
    if found is None:
        samples, expected = None, None
        if data is not None:
            samples = read_samples(data, remote.inputs)
        elif expect is not None:
            samples, expected = read_expected(expect, remote, batch, max_error)
        feeds = make_feeds(remote, batch, seed, samples, axes)
        requests, check = make_requests(remote, feeds), AnswerCheck(remote.outputs, expected)
        sent: dict[str, Any] = {"shapes": {n: a.shape for n, a in feeds[0].items()}}
    elif batch > 1 or axes:
        raise BadInput(f"`{'axes' if axes else 'batch'}` is for tensors")
    else:
        check = BodyCheck(remote.about.get("gives") != "bytes", found.answers, max_error)
        requests, sent = found.requests(remote), {"sends": found.describe()}
    probe(remote, requests[0])
    capacity = None
    if concurrency is None and rate is None:
        capacity = _capacity(remote, requests, check, processes, on_progress)
        most = 0.99 * MAX_SENDS / (duration_s + warmup_s)
        rate = min(max(capacity * CAPACITY_SHARE, 1 / duration_s), most)
    load = Load(rate, concurrency or _most_connections(), warmup_s, duration_s, drain_s, slo_ms)
    result = _run(remote, requests, check, load, processes, seed, batch, on_progress)
    return replace(result, capacity_per_s=capacity, **sent)


def _capacity(
    remote: RemoteModel,
    requests: Sequence[bytes],
    check: AnswerCheck,
    processes: int,
    on_progress: Report | None,
) -> float:
    """Successes per second of a short closed loop. Raises BadInput where there are none."""
    load = Load(None, max(CAPACITY_CONNECTIONS, processes), 0.5, CAPACITY_S)

    def report(text: str, _part: float) -> None:
        if on_progress is not None:
            on_progress(f"capacity: {text}", 0.0)

    found = _run(remote, requests, check, load, processes, 0, 1, report)
    if found.achieved_per_s.value == 0:
        raise BadInput(
            f"{remote.url}: {remote.model}: no request had a good answer in {CAPACITY_S:g} s: "
            f"{found.first_error or 'no answer'}",
            hint="choose the load with `rate` or `concurrency`",
        )
    return found.achieved_per_s.value


def _run(
    remote: RemoteModel,
    requests: Sequence[bytes],
    check: AnswerCheck,
    load: Load,
    processes: int,
    seed: int,
    batch: int,
    on_progress: Report | None,
) -> LoadResult:
    plan = SendPlan(
        remote.address,
        remote.port,
        requests,
        check,
        load.connections,
        None if load.rate_per_s is None else _poisson(load.rate_per_s, load.end_s, seed),
        load.warmup_s,
        load.end_s,
        load.drain_s,
        remote.block,
    )
    server, watch = remote.ask(), Watch(server_processes(remote))
    around_s = min(_AROUND_S, load.duration_s / 10)
    quiet = watch.over(around_s, time.sleep)
    earlier = answer_or(dict[str, Stage](), server.stages, remote.model)
    watch.begin()
    outcomes = run_processes(share(plan, processes), on_progress)
    watch.know_children()  # a server may have started some
    watch.close()
    later = answer_or(dict[str, Stage](), server.stages, remote.model) if earlier else {}
    outside = sum_up(watch, quiet, watch.over(around_s, time.sleep))
    stages_ms, no_stages = time_by_stage(earlier, later, *mean_answer_ms(outcomes))
    found = summarise(load, outcomes)
    found["notes"] += (no_stages,) * bool(no_stages)
    return LoadResult(
        url=remote.url,
        model=remote.model,
        batch=batch,
        seed=seed,
        same_machine=remote.loopback,
        server=remote.about,
        options=remote.options,
        protocol="grpc" if remote.grpc else "http",
        stages_ms=stages_ms,
        outside=outside,
        marks=marks(watch.windows, watch.bound),
        **found,
    )


def _check_options(
    concurrency: int | None,
    rate: float | None,
    duration_s: float,
    warmup_s: float,
    batch: int,
    processes: int,
    slo_ms: float | None,
) -> None:
    if concurrency is not None and rate is not None:
        raise BadInput(
            "`rate` and `concurrency` exclude each other",
            hint="a rate is an open loop, a concurrency a closed one: run them one after the other",
        )
    if concurrency is not None and not 1 <= concurrency <= _most_connections():
        raise BadInput(
            f"`concurrency` must be 1 to {_most_connections()}, got {concurrency}",
            hint=f"the limit on open files (ulimit -n) less 64, and {MAX_CONNECTIONS} at most",
        )
    for name, value in (("rate", rate), ("duration_s", duration_s), ("slo_ms", slo_ms)):
        if value is not None and not 0 < value < math.inf:
            raise BadInput(f"`{name}` must be above 0, got {value:g}")
    if not 0 <= warmup_s < math.inf:
        raise BadInput(f"`warmup_s` must be 0 or more, got {warmup_s:g}")
    if rate is not None and not 1 <= rate * duration_s <= MAX_SENDS - rate * warmup_s:
        raise BadInput(
            f"`rate` {short_bound(rate)} for {short_bound(duration_s)} s is not from 1 to "
            f"{MAX_SENDS:,} requests",
            hint="give a higher rate or a longer duration, or less of both",
        )
    if batch < 1:
        raise BadInput(f"`batch` must be 1 or more, got {batch}")
    if not 1 <= processes <= min(MAX_PROCESSES, concurrency or MAX_PROCESSES):
        most = min(MAX_PROCESSES, concurrency or MAX_PROCESSES)
        raise BadInput(
            f"`processes` must be 1 to {most}, got {processes}",
            hint="each has at least one of the connections",
        )


def _most_connections() -> int:
    """How many this process may open at once, less some files for other uses."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(MAX_CONNECTIONS, soft - 64) if soft > 0 else MAX_CONNECTIONS)


def _poisson(rate: float, span_s: float, seed: int) -> array[float]:
    """Send times in seconds from the start, ascending: a Poisson process over `span_s`."""
    random = np.random.default_rng(seed)
    due_s = np.sort(random.uniform(0.0, span_s, random.poisson(rate * span_s)))
    return array("d", due_s.tobytes())
