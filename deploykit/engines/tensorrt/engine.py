"""Open a `.trt` plan as an `Engine`, after a check against its manifest and this machine.

Supports TensorRT 10.3 to 11.4. TensorRT returns None or False and gives the reason only in its log,
so errors are made from the log's lines.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deploykit.core.artefact import ArtefactLike, Manifest
from deploykit.core.errors import (
    USE_LESS_MEMORY,
    BadInput,
    DeploykitError,
    OutOfMemory,
    Unsupported,
    first_line,
    out_of_memory,
)
from deploykit.core.extras import require
from deploykit.core.tensors import Specs, TensorSpec, axis_name
from deploykit.engines.cuda.execution import Model, Pipeline, Shape, Ticket, give_back
from deploykit.engines.engine import Arrays, CallGuard, Engine, check_feeds
from deploykit.engines.tensorrt.compatibility import (
    PlanFile,
    check_version,
    load_plugins,
    logger,
    open_plan,
    place_of,
    read_machine,
    recorded_plugins,
)

if TYPE_CHECKING:
    import tensorrt as trt

    from deploykit.engines.cuda.driver import CudaDevice


# NumPy lacks BF16, FP8, INT4 and FP4.
_DTYPES: Mapping[str, str] = {
    "FLOAT": "float32",
    "HALF": "float16",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}

Ranges = Mapping[str, tuple[Shape, Shape, Shape]]  # input -> smallest, optimum, largest shape


def specs(engine: trt.ICudaEngine, path: Path, manifest: Manifest | None) -> tuple[Specs, Specs]:
    """Return the inputs and outputs; the manifest names the dynamic axes.

    Raises Unsupported for a type that NumPy lacks, or a tensor that is not linear device memory.
    """
    known = {spec.name: spec for spec in (*manifest.inputs, *manifest.outputs)} if manifest else {}
    found: dict[str, list[TensorSpec]] = {"INPUT": [], "OUTPUT": []}
    for number in range(engine.num_io_tensors):
        name = engine.get_tensor_name(number)
        kind = engine.get_tensor_dtype(name).name
        if kind not in _DTYPES:
            raise Unsupported(
                f"{path}: tensor '{name}' is {kind}, which is not supported for inputs and outputs",
                hint="build it from a model whose inputs and outputs are float32 or float16",
            )
        on_gpu = engine.get_tensor_location(name).name == "DEVICE"
        if engine.is_shape_inference_io(name) or not on_gpu:
            raise Unsupported(f"{path}: tensor '{name}' is a shape tensor, which is not supported")
        if engine.get_tensor_format(name).name != "LINEAR":
            raise Unsupported(f"{path}: tensor '{name}' has no linear memory format")
        sizes = tuple(engine.get_tensor_shape(name))
        names: Sequence[int | str] = known[name].shape if name in known else ()
        if len(names) != len(sizes):
            names = [axis_name(name, place) for place in range(len(sizes))]
        shape = tuple(
            size if size >= 0 else own if isinstance(own, str) else f"{name}_{axis}"
            for axis, (size, own) in enumerate(zip(sizes, names, strict=True))
        )
        found[engine.get_tensor_mode(name).name].append(TensorSpec(name, _DTYPES[kind], shape))
    return tuple(found["INPUT"]), tuple(found["OUTPUT"])


def size_ranges(engine: trt.ICudaEngine, path: Path, inputs: Sequence[TensorSpec]) -> Ranges:
    """Return the smallest, optimum and largest shape of each input, of the first profile.

    Raises BadInput for shapes that are not a range: a damaged plan may be opened on trust.
    """
    if not engine.num_optimization_profiles:
        raise BadInput(f"{path}: has no optimisation profile", hint="build the engine again")
    found = {}
    for spec in inputs:
        if all(isinstance(size, int) for size in spec.shape):
            spans: list[Any] = [spec.shape] * 3
        else:
            spans = [tuple(shape) for shape in engine.get_tensor_profile_shape(spec.name, 0)]
        if (
            len(spans) != 3
            or {len(shape) for shape in spans} != {len(spec.shape)}
            or not all(0 <= low <= best <= high for low, best, high in zip(*spans, strict=True))
        ):
            raise BadInput(
                f"{path}: input '{spec.name}' has no range of sizes in its optimisation profile: "
                f"{', '.join(map(str, spans))}",
                hint="build the engine again",
            )
        found[spec.name] = (spans[0], spans[1], spans[2])
    return found


class TensorRtEngine(Engine):
    """One plan on one GPU. `submit` keeps up to `slots` calls in flight.

    `graphs`: batch sizes to capture as CUDA graphs, cut to the largest batch; each has its own
    context, as a graph is valid only while its context is unchanged. The constructor allocates the
    memory for a call at the optimum. Raises BadInput, Unsupported, OutOfMemory.
    """

    def __init__(
        self,
        nv: Any,
        driver: CudaDevice,
        plan: PlanFile,
        *,
        slots: int = 2,
        graphs: Sequence[int] = (),
    ) -> None:
        self.path = path = plan.path
        self.device, self._nv, self._driver = driver.device, nv, driver
        self._guard = CallGuard(path.name)
        self.runtime = f"tensorrt {nv.__version__}"
        driver.use()
        free, total = driver.memory()
        if len(plan.content) > free:
            raise out_of_memory(f"{path}: {driver.device}", len(plan.content), free, total)
        self._log_errors = LogErrors(nv, path, driver)
        self._runtime = self._log_errors.call("Runtime", nv.Runtime, logger(nv))
        if plan.host_code:  # `check_plan` has accepted it
            self._runtime.engine_host_code_allowed = True
        if plan.dla is not None:
            self._runtime.DLA_core = plan.dla
        deserialize = self._runtime.deserialize_cuda_engine
        engine: trt.ICudaEngine = self._log_errors.call(
            "deserialize_cuda_engine", deserialize, plan.content
        )
        self._engine: trt.ICudaEngine | None = engine
        ask = self._log_errors.call
        self.inputs, self.outputs = ask("tensors", specs, engine, path, plan.manifest)
        self.ranges: Ranges = ask("optimisation profile", size_ranges, engine, path, self.inputs)
        batched = [spec.name for spec in self.inputs if spec.batched]
        self.max_batch = min((self.ranges[name][2][0] for name in batched), default=None)
        self.limits = {
            axis: (low, high)
            for spec in self.inputs
            for axis, low, _, high in zip(spec.shape, *self.ranges[spec.name], strict=True)
            if isinstance(axis, str)
        }
        self._plan_notes = plan.notes
        if (count := engine.num_optimization_profiles) > 1:  # another tool's
            self._plan_notes += (f"{path}: the first of its {count} optimisation profiles is used",)
        del engine  # the frames of an error would keep it alive
        self._pipeline = self._open_pipeline(slots, graphs)

    def _open_pipeline(self, slots: int, graphs: Sequence[int]) -> Pipeline:
        scratch_bytes, most = int(self._opened().device_memory_size_v2), self.max_batch
        model = Model(self._driver, self._context, self.inputs, self.outputs, scratch_bytes)
        sizes = {size if most is None else min(size, most) for size in graphs}
        pipeline = Pipeline(model, slots=slots, graphs=sorted(sizes))
        try:
            pipeline.reserve(self._optimum())
        except BaseException as exc:
            traceback.clear_frames(exc.__traceback__)  # they keep the engine alive
            pipeline.close()
            self._runtime = self._engine = None
            raise
        return pipeline

    def share(
        self, *, slots: int | None = None, graphs: Sequence[int] | None = None
    ) -> TensorRtEngine:
        """Open another engine on the same weights, with its own contexts, for another thread.

        Close each engine; the last one frees the weights. Raises as the constructor does.
        """
        other, own = copy.copy(self), self._pipeline
        own.check()
        other._pipeline = other._open_pipeline(
            own.slots if slots is None else slots, own.graphs if graphs is None else graphs
        )
        return other

    def prepare(self, calls: Iterable[Arrays] = (), *, joined: bool = False) -> None:
        try:
            self._pipeline.reserve(self._optimum(), self.slots)
            self._pipeline.prepare(calls, pad=joined)
        except OutOfMemory as exc:
            traceback.clear_frames(exc.__traceback__)  # they keep the engine alive
            raise

    def _optimum(self) -> list[Shape]:
        return [self.ranges[spec.name][1] for spec in self.inputs]

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        with self._guard:
            return self.submit(feeds).result()

    def submit(self, feeds: Arrays) -> Ticket:
        """Start a call; the ticket's `result()` waits for its outputs."""
        self._opened()
        check_feeds(self.inputs, feeds, self.path.name)
        for spec in self.inputs:
            sizes = zip(spec.shape, feeds[spec.name].shape, *self.ranges[spec.name], strict=True)
            for axis, size, low, _, high in sizes:
                if not low <= size <= high:  # the range that the engine was built for
                    text = f"input '{spec.name}': axis {axis} is {size}, built for {low} to {high}"
                    raise BadInput(f"{self.path.name}: {text}")
        return self._pipeline.submit(feeds)

    def layer_times_ms(self, feeds: Arrays) -> dict[str, float]:
        """Return milliseconds by layer name in one call, from TensorRT's profiler.

        This uses its own context, after a warm-up call. Raises as a call does.
        """
        times: dict[str, float] = {}
        base: Any = self._nv.IProfiler

        class Profiler(base):  # type: ignore[misc]
            def report_layer_time(self, name: str, ms: float) -> None:
                times[name] = times.get(name, 0.0) + ms

        profiler = Profiler()

        def profiled(stream: int, scratch: int) -> Context:
            context = self._context(stream, scratch)
            context.handle.profiler = profiler
            return context

        with Pipeline(replace(self._pipeline.model, make=profiled), slots=1) as pipeline:
            pipeline(feeds)
            times.clear()
            pipeline(feeds)
        return times

    def layer_information(self) -> str:
        """Return the engine inspector's JSON, at the optimum of the first optimisation profile.

        TensorRT 8 to 10 report no types for an engine with a dynamic axis until a context has its
        shapes. Raises as a call does.
        """
        engine = self._opened()
        self._driver.use()  # the thread may differ from the one that loaded the engine
        stream = self._driver.open_stream()
        try:
            with contextlib.closing(self._context(stream, 0)) as context:
                context.shapes({name: best for name, (_, best, _) in self.ranges.items()})
                inspector = self._log_errors.call("inspector", engine.create_engine_inspector)
                inspector.execution_context = context.handle
                kind = self._nv.LayerInformationFormat.JSON
                read = inspector.get_engine_information
                return str(self._log_errors.call("layer information", read, kind))
        finally:
            self._driver.close_stream(stream)

    def _opened(self) -> trt.ICudaEngine:
        if self._engine is None:
            raise DeploykitError(f"{self.path.name}: the engine is closed")
        return self._engine

    def _context(self, stream: int, scratch: int) -> Context:
        return Context(self, stream, scratch)

    @property
    def slots(self) -> int:  # type: ignore[override]  # never set
        return self._pipeline.slots

    @property
    def last_copies_us(self) -> tuple[int, int]:  # type: ignore[override]  # never set
        """The last call's host time to stage the inputs and to fetch the outputs."""
        return self._pipeline.last_copies_us

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]  # never set
        return (*self._plan_notes, *self._pipeline.notes)

    def close(self) -> None:
        self._pipeline.close()  # order: contexts, engine, runtime
        self._engine = None
        self._runtime = None


