"""The served models by name: what they are, how they do, and the way to their engines.

In: engines and `ServeOptions`. Out: metadata, configuration and statistics as the Open Inference
Protocol's JSON values, and `infer`, which queues a decoded request. No transport is known here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deploykit import __version__
from deploykit.core.errors import BadInput, NotFound, Overloaded, Unsupported
from deploykit.core.tensors import TensorSpec, concrete
from deploykit.runtimes.engine import Engine
from deploykit.serving.batcher import Batcher, deliver_here, monotonic_us
from deploykit.serving.metrics import ModelMetrics, prometheus
from deploykit.serving.oip import Request, Signature, signature
from deploykit.serving.options import ServeOptions
from deploykit.serving.payload import Slot, show
from deploykit.serving.policy import BatchPolicy, Pending

log = logging.getLogger(__name__)

VERSION = "1"  # of every model: one file is served under one name
EXTENSIONS = ("binary_tensor_data", "model_configuration", "statistics", "parameters")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RESERVED = (".", "..", "stats")
_PLATFORMS: Mapping[str, tuple[str, str]] = {  # Triton's (platform, backend), which clients know
    "onnxruntime": ("onnxruntime_onnx", "onnxruntime"),
    "tensorrt": ("tensorrt_plan", "tensorrt"),
    "torch": ("pytorch_libtorch", "pytorch"),
}


class ServedModel:
    """One engine under one name, with its batcher and counters."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        options: ServeOptions,
        deliver: Callable[[Sequence[Pending]], None],
        clock_us: Callable[[], int],
    ) -> None:
        self.name = name
        self.engine = engine
        self.max_batch = _max_batch(engine, options.max_batch)
        self.signature: Signature = signature(
            engine.inputs, engine.outputs, self.max_batch, options.max_body_bytes
        )
        self.metrics = ModelMetrics(name, VERSION)
        self._max_delay_us = options.max_delay_us
        self.batcher = Batcher(
            engine,
            BatchPolicy(self.max_batch, options.max_delay_us, options.queue),
            deliver=deliver,
            clock_us=clock_us,
            watcher=self.metrics,
            name=name,
        )

    def warm_up(self) -> None:
        """Run the engine on zeros at batch 1 and `max_batch`, so that the first user need not wait.

        Skipped when an axis other than the batch is dynamic: no size of it is known to be right.
        """
        free = {axis for spec in self.engine.inputs for axis in spec.shape if isinstance(axis, str)}
        batch_axis = self.engine.inputs[0].shape[0] if self.max_batch else None
        if free - {batch_axis}:
            log.info("model '%s': not warmed up, it has dynamic axes %s", self.name, sorted(free))
            return
        for rows in sorted({1, self.max_batch or 1}):
            self.engine(
                {
                    spec.name: np.zeros(concrete(spec, {str(batch_axis): rows}), spec.dtype)
                    for spec in self.engine.inputs
                }
            )

    def metadata(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": self._platform()[0],
            "inputs": [_described(slot) for slot in self.signature.inputs.values()],
            "outputs": [_described(slot) for slot in self.signature.outputs.values()],
        }

    def config(self) -> dict[str, Any]:
        """Triton's ModelConfig; with batching, `dims` leave the batch out."""
        platform, backend = self._platform()
        config: dict[str, Any] = {
            "name": self.name,
            "platform": platform,
            "backend": backend,
            "max_batch_size": self.max_batch,
            "input": [self._configured(slot) for slot in self.signature.inputs.values()],
            "output": [self._configured(slot) for slot in self.signature.outputs.values()],
            "model_transaction_policy": {"decoupled": False},
        }
        if self.max_batch:
            config["dynamic_batching"] = {"max_queue_delay_microseconds": self._max_delay_us}
        return config

    def _platform(self) -> tuple[str, str]:
        runtime = self.engine.runtime.partition(" ")[0]
        return _PLATFORMS.get(runtime, (f"deploykit_{runtime}", runtime))

    def _configured(self, slot: Slot) -> dict[str, Any]:
        dims = _shape(slot.spec)[1 if self.max_batch else 0 :]
        return {"name": slot.spec.name, "data_type": f"TYPE_{slot.datatype}", "dims": dims}


