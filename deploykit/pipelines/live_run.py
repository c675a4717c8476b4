"""One request on its way through a pipeline: each stage begins once it has its arguments.

Functions run on the threads of their stage, models in their batches. All other methods run on the
event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from deploykit.core.ending import INSIDE
from deploykit.core.errors import BadInput, DeploykitError, Expired, Overloaded
from deploykit.pipelines.failures import StageFailed, failure_reason, stage_error
from deploykit.pipelines.live import LivePipeline, LiveStage
from deploykit.pipelines.models import ModelCalls
from deploykit.runtimes.engine import Arrays

log = logging.getLogger(__name__)

Work = Callable[[], Any]
Answer = bytes | Exception  # JSON, or what a stage gave as bytes


class LiveRun:
    """Calls `done` once with the answer or the error, unless it is cancelled."""

    def __init__(
        self,
        pipeline: LivePipeline,
        done: Callable[[Answer, bool], None],
        trace: str | None,
        timeout_us: int | None,
    ) -> None:
        self._pipeline = pipeline
        limit_us = round(pipeline.host.timeout_ms * 1000)
        self._limit_us = limit_us if timeout_us is None else min(limit_us, timeout_us)
        self._stages, self._graph = pipeline.stages, pipeline.graph.stages
        self._answer = pipeline.graph.answer
        self._done = done
        self._trace = trace
        self._values: dict[str, Any] = {}
        self._began_us: dict[str, int] = {}  # of the stages that have begun
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._calls: dict[
            LiveStage, list[Callable[[], object]]
        ] = {}  # of the stages whose model runs
        self._left = {name: each.after(self._stages) for name, each in self._graph.items()}
        self.over = False

    def start(self, read: Callable[[], tuple[Any, int]], reserve: Callable[[int], bool]) -> None:
        """Begin with the input, which `read` returns with its bytes of memory, on a thread.

        `reserve`: as in `LivePipeline.start`.
        """
        pipeline = self._pipeline
        pipeline.counts.in_flight += 1
        self._started_us = _now_us()
        self._timer = pipeline.host.loop.call_later(self._limit_us / 1e6, self._expire, None)
        stage = self._stages[pipeline.graph.input]
        self._begin(stage.name, read, partial(self._admit, stage, reserve))

    def cancel(self) -> None:
        """The client has gone: stages that have not begun are not run."""
        if not self.over:
            self._end("cancelled")

    # -- stages ------------------------------------------------------------------------------------

    def _admit(
        self, stage: LiveStage, reserve: Callable[[int], bool], read: tuple[Any, int]
    ) -> None:
        """Go on with the input if its memory fits into the server's budget."""
        value, size = read
        if reserve(size):
            self._finish(stage, value)
            return
        self._leave(stage)
        error = Overloaded("the server holds too many bytes of requests and answers already")
        self._fail(error, stage)

    def _begin(
        self, name: str, work: Work | None = None, then: Callable[[Any], None] | None = None
    ) -> None:
        stage = self._stages[name]
        try:
            stage.enter()
        except Overloaded as exc:  # which is counted
            self._fail(exc, stage)
            return
        self._began_us[name] = _now_us()
        if stage.timeout_ms is not None:
            later = self._pipeline.host.loop.call_later
            self._timers[name] = later(stage.timeout_ms / 1000, self._expire, name)
        if work is None and not stage.model:
            work = partial(self._run_function, stage)
        if work is not None:
            self._offload(stage, work, then or partial(self._finish, stage))
        else:
            self._offload(stage, partial(self._prepare, stage), partial(self._submit, stage))

    def _offload(self, stage: LiveStage, work: Work, then: Callable[[Any], None]) -> None:
        """Run `work` on a thread of the stage, then `then` on the loop unless the run is over."""

        def job() -> None:
            error: BaseException | None = None
            value = None
            if not self.over:
                try:
                    with INSIDE:
                        value = work()
                except BaseException as exc:  # noqa: BLE001 - every error is a reply
                    error = exc
            try:
                self._pipeline.host.loop.call_soon_threadsafe(self._back, stage, then, value, error)
            except RuntimeError:  # the loop is closed
                log.info("stage '%s' ended after the shutdown", stage.name)
            finally:  # else the error's traceback, this frame and the request are a cycle
                del value, error

        try:
            stage.threads.submit(job)
        except RuntimeError as exc:
            self._leave(stage)
            log.warning("stage '%s': no thread can be started: %s", stage.name, exc)
            self._fail(Overloaded("no thread can be started; try again later"), stage)

    def _back(self, stage: LiveStage, then: Callable[[Any], None], value: Any, error: Any) -> None:
        if self.over:  # it was waiting for this thread, or ran too long
            self._leave(stage)
        elif error is not None:
            self._leave(stage)
            self._fail(error, stage)
        else:
            then(value)

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
        """The stage has given `value`: begin those that have waited for it."""
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

    # -- models ------------------------------------------------------------------------------------

    def _prepare(self, stage: LiveStage) -> ModelCalls:
        max_rows = self._pipeline.host.max_rows(stage.model)
        return self._graph[stage.name].prepare([self._values], max_rows)

    def _submit(self, stage: LiveStage, calls: ModelCalls) -> None:
        """Queue every call of the model; the last that ends goes on."""
        outputs: list[Any] = [None] * len(calls.calls)
        left = len(outputs)

        def go_on() -> None:
            del self._calls[stage]
            work = partial(self._collect, stage, calls, outputs)
            self._offload(stage, work, partial(self._finish, stage))

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

    def _collect(self, stage: LiveStage, calls: ModelCalls, outputs: list[Any]) -> Any:
        found = self._graph[stage.name].collect(calls, outputs)
        value = found if self._graph[stage.name].each else found[0]
        return self._encode(value) if stage.name == self._answer else value

    # -- the end -----------------------------------------------------------------------------------

    def _expire(self, name: str | None) -> None:
        """The time of one stage is over, or that of the request."""
        stage = self._stages[name or next(iter(self._began_us))]
        limit_ms = self._limit_us / 1000 if name is None else stage.timeout_ms
        of = "the request's" if name is None else "its"
        error = Expired(
            f"not ended within {of} time limit of {limit_ms:g} ms",
            hint="send fewer requests at once, or allow more time (`timeout_ms`)",
        )
        self._fail(error, stage)

    def _fail(self, error: BaseException, stage: LiveStage) -> None:
        """End with an error of this stage."""
        failed = stage_error(error, stage.name)
        if isinstance(failed, StageFailed):
            debug = logging.getLogger().isEnabledFor(logging.DEBUG)
            trace = failed.__cause__ if debug else None
            why = failure_reason(failed)
            log.error("pipeline '%s': %s", self._pipeline.name, why, exc_info=trace)
        outcome = outcome_of(failed)
        if self._began_us.pop(stage.name, None) is not None:
            stage.counts.record(outcome)
        failed.__traceback__ = failed.__cause__ = failed.__context__ = None  # frees the request
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
        self._values = {}


def _now_us() -> int:
    return time.monotonic_ns() // 1000


def outcome_of(error: DeploykitError) -> str:
    """How an error is counted."""
    if isinstance(error, Expired):
        return "expired"
    if isinstance(error, Overloaded):
        return "rejected"
    return "bad_request" if isinstance(error, BadInput) else "failed"
