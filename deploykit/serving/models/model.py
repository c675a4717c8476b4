"""One served model: engines under one name, with their warm-up, queue, counters and description.

Before the first request an engine runs at every expected shape, with zeros as inputs: a batch size
that fails then, or returns other outputs than declared, would fail every request. Engines can be
replaced while requests are served: the old ones finish what they accepted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from deploykit.core.errors import (
    BadInput,
    DeploykitError,
    DeviceLost,
    MissingExtra,
    OutOfMemory,
    Unsupported,
    first_line,
)
from deploykit.core.runtime import RUNTIMES
from deploykit.core.task import Task
from deploykit.core.tensors import TensorSpec, carrier, concrete
from deploykit.engines.batching import looks_batched, prove_rows, why_no_batch
from deploykit.engines.engine import Arrays, Engine
from deploykit.engines.tasks import TaskSteps
from deploykit.pipelines.threads import FairGate
from deploykit.serving.batching.batcher import Batcher, Loop, Splitter, shutting_down
from deploykit.serving.batching.buckets import Buckets
from deploykit.serving.batching.queue import DEFAULT_LEVEL, LEVELS, BatchPolicy, Pending, Watcher
from deploykit.serving.batching.slo import Steering
from deploykit.serving.observe.metrics import ModelMetrics, Sample
from deploykit.serving.oip.request import Request, Signature, Slot, signature
from deploykit.serving.options import VERSION, ServeOptions


def why_not_batched(engine: Engine) -> str:
    """Return why requests are not joined, as far as that is known without a run; else ""."""
    if not engine.inputs or not engine.outputs:
        raise Unsupported("a model without inputs or without outputs cannot be served")
    return why_no_batch(engine.inputs, engine.outputs)


def largest_batch(engine: Engine, max_batch: int) -> int:
    return min(max_batch, engine.max_batch or max_batch)


def check_compatible(name: str, served: Engine, other: Engine) -> None:
    """Raise BadInput unless both have the same inputs and outputs."""
    for kind, have, got in (
        ("input", served.inputs, other.inputs),
        ("output", served.outputs, other.outputs),
    ):
        if tuple(have) != tuple(got):
            one, another = (", ".join(map(str, specs)) or "none" for specs in (have, got))
            raise BadInput(
                f"model '{name}': the {kind}s of one engine are {one}, those of another {another}",
                hint="serve another model under another name",
            )


log = logging.getLogger(__name__)

BETWEEN_US = 100_000  # the time for all batch sizes that no option names
AGAIN_US = 50_000  # shorter runs are repeated where times matter: a first run takes longer
SHORT_US = 2000
_RUNS = 3
_LEAST_ITEMS = 64
_ALONE = "requests are served one at a time: {}"


_PLATFORMS: Mapping[str, tuple[str, str]] = {  # Triton's names (platform, backend)
    "onnxruntime": ("onnxruntime_onnx", "onnxruntime"),
    "tensorrt": ("tensorrt_plan", "tensorrt"),
    "torch": ("pytorch_libtorch", "pytorch"),
}


class InUse(NamedTuple):
    """The file in use, as `Artefact.facts` describes it; None for an engine without a file.

    `generation`: 1, and one more for each reload. `loaded_s`: seconds since 1970.
    """

    file: Mapping[str, Any] | None
    generation: int
    loaded_s: float

    @classmethod
    def of(cls, engine: Engine, generation: int) -> InUse:
        return cls(engine.source.facts if engine.source else None, generation, time.time())

    @property
    def labels(self) -> dict[str, str]:
        file = self.file or {"name": "", "sha256": ""}
        return {"file": file["name"], "sha256": file["sha256"]}

    @property
    def parameters(self) -> dict[str, str]:
        """Return the labels and the time of loading, for the model's metadata."""
        loaded = datetime.fromtimestamp(self.loaded_s, timezone.utc).isoformat(timespec="seconds")
        return {**self.labels, "generation": str(self.generation), "loaded": loaded}


