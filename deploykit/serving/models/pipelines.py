"""Host pipelines: their models are served ones, in the same batches as requests to these.

What a pipeline does is given to the server: here is no stage and no graph.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import orjson

from deploykit.core.errors import DeploykitError
from deploykit.runtimes.engine import Arrays
from deploykit.serving.batching.policy import Pending
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.observe.metrics import OUTCOMES, REQUEST_US, US, split_by
from deploykit.serving.observe.prometheus import Histogram, Sample
from deploykit.serving.oip.request import Request

_RECENT = 256  # durations, counted together

Ran = Callable[["Arrays | None", "DeploykitError | None"], None]


class ServedPipeline(Protocol):
    """What answers requests; see `deploykit.pipelines.live.LivePipeline`."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def input(self) -> str: ...
    @property
    def reads_text(self) -> bool: ...

    def start(
        self, data: Callable[[], bytes | str], done: Callable[[Any, bool], None], trace: str | None
    ) -> Callable[[], None]: ...
    def why_not_ready(self) -> str | None: ...
    def close(self) -> None: ...


class PipelineCounts:
    """Outcomes and durations of a pipeline, or of a stage of it. Thread-safe.

    `waiting`: how many requests wait for a thread of the stage.
    """

    def __init__(self, labels: Mapping[str, str], waiting: Callable[[], int] | None) -> None:
        self._prefix = f"deploykit_pipeline{'_stage' if 'stage' in labels else ''}"
        self._labels = labels
        self._waiting = waiting
        self._lock = threading.Lock()
        self._outcomes = dict.fromkeys(OUTCOMES, 0)
        self._seconds = Histogram(REQUEST_US, US)
        self._recent: list[int] = []
        self.in_flight = 0

    def record(self, outcome: str, us: int = 0) -> None:
        """`us`: how long it took, of a success."""
        with self._lock:
            self._outcomes[outcome] += 1
            if outcome == "success":
                self._recent.append(us)
                if len(self._recent) >= _RECENT:
                    self._add_recent()

    def _add_recent(self) -> None:
        self._seconds.add(np.array(self._recent, np.int64))
        self._recent.clear()

    def samples(self) -> list[Sample]:
        with self._lock:
            if self._recent:
                self._add_recent()
            outcomes, seconds = dict(self._outcomes), self._seconds.buckets
        name, labels = self._prefix, self._labels
        more = [] if self._waiting is None else [("waiting", self._waiting())]
        return [
            *split_by(f"{name}_requests_total", labels, "outcome", outcomes),
            Sample(f"{name}_seconds", labels, seconds),
            Sample(f"{name}_in_flight", labels, self.in_flight),
            *(Sample(f"{name}_{what}", labels, value) for what, value in more),
        ]


class PipelineHost:
    """What a pipeline needs of this server; see `deploykit.pipelines.host.Host`."""

    def __init__(
        self, repository: ModelRepository, loop: asyncio.AbstractEventLoop, processes: int
    ) -> None:
        self.loop = loop
        self.timeout_ms: float = repository.options.timeout_ms
        self.limit = repository.options.queue
        self.processes = processes
        self._repository = repository

    @property
    def draining(self) -> bool:
        return self._repository.draining

    def counts(
        self, labels: Mapping[str, str], waiting: Callable[[], int] | None = None
    ) -> PipelineCounts:
        found = PipelineCounts(labels, waiting)
        self._repository.add_metrics(found.samples)
        return found

    def max_rows(self, model: str) -> int:
        return self._repository.find(model).max_batch

    def submit(
        self, model: str, feeds: Arrays, rows: int, left_us: int, trace: str | None, ran: Ran
    ) -> Callable[[], object]:
        served = self._repository.find(model)
        slots, rows = served.signature.inputs, rows if served.max_batch else 1
        key = tuple((n, slots[n].datatype, array.shape[1:]) for n, array in feeds.items())
        request = Request(dict(feeds), rows, key, (), timeout_us=left_us)

        def pass_on(pending: Pending) -> None:
            ran(pending.outputs, pending.error)

        pending = served.submit(request, pass_on, trace=trace, admitted=True)
        return partial(served.cancel, pending)

    def encode(self, answer: Any) -> bytes:
        return orjson.dumps(answer)


MakePipeline = Callable[[PipelineHost], ServedPipeline]