def _max_batch(engine: Engine, asked: int) -> int:
    """Rows per batch; 0 unless every input and output has the same dynamic axis 0."""
    if not engine.inputs or not engine.outputs:
        raise Unsupported("a model without inputs or without outputs cannot be served")
    specs = [*engine.inputs, *engine.outputs]
    if not all(spec.batched for spec in specs) or len({spec.shape[0] for spec in specs}) != 1:
        return 0
    return min(asked, engine.max_batch or asked)


def _shape(spec: TensorSpec) -> list[int]:
    return [-1 if isinstance(axis, str) else axis for axis in spec.shape]


def _described(slot: Slot) -> dict[str, Any]:
    return {"name": slot.spec.name, "datatype": slot.datatype, "shape": _shape(slot.spec)}


class Service:
    """Models by name. `deliver` hands finished requests back, once per batch: see Batcher.

    The engines stay the caller's to close, after `close`.
    """

    def __init__(
        self,
        models: Mapping[str, Engine],
        options: ServeOptions,
        *,
        deliver: Callable[[Sequence[Pending]], None] = deliver_here,
        clock_us: Callable[[], int] = monotonic_us,
    ) -> None:
        if not models:
            raise BadInput("there is no model to serve")
        for name in models:
            if not _NAME.fullmatch(name) or name in _RESERVED:
                raise BadInput(
                    f"'{name}' cannot be the name of a model",
                    hint="1 to 128 letters, digits, '.', '_' or '-'; not '.', '..' or 'stats'",
                )
        self.options = options
        self.draining = False
        self.models: dict[str, ServedModel] = {}
        try:
            for name, engine in models.items():
                self.models[name] = ServedModel(name, engine, options, deliver, clock_us)
        except BaseException:
            self.close(drain=False)
            raise

    def warm_up(self) -> None:
        """Run each engine once or twice; before the first request, as an engine has one caller."""
        for model in self.models.values():
            model.warm_up()

    def find(self, name: str, version: str = VERSION) -> ServedModel:
        """Raises NotFound."""
        hint = f"served here: {', '.join(self.models)} (version {VERSION})"
        model = self.models.get(name)
        if model is None:
            raise NotFound(f"there is no model {show(name)}", hint=hint)
        if version != VERSION:
            raise NotFound(f"model '{name}' has no version {show(version)}", hint=hint)
        return model

    def infer(
        self, model: ServedModel, request: Request, done: Callable[[Pending], None]
    ) -> Pending:
        """Queue a request; `done` gets it with its outputs or its error. Raises Overloaded."""
        if self.draining:
            model.metrics.refused()
            raise Overloaded("the server is shutting down", hint="send the request elsewhere")
        limit_us = self.options.timeout_ms * 1000
        wait_us = min(request.timeout_us or limit_us, limit_us)
        return model.batcher.submit(
            request.feeds, request.rows, request.key, done, wait_us=wait_us, give_up_us=limit_us
        )

    def expire(self) -> None:
        """Answer requests past their deadline; to be called every so often."""
        for model in self.models.values():
            model.batcher.expire()

    @property
    def unanswered(self) -> int:
        return sum(model.batcher.unanswered for model in self.models.values())

    def drain(self) -> None:
        """Take no more requests; those taken are still answered. Not ready from now on."""
        self.draining = True

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> int:
        """End the engines' threads. Returns the requests that stay unanswered: 0 but for a hang."""
        self.draining = True
        return sum(
            model.batcher.close(drain=drain, timeout_s=timeout_s) for model in self.models.values()
        )

    def metadata(self) -> dict[str, Any]:
        return {"name": "deploykit", "version": __version__, "extensions": list(EXTENSIONS)}

    def statistics(self, model: ServedModel | None = None) -> dict[str, Any]:
        chosen = [model] if model else self.models.values()
        return {"model_stats": [each.metrics.statistics() for each in chosen]}

    def index(self) -> list[dict[str, str]]:
        """The repository index: every model, and whether it takes requests."""
        state = "UNAVAILABLE" if self.draining else "READY"
        reason = "the server is shutting down" if self.draining else ""
        return [
            {"name": name, "version": VERSION, "state": state, "reason": reason}
            for name in self.models
        ]

    def prometheus(self) -> str:
        return prometheus(
            [
                model.metrics.samples(model.batcher.waiting, model.batcher.unanswered)
                for model in self.models.values()
            ]
        )
