"""Run a pipeline for many clients at once: stages with threads, limits and counters."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, Expired, Overloaded, StageFailed
from deploykit.core.machine import usable_cores
from deploykit.core.subprocesses import INSIDE
from deploykit.engines.engine import Arrays, Closing
from deploykit.pipelines.connect import StageGraph, input_bytes
from deploykit.pipelines.stages import ModelCalls, failure_reason, stage_error
from deploykit.pipelines.threads import FairThreads, Peer

log = logging.getLogger(__name__)

Ran = Callable[["Arrays | None", "DeploykitError | None"], None]


class Counts(Protocol):
    """Counters of a pipeline or of one of its stages. Thread-safe except for `in_flight`."""

    in_flight: int

    def record(self, outcome: str, us: int = 0) -> None: ...


class Host(Protocol):
    """A server. `limit`: concurrent requests in a stage without its own limit.

    `processes`: the number of processes that share a pipeline's limits.
    """

    loop: asyncio.AbstractEventLoop
    timeout_ms: float
    limit: int
    processes: int

    @property
    def draining(self) -> bool: ...

    def counts(self, labels: Mapping[str, str], waiting: Callable[[], int] | None = None) -> Counts:
        """Return new counters for the metrics; `waiting` counts requests without a thread."""
        ...

    def max_rows(self, model: str) -> int:
        """Return the most rows of one call; 0 if rows must not be joined."""
        ...

    def submit(
        self, model: str, feeds: Arrays, rows: int, left_us: int, trace: str | None, ran: Ran
    ) -> Callable[[], object]:
        """Queue a call and return a function to cancel it. `ran` gets the outputs or the error."""
        ...

    def encode(self, answer: Any) -> bytes:
        """Encode JSON values. Raises TypeError for an integer above 64 bits."""
        ...


class Client(Protocol):
    """The sender of a request. `cancel` is called if it disconnects."""

    cancel: Callable[[], object] | None

    @property
    def peer(self) -> Peer:
        """Return the connection, with whose other work this request waits."""
        ...

    def reserve(self, size: int) -> bool:
        """Count bytes in the memory budget until the reply; return whether they fit."""
        ...


class Sent(NamedTuple):
    """A request's input: its bytes, text or pixels.

    `held_bytes`: memory that it takes besides them; `timeout_us`: the request's own time limit.
    """

    value: bytes | str | np.ndarray
    held_bytes: int = 0
    timeout_us: int | None = None


MOST_THREADS = 16  # per stage; a function mostly holds the GIL


class LiveStage(Closing):
    """One stage, with `limit` concurrent requests of at most `timeout_ms` each.

    `model`: the host's name of the model; "" for a function.
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
        self.threads = FairThreads(most, f"stage {name}")
        self.counts: Counts = host.counts({**labels, "stage": name}, lambda: self.threads.waiting)

    def enter(self) -> None:
        """Count a request that enters. Raises Overloaded at the limit."""
        if self.counts.in_flight >= self.limit:
            self.counts.record("rejected")
            raise Overloaded(
                f"stage '{self.name}' has {self.limit} requests in flight, its limit",
                hint="try again later",
            )
        self.counts.in_flight += 1

    def close(self) -> None:
        self.threads.close()


class LivePipeline(Closing):
    """A checked graph on a host's event loop. `models`: the host's names, by stage."""

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
        read: Callable[[], Sent],
        done: Callable[[Any, bool], None],
        client: Client,
        trace: str | None,
        timeout_us: int | None = None,
    ) -> Callable[[], None]:
        """Answer one request; return a function to cancel it. Call it on the event loop's thread.

        `read` returns the input; it runs on another thread. `done` gets the answer or the error,
        and whether it is JSON. `timeout_us`: the call's time limit, if less than the host's. Raises
        Overloaded during a shutdown.
        """
        if self.host.draining:
            self.counts.record("rejected")
            raise Overloaded("the server is shutting down", hint="send the request elsewhere")
        return LiveRun(self, read, done, client, trace, timeout_us).cancel

    def why_not_ready(self) -> str | None:
        """Return the reason in one sentence; None if no stage hangs."""
        for stage in self.stages.values():
            if stage.threads.hanging(2 * self.host.timeout_ms / 1000):
                return f"pipeline '{self.name}': stage '{stage.name}' does not return"
        return None

    def close(self) -> None:
        for stage in self.stages.values():
            stage.close()


_OUTCOMES = {Expired: "expired", Overloaded: "rejected", BadInput: "bad_request"}  # for metrics
Work = Callable[[LiveStage], Any]
Then = Callable[[LiveStage, Any], None]


