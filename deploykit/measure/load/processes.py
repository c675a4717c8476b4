"""Share a load among processes of its own, which begin at once, and join what they recorded.

A process of its own, even a single one, keeps the generator apart from whatever else its caller
does: a progress bar that is drawn, a garbage collector, other threads.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import select
import signal
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from io import FileIO

from deploykit.core.apart import run_apart
from deploykit.core.errors import DeploykitError
from deploykit.measure.load.client import Client, Report
from deploykit.measure.load.records import RunRecord, SendPlan

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
