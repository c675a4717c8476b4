"""Put load on a running Open Inference Protocol server, and time its answers.

Closed loop: a number of connections, each sends when its last request is answered. Open loop: a
rate, with send times drawn beforehand; latency counts from the intended time, so that a stall of
the server is part of it (no coordinated omission). By default an open loop at half of what a short
closed loop finds to be the server's capacity.
"""

from __future__ import annotations

import math
import resource
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.measure.load.bodies import Bodies, BodyCheck, choose_bodies
from deploykit.measure.load.check import AnswerCheck, short_bound
from deploykit.measure.load.client import Report
from deploykit.measure.load.processes import run_processes, share
from deploykit.measure.load.records import SendPlan
from deploykit.measure.load.result import Load, LoadResult, mean_answer_ms, summarise
from deploykit.measure.load.server_process import server_processes
from deploykit.measure.load.server_side import Stage, answer_or, time_by_stage
from deploykit.measure.load.target import (
    RemoteModel,
    find_model,
    make_feeds,
    make_requests,
    probe,
    read_expected,
)
from deploykit.measure.outside import Watch, marks, sum_up
from deploykit.runtimes.data.samples import read_samples

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
    `deploykit.api.load_test`; an open loop is Poisson, drawn from `seed`. Raises
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
