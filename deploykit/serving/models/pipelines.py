"""Pipelines as the server sees them: their descriptions, their counters, and their host.

A pipeline's models are served models; its requests join the same batches as direct ones.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import orjson

from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.json_value import check_json_size
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Arrays
from deploykit.pipelines.live import Client, LivePipeline, Sent
from deploykit.serving.batching.queue import Pending
from deploykit.serving.models.description import describe_pipeline
from deploykit.serving.models.model import ServedModel
from deploykit.serving.observe.metrics import OUTCOMES, REQUEST_US, US, inference_stats, split_by
from deploykit.serving.observe.prometheus import Histogram, Sample
from deploykit.serving.oip.request import Request, Signature, signature
from deploykit.serving.oip.response import Result, collect_results
from deploykit.serving.options import VERSION, ServeOptions
from deploykit.serving.shared_memory import SharedMemory

_STEP = 1 << 16
NOT_JSON = (
    "send less at once, or not as JSON: a pipeline whose input is annotated as str takes text, as "
    "numpy.ndarray an image, and as bytes anything, such as an .npy file"
)

Ran = Callable[["Arrays | None", "DeploykitError | None"], None]


class Models(Protocol):
    """The part of the repository that pipelines use."""

    options: ServeOptions
    draining: bool
    memory: SharedMemory | None

    def find(self, name: str) -> ServedModel: ...
    def add_metrics(self, samples: Callable[[], Iterable[Sample]]) -> None: ...


class PipelineCounts:
    """Counts outcomes and durations of a pipeline, or of one of its stages. Thread-safe.

    `waiting` returns how many requests wait for a thread of the stage.
    """

    def __init__(self, labels: Mapping[str, str], waiting: Callable[[], int] | None) -> None:
        self._prefix = f"deploykit_pipeline{'_stage' if 'stage' in labels else ''}"
        self._labels = labels
        self._waiting = waiting
        self._lock = threading.Lock()
        self._outcomes = dict.fromkeys(OUTCOMES, 0)
        self._seconds = Histogram(REQUEST_US, US)
        self._lost_us = 0  # total duration of requests that did not succeed
        self._last_s = 0.0
        self.in_flight = 0

    def record(self, outcome: str, us: int = 0) -> None:
        """Record one request. `us`: how long it took."""
        with self._lock:
            self._outcomes[outcome] += 1
            if outcome != "success":
                self._lost_us += us
                return
            self._last_s = time.time()
            self._seconds.add_one(us)

    @property
    def waiting(self) -> int:
        return 0 if self._waiting is None else self._waiting()

    def statistics(self) -> dict[str, Any]:
        """Return statistics as for a model; the whole duration counts as compute time."""
        outcomes, us = dict(self._outcomes), self._seconds.total
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
        seconds = self._seconds
        return {
            "outcomes": dict(self._outcomes),
            **dict.fromkeys(("rows", "runs", "idle_us"), 0),
            "last_ms": int(self._last_s * 1000),
            "request": {"counts": list(seconds.counts), "us": seconds.total},
            "batches": {},
        }

    def samples(self) -> list[Sample]:
        outcomes, seconds = dict(self._outcomes), self._seconds
        name, labels = self._prefix, self._labels
        more = [] if self._waiting is None else [("waiting", self.waiting)]
        return [
            *split_by(f"{name}_requests_total", labels, "outcome", outcomes),
            Sample(f"{name}_seconds", labels, seconds.buckets),
            Sample(f"{name}_in_flight", labels, self.in_flight),
            *(Sample(f"{name}_{what}", labels, value) for what, value in more),
        ]


class ServedPipeline:
    """A pipeline under its name. `counts`: for the whole pipeline, under "", and for each stage."""

    def __init__(
        self, runs: LivePipeline, counts: Mapping[str, PipelineCounts], models: Models
    ) -> None:
        self.name: str = runs.metadata["name"]
        self.takes: str = runs.metadata["parameters"]["takes"]  # image, text, json or bytes
        self.input: str = runs.metadata["inputs"][0]["name"]
        self.output: str = runs.metadata["outputs"][0]["name"]
        self.options, self.memory = models.options, models.memory
        self.start = runs.start
        self.why_not_ready = runs.why_not_ready
        self.close = runs.close
        self._runs = runs
        self._total, self._stages = counts[""], {n: each for n, each in counts.items() if n}
        self._since_s = time.time()
        self.signature = self._signature("string", (1,))
        # an image may be sent as a tensor
        image = self.takes == "image"
        self.tensors = self._signature("uint8", ("H", "W", 3)) if image else self.signature

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
        client: Client,
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
            return Sent(self._input_of(request), request.region_bytes, request.timeout_us)

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
        """Return the protocol's model metadata."""
        return dict(self._runs.metadata)

    def config(self) -> dict[str, Any]:
        """Return Triton's ModelConfig."""
        return describe_pipeline(self._runs.metadata)

    def statistics(self) -> dict[str, Any]:
        """Return one entry of `model_stats`; `response_stats` has the times of the stages."""
        times = {name: each.statistics()["inference_stats"] for name, each in self._stages.items()}
        stages = {
            name: {key: stats[key] for key in ("compute_infer", "success", "fail")}
            for name, stats in times.items()
        }
        about = {"name": self.name, "version": VERSION}
        return {**about, **self._total.statistics(), "response_stats": stages}

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a thread of a stage."""
        return sum(each.waiting for each in self._stages.values())

    def counted(self) -> dict[str, Any]:
        """Return the counters for the dashboard, with the total time of each stage."""
        stages_us = {n: each.status()["request"]["us"] for n, each in self._stages.items()}
        return {**self._total.status(), "stages_us": stages_us}

    def status(self) -> dict[str, Any]:
        """Return the pipeline's figures for the dashboard, in the form of a model's."""
        about = self._runs.metadata
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
            "in_flight": self._total.in_flight,
            **self.counted(),
        }


class PipelineHost:
    """The server as a pipeline uses it; see `deploykit.pipelines.live.Host`."""

    def __init__(self, repository: Models, loop: asyncio.AbstractEventLoop, processes: int) -> None:
        self.loop = loop
        self.timeout_ms: float = repository.options.timeout_ms
        self.limit = repository.options.queue
        self.processes = processes
        self._repository = repository
        self._counts: dict[str, dict[str, PipelineCounts]] = {}

    def serve(self, name: str, make: MakePipeline) -> ServedPipeline:
        """Start the pipeline `name`."""
        runs = make(self)
        return ServedPipeline(runs, self._counts[name], self._repository)

    @property
    def draining(self) -> bool:
        return self._repository.draining

    def counts(
        self, labels: Mapping[str, str], waiting: Callable[[], int] | None = None
    ) -> PipelineCounts:
        found = PipelineCounts(labels, waiting)
        self._counts.setdefault(labels["pipeline"], {})[labels.get("stage", "")] = found
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
        return b"".join(_json_parts(answer))


def _json_parts(value: Any) -> Iterator[bytes]:
    """Write JSON in steps of some thousand values, between which other threads run."""
    if isinstance(value, dict) and len(value) <= _STEP:
        yield b"{"
        for number, (key, inner) in enumerate(value.items()):
            yield (b"," if number else b"") + orjson.dumps(key) + b":"
            yield from _json_parts(inner)
        yield b"}"
    elif isinstance(value, list) and value:
        inside = isinstance(value[0], (list, dict))
        step = max(1, _STEP // max(1, len(value[0]))) if inside else _STEP
        for at in range(0, len(value), step):
            yield b"," if at else b"["
            if step > 1:
                yield orjson.dumps(value[at : at + step])[1:-1]
            else:
                yield from _json_parts(value[at])
        yield b"]"
    else:
        yield orjson.dumps(value)


MakePipeline = Callable[[PipelineHost], LivePipeline]
