"""A pipeline for many clients at once: its stages with their threads, limits and counters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from deploykit.core.errors import Overloaded
from deploykit.core.machine import usable_cores
from deploykit.pipelines.connect import StageGraph
from deploykit.pipelines.formats import input_bytes
from deploykit.pipelines.host import Counts, Host
from deploykit.pipelines.threads import StageThreads
from deploykit.runtimes.engine import Closing

Given = bytes | str | np.ndarray

MOST_THREADS = 16  # of a stage; a function holds Python's lock for most of its time


class LiveStage:
    """One stage: `limit` requests at a time, each for `timeout_ms` at most.

    `model`: the name that the host knows the model by; "" for a function.
    """

    def __init__(
        self, name: str, graph: StageGraph, model: str, host: Host, labels: Mapping[str, str]
    ) -> None:
        self.name = name
        self.model = model
        self.timeout_ms = graph.definition.timeout_ms.get(name)
        own = graph.definition.in_flight.get(name)
        self.limit = host.limit if own is None else math.ceil(own / host.processes)
        most = min(MOST_THREADS, max(2, usable_cores()), self.limit)
        self.threads = StageThreads(f"stage {name}", most)
        self.counts: Counts = host.counts({**labels, "stage": name}, lambda: self.threads.waiting)

    def enter(self) -> None:
        """Raises Overloaded."""
        if self.counts.in_flight >= self.limit:
            self.counts.record("rejected")
            raise Overloaded(
                f"stage '{self.name}' has {self.limit} requests in flight, its limit",
                hint="try again later",
            )
        self.counts.in_flight += 1


class LivePipeline(Closing):
    """A checked graph on a host's event loop. `models`: by stage, the host's names of its models.

    `metadata`: as the Open Inference Protocol's of a model.
    """

    def __init__(self, name: str, graph: StageGraph, models: Mapping[str, str], host: Host) -> None:
        self.name = name
        self.graph = graph
        self.host = host
        self.metadata: Mapping[str, Any] = {"name": name, **graph.metadata}
        labels = {"pipeline": name}
        self.counts: Counts = host.counts(labels)
        self.stages = {
            stage: LiveStage(stage, graph, models.get(stage, ""), host, labels)
            for stage in (*graph.stages, graph.input)
        }

    def start(
        self,
        data: Callable[[], Given],
        done: Callable[[Any, bool], None],
        trace: str | None,
        reserve: Callable[[int], bool],
        timeout_us: int | None = None,
    ) -> Callable[[], None]:
        """Answer one request; returns what cancels it. On the event loop's thread.

        `data` gives the request's bytes, or its text or pixels, on another thread. `done` gets the
        answer, or the error, and whether it is JSON. `reserve` counts bytes of memory for the
        request, on the event loop's thread, and returns whether they fit. `timeout_us`: of this
        request, if less than the host's. Raises Overloaded during a shutdown.
        """
        from deploykit.pipelines.live_run import LiveRun

        if self.host.draining:
            self.counts.record("rejected")
            raise Overloaded("the server is shutting down", hint="send the request elsewhere")
        run = LiveRun(self, done, trace, timeout_us)
        run.start(partial(self._read, data), reserve)
        return run.cancel

    def _read(self, data: Callable[[], Given]) -> tuple[Any, int]:
        """Return the input and its bytes of memory."""
        given = data()
        if not isinstance(given, bytes):
            return given, input_bytes(given, None)
        value = self.graph.read(given)
        return value, input_bytes(value, given if self.graph.kind == "json" else None)

    def why_not_ready(self) -> str | None:
        """The reason in one sentence; None if every stage returns."""
        for stage in self.stages.values():
            if stage.threads.hanging(2 * self.host.timeout_ms / 1000):
                return f"pipeline '{self.name}': stage '{stage.name}' does not return"
        return None

    def close(self) -> None:
        for stage in self.stages.values():
            stage.threads.close()
