"""A `tensorrt` module made of Python: engines described in JSON, run on the CUDA of NumPy.

It answers as the real one was seen to: None and False where it fails, the reason in the log only,
the first logger of a process kept, a shape of -1 for what only running tells. By NVIDIA's
documentation ("Threading", "CUDA Graphs", "Execution contexts"): the contexts of an engine share
its weights, each takes memory of its own, is for one thread at a time and one stream; they may
share a profile (always since 10.0); a graph holds until its context is changed, and can be
captured only after a call with the same shapes.
"""

from __future__ import annotations

import enum
import functools
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.runtimes.own_cuda import FakeCuda

MAGIC = b"ptrt"
WIDTHS = {"FLOAT": np.float32, "HALF": np.float16, "INT64": np.int64, "BOOL": np.bool_}


class Severity(enum.Enum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    Severity = Severity

    def log(self, severity: Severity, text: str) -> None:
        raise NotImplementedError


class IOutputAllocator:
    pass


class IErrorRecorder:
    pass


class IProfiler:
    pass


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class Named(enum.Enum):
    """DataType, TensorLocation and TensorFormat: what matters is the name."""

    FLOAT = 0
    HALF = 1
    INT64 = 2
    BOOL = 3
    BF16 = 4
    FP8 = 5
    DEVICE = 6
    HOST = 7
    LINEAR = 8
    CHW4 = 9


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    USER_MANAGED = 2


def tensor(name: str, mode: str, shape: Sequence[int], dtype: str = "FLOAT", **more: Any) -> Any:
    return {"name": name, "mode": mode, "shape": list(shape), "dtype": dtype, **more}


def plan_bytes(tensors: Sequence[Any], profiles: Sequence[Any], **more: Any) -> bytes:
    """A plan whose output `y` is 2x + 1, or x + x2 where there is a second input.

    `profiles`: for each, {input: [smallest, best, largest shape]}. `more`: `scratch` bytes, `off`
    by how much `y` is wrong, `layers` as the engine inspector tells them, `weights` and `context`
    the bytes that the engine and each of its contexts take.
    """
    return MAGIC + json.dumps({"tensors": tensors, "profiles": profiles, **more}).encode()


class FakeTensorRt:
    """The module."""

    __version__ = "10.13.3.9"
    ILogger = ILogger
    IOutputAllocator = IOutputAllocator
    IErrorRecorder = IErrorRecorder
    IProfiler = IProfiler
    TensorIOMode = TensorIOMode
    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
    LayerInformationFormat = SimpleNamespace(ONELINE=0, JSON=1)

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.logger: Any = None
        self.made: list[weakref.ref[Context]] = []
        self.fail: dict[str, str] = {}  # name of a call -> the line it logs when it fails, once
        self.recorded = True  # False: as Myelin was seen to, to the logger alone
        self.noise: dict[str, str] = {}  # the same of calls that go on to succeed, each time

    @property
    def contexts(self) -> list[Context]:
        """Those that are alive, in the order in which they were made."""
        return [context for each in self.made if (context := each()) is not None]

    def Builder(self) -> None: ...  # noqa: N802 - as TensorRT has it

    def Runtime(self, logger: Any) -> Runtime:  # noqa: N802
        self.logger = self.logger or logger
        if self.failed("Runtime"):
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return Runtime(self)

    def failed(self, call: str, owner: Any = None) -> bool:
        self.report(self.noise.get(call, ""), owner)
        line = self.fail.pop(call, "")
        self.report(line, owner)
        return bool(line)

    def took(self, nbytes: int, owner: Any) -> bool:
        if self.cuda.take(nbytes):
            return True
        self.report(
            f"Requested amount of GPU memory ({nbytes} bytes) could not be allocated.", owner
        )
        return False

    def report(self, line: str, owner: Any = None) -> None:
        """To the recorder of `owner` if it has one, else to the logger: never to both."""
        recorder = getattr(owner, "error_recorder", None) if self.recorded else None
        if line and recorder is not None:
            assert recorder.report_error("INTERNAL_ERROR", line)
        elif line:
            self.logger.log(Severity.ERROR, line)


class Runtime:
    kind: type[Engine]
    engine_host_code_allowed = False
    error_recorder: Any = None
    DLA_core = -1

    def __init__(self, nv: FakeTensorRt) -> None:
        self.nv = nv

    def deserialize_cuda_engine(self, content: bytes) -> Engine | None:
        if self.nv.failed("deserialize_cuda_engine", self) or not content.startswith(MAGIC):
            return None
        told = json.loads(content[len(MAGIC) :])
        if not self.nv.took(told.get("weights", 0), self):
            return None
        return self.kind(self.nv, told)


class Engine:
    kind: type[Context]
    error_recorder: Any = None

    def __init__(self, nv: FakeTensorRt, told: Any) -> None:
        self.nv, self.told = nv, told
        self.tensors = {item["name"]: item for item in told["tensors"]}
        self.num_io_tensors = len(self.tensors)
        self.num_optimization_profiles = len(told["profiles"])
        self.device_memory_size_v2 = told.get("scratch", 0)

    def __del__(self) -> None:
        self.nv.cuda.take(-self.told.get("weights", 0))

    def get_tensor_name(self, number: int) -> str:
        return list(self.tensors)[number]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode[self.tensors[name]["mode"]]

    def get_tensor_dtype(self, name: str) -> Named:
        return Named[self.tensors[name]["dtype"]]

    def get_tensor_shape(self, name: str) -> list[int]:
        return self.tensors[name]["shape"]

    def get_tensor_location(self, name: str) -> Named:
        return Named[self.tensors[name].get("location", "DEVICE")]

    def get_tensor_format(self, name: str) -> Named:
        return Named[self.tensors[name].get("format", "LINEAR")]

    def is_shape_inference_io(self, name: str) -> bool:
        return bool(self.tensors[name].get("shape_io"))

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[list[int]]:
        return self.told["profiles"][profile][name]

    def create_engine_inspector(self) -> Inspector:
        return Inspector(self)

    def create_execution_context(self, strategy: Any) -> Context | None:
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        if self.nv.failed("create_execution_context", self):
            return None
        if not self.nv.took(self.told.get("context", 0), self):
            return None
        context = self.kind(self)
        self.nv.made.append(weakref.ref(context))
        return context


class Inspector:
    """As TensorRT 8.6 was seen: a dynamic engine tells no types before shapes are inferred."""

    execution_context: Context | None = None

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def get_engine_information(self, _form: Any) -> str:
        layers: str = self.engine.told.get("layers", "")
        dynamic = any(-1 in item["shape"] for item in self.engine.told["tensors"])
        if dynamic and not (self.execution_context and self.execution_context.inferred):
            layers = re.sub(
                r'("Format/Datatype": )"[^"]*"', r'\1"N/A due to dynamic shapes"', layers
            )
        return layers


def alone(method: Callable[..., Any]) -> Callable[..., Any]:
    """Fails when two threads are inside one context at once."""

    @functools.wraps(method)
    def call(self: Context, *arguments: Any) -> Any:
        assert self.busy.acquire(blocking=False), "two threads use one context"
        try:
            time.sleep(0)  # lets another thread in, if there is one
            return method(self, *arguments)
        finally:
            self.busy.release()

    return call


class Context:
    inferred = False
    error_recorder: Any = None

    def __init__(self, engine: Engine) -> None:
        self.engine, self.nv = engine, engine.nv
        self.profile = -1
        self.scratch = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}
        self.profiler: Any = None
        self.changes = 0
        self.ready = -1  # the changes at the last call that was not captured
        self.stream = 0  # of its calls
        self.busy = threading.Lock()

    def __del__(self) -> None:
        self.nv.cuda.take(-self.engine.told.get("context", 0))

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0
        assert size == self.engine.device_memory_size_v2
        self.scratch = memory

    @alone
    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert stream in self.nv.cuda.streams
        self.profile, self.shapes = profile, {}
        self.changes += 1
        return not self.nv.failed("set_optimization_profile_async", self)

    @alone
    def set_input_shape(self, name: str, shape: Iterable[int]) -> bool:
        low, _, high = self.engine.get_tensor_profile_shape(name, self.profile)
        shape = tuple(shape)
        self.shapes[name] = shape
        self.changes += 1
        fits = all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
        return fits and not self.nv.failed("set_input_shape", self)

    @alone
    def infer_shapes(self) -> list[str]:
        self.inferred = True
        return [
            name
            for name, item in self.engine.tensors.items()
            if item["mode"] == "INPUT" and name not in self.shapes
        ]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        item = self.engine.tensors[name]
        if item.get("late"):
            return tuple(-1 if axis == 0 else n for axis, n in enumerate(item["shape"]))
        batch = next((shape[0] for shape in self.shapes.values()), -1)
        return tuple(batch if n < 0 else n for n in item["shape"])

    @alone
    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory % 256 == 0
        self.addresses[name] = memory
        self.changes += 1
        return not self.nv.failed("set_tensor_address", self)

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self.allocators[name] = allocator
        return True

    @alone
    def execute_async_v3(self, stream: int) -> bool:
        if self.nv.failed("execute_async_v3", self):
            return False
        assert self.scratch or not self.engine.device_memory_size_v2, "no memory to work in"
        cuda, changes = self.nv.cuda, self.changes
        self.stream = self.stream or stream
        assert stream == self.stream, "a context on two streams"
        if self.scratch:
            assert cuda.scratch_of.setdefault(self.scratch, stream) == stream, "shared scratch"
        inputs = [self._array(name, shape) for name, shape in self.shapes.items()]
        captured = stream in cuda.capturing
        if captured and self.ready != changes:
            self.nv.report("Cuda Runtime (operation not permitted when stream is capturing)", self)
            return False
        self.ready = changes
        for name, allocator in self.allocators.items():  # the rows that are above 0
            cuda.wait_stream(stream)
            found = inputs[0][inputs[0][:, 0] > 0].copy()
            memory = allocator.reallocate_output_async(name, 0, found.nbytes, 256, stream)
            if not memory:
                self.nv.report("output allocation failed", self)
                return False
            cuda.at(memory, found.nbytes)[:] = np.frombuffer(found.tobytes(), np.uint8)
            allocator.notify_shape(name, list(found.shape))
        outputs = [
            self._array(name, self.get_tensor_shape(name))
            for name in self.addresses
            if name not in self.shapes and name not in self.allocators
        ]

        def run() -> None:
            assert not captured or changes == self.changes, "a graph of a context since changed"
            for y in outputs:
                first = inputs[0] if len(inputs) == 1 else inputs[0] + inputs[1]
                value = first * 2 + 1 if len(inputs) == 1 else first
                y[:] = (value + self.engine.told.get("off", 0)).astype(y.dtype)

        cuda.push(stream, "enqueue", run)
        if self.profiler is not None:
            for layer in json.loads(self.engine.told["layers"])["Layers"]:
                self.profiler.report_layer_time(layer["Name"], layer.get("ms", 1.0))
        return True

    def _array(self, name: str, shape: Sequence[int]) -> np.ndarray:
        dtype = np.dtype(WIDTHS[self.engine.tensors[name]["dtype"]])
        nbytes = dtype.itemsize * int(np.prod(shape))
        return self.nv.cuda.at(self.addresses[name], nbytes).view(dtype).reshape(shape)


Runtime.kind, Engine.kind = Engine, Context