class Context:
    """An execution context as a `Work`, bound to one stream and to `scratch`."""

    def __init__(self, owner: TensorRtEngine, stream: int, scratch: int) -> None:
        nv, engine, log_errors = owner._nv, owner._opened(), owner._log_errors
        strategy = nv.ExecutionContextAllocationStrategy.USER_MANAGED
        context: trt.IExecutionContext = log_errors.call(
            "create_execution_context", engine.create_execution_context, strategy
        )
        self._log_errors = log_errors
        if scratch:
            context.set_device_memory(scratch, engine.device_memory_size_v2)
        self.handle = context
        self._outputs = [spec.name for spec in owner.outputs]
        set_profile = context.set_optimization_profile_async  # else only the first has one
        log_errors.call("optimisation profile 0", set_profile, 0, stream)
        self._late = {name: _output_allocator(nv)(owner._driver) for name in self._outputs}

    def shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape | None]:
        """Set the inputs' shapes; return the outputs', None if they depend on the data."""
        context, call = self.handle, self._log_errors.call
        for name, shape in inputs.items():
            call(f"shape {list(shape)} of input '{name}'", context.set_input_shape, name, shape)
        missing = call("shapes", context.infer_shapes)
        if missing:
            raise self._log_errors.refusal(f"input '{missing[0]}' is not specified")
        found: dict[str, Shape | None] = {}
        for name in self._outputs:
            shape = call(f"shape of output '{name}'", _shape_of, context, name)
            found[name] = shape if min(shape, default=0) >= 0 else None
            if found[name] is None:
                what = f"output '{name}' of a shape that depends on the data"
                call(what, context.set_output_allocator, name, self._late[name])
        return found

    def bind(self, addresses: Mapping[str, int]) -> None:
        for name, address in addresses.items():
            what = f"address of tensor '{name}'"
            self._log_errors.call(what, self.handle.set_tensor_address, name, address)

    def enqueue(self, stream: int) -> None:
        try:
            self._log_errors.call("execute_async_v3", self.handle.execute_async_v3, stream)
        except DeploykitError:
            for memory in self._late.values():
                if memory.error is not None:
                    raise memory.error from None
            raise

    def late(self, name: str) -> tuple[int, Shape]:
        """Return address and shape of an output whose shape depends on the data.

        Both are known once `execute_async_v3` returns (see IOutputAllocator).
        """
        memory = self._late[name]
        if memory.shape is None:
            raise self._log_errors.refusal(f"output '{name}' has no shape")
        return memory.address, memory.shape

    def close(self) -> None:
        del self.handle  # TensorRT destroys it with its last reference
        for memory in self._late.values():
            memory.release()