class ModelTask:
    """The task that a file's manifest declares; empty without a manifest.

    Raises BadInput for a task that does not fit the model. If a package for the task is missing,
    the model is served all the same, for clients that send tensors.
    """

    def __init__(self, name: str, engine: Engine) -> None:
        manifest = engine.source.manifest if engine.source else None
        self.task: Task | None = manifest.task if manifest else None
        self.note = ""
        self.ready = False  # whether the model takes images or sentences
        self._steps: TaskSteps | None = None
        self._why: DeploykitError = Unsupported(
            f"model '{name}' has no task, so it takes only tensors: POST /v2/models/{name}/infer",
            hint="export it with `task`, so that it takes images or sentences",
        )
        if self.task is None or engine.source is None:
            return
        try:
            folder = engine.source.path.parent
            self._steps = TaskSteps(self.task, engine.inputs, engine.outputs, folder)
            self.ready = True
        except MissingExtra as exc:
            self._why = exc
            self.note = f"takes only tensors: {exc.message}; {exc.hint}"
            log.warning("model '%s': %s", name, self.note)

    @property
    def steps(self) -> TaskSteps:
        """Return the steps. Raises Unsupported or MissingExtra if there are none."""
        if self._steps is None:
            raise self._why
        return self._steps

    @property
    def parameters(self) -> dict[str, str]:
        """Return the task as strings, for the model's metadata."""
        if self.task is None or self._steps is None:
            return {}
        return {"task": self.task.kind, "takes": "text" if self.task.image is None else "image"}

    @property
    def facts(self) -> dict[str, Any] | None:
        """Return the parameters with the number of labels, for the dashboard."""
        found = self.parameters
        return {**found, "labels": len(self.task.labels)} if found and self.task else None


def warm_up(
    name: str,
    engine: Engine,
    clock_us: Callable[[], int],
    *,
    max_batch: int,
    lengths: Sequence[Mapping[str, int]] = ({},),
    again_us: int = 0,
) -> dict[int, int]:
    """Run the engine of a model at every expected size, with zeros as inputs.

    Args:
        max_batch: the most rows; 0 if axis 0 is not the batch.
        lengths: the combinations of sizes of the axes that have buckets.
        again_us: runs are repeated, as long as they take less on average, and the shortest counts:
            other programs can make one run long.

    Returns µs by rows at the longest lengths; nothing if the size of an axis is unknown. An error
    of the engine names model and shape; one that is not a DeploykitError becomes Unsupported.
    """
    joined = max_batch > 0
    batch_axis = str(engine.inputs[0].shape[0]) if joined else None
    required, powers = sorted({1, max_batch or 1}), [1 << n for n in range(1, 32)]
    between = [rows for rows in powers if rows < max_batch]
    axes = {axis for spec in engine.inputs for axis in spec.shape if isinstance(axis, str)}
    known = axes <= {batch_axis, *lengths[0]}
    zeros = partial(_zeros, engine, batch_axis)
    try:
        largest_first = sorted((*required, *between), reverse=True)
        each = (zeros(rows, sizes) for sizes in reversed(lengths) for rows in largest_first)
        engine.prepare(each if known else (), joined=joined)
    except OutOfMemory as exc:
        raise OutOfMemory(f"model '{name}': {exc.message}", hint=exc.hint) from exc
    if not known:
        try:
            engine(zeros(1, lengths[-1]))
        except (DeviceLost, OutOfMemory):
            raise
        except Exception as exc:  # noqa: BLE001 - the first request may have a size that it takes
            log.info("model '%s' was not warmed up: %s", name, first_line(exc))
        return {}
    check = Splitter(engine.outputs, joined=joined).check
    times, spent_us = dict[int, int](), 0
    for rows in (*required, *between):
        if rows in between:
            spent_us += 2 * max([us for size, us in times.items() if size < rows])
            if spent_us > BETWEEN_US:
                break
        for sizes in lengths:
            feeds, found = zeros(rows, sizes), list[int]()
            while not found or (len(found) < _RUNS and sum(found) < _RUNS * again_us):
                started_us = clock_us()
                try:
                    check(engine(feeds), rows)
                except Exception as exc:
                    raise _cannot_run(name, feeds, exc) from exc
                found.append(clock_us() - started_us)
            times[rows] = min(found)
    if engine.trim():
        engine(zeros(1, lengths[0]))
    return times


