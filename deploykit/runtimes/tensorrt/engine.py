"""A TensorRT engine as ours: its tensors, its optimisation profiles, its contexts as `Work`.

In: the `tensorrt` module (10.3 to 11.4, one path), a plan that `plan.check_plan` let through and a
CUDA driver. Out: `TensorRtEngine`. TensorRT answers None or False and says why in its log only, so
the log is kept and its words become our errors.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, Unsupported, first_line
from deploykit.core.manifest import Manifest
from deploykit.runtimes.cuda.errors import cuda_error, out_of_memory
from deploykit.runtimes.cuda.execution import Pipeline, Ticket, in_turn
from deploykit.runtimes.cuda.memory import Driver, Shape
from deploykit.runtimes.engine import Arrays, BaseEngine, check_feeds
from deploykit.runtimes.tensorrt.compatibility import Plan
from deploykit.runtimes.tensorrt.log import logger
from deploykit.runtimes.tensorrt.tensors import (
    Ranges,
    axis_limits,
    choose_profile,
    max_batch,
    misfit,
    optimisation_profiles,
    specs,
)

if TYPE_CHECKING:
    import tensorrt as trt

_CUDA_SAID = re.compile(r"Cuda (?:Runtime|Driver)[^(]*\((.+?)\)", re.IGNORECASE)
_WHERE = re.compile(r"^\[.*?\]|\.?\s*In \w+ at \S+:\d+\)?$")  # in TensorRT's own source


class TensorRtEngine(BaseEngine):
    """One plan on one GPU. `submit` and `map` keep up to `slots` calls under way.

    `graphs`: batch sizes to capture as CUDA graphs; each has a context of its own, as a graph holds
    only while its context is left as it was. `limits`: smallest and largest size by dynamic axis.
    `notes`: warnings about the plan, and why a graph was refused. Raises BadInput, Unsupported,
    OutOfMemory.
    """

    def __init__(
        self,
        nv: Any,
        driver: Driver,
        path: Path,
        plan: Plan,
        manifest: Manifest | None,
        *,
        slots: int = 2,
        graphs: Sequence[int] = (),
        cuda_texts: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self.device, self._nv, self._driver = path, driver.device, nv, driver
        self.runtime = f"tensorrt {nv.__version__}"
        driver.use()
        free, total = driver.memory()
        if len(plan.content) > free:
            raise out_of_memory(f"{path}: {driver.device}", len(plan.content), free, total)
        self._says = Says(nv, path, driver.device, cuda_texts or {})
        self._engine: trt.ICudaEngine | None
        self._runtime, self._engine = _deserialize(nv, plan, self._says)
        self.inputs, self.outputs = specs(self._engine, path, manifest)
        self.profiles = optimisation_profiles(self._engine, self.inputs)
        self.max_batch = max_batch(self.profiles, self.inputs)
        self.limits = axis_limits(self.profiles, self.inputs)
        self._plan_notes = plan.notes
        self._pipeline = Pipeline(
            driver,
            self._context,
            self.inputs,
            self.outputs,
            slots=slots,
            graphs=graphs,
            scratch_bytes=int(self._engine.device_memory_size_v2),
        )
        try:
            self._pipeline.prepare()  # not enough memory for one call: say so now
        except BaseException:
            self.close()
            raise

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return self.submit(feeds).result()

    def submit(self, feeds: Arrays) -> Ticket:
        """Start a call; its answer is the ticket's `result()`."""
        if self._engine is None:
            raise DeploykitError(f"{self.path.name}: the engine is closed")
        check_feeds(self.inputs, feeds, self.path.name)
        if choose_profile(self.profiles, {name: a.shape for name, a in feeds.items()}) is None:
            raise BadInput(f"{self.path.name}: {misfit(self.profiles, self.inputs, feeds)}")
        return self._pipeline.submit(feeds)

    def map(self, batches: Iterable[Arrays]) -> Iterator[dict[str, np.ndarray]]:
        """The answers in order; copies of one call run while another one computes."""
        return in_turn(self.submit, batches, self._pipeline.slots)

    def layer_times_ms(self, feeds: Arrays) -> dict[str, float]:
        """Milliseconds of each layer in one call, as TensorRT's profiler tells them by name.

        In a context of its own, after a first call whose times are dropped. Raises as a call does.
        """
        times: dict[str, float] = {}
        profiler = _profiler(self._nv)(times)

        def profiled(stream: int, scratch: int) -> Context:
            context = self._context(stream, scratch)
            context.watch(profiler)
            return context

        pipeline = Pipeline(
            self._driver,
            profiled,
            self.inputs,
            self.outputs,
            slots=1,
            scratch_bytes=self._pipeline.scratch_bytes,
        )
        with pipeline:
            pipeline(feeds)
            times.clear()
            pipeline(feeds)
        return times

    def _context(self, stream: int, scratch: int) -> Context:
        if self._engine is None:
            raise DeploykitError(f"{self.path.name}: the engine is closed")
        return Context(
            self._nv, self._engine, self._driver, self.profiles, self._says, stream, scratch
        )

    @property
    def last_copies_us(self) -> tuple[int, int]:  # type: ignore[override]  # never set
        """Of the last call, on the host: inputs staged, outputs fetched; the GPU's run beside."""
        return self._pipeline.last_copies_us

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]  # never set
        return (*self._plan_notes, *self._pipeline.notes)

    def close(self) -> None:
        self._pipeline.close()  # contexts before their engine, the engine before its runtime
        self._engine = None
        self._runtime = None