def _shape_of(context: trt.IExecutionContext, name: str) -> Shape:
    return tuple(context.get_tensor_shape(name))  # the bindings raise for a rank of -1


_NO_MEMORY = re.compile(
    r"\bout ?of ?memory\b|Requested amount of GPU memory|ALLOC\w*_FAILED", re.IGNORECASE
)
_WHERE = re.compile(r"^\[.*?\]|\.?\s*In \w+ at \S+:\d+\)?$")  # a place in TensorRT's source


@dataclass(frozen=True)
class LogErrors:
    """Makes errors of the plan `path` on `driver` from the log's lines.

    TensorRT logs errors even in calls that succeed: `call` forgets them before each.
    """

    nv: Any
    path: Path
    driver: CudaDevice

    def call(self, what: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a member of TensorRT returns, which is neither None nor False.

        Raises the refusal: NVIDIA's bindings return one of these, or raise, each member as it is.
        """
        logger(self.nv).errors.clear()
        try:
            answer = run(*arguments)
        except (RuntimeError, TypeError, ValueError) as exc:  # a null pointer, a rank of -1
            raise self.refusal(f"{what} ({first_line(exc)})") from exc
        if answer is None or answer is False:
            raise self.refusal(what)
        return answer

    def refusal(self, what: str) -> DeploykitError:
        """Return the error for the lines of the last call, whose first one is the root cause."""
        lines = [*logger(self.nv).errors]
        if any(map(_NO_MEMORY.search, lines)):
            free, total = (f"{count / 2**20:,.1f} MiB" for count in self.driver.memory())
            text = f"{self.path}: {self.driver.device}: out of memory in {what}"
            return OutOfMemory(f"{text}: {free} free of {total}", hint=USE_LESS_MEMORY)
        why = _WHERE.sub("", first_line(lines[0])).strip() if lines else "no reason in its log"
        return Unsupported(f"{self.path}: TensorRT refused it ({what}): {why}")


@functools.cache
def _output_allocator(nv: Any) -> Any:
    """Return the class that allocates memory for one output of data-dependent shape."""
    base: Any = nv.IOutputAllocator

    class OutputAllocator(base):  # type: ignore[misc]
        def __init__(self, driver: CudaDevice) -> None:
            base.__init__(self)
            self.driver = driver
            self.address = self.size = 0
            self.shape: Shape | None = None
            self.error: DeploykitError | None = None

        def reallocate_output(self, _name: str, _memory: int, size: int, _align: int) -> int:
            """Return an address, or 0 if memory is short, as an exception would not propagate."""
            self.shape, self.error = None, None
            if 0 < size <= self.size:
                return self.address
            self.release()
            try:
                self.address = self.driver.allocate(max(size, 1))  # the interface forbids null
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
            give_back(self.driver.free, self.address)
            self.address = self.size = 0

    return OutputAllocator


def open_engine(
    source: ArtefactLike,
    device: str = "auto",
    threads: int | None = None,  # noqa: ARG001 - a GPU engine uses no CPU threads
    trust: bool = False,
    *,
    slots: int = 2,
    graphs: Sequence[int] = (),
) -> TensorRtEngine:
    """Open a plan on "cuda:N" ("auto" and "cuda": the first GPU).

    `trust`: also open a plan without a manifest, or with code from elsewhere. `slots`, `graphs`:
    see `Pipeline`. Raises BadInput for a plan that is damaged, not described or not trusted,
    Unsupported for a plan of another machine, or without a GPU.
    """
    path = Path(source)
    if device == "cpu":
        raise Unsupported(
            f"{path}: a TensorRT engine runs on a GPU only",
            hint="deploykit build MODEL.onnx --profile cpu makes a file for the CPU",
        )
    nv = require("tensorrt")
    check_version(str(nv.__version__))
    from deploykit.engines.cuda.driver import CudaDevice  # after TensorRT's check

    driver = CudaDevice(int(device.partition(":")[2] or 0))
    machine = read_machine(driver)
    plan = open_plan(source, machine, trust)
    load_plugins(nv, recorded_plugins(path, plan.manifest.plugins if plan.manifest else {}))
    engine = TensorRtEngine(nv, driver, plan, slots=slots, graphs=graphs)
    engine.place = place_of(machine.facts())
    return engine
