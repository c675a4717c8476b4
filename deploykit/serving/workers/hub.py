"""What all workers counted, added up, and the changes that all make: the parent passes both on."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from deploykit.core.errors import DeploykitError, Overloaded
from deploykit.serving.observe.prometheus import Sample
from deploykit.serving.web.history import EVERY_US, History
from deploykit.serving.workers import merge
from deploykit.serving.workers.link import Message
from deploykit.serving.workers.process import Forked

log = logging.getLogger(__name__)

REPORT_S = 1.0  # after which a worker's last report is taken
MOST_MISSED = 10  # samples in a row, half a minute: then its event loop hangs
_PAUSE_S = 0.01  # between two collections


class Hub:
    """`workers`: those that run, by process, which their owner adds and removes.

    `wanted`: how many there should be. `restarts`: how often one was replaced. `run` runs a
    coroutine.
    """

    def __init__(
        self,
        workers: Mapping[int, Forked],
        wanted: int,
        run: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._workers = workers
        self._wanted = wanted
        self._run = run
        self.restarts = 0
        self._ended: merge.Report | None = None  # what those counted that have ended
        self._regions: dict[str, tuple[str, tuple[Any, ...]]] = {}
        self._asks: list[tuple[Forked, int, str, int]] = []
        self._announced: dict[str, str] = {}  # the last message about each model
        self._collecting = False
        self._numbers = itertools.count()
        self._history = History()

    @property
    def serving(self) -> int:
        return sum(worker.serving for worker in self._workers.values())

    @property
    def changes(self) -> list[tuple[str, tuple[Any, ...]]]:
        """What a new worker has to do first: what all others have done already."""
        return list(self._regions.values())

    def receive(self, worker: Forked, message: Message) -> None:
        """A message that begins with done, collect, announce or change."""
        kind, *content = message
        if kind == "done":
            worker.missed = 0
            number, value = content
            future = worker.waiting.pop(number, None)
            if isinstance(value, dict):
                worker.report = value
            if future is not None and not future.done():
                future.set_result(value)
        elif kind == "collect":
            self._asks.append((worker, *content))
            if not self._collecting:
                self._collecting = True
                self._run(self._collect())
        elif kind == "announce":
            model, level, text = content
            if self._announced.get(model) != text:  # another worker has not reported it
                self._announced[model] = text
                log.log(level, "%s", text)
        else:
            self._run(self._change(worker, *content))

    def end(self, worker: Forked) -> None:
        """Keep what a worker counted that has ended, and no longer wait for it."""
        for future in worker.waiting.values():
            if not future.done():
                future.set_result(None)
        if worker.report is not None:
            self._ended = merge.counters([each for each in (self._ended, worker.report) if each])

    async def keep_history(self) -> None:
        """Sample the counters for the dashboard, until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_US / 1e6)
            for worker in self._workers.values():
                worker.missed += worker.ready
            reports = await self._reports("most_waiting")
            self._kill_hanging()
            if not reports:
                continue
            counts = merge.merge_counts(reports)
            models = []
            for name, counted in counts.items():
                waiting = sum(each.get("most_waiting", {}).get(name, 0) for each in reports)
                models.append({"name": name, **counted, "waiting": waiting})
            self._history.add(time.monotonic_ns() // 1000, models)

    def _kill_hanging(self) -> None:
        for worker in self._workers.values():
            if worker.missed >= MOST_MISSED:
                log.error("worker %d does not answer its parent and is killed", worker.number)
                os.kill(worker.pid, signal.SIGKILL)

    async def _collect(self) -> None:
        """Answer all that ask, with figures counted after they did."""
        while self._asks:
            asks, self._asks = self._asks, []
            reports = await self._reports()
            values = {
                what: self._merged(what, reports) for what in {what for _, _, what, _ in asks}
            }
            for worker, number, what, since_us in asks:
                value = values[what]
                if what == "status" and not isinstance(value, Exception):
                    value = value, self._history.since(since_us)
                if worker.link is not None:
                    worker.link.send("answer", number, value)
            await asyncio.sleep(_PAUSE_S)
        self._collecting = False

    def _merged(self, what: str, reports: Sequence[merge.Report]) -> Any:
        if not any(report["status"] for report in reports):
            return DeploykitError("no worker reports its figures")
        if what == "samples":
            return [
                *merge.merge_samples(reports),
                Sample("deploykit_workers", {}, self.serving),
                Sample("deploykit_worker_restarts_total", {}, self.restarts),
            ]
        if what == "statistics":
            return merge.merge_statistics(reports)
        workers = {"wanted": self._wanted, "serving": self.serving, "restarts": self.restarts}
        return {**merge.merge_status(reports), "workers": workers}

    async def _reports(self, *more: str) -> list[merge.Report]:
        """The figures of all workers; of those that do not answer in time, the last ones."""
        await self._ask_all("report", (*merge.PARTS, *more))
        found = [each.report for each in self._workers.values() if each.report is not None]
        return found if self._ended is None else [*found, self._ended]

    async def _ask_all(self, *message: Any) -> list[Any]:
        """The answers of the workers; an error for one that gives none in time."""
        number, futures = next(self._numbers), []
        kind, *content = message
        for worker in self._workers.values():
            if worker.ready and worker.link is not None:
                future = worker.waiting[number] = asyncio.get_running_loop().create_future()
                worker.link.send(kind, number, *content)
                futures.append(future)
        if futures:
            await asyncio.wait(futures, timeout=REPORT_S)
        for worker in self._workers.values():
            worker.waiting.pop(number, None)
        late = Overloaded("a worker of this server does not answer", hint="try again later")
        return [each.result() if each.done() else late for each in futures]

    async def _change(
        self, worker: Forked, number: int, what: str, arguments: tuple[Any, ...]
    ) -> None:
        """All workers register or unregister a region, in the order in which they asked."""
        answers = await self._ask_all("do", what, arguments)
        problem = next((each for each in answers if each is not None), None)
        name = arguments[0]
        if what == "register" and problem is None:
            self._regions[name] = (what, arguments)
        elif what == "register" and None in answers and name not in self._regions:
            await self._ask_all("do", "unregister", (name,))  # some have it, some do not
        elif what == "unregister":
            for each in [each for each in self._regions if name in (None, each)]:
                del self._regions[each]
        if worker.link is not None:
            worker.link.send("answer", number, problem)
