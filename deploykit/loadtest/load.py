"""Put a running server under load and measure its answers.

In the closed loop each connection sends when its last request is answered. In the open loop
requests have a rate, and send times are drawn beforehand; latency counts from the intended time, so
that it includes stalls of the server (no coordinated omission). The default is an open loop at half
of the capacity that a short closed loop measures.
"""

from __future__ import annotations

import math
import operator
import os
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.arguments import checked
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Gate, Interval
from deploykit.core.files import StrPath
from deploykit.core.machine import now, provenance, this_machine, usable_cores
from deploykit.evaluation.artefacts import Progress, claim_report, no_progress
from deploykit.evaluation.statistics import Latency, throughput
from deploykit.loadtest.client import Load, RunRecord, SendPlan, run_plans
from deploykit.loadtest.server import find_server
from deploykit.loadtest.target import RemoteModel, Requests, find_model, make_requests, probe
from deploykit.loadtest.wire import NO_ANSWER, UNSENT, short_bound
from deploykit.reporting.machine_load import Watch, marks, sum_up
from deploykit.reporting.report import LoadResult, Report, write
from deploykit.reporting.verdict import verdict

MAX_SENDS = 5_000_000  # requests of one open loop
MAX_CONNECTIONS = 1024
CAPACITY_CONNECTIONS, CAPACITY_S, CAPACITY_SHARE = 32, 2.0, 0.5  # the closed loop before