class Context:
    """An execution context as `Work`; it stays bound to one stream and to `scratch`."""

    def __init__(
        self,
        nv: Any,
        engine: trt.ICudaEngine,
        driver: Driver,
        profiles: Sequence[Ranges],
        says: Says,
        stream: int,
        scratch: int,
    ) -> None:
        self._says, self._stream, self._profiles = says, stream, profiles
        strategy = nv.ExecutionContextAllocationStrategy.USER_MANAGED
        context: trt.IExecutionContext | None = engine.create_execution_context(strategy)
        if context is None:
            raise says.refusal("create_execution_context")
        if scratch:
            context.set_device_memory(scratch, engine.device_memory_size_v2)
        self._context = context
        self._outputs = [
            name
            for name in map(engine.get_tensor_name, range(engine.num_io_tensors))
            if engine.get_tensor_mode(name) == nv.TensorIOMode.OUTPUT
        ]
        self._profile = -1  # none: TensorRT chooses one by itself for the first context only
        self._late = {name: _late_memory(nv)(driver) for name in self._outputs}

    def shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape | None]:
        profile = choose_profile(self._profiles, inputs)
        if profile is None:
            raise BadInput("the shapes fit none of the engine's optimisation profiles")
        context = self._context
        if profile != self._profile:
            if not context.set_optimization_profile_async(profile, self._stream):
                raise self._says.refusal(f"optimisation profile {profile}")
            self._profile = profile
        for name, shape in inputs.items():
            if not context.set_input_shape(name, shape):
                raise self._says.refusal(f"shape {list(shape)} of input '{name}'")
        try:
            missing = context.infer_shapes()
        except RuntimeError as exc:
            raise self._says.refusal(f"shapes ({first_line(exc)})") from exc
        if missing:
            raise self._says.refusal(f"input '{missing[0]}' is not specified")
        found: dict[str, Shape | None] = {}
        for name in self._outputs:
            shape = tuple(context.get_tensor_shape(name))
            found[name] = shape if min(shape, default=0) >= 0 else None
            if found[name] is None and not context.set_output_allocator(name, self._late[name]):
                raise self._says.refusal(f"output '{name}' of a shape that depends on the data")
        return found

    def bind(self, addresses: Mapping[str, int]) -> None:
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise self._says.refusal(f"address of tensor '{name}'")

    def enqueue(self, stream: int) -> None:
        if not self._context.execute_async_v3(stream):
            for memory in self._late.values():
                if memory.error is not None:
                    raise memory.error
            raise self._says.refusal("execute_async_v3")

    def watch(self, profiler: Any) -> None:
        """Have `profiler`, an IProfiler, told of every layer; slows each call down."""
        self._context.profiler = profiler

    def late(self, name: str) -> tuple[int, Shape]:
        """TensorRT tells the shape before `execute_async_v3` returns (IOutputAllocator's text)."""
        memory = self._late[name]
        if memory.shape is None:
            raise self._says.refusal(f"output '{name}' was given no shape")
        return memory.address, memory.shape

    def close(self) -> None:
        del self._context  # TensorRT ends it with its last reference
        for memory in self._late.values():
            memory.release()


