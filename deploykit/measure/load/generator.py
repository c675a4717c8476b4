"""Put HTTP load on a running Open Inference Protocol server, and time its answers.

Closed loop: a number of connections, each sends when its last request is answered. Open loop: a
rate, with send times drawn beforehand; latency counts from the intended time, so that a stall of
the server is part of it (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.json_value import Record
from deploykit.measure.latency import Latency
from deploykit.measure.load.target import find_model, make_requests, probe
from deploykit.measure.statistics import Interval, throughput
from deploykit.runtimes.data.samples import read_samples

if TYPE_CHECKING:
    from deploykit.measure.load.client import Client  # needs [serve], which a report does not

SLICES = 20  # the measured time is cut into these, for the interval of the rate
BUSY_CORE = 0.9  # a closed-loop client that used more of its one core was the limit itself
MAX_SENDS = 5_000_000  # requests of one open loop
MAX_CONNECTIONS = 1024
REPORT_S = 0.5  # between two reports of progress


@dataclass(frozen=True)
class LoadResult(Record):
    """Result of a load test. Counts are of requests sent (open loop: due) in the measured time.

    `latency` is of successes alone: in the open loop from the intended time to the answer, in the
    closed loop from the sending. `lag_p99_ms`: how late the generator itself was (open loop).
    `client_busy`: share of one core that the generator used. `generator_limited`: it could not keep
    to its plan, so the figures describe the generator, not the server.
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
    latency: Latency | None  # None: no request was answered
    sent: int
    ok: int
    refused: int  # 503
    expired: int  # 504
    failed: int  # any other status, a broken connection, no answer
    lag_p99_ms: float | None
    client_busy: float
    generator_limited: bool
    same_machine: bool
    errors: Mapping[str, int] = field(
        default_factory=dict
    )  # the first few messages, with their count

    shown: ClassVar[tuple[str, ...]] = ("first_error",)

    @property
    def first_error(self) -> str | None:
        return next(iter(self.errors), None)

    def _repr_html_(self) -> str:
        from deploykit.measure.report.notebook import load_html

        return load_html(self)


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
    drain_s: float = 5.0,
    on_progress: Callable[[str, float], None] | None = None,
) -> LoadResult:
    """Load `model` at `url` for `warmup_s` + `duration_s`, then wait up to `drain_s` for answers.

    `concurrency`: connections of a closed loop (1 if neither is given). `rate`: requests per second
    of an open loop, Poisson, drawn from `seed`. `model` may be left out where the server has one.
    `data`: inputs to send instead of random ones.
    Raises BadInput (no such server, not this protocol, contradictory options, a request that the
    server calls wrong) or NotFound (no such model).
    """
    from deploykit.measure.load.client import Client, event_loop

    _check_options(concurrency, rate, duration_s, warmup_s, batch)
    remote = find_model(url, model, with_data=data is not None)
    samples = read_samples(data, remote.inputs) if data is not None else None
    requests = make_requests(remote, batch, seed, samples)
    probe(remote, requests[0])
    client = Client(
        remote,
        requests,
        connections=(concurrency or 1) if rate is None else _most_connections(),
        due_s=None if rate is None else _poisson(rate, warmup_s + duration_s, seed),
        begin_s=warmup_s,
        end_s=warmup_s + duration_s,
        drain_s=drain_s,
    )
    with event_loop(precise=rate is not None) as loop, _frozen_garbage(), _ctrl_c(loop, client):
        if on_progress is not None:
            _report(loop, client, on_progress)
        loop.run_until_complete(client.run())
    if client.interrupted:
        raise KeyboardInterrupt
    return result_of(client, url, rate, batch=batch, seed=seed)