def _zeros(engine: Engine, batch_axis: str | None, rows: int, sizes: Mapping[str, int]) -> Arrays:
    shapes = {each: concrete(each, {**sizes, str(batch_axis): rows}) for each in engine.inputs}
    return {
        each.name: np.full(shape, "", object)
        if each.dtype == "string"
        else np.zeros(shape, carrier(each.dtype))
        for each, shape in shapes.items()
    }


def _cannot_run(name: str, feeds: Arrays, exc: Exception) -> DeploykitError:
    shapes = ", ".join(f"{each} {list(array.shape)}" for each, array in feeds.items())
    why = f"model '{name}' cannot run {shapes}:"
    if isinstance(exc, DeploykitError):
        return type(exc)(f"{why} {exc.message}", hint=exc.hint)
    return Unsupported(f"{why} {first_line(exc)}", hint="try a smaller `max_batch`")


def short_rows(times: Mapping[int, int]) -> float:
    """Return the most rows that ran within SHORT_US, by `warm_up`; inf if all did."""
    short = [rows for rows, us in times.items() if us <= SHORT_US]
    return math.inf if times and len(short) == len(times) else max(short, default=0)


class ServedModel:
    """Engines under one name, with their queue and counters. Raises BadInput and Unsupported.

    `batcher` cancels requests, answers those past their deadline, and ends the engines' threads.
    """

    def __init__(
        self,
        name: str,
        engines: Sequence[Engine],
        options: ServeOptions,
        loop: Loop,
    ) -> None:
        """Set up the model, not yet warmed up."""
        self.name = name
        self.engines = tuple(engines)
        self._options = options
        self.task = ModelTask(name, engines[0])
        self.not_batched = why_not_batched(engines[0])
        # the reason, but only where the names of the axes make users expect a batch
        self._dependent = self.not_batched if looks_batched(engines[0]) else ""
        self._set_batch()
        # images or sentences under way: two batches, so that no engine waits; more would keep the
        # engines, and the event loop, from other clients
        self.items = FairGate(max(_LEAST_ITEMS, 2 * self.max_batch) * len(engines))
        self.buckets = _buckets(name, engines[0], options) if self.max_batch else None
        self.metrics = ModelMetrics(name)
        self._watchers: list[Watcher] = [self.metrics]
        self._loop, self._clock_us = loop, loop.clock_us
        self.warm_up_s = 0.0
        self.remark: Callable[[], str | None] = lambda: None  # returns an additional note, or None
        self.draining = False  # only admitted requests are still accepted
        self._limit_us = options.timeout_ms * 1000
        self.in_use = InUse.of(self.engines[0], 1)
        self._set_batcher()

    # -- life ----------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run every engine at every expected shape, before the first request.

        First prove that requests may be joined; a model that fails is served one request at a time.
        Also check that padding to buckets changes no output. An error names the shape that failed.
        """
        begun_s = time.monotonic()
        why = self._why_dependent(self.engines[0])
        if why:
            self._stop_batching(why)
        if self._dependent:
            log.warning("model '%s': %s", self.name, _ALONE.format(self._dependent))
        self.batcher.inline_max_rows = self._warm(self.engines, self.batcher.steering)
        self.warm_up_s = time.monotonic() - begun_s

    def replace(self, engines: Sequence[Engine], wanted: Callable[[], bool] = lambda: True) -> None:
        """Warm up `engines` and serve with them from now on, if they are still `wanted` then.

        The previous ones answer what they accepted and are closed then; `batcher.close` closes the
        new ones. Raises BadInput for incompatible engines, and the errors of a warm-up: then
        nothing has changed, and the caller still owns the new engines.
        """
        for engine in engines:
            check_compatible(self.name, self.engines[0], engine)
            if engine.max_batch is not None and engine.max_batch < self.max_batch:
                raise BadInput(
                    f"model '{self.name}': the new engine takes batches of {engine.max_batch} "
                    f"at most, the one in use takes {self.max_batch}"
                )
        task, why = ModelTask(self.name, engines[0]), self._why_dependent(engines[0])
        if why:
            raise BadInput(
                f"model '{self.name}': requests to the engine in use are joined, those to the new "
                f"one may not be: {why}",
                hint="start the server again to serve it one request at a time",
            )
        steering = self._new_steering(len(engines))
        inline_max_rows = self._warm(engines, steering)
        in_use = InUse.of(engines[0], self.in_use.generation + 1)
        if not wanted():
            raise shutting_down()
        self.batcher.replace(engines, steering, inline_max_rows)
        self.engines, self.in_use, self.task = tuple(engines), in_use, task

    def why_not_ready(self) -> str | None:
        """Return the reason in one sentence; None if requests are accepted and can be answered."""
        batcher = self.batcher
        if batcher.lost:
            return f"model '{self.name}': the GPU is lost to this server, which will stop"
        if batcher.hung == len(self.engines):
            return f"model '{self.name}': the engine does not return from a request"
        return None

    @property
    def device(self) -> str:
        return self.engines[0].device

    @property
    def notes(self) -> tuple[str, ...]:
        """Return messages for the operator: settings that could not be met, engines that hang."""
        found = [note for engine in self.engines for note in engine.notes]
        if hung := self.batcher.hung:
            found.append(f"{hung} of {len(self.engines)} engines do not return from a request")
        if self._dependent:
            found.append(_ALONE.format(self._dependent))
        found.append(misplaced_pairs(self.engines[0]))
        found += [self.remark() or "", self.task.note]
        return tuple(dict.fromkeys(filter(None, found)))

    # -- requests ------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        done: Callable[[Pending], None],
        *,
        trace: str | None = None,
        started_us: int | None = None,
        admitted: bool = False,
        sender: Any = None,
    ) -> Pending:
        """Queue a request; `done` is called with its outputs or its error set.

        `started_us`: when its decoding began. `admitted`: it arrived before the shutdown began and
        is still answered. `sender`: its `peer` takes turns with others. Raises Overloaded,
        and BadInput for an input longer than its buckets.
        """
        feeds, rows, key, _, name, wait_us, level, _ = request
        now_us, limit_us = self._clock_us(), self._limit_us
        if started_us is None:
            started_us = now_us
        if self.draining and not admitted:
            raise self.refuse(shutting_down(), started_us, trace, name)
        if self.buckets is not None:
            key = self.buckets.key(key)
        if not wait_us or wait_us > limit_us:
            wait_us = limit_us
        due_us, end_us, waited_us = now_us + wait_us, now_us + limit_us, now_us - started_us
        pending = Pending(
            feeds, rows, key, done, now_us, due_us, end_us, level, trace, waited_us, name, sender
        )
        self.batcher.submit(pending)
        return pending

    def refuse(
        self, error: DeploykitError, started_us: int, trace: str | None, request_id: str | None
    ) -> DeploykitError:
        """Record a request that does not reach the queue; return its error."""
        request = Pending(
            {}, 0, (), lambda _: None, started_us, 0, 0, trace=trace, error=error, id=request_id
        )
        for watcher in self._watchers:
            watcher.record_refusal(request)
        return error

    @property
    def unanswered(self) -> int:
        return self.batcher.unanswered

    def watch(self, watcher: Watcher) -> None:
        self._watchers.append(watcher)

    # -- description ---------------------------------------------------------------------------

    @property
    def platform(self) -> tuple[str, str]:
        """Return Triton's platform and backend."""
        runtime = self.engines[0].runtime.partition(" ")[0]
        return _PLATFORMS.get(runtime, (f"deploykit_{runtime}", runtime))

    def metadata(self) -> dict[str, Any]:
        """Return the model metadata; `parameters` has device, batching, file and notes."""
        inputs, outputs = self.signature.inputs, self.signature.outputs
        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": self.platform[0],
            "inputs": [_describe(slot) for slot in inputs.values()],
            "outputs": [_describe(slot) for slot in outputs.values()],
            "parameters": {
                "device": self.device,
                "batching": f"off: {self.not_batched}" if self.not_batched else "on",
                "notes": "; ".join(self.notes),
                **self.task.parameters,
                **self.in_use.parameters,
            },
        }

    def config(self) -> dict[str, Any]:
        """Return Triton's ModelConfig; with batching, `dims` exclude the batch axis."""
        kind, _, number = self.device.partition(":")
        group: dict[str, Any] = {"name": f"{self.name}_0", "count": len(self.engines)}
        group |= (
            {"kind": "KIND_GPU", "gpus": [int(number or 0)]}
            if kind == "cuda"
            else {"kind": "KIND_CPU"}
        )
        batched = self.max_batch > 0
        parameters = {**self.task.parameters, **self.in_use.parameters}
        found: dict[str, Any] = {
            "name": self.name,
            "platform": self.platform[0],
            "backend": self.platform[1],
            "max_batch_size": self.max_batch,
            "input": [_config_entry(slot, batched) for slot in self.signature.inputs.values()],
            "output": [_config_entry(slot, batched) for slot in self.signature.outputs.values()],
            "instance_group": [group],
            "model_transaction_policy": {"decoupled": False},
            "parameters": {name: {"string_value": value} for name, value in parameters.items()},
        }
        if batched:
            found["dynamic_batching"] = {
                "preferred_batch_size": [],
                "max_queue_delay_microseconds": self._options.max_delay_us,
                "priority_levels": LEVELS,
                "default_priority_level": DEFAULT_LEVEL,
            }
        return found

    def samples(self) -> list[Sample]:
        """Return the counters and the current settings, for Prometheus."""
        batcher, engine = self.batcher, self.engines[0]
        policy, labels = batcher.policy, {"model": self.name, "version": VERSION}
        about = {"runtime": engine.runtime, "device": engine.device, **self.in_use.labels}
        values = {
            "deploykit_model_notes": len(self.notes),
            "deploykit_model_ready": self.why_not_ready() is None,
            "deploykit_model_batched": self.max_batch > 0,
            "deploykit_model_generation": self.in_use.generation,
            "deploykit_model_loaded_timestamp_seconds": self.in_use.loaded_s,
            "deploykit_engines": batcher.engines,
            "deploykit_engines_hung": batcher.hung,
            "deploykit_batch_limit_rows": max(1, policy.max_batch),
            "deploykit_queue_limit_rows": policy.queue_rows,
            "deploykit_batch_delay_seconds": policy.max_delay_us / 1e6,
        }
        return [
            *self.metrics.samples(batcher.waiting, batcher.unanswered),
            Sample("deploykit_model_info", {**labels, **about}, 1),
            *(Sample(name, labels, value) for name, value in values.items() if value is not None),
        ]

    # -- set-up ---------------------------------------------------------------------------------

    def _set_batch(self) -> None:
        engine, options = self.engines[0], self._options
        self.max_batch = 0 if self.not_batched else largest_batch(engine, options.max_batch)
        self.signature: Signature = signature(
            engine.inputs, engine.outputs, self.max_batch, options.max_body_bytes
        )
        self.largest_output_bytes = largest_output_bytes(self.signature)

    def _why_dependent(self, engine: Engine) -> str:
        """Return why requests may not be joined, by the engine's manifest or by a run.

        Return "" if they may be, or if batching is off.
        """
        if not self.max_batch or self._options.assume_batched:
            return ""
        rows, proof = largest_batch(engine, self._options.max_batch), engine.batching
        if proof is None or (proof.passed and rows > max(proof.rows, default=0)):
            sizes = self.buckets.sizes()[0] if self.buckets else {}
            proof = prove_rows(engine, rows, sizes=sizes, samples=engine.examples)
        return "" if proof.passed else proof.why

    def _stop_batching(self, why: str) -> None:
        """Serve one request at a time from now on. Called before the first request."""
        if self.buckets is not None:
            raise BadInput(
                f"model '{self.name}': `buckets` join requests, and its rows may not be: {why}",
                hint="serve it without `buckets`",
            )
        self.not_batched = self._dependent = why
        self._set_batch()
        before = self.batcher
        self._set_batcher()
        before.close()

    def _policy(self) -> BatchPolicy:
        options = self._options
        hung_us = 2000 * options.timeout_ms
        return BatchPolicy(self.max_batch, options.max_delay_us, options.queue, hung_us=hung_us)

    def _new_steering(self, engines: int) -> Steering | None:
        slo_ms = self._options.slo_ms
        return Steering(round(slo_ms * 1000), self._policy(), engines) if slo_ms else None

    def _set_batcher(self) -> None:
        self.batcher = Batcher(
            self.engines,
            self._policy(),
            self._loop,
            watchers=self._watchers,
            name=self.name,
            buckets=self.buckets,
            steering=self._new_steering(len(self.engines)),
        )

    def _warm(self, engines: Sequence[Engine], steering: Steering | None) -> float:
        """Run the engines; return the most rows of a batch on the loop's thread."""
        lengths = self.buckets.sizes() if self.buckets else [{}]
        inline = (
            self._loop.call_soon is not None and steering is None and not self._options.max_delay_us
        )
        run = partial(warm_up, self.name, max_batch=self.max_batch, lengths=lengths)
        inline_max_rows = math.inf
        for engine in engines:
            if self.buckets is not None:
                self.buckets.check(engine, self.max_batch)
            steady = inline and engine.steady
            again_us = 5 * SHORT_US if steady else AGAIN_US if steering else 0
            times = run(engine, self._clock_us, again_us=again_us)
            inline_max_rows = min(inline_max_rows, short_rows(times)) if steady else 0
            if steering is not None:
                for rows, taken_us in sorted(times.items()):
                    steering.record_time(rows, taken_us)
        if misplaced := misplaced_pairs(engines[0]):
            log.info("model '%s': %s", self.name, misplaced)
        return inline_max_rows