@checked
def load_test(
    url: str,
    *,
    model: str | None = None,
    rate: float | None = None,
    concurrency: int | None = None,
    duration_s: float = 10.0,
    warmup_s: float = 1.0,
    drain_s: float = 5.0,
    batch: int = 1,
    slo_ms: float | None = None,
    fail_on: str | None = None,
    data: StrPath | None = None,
    text: Sequence[str] | None = None,
    expect: StrPath | None = None,
    max_error: float = 1e-3,
    axes: Mapping[str, int] | None = None,
    seed: int = 0,
    token: str | None = None,
    ca_file: StrPath | None = None,
    cert_file: StrPath | None = None,
    out: StrPath | None = None,
    force: bool = False,
    command: str = "",
    on_progress: Progress = no_progress,
) -> LoadResult:
    """Load a server with `rate` requests per second (open loop) or `concurrency` connections.

    The default is an open loop at half the rate that a closed loop of 32 connections reaches in
    2 s. One process sends; if its core was the limit, the run is repeated with more processes.

    Args:
        url: http://HOST:PORT or grpc://HOST:PORT; with TLS https:// or grpcs://; HTTP may have a
            path before /v2. A Unix socket is unix:FILE, with gRPC if its name ends in ".grpc".
        warmup_s: seconds of load before the measured `duration_s`.
        drain_s: how long to wait for answers afterwards.
        data: inputs to send, an .npz, a folder or golden samples; by default random ones from
            `seed`. A task or a pipeline gets a file, or each file of a folder, as it is.
        text: sentences to send to a task or a pipeline.
        expect: golden samples, or a pipeline's answers as `predict` wrote them (.jsonl): their
            inputs are sent, and an answer that differs by more than `max_error`
            (max |a-b| / max |a|) has failed.
        axes: sizes of dynamic axes other than the batch, such as {"T": 128}, or
            {"axis1": 128, "axis2": 4} where there are several; "h_1" is that of one input.
        token: sent as `Authorization: Bearer`.
        ca_file: certificates to trust in place of the system's.
        cert_file: the client's own certificate and its key, where the server wants one.
        slo_ms: also count the answers within this latency, the goodput.
        fail_on: conditions such as "p99>20ms,errors>0"; those that hold are in `unmet`, which
            `raise_if_unmet` turns into GateFailed.

    Raises:
        BadInput: no such server, another protocol, contradictory options, a request that the
            server rejects.
        NotFound: no such model.
    """
    for name, value in (("rate", rate), ("duration_s", duration_s), ("slo_ms", slo_ms)):
        if value is not None and not 0 < value < math.inf:
            raise BadInput(f"`{name}` must be above 0, got {value:g}")
    for name, value in (("warmup_s", warmup_s), ("drain_s", drain_s), ("max_error", max_error)):
        if not 0 <= value < math.inf:
            raise BadInput(f"`{name}` must be 0 or more, got {value:g}")
    _check_options(rate, concurrency, duration_s, warmup_s)
    if batch < 1:
        raise BadInput(f"`batch` must be 1 or more, got {batch}")
    if sum(map(bool, (text, data, expect))) > 1:
        hint = "`expect` has inputs, too"
        raise BadInput("`text`, `data` and `expect` exclude each other", hint=hint)
    conditions = parse_conditions(fail_on) if fail_on is not None else ()
    folder = claim_report(out, (data, expect), force=force) if out is not None else None
    certificates = (file if file is None else os.fspath(file) for file in (ca_file, cert_file))
    remote = find_model(find_server(url, token, *certificates), model)
    file = expect if expect is not None else data
    requests = make_requests(
        remote,
        (text or None) if file is None else Path(file),
        batch=batch,
        seed=seed,
        max_error=None if expect is None else max_error,
        axes=axes,
    )
    requests = probe(remote, requests)
    capacity, processes = None, 1
    if concurrency is None and rate is None:
        trial = run_load(
            remote,
            requests,
            Load(None, CAPACITY_CONNECTIONS, 0.5, CAPACITY_S),
            on_progress=lambda what, _part: on_progress(f"capacity: {what}", 0.0),
        )
        capacity, processes = trial.achieved_per_s.value, trial.processes
        if capacity == 0:
            why = f"in {CAPACITY_S:g} s: {trial.first_error or 'no answer'}"
            hint = "choose the load with `rate` or `concurrency`"
            raise BadInput(f"{remote}: no request had a good answer {why}", hint=hint)
        most = 0.99 * MAX_SENDS / (duration_s + warmup_s)
        rate = min(max(capacity * CAPACITY_SHARE, 1 / duration_s), most)
    load = Load(rate, concurrency or _most_connections(), warmup_s, duration_s, drain_s, slo_ms)
    result = run_load(remote, requests, load, seed, processes, on_progress)
    result = apply_conditions(replace(result, capacity_per_s=capacity), conditions)
    if folder is not None:
        failed = {why.partition(":")[0]: why for why in result.unmet}
        report = Report(
            title=f"{result.model} under load",
            created=now(),
            command=command,
            machine=this_machine().to_dict(),
            provenance=provenance(),
            gates=tuple(
                Gate(f"fail on {each.text}", each.text not in failed, failed.get(each.text, ""))
                for each in conditions
            ),
            serving=(result,),
        )
        write(replace(report, verdict=verdict(report)), folder)
    return result


def _check_options(
    rate: float | None, concurrency: int | None, duration_s: float, warmup_s: float
) -> None:
    if concurrency is not None and rate is not None:
        hint = "a rate is an open loop, a concurrency a closed one: run them one after the other"
        raise BadInput("`rate` and `concurrency` exclude each other", hint=hint)
    if concurrency is not None and not 1 <= concurrency <= _most_connections():
        raise BadInput(
            f"`concurrency` must be 1 to {_most_connections()}, got {concurrency}",
            hint=f"the limit on open files (ulimit -n) less 64, and {MAX_CONNECTIONS} at most",
        )
    if rate is not None and not 1 <= rate * duration_s <= MAX_SENDS - rate * warmup_s:
        asked = f"`rate` {short_bound(rate)} for {short_bound(duration_s)} s"
        hint = "give a higher rate or a longer duration, or less of both"
        raise BadInput(f"{asked} is not from 1 to {MAX_SENDS:,} requests", hint=hint)


