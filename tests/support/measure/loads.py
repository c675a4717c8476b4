"""Short loads in which something was sent, on a machine that may stand still for longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deploykit.loadtest.client import Client, Load, RunRecord, SendPlan
from deploykit.loadtest.load import load_test
from deploykit.loadtest.server import find_server
from deploykit.loadtest.target import find_model, make_requests
from deploykit.reporting.report import LoadResult

TRIES = 5


def load(
    url: str,
    received: list[Any] | None = None,
    enough: Callable[[LoadResult], bool] = lambda result: result.sent > 0,
    **options: Any,
) -> LoadResult:
    """The result of a run in which `enough` happened: a closed loop sends nothing past its end.

    Where the machine stood still meanwhile, the run is repeated, each time for twice as long;
    `received`, in which the server notes its requests, is of the last run.
    """
    for number in range(TRIES):
        if received is not None:
            received.clear()
        result = load_test(url, **options | {"duration_s": options["duration_s"] * 2**number})
        if enough(result):
            break
    return result


def at_least(count: int) -> Callable[[LoadResult], bool]:
    return lambda result: result.sent >= count


def client_of(
    url: str,
    connections: int,
    due_s: Sequence[float] | None,
    end_s: float,
    drain_s: float = 10.0,
    **options: Any,
) -> Client:
    """What carries out a plan in this process; `options` of `make_requests`."""
    remote = find_model(find_server(url), None)
    load = Load(None, connections, 0.0, end_s, drain_s)
    requests = make_requests(remote, **options)
    return Client(SendPlan(remote.server, requests.messages, requests.check, load, due_s))


def run_here(url: str, **options: Any) -> RunRecord:
    """Send for 0.1 s or longer, until something was answered, without a process of its own."""
    for _ in range(TRIES):
        record = client_of(url, 1, None, 0.1, **options).run()
        if record.statuses:
            break
    return record
