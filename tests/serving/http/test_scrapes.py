"""However many clients ask for /metrics, they are written once for all that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from deploykit.core.errors import Overloaded
from deploykit.serving.http import routes as scrapes
from deploykit.serving.http.routes import Scrapes
from deploykit.serving.models.offload import Result
from deploykit.serving.observe.prometheus import Sample
from deploykit.serving.transport.call import Head
from deploykit.serving.workers.group import ServerGroup
from tests.support.serving.memory import Seen


def group_of(samples: Callable[[], list[Sample]]) -> ServerGroup:
    group = ServerGroup()
    group.offer({"samples": samples}, {}, lambda _: [])
    return group


class Later:
    """An Offload whose work is done when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[[Result[Any]], None]]] = []

    def __call__(self, work: Callable[[], Any], then: Any, **_: object) -> None:
        self.jobs.append((work, then))

    def finish(self) -> None:
        work, then = self.jobs.pop(0)
        result = work()
        then(lambda: result)


def asked(route: Scrapes, count: int, accept: bytes | None = None) -> list[Seen]:
    calls = [Seen(Head(accept=accept), b"") for _ in range(count)]
    for call in calls:
        route(call)
    return calls


def test_scrapes_that_wait_share_one_that_began_after_them() -> None:
    count = 0

    def samples() -> list[Sample]:
        nonlocal count
        count += 1
        return [Sample("deploykit_held_bytes", {}, count)]

    async def main() -> None:
        later = Later()
        route = Scrapes(group_of(samples), later)
        first = asked(route, 1)
        others = asked(route, 250)
        openmetrics = b"application/openmetrics-text; version=1.0.0"
        others += asked(route, 50, openmetrics)
        others += [asked(route, 1, b"text/plain;q=0.%d" % number)[0] for number in range(1, 9)]
        assert len(later.jobs) == 1
        later.finish()
        assert [call.status for call in first] == [200]
        assert not any(call.status for call in others)  # what counts may have come since
        assert not later.jobs  # and not again at once
        while not later.jobs:
            await asyncio.sleep(scrapes._PAUSE_S)
        assert len(later.jobs) == 1
        later.finish()
        assert sum(call.status == 200 for call in others) == scrapes._REPLIES
        while not all(call.status == 200 for call in others):
            await asyncio.sleep(0)
        assert count == 2
        last = asked(route, 1)
        later.finish()
        assert last[0].status == 200
        assert not later.jobs

    asyncio.run(main())


def test_a_scrape_that_cannot_start_is_refused_and_the_next_one_tried() -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise Overloaded("no thread can be started; try again later")

    route = Scrapes(group_of(list), refuse)
    assert [call.status for call in asked(route, 2)] == [503, 503]


def test_an_error_is_a_reply_to_each() -> None:
    def broken() -> list[Sample]:
        raise ValueError

    async def main() -> None:
        route = Scrapes(group_of(broken), lambda work, then, **_: then(work))
        assert [call.status for call in asked(route, 2)] == [500, 500]

    asyncio.run(main())