def _most_connections() -> int:
    """Return how many connections this process may open, with some files left for other uses."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(MAX_CONNECTIONS, soft - 64) if soft > 0 else MAX_CONNECTIONS)


def run_load(
    remote: RemoteModel,
    requests: Requests,
    load: Load,
    seed: int = 0,
    processes: int = 1,
    on_progress: Progress = no_progress,
) -> LoadResult:
    """Run a load; double the processes and repeat as long as they used up their cores."""
    cores = usable_cores()
    most = min(cores // 2 if remote.server.loopback else cores, load.connections)
    plan = SendPlan(remote.server, requests.messages, requests.check, load, load.due_s(seed))
    while True:
        watch = Watch(remote.server.processes())
        before = watch.around(load.duration_s)
        watch.begin()
        records = run_plans(plan.share(processes), on_progress)
        watch.know_children()  # processes that a server started
        watch.close()
        figures = summarise(load, records)
        limited = figures["generator_limited"] and figures["client_busy"] > BUSY_CORE
        if not limited or 2 * processes > most:
            break
        processes *= 2
    if remote.server.unix:
        figures["lag_p99_ms"] = None
        figures["notes"] += ("a Unix socket carries no time stamps: late reads were not measured",)
    figures["notes"] += (requests.note,) if requests.note else ()
    outside = sum_up(watch, before, watch.around(load.duration_s))
    return LoadResult(
        url=remote.server.url,
        model=remote.name,
        batch=requests.batch,
        seed=seed,
        same_machine=remote.server.loopback,
        server=remote.about,
        options=remote.options,
        protocol="grpc" if remote.server.grpc else "http",
        shapes=requests.shapes,
        sends=requests.sends,
        outside=outside,
        marks=marks(watch.windows, watch.bound),
        **figures,
    )


# The figures of a load test, and whether they describe the server or the generator.

SLICES = 60  # parts of the measured time, for the interval of the rate
REFUSED, EXPIRED = (429, 503), 504
BUSY_CORE = 0.9  # a closed-loop generator that used more of its core was the limit
MOST_LAG_MS, MOST_LAG, SEEN_LAG_MS = 1.0, 0.1, 0.2
MOST_BEHIND = 0.1  # share of a connection's time spent in the generator
MOST_BACKLOG = 0.02  # share of the requests by which a server may fall behind


def summarise(load: Load, records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the figures of a `LoadResult` from the records of all processes."""
    record = RunRecord.join(records)
    order = np.argsort(record.starts_s, kind="stable")
    start_s, end_s = np.asarray(record.starts_s)[order], np.asarray(record.ends_s)[order]
    status = np.asarray(record.statuses)[order]
    chosen = _measured(load, start_s, end_s, status)
    success, refused = status == 200, np.isin(status, REFUSED)
    lost = chosen & ~success & ~refused
    taken_s = np.where(success, end_s - start_s, np.inf)
    within = success & (taken_s * 1e3 <= (load.slo_ms or 0.0))
    latency = Latency.of(taken_s[chosen & ~refused]) if (chosen & success).any() else None
    lags_ms = {
        "sent requests": _p99_ms(record.send_lags_s),
        "read answers": _p99_ms(np.repeat(record.read_lags_s, record.reads)),
    }
    behind = record.behind_s / max(record.opened * load.duration_s, 1e-9)
    p50_s = float(np.median((end_s - start_s)[chosen & success])) if latency else 0.0
    limits = _limits(load, record, lags_ms, behind, p50_s * 1e3)
    closed = load.rate_per_s is None
    sustained = None if closed else _kept_up(load, start_s, end_s)
    return {
        "mode": "closed" if closed else "open",
        "concurrency": load.connections if closed else None,
        "rate_per_s": load.rate_per_s,
        "warmup_s": load.warmup_s,
        "duration_s": load.duration_s,
        "achieved_per_s": _rate(load, end_s[success]),
        "latency": latency,
        "sent": int((chosen & (status != UNSENT)).sum()),
        "ok": int((chosen & success).sum()),
        "refused": int((chosen & refused).sum()),
        "expired": int((chosen & (status == EXPIRED)).sum()),
        "failed": int((lost & (status != EXPIRED) & (status != UNSENT)).sum()),
        "unsent": int((chosen & (status == UNSENT)).sum()),
        "lag_p99_ms": max(lags_ms.values()),
        "client_busy": record.busy,
        "generator_limited": bool(limits),
        "limits": limits,
        "behind": min(behind, 1.0),
        "sustained": sustained,
        "notes": _notes(load, record, sustained),
        "connections": record.opened,
        "processes": len(records),
        "slo_ms": load.slo_ms,
        "goodput_per_s": _rate(load, end_s[within]) if load.slo_ms else None,
        "errors": record.errors,
    }