@functools.cache
def _profiler(nv: Any) -> Any:
    """The class of a profiler that adds each layer's milliseconds to a dictionary."""
    base: Any = nv.IProfiler

    class Profiler(base):  # type: ignore[misc]
        def __init__(self, times_ms: dict[str, float]) -> None:
            base.__init__(self)
            self.times_ms = times_ms

        def report_layer_time(self, name: str, ms: float) -> None:
            self.times_ms[name] = self.times_ms.get(name, 0.0) + ms

    return Profiler


@functools.cache
def _late_memory(nv: Any) -> Any:
    """The class of the memory for one output whose shape depends on the data."""
    base: Any = nv.IOutputAllocator

    class LateMemory(base):  # type: ignore[misc]
        def __init__(self, driver: Driver) -> None:
            base.__init__(self)
            self.driver = driver
            self.address = self.size = 0
            self.shape: Shape | None = None
            self.error: DeploykitError | None = None

        def reallocate_output(self, _name: str, _memory: int, size: int, _align: int) -> int:
            """0 when there is not enough memory: an exception would not come through."""
            self.shape, self.error = None, None
            if 0 < size <= self.size:
                return self.address
            self.release()
            try:
                self.address = self.driver.allocate(max(size, 1))  # never null, by the interface
            except DeploykitError as exc:
                self.error = exc
                return 0
            self.size = max(size, 1)
            return self.address

        def reallocate_output_async(
            self, name: str, memory: int, size: int, alignment: int, _stream: int
        ) -> int:
            return self.reallocate_output(name, memory, size, alignment)

        def notify_shape(self, _name: str, shape: Iterable[int]) -> None:
            self.shape = tuple(shape)

        def release(self) -> None:
            with contextlib.suppress(DeploykitError):
                if self.address:
                    self.driver.free(self.address)
            self.address = self.size = 0

    return LateMemory


class Says:
    """TensorRT's log, turned into errors. `texts`: CUDA's error texts -> names of the codes."""

    def __init__(self, nv: Any, path: Path, device: str, texts: Mapping[str, str]) -> None:
        self.log, self.path, self.device, self.texts = logger(nv), path, device, texts

    def refusal(self, what: str) -> DeploykitError:
        """What the error lines since the last time mean: CUDA's own failures by their code."""
        lines, self.log.errors = list(self.log.errors), deque(maxlen=self.log.errors.maxlen)
        for line in lines:
            match = _CUDA_SAID.search(line)
            name = self.texts.get(match[1]) if match else None
            if name:
                return cuda_error(
                    f"{self.path}: {self.device}", what, name, match[1] if match else ""
                )
        said = _WHERE.sub("", lines[0]).strip() if lines else "it gave no reason"
        return Unsupported(f"{self.path}: TensorRT refused it ({what}): {said}")


def _deserialize(nv: Any, plan: Plan, says: Says) -> tuple[Any, trt.ICudaEngine]:
    try:
        runtime = nv.Runtime(logger(nv))
    except (TypeError, RuntimeError) as exc:  # pybind11: the factory returned nullptr
        raise says.refusal(f"Runtime ({first_line(exc)})") from exc
    if plan.host_code:  # a version compatible plan brings its runtime; ours was built by us
        runtime.engine_host_code_allowed = True
    engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(plan.content)
    if engine is None:
        raise says.refusal("deserialize_cuda_engine")
    return runtime, engine
