"""What a server does when more is asked than it can: goodput, refusals, recovery.

In: how many times its capacity is offered. Out, as Markdown: for each, answers with success within
the limit over the most it can do, latency of answers and of refusals (503), and how long after the
overload the latency is what it was before.

    python benchmarks/serve/overload.py [--times 2,10] [--seconds 5] [--rounds 3]

The engine is a stand-in that takes 40 ms for up to 16 rows and uses no core, so that its capacity
is known, 400 requests/s, and client and server do not take it from each other. The load is open:
requests are due at times drawn beforehand, over up to 1,024 connections, whatever the server does;
latency counts from when a request was due. Each run is half the capacity for 2 s, then the
overload, then half the capacity again; its maximum is a closed loop of 64 connections before that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from child import header
from processes import free_port, started

from deploykit.core.errors import DeploykitError
from deploykit.loadtest.client import Client
from deploykit.loadtest.load import load_test
from deploykit.loadtest.schedule import Load
from deploykit.loadtest.target import RemoteModel, find_model, make_requests

HERE = Path(__file__).resolve().parent
MAX_BATCH, LATENCY_MS, QUEUE = 16, 40, 128
CAPACITY_PER_S = MAX_BATCH / LATENCY_MS * 1e3
LIMIT_MS = 2 * (QUEUE / MAX_BATCH + 2) * LATENCY_MS  # a full queue, twice: later is no success
QUIET_S, AFTER_S = 2.0, 8.0
WINDOW_S = 0.25  # latency is back when a window's median is, and none after it is not
CONNECTIONS = 1024
LATE_MS = 10.0  # a generator this late (p99) was short of processor: its figures are no verdict


@dataclass(frozen=True)
class Overload:
    """One run. `goodput_per_s`: successes within LIMIT_MS, by when they were answered."""

    goodput_per_s: float
    p99_ms: float  # of successes
    refused_share: float
    refused_p50_ms: float | None
    refused_p99_ms: float | None
    failed: int  # neither 200 nor 503
    recovery_s: float
    lag_p99_ms: float  # of the generator itself


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", default="2,10")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    port = free_port()
    words = [port, MAX_BATCH, LATENCY_MS, QUEUE]
    command = [sys.executable, str(HERE / "engine_server.py"), *map(str, words)]
    url = f"http://127.0.0.1:{port}"
    print(header("Overload"))
    print(
        f"An engine of {CAPACITY_PER_S:.0f} requests/s ({LATENCY_MS} ms for up to {MAX_BATCH} "
        f"rows), a queue of {QUEUE}, {options.seconds:g} s of overload; medians of "
        f"{options.rounds} rounds, failures their sum, recovery the longest. Good: 200 within "
        f"{LIMIT_MS:.0f} ms.\n"
    )
    print(
        "| offered | goodput/s | of the maximum | p99 ms of successes | refused | refusals' p50 ms "
        "| p99 ms | failed | back to normal after s | generator's lag, p99 ms |\n"
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    with started(command, lambda: _is_up(url)):
        remote = find_model(url, "m")
        for times in (float(word) for word in options.times.split(",")):
            runs, shares = [], []
            for turn in range(options.rounds):
                most = load_test(url, model="m", concurrency=4 * MAX_BATCH, duration_s=2.0)
                run = overload(remote, times, options.seconds, turn)
                runs.append(run)
                shares.append(run.goodput_per_s / most.achieved_per_s.value)
            print(row(times, runs, shares), flush=True)


def overload(remote: RemoteModel, times: float, seconds: float, seed: int) -> Overload:
    """Half the capacity, `times` the capacity for `seconds`, half the capacity again."""
    begin_s, end_s = QUIET_S, QUIET_S + seconds
    random = np.random.default_rng(seed)
    phases = ((0.0, begin_s, 0.5), (begin_s, end_s, times), (end_s, end_s + AFTER_S, 0.5))
    due_s = np.concatenate(
        [
            np.sort(random.uniform(low, high, round(CAPACITY_PER_S * share * (high - low))))
            for low, high, share in phases
        ]
    )
    load = Load(CAPACITY_PER_S, CONNECTIONS, 0.0, end_s + AFTER_S)
    plan = remote.plan(make_requests(remote, seed=seed), load, due_s.tolist())
    found = Client(plan).run()
    arrays = (np.array(part) for part in (found.starts_s, found.ends_s, found.statuses))
    return summary(*arrays, begin_s, end_s, float(np.percentile(found.send_lags_s, 99)) * 1e3)


def summary(
    start_s: np.ndarray,
    end_s: np.ndarray,
    status: np.ndarray,
    overload_s: float,
    over_s: float,
    lag_p99_ms: float,
) -> Overload:
    """From every request's due time, end and status; overload from `overload_s` to `over_s`.

    Recovery: from `over_s` to the end of the last window (by due time) in which a request was
    refused or the median latency was above twice what it was before.
    """
    taken_ms = (end_s - start_s) * 1e3
    during = (start_s >= overload_s) & (start_s < over_s)
    good = (status == 200) & (taken_ms <= LIMIT_MS) & (end_s >= overload_s) & (end_s < over_s)
    refused = during & (status == 503)
    before_ms = float(np.median(taken_ms[(start_s < overload_s) & (status == 200)]))
    recovery_s, at_s = 0.0, over_s
    while at_s < start_s.max():
        window = (start_s >= at_s) & (start_s < at_s + WINDOW_S)
        at_s += WINDOW_S
        if not window.any():
            continue
        late = float(np.median(taken_ms[window])) > 2 * before_ms
        if late or bool((status[window] != 200).any()):
            recovery_s = at_s - over_s
    p50_ms, p99_ms = np.percentile(taken_ms[refused], [50, 99]) if refused.any() else (None, None)
    return Overload(
        goodput_per_s=float(good.sum() / (over_s - overload_s)),
        p99_ms=float(np.percentile(taken_ms[during & (status == 200)], 99)),
        refused_share=float(refused.sum() / during.sum()),
        refused_p50_ms=p50_ms,
        refused_p99_ms=p99_ms,
        failed=int((~np.isin(status, (200, 503))).sum()),
        recovery_s=recovery_s,
        lag_p99_ms=lag_p99_ms,
    )


def row(times: float, runs: Sequence[Overload], shares: Sequence[float]) -> str:
    def median(name: str) -> str:
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        return f"{statistics.median(values):,.1f}" if values else ""

    late = statistics.median(run.lag_p99_ms for run in runs) > LATE_MS
    return (
        f"| {times:g}x | {median('goodput_per_s')} | {statistics.median(shares):.1%} "
        f"({min(shares):.1%}–{max(shares):.1%}) | {median('p99_ms')} "
        f"| {statistics.median(run.refused_share for run in runs):.1%} "
        f"| {median('refused_p50_ms')} | {median('refused_p99_ms')} "
        f"| {sum(run.failed for run in runs)} | {max(run.recovery_s for run in runs):.2f} "
        f"| {median('lag_p99_ms')}{': too late, no verdict' if late else ''} |"
    )


def _is_up(url: str) -> bool:
    try:
        find_model(url, "m")
    except DeploykitError:
        return False
    return True


if __name__ == "__main__":
    main()