def _measured(load: Load, start_s: np.ndarray, end_s: np.ndarray, status: np.ndarray) -> np.ndarray:
    """Return which requests count: those open, or in the open loop due, in the measured time."""
    if load.rate_per_s is None:
        return (end_s >= load.warmup_s) & (start_s < load.end_s)
    hung = (end_s >= load.warmup_s) & np.isin(status, (NO_ANSWER, UNSENT))
    return (start_s >= load.warmup_s) | hung


def _rate(load: Load, end_s: np.ndarray) -> Interval:
    edges_s = np.linspace(load.warmup_s, load.end_s, SLICES + 1)
    per_slice, _ = np.histogram(end_s, edges_s)
    return throughput(per_slice.tolist(), [load.duration_s / SLICES] * SLICES)


def _p99_ms(lags_s: Sequence[float] | np.ndarray) -> float:
    return float(np.percentile(lags_s, 99)) * 1e3 if len(lags_s) else 0.0


def _limits(
    load: Load, record: RunRecord, lags_ms: Mapping[str, float], behind: float, p50_ms: float
) -> tuple[str, ...]:
    """Return why the figures are the generator's, as when its p99 lag exceeds its bound.

    The bound is 10 % of the median, at most 1 ms, and at least 0.2 ms, as any thread needs some
    time to wake.
    """
    bound_ms = min(MOST_LAG_MS, max(MOST_LAG * p50_ms, SEEN_LAG_MS))
    limits = [
        f"it {what} late: p99 {lag_ms:.2f} ms, where {bound_ms:.2g} ms is the most"
        for what, lag_ms in lags_ms.items()
        if lag_ms > bound_ms
    ]
    if load.rate_per_s is None and behind > MOST_BEHIND:
        limits.append(f"connections waited for it {min(behind, 1.0):.0%} of the time")
    if load.rate_per_s is None and record.busy > BUSY_CORE:
        limits.append(f"it used {record.busy:.0%} of its core")
    if record.limit:
        limits.append(f"it could open no more than {record.opened:,} connections: {record.limit}")
    elif record.waited and record.opened < load.connections:
        limits.append(f"{record.waited:,} requests waited for one of its connections")
    return tuple(limits)


def _kept_up(load: Load, start_s: np.ndarray, end_s: np.ndarray) -> bool:
    """Return whether the number of open requests did not grow over the measured time.

    Its means over the first and the last fifth are compared. It may grow by 2 % of the requests
    plus what chance explains.
    """
    fifth_s, open_requests = load.duration_s / 5, []
    for low_s in (load.warmup_s, load.end_s - fifth_s):
        overlap_s = np.minimum(end_s, low_s + fifth_s) - np.maximum(start_s, low_s)
        open_requests.append(float(np.maximum(overlap_s, 0.0).sum()) / fifth_s)
    first, last = open_requests
    due = int(((start_s >= load.warmup_s) & (start_s < load.end_s)).sum())
    return bool(last - first <= max(MOST_BACKLOG * due, 5 * (first + 1) ** 0.5))