class LiveRun:
    """One request on its way through a pipeline: each stage begins once it has its arguments.

    Functions run on the threads of their stage, models in batches, everything else on the event
    loop's thread. Calls `done` once with the answer or the error, unless cancelled.
    """

    def __init__(
        self,
        pipeline: LivePipeline,
        read: Callable[[], Sent],
        done: Callable[[bytes | Exception, bool], None],
        client: Client,
        trace: str | None,
        timeout_us: int | None,
    ) -> None:
        self._pipeline = pipeline
        self._read_input: Callable[[], Sent] | None = read
        self._client, self._peer = client, client.peer
        self._stages, self._graph = pipeline.stages, pipeline.graph.stages
        self._answer = pipeline.graph.answer
        self._done = done
        self._trace = trace
        self._values: dict[str, Any] = {}
        self._began_us: dict[str, int] = {}  # start of each running stage
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # calls of the models that run, by stage
        self._calls: dict[LiveStage, list[Callable[[], object]]] = {}
        self._left = {
            name: {s.stage for s in each.arguments.values() if s.stage in self._stages}
            for name, each in self._graph.items()
        }
        self.over = False
        pipeline.counts.in_flight += 1
        self._started_us = _now_us()
        limit_us = round(pipeline.host.timeout_ms * 1000)
        self._limit_us = limit_us if timeout_us is None else min(limit_us, timeout_us)
        self._timer = self._start_timer()
        self._begin(pipeline.graph.input)

    def _start_timer(self) -> asyncio.TimerHandle:
        left_us = self._started_us + self._limit_us - _now_us()
        return self._pipeline.host.loop.call_later(max(0, left_us) / 1e6, self._expire, None)

    def cancel(self) -> None:
        """End the run because the client disconnected; no further stage begins."""
        if not self.over:
            self._end("cancelled")

    def _read(self, _stage: LiveStage) -> tuple[Any, int, int | None]:
        """Return the input, its size in memory in bytes, and the request's time limit."""
        read, self._read_input = self._read_input, None
        assert read is not None
        value, held_bytes, timeout_us = read()
        graph, data = self._pipeline.graph, None
        if isinstance(value, bytes):
            data = value if graph.kind == "json" else None
            value = graph.read(value)
        return value, held_bytes + input_bytes(value, data), timeout_us

    def _admit(self, stage: LiveStage, read: tuple[Any, int, int | None]) -> None:
        """Continue with the input if its memory fits into the server's budget."""
        value, size, timeout_us = read
        if timeout_us is not None and timeout_us < self._limit_us:
            self._timer.cancel()
            self._limit_us = timeout_us
            self._timer = self._start_timer()
        if self._client.reserve(size):
            self._finish(stage, value)
            return
        self._leave(stage)
        error = Overloaded("the server holds too many bytes of requests and answers already")
        self._fail(error, stage)

    def _begin(self, name: str) -> None:
        stage = self._stages[name]
        try:
            stage.enter()
        except Overloaded as exc:  # `enter` has counted it
            self._fail(exc, stage)
            return
        self._began_us[name] = _now_us()
        if stage.timeout_ms is not None:
            later = self._pipeline.host.loop.call_later
            self._timers[name] = later(stage.timeout_ms / 1000, self._expire, name)
        if name == self._pipeline.graph.input:
            self._offload(stage, self._read, self._admit)
        elif stage.model:
            self._offload(stage, self._prepare, self._submit)
        else:
            self._offload(stage, self._run_function, self._finish)

    def _offload(self, stage: LiveStage, work: Work, then: Then) -> None:
        """Run `work` on a thread of the stage, then `then` on the loop unless the run is over."""

        def job() -> None:
            error: BaseException | None = None
            value = None
            if not self.over:
                try:
                    with INSIDE:
                        value = work(stage)
                except BaseException as exc:  # noqa: BLE001 - every error is a reply
                    error = exc
            try:
                self._pipeline.host.loop.call_soon_threadsafe(self._back, stage, then, value, error)
            except RuntimeError:  # the event loop is closed
                log.info("stage '%s' ended after the shutdown", stage.name)
            finally:  # else error, traceback, frame and request form a cycle
                del value, error

        try:
            stage.threads.submit(job, self._peer)
        except RuntimeError as exc:
            self._leave(stage)
            log.warning("stage '%s': no thread can be started: %s", stage.name, exc)
            self._fail(Overloaded("no thread can be started; try again later"), stage)

    def _back(self, stage: LiveStage, then: Then, value: Any, error: Any) -> None:
        if self.over:  # the run ended while this job waited or ran
            self._leave(stage)
        elif error is not None:
            self._leave(stage)
            self._fail(error, stage)
        else:
            then(stage, value)

    def _leave(self, stage: LiveStage) -> None:
        stage.counts.in_flight -= 1
        timer = self._timers.pop(stage.name, None)
        if timer is not None:
            timer.cancel()

    def _run_function(self, stage: LiveStage) -> Any:
        value = self._graph[stage.name].run(self._values)
        return self._encode(value) if stage.name == self._answer else value

    def _encode(self, value: Any) -> tuple[bytes, bool]:
        if isinstance(value, (bytes, bytearray)):
            return bytes(value), False
        pipeline = self._pipeline
        return pipeline.host.encode(pipeline.graph.answer_json(value)), True

    def _finish(self, stage: LiveStage, value: Any) -> None:
        """Store the stage's value, and begin the stages that waited for it."""
        name = stage.name
        self._leave(stage)
        stage.counts.record("success", _now_us() - self._began_us.pop(name))
        if name == self._answer:
            self._end("success")
            self._done(*value)
            return
        self._values[name] = value
        for before in self._left.values():
            before.discard(name)
        for each in [n for n, before in self._left.items() if not before]:
            if not self.over:
                del self._left[each]
                self._begin(each)

    def _prepare(self, stage: LiveStage) -> ModelCalls:
        max_rows = self._pipeline.host.max_rows(stage.model)
        return self._graph[stage.name].prepare([self._values], max_rows)

    def _submit(self, stage: LiveStage, calls: ModelCalls) -> None:
        """Queue every call of the model; the last to end continues the run."""
        outputs: list[Any] = [None] * len(calls.calls)
        left = len(outputs)

        def go_on() -> None:
            del self._calls[stage]
            self._offload(stage, partial(self._collect, calls, outputs), self._finish)

        def ran(at: int, found: Arrays | None, error: DeploykitError | None) -> None:
            nonlocal left
            if self.over:
                return
            if error is not None:
                self._fail(error, stage)
                return
            outputs[at] = found
            left -= 1
            if not left:
                go_on()

        host, waiting = self._pipeline.host, self._calls.setdefault(stage, [])
        left_us = self._started_us + self._limit_us - _now_us()
        try:
            for at, call in enumerate(calls.calls):
                run = partial(ran, at)
                args = stage.model, call.feeds, call.rows, max(1, left_us), self._trace, run
                waiting.append(host.submit(*args))
        except DeploykitError as exc:
            self._fail(exc, stage)
            return
        if not outputs:
            go_on()

    def _collect(self, calls: ModelCalls, outputs: list[Any], stage: LiveStage) -> Any:
        found = self._graph[stage.name].collect(calls, outputs)
        value = found if self._graph[stage.name].each else found[0]
        return self._encode(value) if stage.name == self._answer else value

    def _expire(self, name: str | None) -> None:
        """Fail the run because a stage or, with `name` None, the request timed out."""
        stage = self._stages[name or next(iter(self._began_us))]
        limit_ms = self._limit_us / 1000 if name is None else stage.timeout_ms
        of = "the request's" if name is None else "its"
        error = Expired(
            f"not ended within {of} time limit of {limit_ms:g} ms",
            hint="send fewer requests at once, or allow more time (`timeout_ms`)",
        )
        self._fail(error, stage)

    def _fail(self, error: BaseException, stage: LiveStage) -> None:
        """End the run with an error of this stage."""
        failed = stage_error(error, stage.name)
        if isinstance(failed, StageFailed):
            debug = logging.getLogger().isEnabledFor(logging.DEBUG)
            trace = failed.__cause__ if debug else None
            why = failure_reason(failed)
            log.error("pipeline '%s': %s", self._pipeline.name, why, exc_info=trace)
        known = (name for kind, name in _OUTCOMES.items() if isinstance(failed, kind))
        outcome = next(known, "failed")
        if self._began_us.pop(stage.name, None) is not None:
            stage.counts.record(outcome)
        failed.__traceback__ = failed.__cause__ = failed.__context__ = None  # free the request
        self._end(outcome)
        self._done(failed, True)

    def _end(self, outcome: str) -> None:
        pipeline, self.over = self._pipeline, True
        pipeline.counts.in_flight -= 1
        pipeline.counts.record(outcome, _now_us() - self._started_us)
        self._timer.cancel()
        for name in self._began_us:
            self._stages[name].counts.record("cancelled")
        for timer in self._timers.values():
            timer.cancel()
        running, self._calls = self._calls, {}
        for stage, waiting in running.items():
            self._leave(stage)
            for cancel in waiting:
                cancel()
        self._values, self._read_input = {}, None


def _now_us() -> int:
    return time.monotonic_ns() // 1000
