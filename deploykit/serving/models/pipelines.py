"""Pipelines as the server runs them: stages with threads, limits and counters.

A pipeline's models are served models; its requests join the same batches as direct ones.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson

from deploykit.core.errors import BadInput, DeploykitError, Expired, Overloaded, StageFailed
from deploykit.core.json_value import check_json_size
from deploykit.core.machine import usable_cores
from deploykit.core.subprocesses import INSIDE
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Closing
from deploykit.pipelines.stages import (
    ModelCalls,
    StageGraph,
    failure_reason,
    input_bytes,
    plain,
    stage_error,
)
from deploykit.pipelines.threads import FairThreads, Peer
from deploykit.serving.batching.batcher import monotonic_us
from deploykit.serving.batching.queue import Pending
from deploykit.serving.models.model import ServedModel
from deploykit.serving.observe.metrics import (
    OUTCOMES,
    REQUEST_US,
    US,
    Histogram,
    Sample,
    inference_stats,
    split_by,
)
from deploykit.serving.oip.request import Request, Result, Signature, collect_results, signature
from deploykit.serving.options import VERSION, ServeOptions
from deploykit.serving.shared_memory import SharedMemory

log = logging.getLogger(__name__)

MOST_THREADS = 16  # per stage; a function mostly holds the GIL
_STEP = 1 << 16
_JSON = orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
NOT_JSON = (
    "send less at once, or not as JSON: a pipeline whose input is annotated as str takes text, as "
    "numpy.ndarray an image, and as bytes anything, such as an .npy file"
)

PipelineGraph = tuple[StageGraph, Mapping[str, str]]  # with the names of its models, by stage


class Receiver(Protocol):
    """A receiver of the reply: a call, or one message of a streaming call."""

    cancel: Callable[[], object] | None  # called if the client disconnects
    about: tuple[str | None, int] | None  # the id and the rows, once the model has the request

    @property
    def peer(self) -> Peer:
        """Return the connection, with whose other work this request waits."""

    @property
    def gone(self) -> bool:
        """Return whether no reply can be sent any more."""

    @property
    def reply(self) -> Callable[..., None]:
        """Return the function that takes the values of `Inference.encode`."""

    def reserve(self, size: int) -> bool:
        """Count `size` bytes in the memory budget until the reply; return whether they fit."""


def over_budget() -> Overloaded:
    return Overloaded("the server holds too many bytes of requests and answers already")


class Sent(NamedTuple):
    """A request's input: its bytes, text or pixels.

    `held_bytes`: memory that it takes besides them; `timeout_us`: the request's own time limit.
    """

    value: bytes | str | np.ndarray
    held_bytes: int = 0
    timeout_us: int | None = None


class PipelineCounts:
    """Counts outcomes and durations of a pipeline, or of one of its stages. Thread-safe.

    `waiting` returns how many requests wait for a thread of the stage.
    """

    def __init__(self, labels: Mapping[str, str], waiting: Callable[[], int] | None = None) -> None:
        self._prefix = f"deploykit_pipeline{'_stage' if 'stage' in labels else ''}"
        self._labels = labels
        self._waiting = waiting
        self._lock = threading.Lock()
        self._outcomes = dict.fromkeys(OUTCOMES, 0)
        self.seconds = Histogram(REQUEST_US, US)  # durations of successes
        self._lost_us = 0  # total duration of requests that did not succeed
        self._last_s = 0.0
        self.in_flight = 0

    def record(self, outcome: str, us: int = 0) -> None:
        """Record one request. `us`: how long it took."""
        with self._lock:
            self._outcomes[outcome] += 1
            if outcome == "success":
                self._last_s = time.time()
                self.seconds.add_one(us)
            else:
                self._lost_us += us

    def statistics(self) -> dict[str, Any]:
        """Return statistics as for a model; the whole duration counts as compute time."""
        outcomes, us = dict(self._outcomes), self.seconds.total
        count = outcomes.pop("success")
        times_us = {"success": us, "compute_infer": us}
        failures = sum(outcomes.values())
        return {
            "last_inference": int(self._last_s * 1000),
            "inference_count": count,
            "execution_count": count,
            "inference_stats": inference_stats(count, times_us, failures, self._lost_us),
            "batch_stats": [],
        }

    def status(self) -> dict[str, Any]:
        """Return the same form as `ModelMetrics.status`, without stages."""
        seconds = self.seconds
        return {
            "outcomes": dict(self._outcomes),
            **dict.fromkeys(("rows", "runs", "idle_us"), 0),
            "last_ms": int(self._last_s * 1000),
            "request": {"counts": list(seconds.counts), "us": seconds.total},
            "batches": {},
        }

    def samples(self) -> list[Sample]:
        outcomes, seconds = dict(self._outcomes), self.seconds
        name, labels = self._prefix, self._labels
        more = [] if self._waiting is None else [("waiting", self._waiting())]
        return [
            *split_by(f"{name}_requests_total", labels, "outcome", outcomes),
            Sample(f"{name}_seconds", labels, seconds.buckets),
            Sample(f"{name}_in_flight", labels, self.in_flight),
            *(Sample(f"{name}_{what}", labels, value) for what, value in more),
        ]


class PipelineStage(PipelineCounts):
    """One stage, with `limit` concurrent requests of at most `timeout_ms` each."""

    def __init__(
        self, name: str, model: ServedModel | None, pipeline: ServedPipeline, processes: int
    ) -> None:
        super().__init__({"pipeline": pipeline.name, "stage": name}, lambda: self.threads.waiting)
        self.name = name
        self.model = model
        about = pipeline.graph.definition
        self.timeout_ms = about.timeout_ms.get(name)
        own = about.in_flight.get(name)
        self.limit = pipeline.options.queue if own is None else math.ceil(own / processes)
        most = min(MOST_THREADS, max(2, usable_cores()), self.limit)
        self.threads = FairThreads(most, f"stage {name}")


class ServedPipeline(PipelineCounts, Closing):
    """A checked graph under its name. `models`: the served models, by stage.

    `processes`: how many servers share the limits of its stages.
    """

    def __init__(
        self,
        name: str,
        graph: StageGraph,
        models: Mapping[str, ServedModel],
        options: ServeOptions,
        memory: SharedMemory | None,
        loop: asyncio.AbstractEventLoop,
        processes: int,
    ) -> None:
        super().__init__({"pipeline": name})
        self.name = name
        self.graph = graph
        self.takes, self.input, self.output = graph.kind, graph.input, graph.answer
        self.options = options
        self.memory = memory
        self.loop = loop
        self.draining = False  # no request is accepted
        self.stages = {
            stage: PipelineStage(stage, models.get(stage), self, processes)
            for stage in (*graph.stages, graph.input)
        }
        self._about = {"name": name, **graph.metadata}
        self._since_s = time.time()
        self.signature = self._signature("string", (1,))
        # an image may be sent as a tensor
        image = self.takes == "image"
        self.tensors = self._signature("uint8", ("H", "W", 3)) if image else self.signature

    def close(self) -> None:
        for stage in self.stages.values():
            stage.threads.close()

    def why_not_ready(self) -> str | None:
        for stage in self.stages.values():
            if stage.threads.hanging(2 * self.options.timeout_ms / 1000):
                return f"pipeline '{self.name}': stage '{stage.name}' does not return"
        return None

    def start(
        self,
        read: Callable[[], Sent],
        done: Callable[[Any, bool], None],
        client: Receiver,
        trace: str | None,
        timeout_us: int | None = None,
    ) -> Callable[[], None]:
        """Answer one request; return a function to cancel it. Call it on the event loop's thread.

        `read` returns the input; it runs on another thread. `done` gets the answer or the error,
        and whether it is JSON. `timeout_us`: the call's time limit, if less than the server's.
        Raises Overloaded during a shutdown.
        """
        if self.draining:
            self.record("rejected")
            raise Overloaded("the server is shutting down", hint="send the request elsewhere")
        return PipelineRun(self, read, done, client, trace, timeout_us).cancel

    def _signature(self, dtype: str, shape: tuple[int | str, ...]) -> Signature:
        takes = TensorSpec(self.input, dtype, shape)
        gives = TensorSpec(self.output, "string", (1,))
        found = signature([takes], [gives], 0, self.options.max_body_bytes)
        slots = {name: replace(slot, raw=True) for name, slot in found.inputs.items()}
        return replace(found, inputs=slots)

    def infer(
        self,
        decode: Callable[[], Request],
        reply: Callable[[Request, list[Result]], None],
        fail: Callable[[Exception], None],
        client: Receiver,
        trace: str | None,
        timeout_us: int | None = None,
    ) -> None:
        """Answer a request of the protocol, for HTTP and gRPC alike.

        `decode` runs on another thread, one of `reply` and `fail` on the event loop's.
        `timeout_us`: of the call, next to the request's own. Raises Overloaded at the shutdown.
        """
        requests: list[Request] = []

        def read() -> Sent:
            request = decode()
            requests.append(request._replace(feeds={}))
            return Sent(self._input_of(request), request.copied_bytes, request.timeout_us)

        def finish(answer: bytes | Exception, _json: bool) -> None:
            client.cancel = None
            try:
                if isinstance(answer, Exception):
                    raise answer
                array = np.empty(1, object)
                array[0] = answer
                outputs = {self.output: array}
                found = collect_results(requests[0], outputs, self.signature, self.memory)
                reply(requests[0], found)
            except Exception as exc:  # noqa: BLE001 - every error is a reply
                fail(exc)

        client.cancel = self.start(read, finish, client, trace, timeout_us)

    def _input_of(self, request: Request) -> bytes | np.ndarray:
        """Return the input. Raises BadInput for no pixels, TooLarge for JSON above its limit."""
        (array,) = request.feeds.values()
        if array.dtype.kind == "O":
            given: bytes = array[0]
            if self.takes == "json":
                check_json_size(given, NOT_JSON)
            return given
        if not array.size:
            raise BadInput(f"'{self.input}' has no pixels")
        return array

    def metadata(self) -> dict[str, Any]:
        return dict(self._about)

    def config(self) -> dict[str, Any]:
        """Return Triton's ModelConfig: one string in, one out, no batch."""
        about = self._about
        tensors = {
            kind: [
                {"name": each["name"], "data_type": "TYPE_STRING", "dims": each["shape"]}
                for each in about[f"{kind}s"]
            ]
            for kind in ("input", "output")
        }
        return {
            "name": self.name,
            "platform": about["platform"],
            "backend": "deploykit",
            "max_batch_size": 0,
            **tensors,
            "parameters": {k: {"string_value": v} for k, v in about["parameters"].items()},
            "model_transaction_policy": {"decoupled": False},
        }

    def statistics(self) -> dict[str, Any]:
        """Return one entry of `model_stats`; `response_stats` has the times of the stages."""
        stages = {}
        for name, each in self.stages.items():
            stats = each.statistics()["inference_stats"]
            stages[name] = {key: stats[key] for key in ("compute_infer", "success", "fail")}
        about = {"name": self.name, "version": VERSION}
        return {**about, **super().statistics(), "response_stats": stages}

    def samples(self) -> list[Sample]:
        return super().samples() + [s for each in self.stages.values() for s in each.samples()]

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a thread of a stage."""
        return sum(each.threads.waiting for each in self.stages.values())

    def counted(self) -> dict[str, Any]:
        """Return the counters for the dashboard, with the total time of each stage."""
        stages_us = {name: each.seconds.total for name, each in self.stages.items()}
        return {**super().status(), "stages_us": stages_us}

    def status(self) -> dict[str, Any]:
        """Return the pipeline's figures for the dashboard, in the form of a model's."""
        about = self._about
        return {
            "name": self.name,
            "platform": about["platform"],
            "device": "",
            "runtime": "pipeline",
            **dict.fromkeys(("engines", "max_batch", "batch_limit", "delay_us"), 0),
            "queue": self.options.queue,
            "notes": [],
            "task": about["parameters"],
            "file": None,
            "generation": 1,
            "loaded_s": self._since_s,
            "inputs": about["inputs"],
            "outputs": about["outputs"],
            "waiting": self.waiting,
            "in_flight": self.in_flight,
            **self.counted(),
        }


_OUTCOMES = {Expired: "expired", Overloaded: "rejected", BadInput: "bad_request"}  # for metrics
Work = Callable[[PipelineStage], Any]
Then = Callable[[PipelineStage, Any], None]


class PipelineRun:
    """One request on its way through a pipeline: each stage begins once it has its arguments.

    Functions run on the threads of their stage, models in batches, everything else on the event
    loop's thread. Calls `done` once with the answer or the error, unless cancelled.
    """

    def __init__(
        self,
        pipeline: ServedPipeline,
        read: Callable[[], Sent],
        done: Callable[[bytes | Exception, bool], None],
        client: Receiver,
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
        self._calls: dict[PipelineStage, list[Callable[[], object]]] = {}
        self._left = {
            name: {s.stage for s in each.arguments.values() if s.stage in self._stages}
            for name, each in self._graph.items()
        }
        self.over = False
        pipeline.in_flight += 1
        self._started_us = monotonic_us()
        limit_us = round(pipeline.options.timeout_ms * 1000)
        self._limit_us = limit_us if timeout_us is None else min(limit_us, timeout_us)
        self._timer = self._start_timer()
        self._begin(pipeline.graph.input)

    def _start_timer(self) -> asyncio.TimerHandle:
        left_us = self._started_us + self._limit_us - monotonic_us()
        return self._pipeline.loop.call_later(max(0, left_us) / 1e6, self._expire, None)

    def cancel(self) -> None:
        """End the run because the client disconnected; no further stage begins."""
        if not self.over:
            self._end("cancelled")

    def _read(self, _stage: PipelineStage) -> tuple[Any, int, int | None]:
        """Return the input, its size in memory in bytes, and the request's time limit."""
        read, self._read_input = self._read_input, None
        assert read is not None
        value, held_bytes, timeout_us = read()
        graph, data = self._pipeline.graph, None
        if isinstance(value, bytes):
            data = value if graph.kind == "json" else None
            value = graph.read(value)
        return value, held_bytes + input_bytes(value, data), timeout_us

    def _admit(self, stage: PipelineStage, read: tuple[Any, int, int | None]) -> None:
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
        self._fail(over_budget(), stage)

    def _begin(self, name: str) -> None:
        stage = self._stages[name]
        if stage.in_flight >= stage.limit:
            stage.record("rejected")
            what = f"stage '{name}' has {stage.limit} requests in flight, its limit"
            self._fail(Overloaded(what, hint="try again later"), stage)
            return
        stage.in_flight += 1
        self._began_us[name] = monotonic_us()
        if stage.timeout_ms is not None:
            later = self._pipeline.loop.call_later
            self._timers[name] = later(stage.timeout_ms / 1000, self._expire, name)
        if name == self._pipeline.graph.input:
            self._offload(stage, self._read, self._admit)
        elif stage.model is not None:
            self._offload(stage, self._prepare, self._submit)
        else:
            self._offload(stage, self._run_function, self._finish)

    def _offload(self, stage: PipelineStage, work: Work, then: Then) -> None:
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
                self._pipeline.loop.call_soon_threadsafe(self._back, stage, then, value, error)
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

    def _back(self, stage: PipelineStage, then: Then, value: Any, error: Any) -> None:
        if self.over:  # the run ended while this job waited or ran
            self._leave(stage)
        elif error is not None:
            self._leave(stage)
            self._fail(error, stage)
        else:
            then(stage, value)

    def _leave(self, stage: PipelineStage) -> None:
        stage.in_flight -= 1
        if timer := self._timers.pop(stage.name, None):
            timer.cancel()

    def _run_function(self, stage: PipelineStage) -> Any:
        value = self._graph[stage.name].run(self._values)
        return self._encode(value) if stage.name == self._answer else value

    def _encode(self, value: Any) -> tuple[bytes, bool]:
        if isinstance(value, (bytes, bytearray)):
            return bytes(value), False
        with self._pipeline.graph.writing():
            return b"".join(_json_parts(value)), True

    def _finish(self, stage: PipelineStage, value: Any) -> None:
        """Store the stage's value, and begin the stages that waited for it."""
        name = stage.name
        self._leave(stage)
        stage.record("success", monotonic_us() - self._began_us.pop(name))
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

    def _prepare(self, stage: PipelineStage) -> ModelCalls:
        assert stage.model is not None
        return self._graph[stage.name].prepare([self._values], stage.model.max_batch)

    def _submit(self, stage: PipelineStage, calls: ModelCalls) -> None:
        """Queue every call of the model; the last to end continues the run."""
        outputs: list[Any] = [None] * len(calls.feeds)
        left = len(outputs)

        def go_on() -> None:
            del self._calls[stage]
            self._offload(stage, partial(self._collect, calls, outputs), self._finish)

        def ran(at: int, pending: Pending) -> None:
            nonlocal left
            if self.over:
                return
            if pending.error is not None:
                self._fail(pending.error, stage)
                return
            outputs[at] = pending.outputs
            left -= 1
            if not left:
                go_on()

        model = stage.model
        assert model is not None
        waiting = self._calls.setdefault(stage, [])
        left_us = max(1, self._started_us + self._limit_us - monotonic_us())
        slots = model.signature.inputs
        try:
            for at, feeds in enumerate(calls.feeds):
                key = tuple((n, slots[n].datatype, array.shape[1:]) for n, array in feeds.items())
                rows = len(next(iter(feeds.values()))) if model.max_batch else 1
                request = Request(dict(feeds), rows, key, (), timeout_us=left_us)
                pending = model.submit(request, partial(ran, at), trace=self._trace, admitted=True)
                waiting.append(partial(model.cancel, pending))
        except DeploykitError as exc:
            self._fail(exc, stage)
            return
        if not outputs:
            go_on()

    def _collect(self, calls: ModelCalls, outputs: list[Any], stage: PipelineStage) -> Any:
        (value,) = calls.collect(outputs)
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

    def _fail(self, error: BaseException, stage: PipelineStage) -> None:
        failed = stage_error(error, stage.name)
        if isinstance(failed, StageFailed):
            debug = logging.getLogger().isEnabledFor(logging.DEBUG)
            trace = failed.__cause__ if debug else None
            why = failure_reason(failed)
            log.error("pipeline '%s': %s", self._pipeline.name, why, exc_info=trace)
        known = (name for kind, name in _OUTCOMES.items() if isinstance(failed, kind))
        outcome = next(known, "failed")
        if self._began_us.pop(stage.name, None) is not None:
            stage.record(outcome)
        failed.__traceback__ = failed.__cause__ = failed.__context__ = None  # free the request
        self._end(outcome)
        self._done(failed, True)

    def _end(self, outcome: str) -> None:
        pipeline, self.over = self._pipeline, True
        pipeline.in_flight -= 1
        pipeline.record(outcome, monotonic_us() - self._started_us)
        self._timer.cancel()
        for name in self._began_us:
            self._stages[name].record("cancelled")
        for timer in self._timers.values():
            timer.cancel()
        running, self._calls = self._calls, {}
        for stage, waiting in running.items():
            self._leave(stage)
            for cancel in waiting:
                cancel()
        self._values, self._read_input = {}, None


def _json_parts(value: Any) -> Iterator[bytes]:
    """Write JSON in steps of some thousand values, between which other threads run.

    NaN and infinity are null. Raises TypeError.
    """
    if isinstance(value, dict) and 0 < len(value) <= _STEP:
        for number, (key, inner) in enumerate(value.items()):
            yield (b"," if number else b"{") + orjson.dumps(str(key)) + b":"
            yield from _json_parts(inner)
        yield b"}"
    elif type(value) in (list, tuple, np.ndarray) and getattr(value, "shape", True) and len(value):
        step = max(1, _STEP // max(1, _size(value[0])))
        for at in range(0, len(value), step):
            yield b"," if at else b"["
            if step > 1:
                yield orjson.dumps(value[at : at + step], _plain, _JSON)[1:-1]
            else:
                yield from _json_parts(value[at])
        yield b"]"
    else:
        yield orjson.dumps(value, _plain, _JSON)


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.size
    return len(value) if isinstance(value, (list, tuple, dict)) else 1


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else plain(value)