def _notes(load: Load, record: RunRecord, sustained: bool | None) -> tuple[str, ...]:
    notes = []
    if sustained is False:
        notes.append(
            f"the server did not sustain {load.rate_per_s:,.6g} requests/s: open requests piled "
            "up, so that percentiles grow with the duration"
        )
    if record.waited and record.opened >= load.connections:
        notes.append(
            f"{record.waited:,} requests were due while all {load.connections:,} connections that "
            "the generator opens waited for the server: the wait is in their latency"
        )
    if record.resent:
        notes.append(
            f"{record.resent:,} requests were sent again, with the time of both: the server had "
            "closed their connection before it read them"
        )
    return tuple(notes)


# The conditions of failure: "p99>20ms, errors>0, throughput<500".

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_MS: Mapping[str, float] = {"ms": 1.0, "s": 1e3, "us": 1e-3}
_PERCENTILES, _RATES = ("p50", "p90", "p99", "max"), ("throughput", "goodput")
_COUNTS = ("errors", "refused", "expired", "failed", "unsent")
_CONDITION = re.compile(r"\s*([a-z0-9]+)\s*(>=|<=|>|<)\s*([0-9]*\.?[0-9]+)\s*([a-z/%]*)\s*")


@dataclass(frozen=True)
class Condition:
    """One condition of failure, such as "p99>20ms"; `bound` is in `unit`."""

    text: str
    metric: str
    operator: str
    bound: float
    unit: str

    def failure(self, result: LoadResult) -> str | None:
        """Return why the run fails (the condition holds or is not known); None if it does not."""
        value = self._value(result)
        if value is None:
            return f"{self.text}: {self.metric} is not known"
        value /= max(result.sent + result.unsent, 1) / 100 if self.unit == "%" else 1.0
        value /= _MS.get(self.unit, 1.0)
        if not _OPERATORS[self.operator](value, self.bound):
            return None
        return f"{self.text}: {short_bound(value)} {self.unit}".rstrip()

    def _value(self, result: LoadResult) -> float | None:
        """Return the value, None if unknown. Percentiles that no answer reached are infinite."""
        if self.metric == "errors":
            return float(result.failed + result.expired + result.unsent)
        if self.metric in _COUNTS:
            return float(getattr(result, self.metric))
        if self.metric in _RATES:
            rate = result.achieved_per_s if self.metric == "throughput" else result.goodput_per_s
            return rate.value if rate else None
        if result.latency is None:
            return math.inf
        if self.metric == "max":
            return math.inf if result.latency.lost else result.latency.max_ms
        percentile = getattr(result.latency, f"{self.metric}_ms")
        if percentile is None:
            return None if f"{self.metric}_ms" in result.latency.needs else math.inf
        return float(percentile.value)


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Parse conditions separated by commas. Raises BadInput."""
    units = {metric: tuple(_MS) for metric in _PERCENTILES}
    units |= dict.fromkeys(_RATES, ("/s", "")) | dict.fromkeys(_COUNTS, ("%", ""))
    hint = f"such as 'p99>20ms' or 'errors>1%'; metrics are {', '.join(units)}"
    conditions = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        metric, compare, number, unit = match.groups() if match else ("", "", "", "")
        if unit not in units.get(metric, ()):
            known = " or ".join(each or "no unit" for each in units.get(metric, ()))
            why = f"needs {known}" if known else "is not a condition"
            raise BadInput(f"`fail_on`: '{part.strip()}' {why}", hint=hint)
        name = f"{metric}{compare}{number}{unit}"
        conditions.append(Condition(name, metric, compare, float(number), unit))
    return tuple(conditions)


def apply_conditions(result: LoadResult, conditions: Sequence[Condition]) -> LoadResult:
    """Return the result with its unmet conditions: all, if the generator or others disturbed it."""
    doubts = [f"the generator was the limit: {why}" for why in result.limits[:1]]
    doubts += result.marks
    if doubts:
        unmet = [f"{each.text}: not known, as {'; '.join(doubts)}" for each in conditions]
    else:
        unmet = [why for each in conditions if (why := each.failure(result)) is not None]
    return replace(result, unmet=tuple(unmet))