def _check_options(
    concurrency: int | None, rate: float | None, duration_s: float, warmup_s: float, batch: int
) -> None:
    if concurrency is not None and rate is not None:
        raise BadInput(
            "a rate and a concurrency exclude each other",
            hint="a rate is an open loop, a concurrency a closed one: run them one after the other",
        )
    if concurrency is not None and not 1 <= concurrency <= _most_connections():
        raise BadInput(f"concurrency must be 1 to {_most_connections()}, got {concurrency}")
    if not 0 < duration_s < float("inf") or not 0 <= warmup_s < float("inf"):
        raise BadInput(
            f"`duration_s` must be above 0, `warmup_s` 0 or more: {duration_s}, {warmup_s}"
        )
    if rate is not None and not (
        rate > 0 and rate * duration_s >= 1 and rate * (duration_s + warmup_s) <= MAX_SENDS
    ):
        raise BadInput(
            f"a rate of {rate}/s over {duration_s} s is not 1 to {MAX_SENDS} requests",
            hint="give a higher rate or a longer duration, or less of both",
        )
    if batch < 1:
        raise BadInput(f"batch must be 1 or more, got {batch}")


def _most_connections() -> int:
    """How many this process may open at once, less some files for other uses."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(MAX_CONNECTIONS, soft - 64) if soft > 0 else MAX_CONNECTIONS)


def _poisson(rate: float, span_s: float, seed: int) -> list[float]:
    """Send times in seconds from the start, ascending: a Poisson process over `span_s`."""
    random = np.random.default_rng(seed)
    due_s: list[float] = np.sort(
        random.uniform(0.0, span_s, random.poisson(rate * span_s))
    ).tolist()
    return due_s


@contextlib.contextmanager
def _frozen_garbage() -> Iterator[None]:
    """No garbage collection while requests are timed: the client's pauses are not latency."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _report(
    loop: asyncio.AbstractEventLoop, client: Client, on_progress: Callable[[str, float], None]
) -> None:
    """Call `on_progress` now and every half second of the run."""
    began_s = time.perf_counter()

    def tick() -> None:
        share = min((time.perf_counter() - began_s) / client.end_s, 1.0)
        on_progress(f"{len(client.ends_s)} requests", share)
        loop.call_later(REPORT_S, tick)

    loop.call_soon(tick)


@contextlib.contextmanager
def _ctrl_c(loop: asyncio.AbstractEventLoop, client: Client) -> Iterator[None]:
    """Let Ctrl-C end the run; KeyboardInterrupt raised in a callback would only be logged."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (
        None,
        signal.SIG_IGN,
    ):
        yield
        return
    loop.add_signal_handler(signal.SIGINT, client.interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


def result_of(client: Client, url: str, rate: float | None, *, batch: int, seed: int) -> LoadResult:
    """Summarise a run that is over. `rate` None: a closed loop."""
    start_s, end_s = np.array(client.starts_s), np.array(client.ends_s)
    status = np.array(client.statuses)
    measured = (start_s >= client.begin_s) & (start_s < client.end_s)
    success = status == 200
    taken_s = (end_s - start_s)[measured & success]
    duration_s = client.end_s - client.begin_s
    edges_s = np.linspace(client.begin_s, client.end_s, SLICES + 1)
    per_slice, _ = np.histogram(end_s[success], edges_s)
    lag_p99_ms = None
    limited = client.busy > BUSY_CORE
    if rate is not None:
        lag_p99_ms = float(np.percentile(client.lags_s, 99)) * 1e3 if client.lags_s else 0.0
        p50_ms = float(np.median(taken_s)) * 1e3 if len(taken_s) else 0.0
        limited = lag_p99_ms > max(1.0, 0.1 * p50_ms)
    return LoadResult(
        url=url,
        model=client.remote.model,
        mode="closed" if rate is None else "open",
        concurrency=client.most if rate is None else None,
        rate_per_s=rate,
        batch=batch,
        seed=seed,
        warmup_s=client.begin_s,
        duration_s=duration_s,
        achieved_per_s=throughput(per_slice.tolist(), [duration_s / SLICES] * SLICES),
        latency=Latency.of(taken_s) if len(taken_s) else None,
        sent=int(measured.sum()),
        ok=int((measured & success).sum()),
        refused=int((measured & (status == 503)).sum()),
        expired=int((measured & (status == 504)).sum()),
        failed=int((measured & ~np.isin(status, (200, 503, 504))).sum()),
        lag_p99_ms=lag_p99_ms,
        client_busy=client.busy,
        generator_limited=limited,
        same_machine=client.remote.loopback,
        errors=client.errors,
    )
