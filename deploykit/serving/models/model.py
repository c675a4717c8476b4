"""One served model: engines under one name, with their queue, counters and description.

Engines can be replaced while requests are served: the old ones finish what they accepted.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.machine import usable_cores
from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.engine import Engine
from deploykit.serving.batching.batcher import Batcher, Retired, shutting_down
from deploykit.serving.batching.buckets import Buckets
from deploykit.serving.batching.delivery import CallSoon, countdown
from deploykit.serving.batching.policy import (
    DEFAULT_LEVEL,
    LEVELS,
    BatchPolicy,
    Pending,
    Watcher,
    Watchers,
)
from deploykit.serving.batching.slo import Steering
from deploykit.serving.models.compatibility import check_compatible, largest_batch
from deploykit.serving.models.warmup import AGAIN_US, SHORT_US, WarmUp, short_rows
from deploykit.serving.observe.metrics import ModelMetrics
from deploykit.serving.observe.prometheus import Sample
from deploykit.serving.oip.request import Request, Signature, signature
from deploykit.serving.oip.tensors import Slot
from deploykit.serving.options import VERSION, ServeOptions

log = logging.getLogger(__name__)

SPIN_US = 100  # after a batch; a single client got 10 to 20 % more replies, on 2 cores
_PLATFORMS: Mapping[str, tuple[str, str]] = {  # Triton's names (platform, backend)
    "onnxruntime": ("onnxruntime_onnx", "onnxruntime"),
    "tensorrt": ("tensorrt_plan", "tensorrt"),
    "torch": ("pytorch_libtorch", "pytorch"),
}


class ServedModel:
    """Engines under one name, with their queue and counters. Raises BadInput and Unsupported."""

    def __init__(
        self,
        name: str,
        engines: Sequence[Engine],
        options: ServeOptions,
        deliver: Callable[[Sequence[Pending]], None],
        clock_us: Callable[[], int],
        call_soon: CallSoon | None = None,
    ) -> None:
        self.name = name
        self.engines = tuple(engines)
        if not engines:
            raise BadInput(f"model '{name}' has no engine")
        for engine in engines[1:]:
            check_compatible(name, engines[0], engine)
        self.max_batch = largest_batch(engines[0], options.max_batch)
        self.signature: Signature = signature(
            engines[0].inputs, engines[0].outputs, self.max_batch, options.max_body_bytes
        )
        self.buckets = _buckets(name, engines[0], options) if self.max_batch else None
        self.metrics = ModelMetrics(name, VERSION)
        self._watcher: Watcher = self.metrics
        self._options = options
        self._deliver = deliver
        self._clock_us = clock_us
        self._call_soon = call_soon
        self._preferred = tuple(n for n in sorted(set(options.preferred)) if n <= self.max_batch)
        self._warm_notes: tuple[str, ...] = ()
        self.remark: Callable[[], str | None] = lambda: None  # an additional note, or None
        self._swap = threading.Lock()  # for replacements and the end
        self.draining = False  # only admitted requests are still accepted
        self._limit_us = options.timeout_ms * 1000
        self._closed = False
        self._replaced: list[Batcher] = []  # replaced, and perhaps still running
        self._steering = self._new_steering(len(engines))
        self.batcher = self._new_batcher(self.engines, self._steering)

    # -- life ----------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run every engine at every expected shape, before the first request.

        Also checks that padding to buckets changes no output. An error names the shape that failed.
        """
        self._warm_notes, self.batcher.inline_max_rows = self._warm(self.engines, self._steering)

    def replace(self, engines: Sequence[Engine]) -> None:
        """Warm up `engines` and serve with them from now on.

        The previous ones answer what they accepted and are closed then; `close` closes the new
        ones. Raises BadInput for incompatible engines, and what a warm-up raises: then nothing
        has changed, and the caller still owns the new engines.
        """
        if not engines:
            raise BadInput(f"model '{self.name}': no engine was given to replace it")
        for engine in engines:
            check_compatible(self.name, self.engines[0], engine)
            if engine.max_batch is not None and engine.max_batch < self.max_batch:
                raise BadInput(
                    f"model '{self.name}': the new engine takes batches of {engine.max_batch} "
                    f"at most, the one in use takes {self.max_batch}"
                )
        steering = self._new_steering(len(engines))
        notes, inline_max_rows = self._warm(engines, steering)
        with self._swap:
            if self._closed:
                raise shutting_down()
            before = self.batcher
            self._replaced = [each for each in self._replaced if not each.ended] + [before]
            self.batcher = self._new_batcher(engines, steering, close_engines=True)
            self.batcher.inline_max_rows = inline_max_rows
            self.engines, self._steering, self._warm_notes = tuple(engines), steering, notes
        before.retire()

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> int:
        """End the engines' threads. Returns the number of unanswered requests."""
        with self._swap:
            self._closed = True
        left_s, batchers = countdown(timeout_s), (self.batcher, *self._replaced)
        return sum(each.close(drain=drain, timeout_s=left_s()) for each in batchers)

    def why_not_ready(self) -> str | None:
        """The reason in one sentence; None if it accepts requests and can answer them."""
        batcher = self.batcher
        if batcher.lost:
            return f"model '{self.name}': the GPU is lost to this server, which will stop"
        if batcher.hung == len(self.engines):
            return f"model '{self.name}': the engine does not return from a request"
        return None

    @property
    def device(self) -> str:
        """Such as "cpu" or "cuda:0"."""
        return self.engines[0].device

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the operator: settings that could not be met, and engines that hang."""
        found = [note for engine in self.engines for note in engine.notes]
        hung = self.batcher.hung
        if hung:
            found.append(f"{hung} of {len(self.engines)} engines do not return from a request")
        remark = self.remark()
        return tuple(dict.fromkeys([*found, *self._warm_notes, *([remark] if remark else [])]))

    # -- requests ------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        done: Callable[[Pending], None],
        *,
        trace: str | None = None,
        started_us: int | None = None,
        admitted: bool = False,
    ) -> Pending:
        """Queue a request; `done` gets it with its outputs or its error.

        `started_us`: when its decoding began. `admitted`: it arrived before the shutdown began and
        is still answered. Raises Overloaded, and BadInput for an input longer than its buckets.
        """
        if self.draining and not admitted:
            self.metrics.record_refusal()
            raise shutting_down()
        key = request.key if self.buckets is None else self.buckets.key(request.key)
        limit_us, wait_us = self._limit_us, request.timeout_us
        if wait_us is None or wait_us > limit_us:
            wait_us = limit_us
        now_us = self._clock_us()
        pending = Pending(
            request.feeds, request.rows, key, done, now_us, now_us + wait_us, now_us + limit_us,
            request.priority, trace, 0 if started_us is None else now_us - started_us,
        )  # fmt: skip
        while True:
            try:
                self.batcher.submit(pending)
                return pending
            except Retired:  # replaced in this moment: `self.batcher` is the new one already
                continue

    def cancel(self, pending: Pending) -> bool:
        """Cancel a waiting request. False if an engine is running it or has run it."""
        return any(batcher.cancel(pending) for batcher in (self.batcher, *self._replaced))

    def expire(self) -> None:
        """Answer requests past their deadline; called every so often."""
        for batcher in (*self._replaced, self.batcher):
            batcher.expire()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return sum(batcher.waiting for batcher in (self.batcher, *self._replaced))

    @property
    def unanswered(self) -> int:
        """Requests accepted and not yet delivered."""
        return sum(batcher.unanswered for batcher in (self.batcher, *self._replaced))

    def watch(self, watcher: Watcher) -> None:
        """Add a watcher."""
        self._watcher = self.batcher.watcher = Watchers(self._watcher, watcher)

    # -- description ---------------------------------------------------------------------------

    def metadata(self) -> dict[str, Any]:
        """The protocol's model metadata; `parameters` has the device and the notes."""
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": self._platform()[0],
            "inputs": [_describe(slot) for slot in self.signature.inputs.values()],
            "outputs": [_describe(slot) for slot in self.signature.outputs.values()],
            "parameters": {"device": self.device, "notes": "; ".join(self.notes)},
        }

    def config(self) -> dict[str, Any]:
        """Triton's ModelConfig; with batching, `dims` exclude the batch axis."""
        platform, backend = self._platform()
        config: dict[str, Any] = {
            "name": self.name,
            "platform": platform,
            "backend": backend,
            "max_batch_size": self.max_batch,
            "input": [self._config_entry(slot) for slot in self.signature.inputs.values()],
            "output": [self._config_entry(slot) for slot in self.signature.outputs.values()],
            "instance_group": [_instances(self.name, self.engines)],
            "model_transaction_policy": {"decoupled": False},
        }
        if self.max_batch:
            config["dynamic_batching"] = {
                "preferred_batch_size": list(self._preferred),
                "max_queue_delay_microseconds": self._options.max_delay_us,
                "priority_levels": LEVELS,
                "default_priority_level": DEFAULT_LEVEL,
            }
        return config

    def _platform(self) -> tuple[str, str]:
        runtime = self.engines[0].runtime.partition(" ")[0]
        return _PLATFORMS.get(runtime, (f"deploykit_{runtime}", runtime))

    def _config_entry(self, slot: Slot) -> dict[str, Any]:
        dims = _shape(slot.spec)[1 if self.max_batch else 0 :]
        return {"name": slot.spec.name, "data_type": _data_type(slot), "dims": dims}

    def samples(self) -> list[Sample]:
        """For Prometheus: the counters, and the settings as they are now."""
        batcher, engine = self.batcher, self.engines[0]
        policy, labels = batcher.policy, {"model": self.name, "version": VERSION}
        about = {"runtime": engine.runtime, "device": engine.device}
        values = {
            "deploykit_model_notes": len(self.notes),
            "deploykit_model_ready": self.why_not_ready() is None,
            "deploykit_engines": len(self.engines),
            "deploykit_engines_hung": batcher.hung,
            "deploykit_batch_limit_rows": max(1, policy.max_batch),
            "deploykit_queue_limit_rows": policy.queue_rows,
            "deploykit_batch_delay_seconds": policy.max_delay_us / 1e6,
        }
        return [
            *self.metrics.samples(self.waiting, self.unanswered),
            Sample("deploykit_model_info", {**labels, **about}, 1),
            *(Sample(name, labels, value) for name, value in values.items() if value is not None),
        ]

    # -- set-up ---------------------------------------------------------------------------------

    def _policy(self) -> BatchPolicy:
        options = self._options
        return BatchPolicy(self.max_batch, options.max_delay_us, options.queue, self._preferred)

    def _new_steering(self, engines: int) -> Steering | None:
        slo_ms = self._options.slo_ms
        return Steering(round(slo_ms * 1000), self._policy(), engines) if slo_ms else None

    def _new_batcher(
        self, engines: Sequence[Engine], steering: Steering | None, *, close_engines: bool = False
    ) -> Batcher:
        return Batcher(
            engines,
            self._policy(),
            deliver=self._deliver,
            clock_us=self._clock_us,
            watcher=self._watcher,
            name=self.name,
            buckets=self.buckets,
            steering=steering,
            hung_us=2000 * self._options.timeout_ms,
            close_engines=close_engines,
            call_soon=self._call_soon,
            spin_us=SPIN_US if usable_cores() > 1 else 0,
        )

    def _warm(
        self, engines: Sequence[Engine], steering: Steering | None
    ) -> tuple[tuple[str, ...], float]:
        """Returns notes, and the largest batch to run on the event loop's thread."""
        lengths = self.buckets.sizes() if self.buckets else [{}]
        notes: tuple[str, ...] = ()
        inline = self._call_soon is not None and steering is None and not self._options.max_delay_us
        inline_max_rows = math.inf
        for engine in engines:
            if self.buckets is not None:
                self.buckets.check(engine, self.max_batch)
            warm_up = WarmUp(
                self.name,
                engine,
                self._clock_us,
                max_batch=self.max_batch,
                preferred=self._preferred,
                lengths=lengths,
            )
            steady = inline and engine.steady
            again_us = 5 * SHORT_US if steady else AGAIN_US if steering else 0
            times, notes = warm_up.run(again_us=again_us)
            inline_max_rows = min(inline_max_rows, short_rows(times)) if steady else 0
            if steering is not None:
                for rows, taken_us in times.items():
                    steering.record_time(rows, taken_us, self._clock_us())
        for note in notes:
            log.info("model '%s': %s", self.name, note)
        return notes, inline_max_rows


def _buckets(name: str, engine: Engine, options: ServeOptions) -> Buckets | None:
    """The buckets of the options whose axes this model has."""
    axes = {axis for spec in engine.inputs for axis in spec.shape[1:]}
    lengths = {axis: found for axis, found in options.buckets.items() if axis in axes}
    if not lengths:
        return None
    return Buckets(name, engine.inputs, engine.outputs, lengths, options.pad)


def _instances(name: str, engines: Sequence[Engine]) -> dict[str, Any]:
    kind, _, number = engines[0].device.partition(":")
    group: dict[str, Any] = {"name": f"{name}_0", "count": len(engines)}
    if kind == "cuda":
        return {**group, "kind": "KIND_GPU", "gpus": [int(number or 0)]}
    return {**group, "kind": "KIND_CPU"}


def _shape(spec: TensorSpec) -> list[int]:
    return [-1 if isinstance(axis, str) else axis for axis in spec.shape]


def _data_type(slot: Slot) -> str:
    return "TYPE_STRING" if slot.datatype == "BYTES" else f"TYPE_{slot.datatype}"


def _describe(slot: Slot) -> dict[str, Any]:
    return {"name": slot.spec.name, "datatype": slot.datatype, "shape": _shape(slot.spec)}