def _buckets(name: str, engine: Engine, options: ServeOptions) -> Buckets | None:
    """Return the buckets of the options for the axes that this model has."""
    axes = {axis for spec in engine.inputs for axis in spec.shape[1:]}
    lengths = {axis: found for axis, found in options.lengths.items() if axis in axes}
    if not lengths:
        return None
    return Buckets(name, engine.inputs, engine.outputs, lengths, options.pad)


def misplaced_pairs(engine: Engine) -> str:
    """Return a note if the manifest shows that the engine computes INT8 nodes in float32.

    ONNX Runtime finds its integer kernels only between pairs that are placed for a CPU.
    """
    manifest = engine.source.manifest if engine.source else None
    record = manifest.evidence.quantize if manifest else None
    if manifest is None or record is None or not manifest.precision.get("int8"):
        return ""
    made, runs = (RUNTIMES.get(each) for each in (record.runtime, engine.runtime.split()[0]))
    if made is None or runs is None or made.scales_outputs or not runs.scales_outputs:
        return ""
    if engine.device != "cpu" or manifest.built_on:
        return ""
    return (
        f"its INT8 pairs are placed for {made.title}: {runs.title} computes in float32, slower "
        f"than the model before; move them with: deploykit build {engine.source} --profile cpu"
    )


def largest_output_bytes(signature: Signature) -> float:
    """Return the most bytes of an output; inf for strings and for other dynamic axes."""
    most = 0
    for slot in signature.outputs.values():
        first = [signature.max_batch] if signature.max_batch else []
        axes = [*first, *slot.spec.shape[len(first) :]]
        if not slot.item_bytes or any(isinstance(axis, str) for axis in axes):
            return math.inf
        most = max(most, math.prod(map(int, axes)) * slot.dtype.itemsize)
    return most


def _config_entry(slot: Slot, batched: bool) -> dict[str, Any]:
    dims = _shape(slot.spec)[1 if batched else 0 :]
    kind = "STRING" if slot.datatype == "BYTES" else slot.datatype
    return {"name": slot.spec.name, "data_type": f"TYPE_{kind}", "dims": dims}


def _shape(spec: TensorSpec) -> list[int]:
    return [-1 if isinstance(axis, str) else axis for axis in spec.shape]


def _describe(slot: Slot) -> dict[str, Any]:
    return {"name": slot.spec.name, "datatype": slot.datatype, "shape": _shape(slot.spec)}
