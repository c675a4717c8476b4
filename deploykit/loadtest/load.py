"""Put a running server under load and measure its answers.

In the closed loop each connection sends when its last request is answered. In the open loop
requests have a rate, and send times are drawn beforehand; latency counts from the intended time, so
that it includes stalls of the server (no coordinated omission). The default is an open loop at half
of the capacity that a short closed loop measures.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deploykit.core.arguments import checked
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Gate
from deploykit.core.files import StrPath
from deploykit.core.machine import now, provenance, this_machine, usable_cores
from deploykit.evaluation.artefacts import Progress, claim_report, no_progress
from deploykit.loadtest.check import short_bound
from deploykit.loadtest.client import SendPlan, run_plans
from deploykit.loadtest.result import BUSY_CORE, apply_conditions, parse_conditions, summarise
from deploykit.loadtest.schedule import Load
from deploykit.loadtest.server import find_server
from deploykit.loadtest.target import RemoteModel, Requests, find_model, make_requests, probe
from deploykit.reporting import report as reports
from deploykit.reporting.machine_load import Watch, marks, sum_up
from deploykit.reporting.points import LoadResult
from deploykit.reporting.verdict import verdict

MAX_SENDS = 5_000_000  # requests of one open loop
MAX_CONNECTIONS = 1024
_AROUND_S = 0.5  # how long the machine is watched before and after
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
    key_file: StrPath | None = None,
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
        cert_file: the client's own certificate, where the server wants one.
        key_file: its private key, if that is not in `cert_file`.
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
    if text and (data or expect):
        raise BadInput("`text` and `data` or `expect` exclude each other")
    if data and expect:
        raise BadInput("`data` and `expect` exclude each other", hint="`expect` has inputs, too")
    conditions = parse_conditions(fail_on) if fail_on is not None else ()
    folder = claim_report(out, (data, expect), force=force) if out is not None else None
    files = {"ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}
    paths = {name: os.fspath(file) for name, file in files.items() if file is not None}
    remote = find_model(find_server(url, token=token, **paths), model)
    requests = make_requests(
        remote,
        batch=batch,
        seed=seed,
        data=None if data is None else Path(data),
        text=text or (),
        expect=None if expect is None else Path(expect),
        max_error=max_error,
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
    notes = (*result.notes, *filter(None, [requests.note]))
    result = replace(result, batch=requests.batch, capacity_per_s=capacity, notes=notes)
    result = apply_conditions(result, conditions)
    if folder is not None:
        failed = {why.partition(":")[0]: why for why in result.unmet}
        report = reports.Report(
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
        reports.write(replace(report, verdict=verdict(report)), folder)
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
    around_s = min(_AROUND_S, load.duration_s / 10)
    while True:
        watch = Watch(remote.server.processes())
        quiet = watch.over(around_s, time.sleep)
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
    outside = sum_up(watch, quiet, watch.over(around_s, time.sleep))
    return LoadResult(
        url=remote.server.url,
        model=remote.name,
        batch=1,
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
