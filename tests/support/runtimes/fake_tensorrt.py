"""A `tensorrt` module made of Python: a builder that logs what it was asked for, and engines.

Its engines are described in JSON and run on the CUDA of our own driver. Its network has one input,
`x` float32[-1, 4], and layers of the given types: it parses nothing. `Behaviour` says what it does.

It fails as NVIDIA's bindings do for each member (None, False or an exception; the reason in the log
only), and asserts what NVIDIA's documentation asks of threads, contexts, streams and graphs.
"""

# ruff: noqa: ARG002, ARG005 - members take what those of NVIDIA take

from __future__ import annotations

import contextlib
import enum
import functools
import importlib.machinery
import json
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from deploykit.building.builder import AxisRange, BuildResult, Options, Shapes
from deploykit.building.tensorrt import build
from deploykit.core.profile import Profile, load_profile
from tests.support.onnx_zoo import linear, save

if TYPE_CHECKING:
    from tests.support.runtimes.own_cuda import FakeCuda

BATCH = AxisRange(1, 4, 8)
NO_FORMATS = "Internal Error (conv: could not find any supported formats consistent with types)"
MAGIC = b"ptrt"
WIDTHS = {"FLOAT": np.float32, "HALF": np.float16, "INT64": np.int64, "BOOL": np.bool_}

# a module -> our files with `require` of it at their top, and what is inside it
HOLDERS = {"cuda": ("deploykit.engines.cuda.driver", "cuda.bindings", "cuda.bindings.driver")}


@contextlib.contextmanager
def replaced(name: str, module: Any) -> Iterator[None]:
    """`sys.modules[name]` is `module` inside the block; None: it is not installed.

    Our files that import it at their top are imported anew inside, and are what they were after.
    """
    kept = {each: _taken(each) for each in (name, *HOLDERS.get(name, ()))}
    sys.modules[name] = module
    try:
        yield
    finally:
        for each, before in kept.items():
            _taken(each)
            if before is not None:
                package, _, last = each.rpartition(".")
                sys.modules[each] = before
                if package:
                    setattr(sys.modules[package], last, before)


def _taken(name: str) -> Any:
    """The module, out of `sys.modules` and out of its package; None where it was not imported."""
    package, _, last = name.rpartition(".")
    if package and package in sys.modules:
        vars(sys.modules[package]).pop(last, None)
    return sys.modules.pop(name, None)


Severity = enum.Enum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE", start=0)
TensorIOMode = enum.Enum("TensorIOMode", "INPUT OUTPUT")


class ILogger:
    Severity = Severity


def tensor(name: str, mode: str, shape: Sequence[Any], dtype: str = "FLOAT", **more: Any) -> Any:
    """`shape`: -1 is the batch; a name is the size that another tensor has there."""
    return {"name": name, "mode": mode, "shape": list(shape), "dtype": dtype, **more}


def plan_bytes(tensors: Sequence[Any], profiles: Sequence[Any], **more: Any) -> bytes:
    """A plan whose output `y` is 2x + 1, or x + x2 where there is a second input.

    `profiles`: for each, {input: [smallest, best, largest shape]}. `more`: `scratch` bytes, `off`
    by how much `y` is wrong, `layers` as the engine inspector tells them, `weights` and `context`
    the bytes that the engine and each of its contexts take.
    """
    return MAGIC + json.dumps({"tensors": tensors, "profiles": profiles, **more}).encode()


def options(
    profile: Profile | str = "l4",
    batch: AxisRange = BATCH,
    *,
    axes: Mapping[str, AxisRange] | None = None,
    free_bytes: int | None = None,
    **shapes: Any,
) -> Options:
    target = load_profile(profile) if isinstance(profile, str) else profile
    return Options(target, Shapes(**shapes), batch, axes or {}, free_bytes)


@dataclass
class Behaviour:
    """What this TensorRT does, and in `seen` what it was asked to do."""

    version: str = "10.13.3.9"
    plan: bytes = b"ftrt" + bytes(60)
    strong_error: str | None = None  # logged in place of a strongly typed plan
    weak_error: str | None = None
    dtypes: tuple[str, ...] = ("FLOAT",)
    dla_cores: int = 0
    warnings: tuple[str, ...] = ()  # logged while it builds
    needs_plugins: bool = False  # the graph has a node that NVIDIA's own plugins run
    layers: str | None = None  # the inspector's answer; None: the plan cannot be read back
    strong_number: int = 1  # STRONGLY_TYPED is 1 in TensorRT 10, 0 in 11
    cache_refused: str = ""  # by "create", which gives an empty one, or by "set"
    driver: bool = True
    during_build: Callable[[], None] = lambda: None
    seen: dict[str, Any] = field(default_factory=dict)


Computes = Callable[[Mapping[str, np.ndarray]], Mapping[str, Any]]


def affine(inputs: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
    first, *second = inputs.values()
    return {"y": first + second[0] if second else 2 * first + 1}


class FakeTensorRt:
    """The module. `cuda`: where its engines run; without one, it only builds."""

    ILogger = ILogger
    IOutputAllocator = type("IOutputAllocator", (), {})
    IErrorRecorder = type("IErrorRecorder", (), {})
    IProfiler = type("IProfiler", (), {})
    IProgressMonitor = type("IProgressMonitor", (), {})
    TensorIOMode = TensorIOMode
    TensorFormat = enum.IntEnum("TensorFormat", {"LINEAR": 0, "CHW4": 2})
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user managed")
    __spec__ = importlib.machinery.ModuleSpec("tensorrt", None)

    def __init__(
        self,
        cuda: FakeCuda | None = None,
        does: Behaviour | None = None,
        computes: Computes = affine,
    ) -> None:
        self.cuda: Any = cuda
        self.does = does = does or Behaviour()
        self.computes = computes
        self.__version__ = does.version
        self.logger: Any = None
        self.made: list[weakref.ref[Context]] = []
        self.fail: dict[str, str] = {}  # name of a call -> the line it logs when it fails, once
        number = {"STRONGLY_TYPED": does.strong_number}
        self.NetworkDefinitionCreationFlag: Any = enum.IntEnum("Creation", number)
        self.BuilderFlag = _names("FP16 BF16 INT8 FP8 INT4 TF32 GPU_FALLBACK VERSION_COMPATIBLE")
        self.MemoryPoolType = _names("WORKSPACE")
        self.ProfilingVerbosity = _names("DETAILED")
        self.HardwareCompatibilityLevel = _names("NONE AMPERE_PLUS")  # 10.13 has one more
        self.DeviceType = _names("GPU DLA")
        self.LayerInformationFormat = _names("ONELINE JSON")

    def init_libnvinfer_plugins(self, log: Any, space: str) -> bool:
        assert isinstance(log, ILogger)
        self.does.seen["plugins"] = True
        return True

    def get_plugin_registry(self) -> SimpleNamespace:
        libraries = self.does.seen.setdefault("libraries", [])
        return SimpleNamespace(
            load_library=lambda path: libraries.append(path) or path,
            all_creators=self.does.seen.setdefault("creators", []),
        )

    def Builder(self, log: Any) -> _Builder:  # noqa: N802 - as TensorRT has it
        return _Builder(self.does, log)

    def OnnxParser(self, network: Any, log: Any) -> _Parser:  # noqa: N802
        return _Parser(self.does, log)

    @property
    def contexts(self) -> list[Context]:
        """Those that are alive, in the order in which they were made."""
        return [context for each in self.made if (context := each()) is not None]

    def Runtime(self, logger: Any) -> Runtime:  # noqa: N802
        self.logger = self.logger or logger
        if self.failed("Runtime"):
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return Runtime(self)

    def failed(self, call: str, owner: Any = None) -> bool:
        line = self.fail.pop(call, "")
        self.report(line, owner)
        return bool(line)

    def took(self, nbytes: int, owner: Any) -> bool:
        fits = self.cuda is None or bool(self.cuda.take(nbytes))
        if not fits:
            self.report(f"Requested amount of GPU memory ({nbytes} bytes) could not be", owner)
        return fits

    def report(self, line: str, _owner: Any = None) -> None:
        if line:
            self.logger.log(Severity.ERROR, line)


class Runtime:
    engine_host_code_allowed = False
    DLA_core = -1

    def __init__(self, nv: FakeTensorRt) -> None:
        self.nv = nv

    def deserialize_cuda_engine(self, content: bytes) -> Engine | None:
        if self.nv.failed("deserialize_cuda_engine", self):
            return None
        does = self.nv.does
        does.seen["host_code"] = self.engine_host_code_allowed
        does.seen["runtime_dla"] = self.DLA_core
        if content.startswith(MAGIC):
            told = json.loads(content[len(MAGIC) :])
        elif does.layers is not None:  # an engine that can only be inspected
            told = {"tensors": [], "profiles": [], "layers": does.layers}
        else:
            return None
        return Engine(self.nv, told) if self.nv.took(told.get("weights", 0), self) else None


def _reads(key: str, default: str) -> Callable[[Engine, str], SimpleNamespace]:
    """A member of an enumeration, of which only the name matters."""
    return lambda engine, name: SimpleNamespace(name=engine.tensors[name].get(key, default))


class Engine:
    def __init__(self, nv: FakeTensorRt, told: Any) -> None:
        self.nv, self.told = nv, told
        self.tensors = {item["name"]: item for item in told["tensors"]}
        self.num_io_tensors = len(self.tensors)
        self.num_optimization_profiles = len(told["profiles"])
        self.device_memory_size_v2 = told.get("scratch", 0)

    def __del__(self) -> None:
        if self.nv.cuda is not None:
            self.nv.cuda.take(-self.told.get("weights", 0))

    def get_tensor_name(self, number: int) -> str:
        return list(self.tensors)[number]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode[self.tensors[name]["mode"]]

    def get_tensor_shape(self, name: str) -> list[int]:
        return [-1 if isinstance(n, str) else n for n in self.tensors[name]["shape"]]

    get_tensor_dtype = _reads("dtype", "FLOAT")
    get_tensor_location = _reads("location", "DEVICE")
    get_tensor_format = _reads("format", "LINEAR")

    def is_shape_inference_io(self, name: str) -> bool:
        return bool(self.tensors[name].get("shape_io"))

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[list[int]]:
        return self.told["profiles"][profile][name]

    def create_engine_inspector(self) -> Inspector | None:
        return None if self.nv.failed("create_engine_inspector", self) else Inspector(self)

    def create_execution_context(self, strategy: Any) -> Context | None:
        assert strategy == "user managed"
        failed = self.nv.failed("create_execution_context", self)
        if failed or not self.nv.took(self.told.get("context", 0), self):
            return None
        context = Context(self)
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
            unknown = r'\1"N/A due to dynamic shapes"'
            layers = re.sub(r'("Format/Datatype": )"[^"]*"', unknown, layers)
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
    profiler: Any = None

    def __init__(self, engine: Engine) -> None:
        self.engine, self.nv = engine, engine.nv
        self.profile = -1
        self.scratch = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}
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
        if self.nv.failed("set_optimization_profile_async", self):
            raise RuntimeError("Error in set optimization profile async.")
        return True

    @alone
    def set_input_shape(self, name: str, shape: Iterable[int]) -> bool:
        low, _, high = self.engine.get_tensor_profile_shape(name, self.profile)
        self.shapes[name] = shape = tuple(shape)
        self.changes += 1
        fits = all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
        return fits and not self.nv.failed("set_input_shape", self)

    @alone
    def infer_shapes(self) -> list[str]:
        if self.nv.failed("infer_shapes", self):
            raise RuntimeError("infer_shapes error code: -1")
        self.inferred = True
        tensors = self.engine.tensors.values()
        inputs = [item["name"] for item in tensors if item["mode"] == "INPUT"]
        return [name for name in inputs if name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if self.nv.failed("get_tensor_shape", self):
            raise ValueError("__len__() should return >= 0")
        tensors, late = self.engine.tensors, self.engine.tensors[name].get("late")
        sizes: dict[Any, int] = {}  # by the names of axes; -1 is the batch
        for given, shape in self.shapes.items():
            sizes |= dict(zip(tensors[given]["shape"], shape, strict=True))
        sizes[-1] = next((shape[0] for shape in self.shapes.values()), -1)
        found = [sizes.get(n, n) for n in tensors[name]["shape"]]
        return (-1, *found[1:]) if late else tuple(found)

    @alone
    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory % 256 == 0
        self.addresses[name] = memory
        self.changes += 1
        return not self.nv.failed("set_tensor_address", self)

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self.allocators[name] = allocator
        return not self.nv.failed("set_output_allocator", self)

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
        inputs = {name: self._array(name, shape) for name, shape in self.shapes.items()}
        captured = stream in cuda.capturing
        if captured and self.ready != changes:
            self.nv.report("Cuda Runtime (operation not permitted when stream is capturing)", self)
            return False
        self.ready = changes
        for name, allocator in self.allocators.items():
            if not self._late(name, allocator, *inputs.values()):
                self.nv.report("output allocation failed", self)
                return False
        outputs = {
            name: self._array(name, self.get_tensor_shape(name))
            for name in self.addresses
            if name not in self.shapes and name not in self.allocators
        }

        def run() -> None:
            assert not captured or changes == self.changes, "a graph of a context since changed"
            values = self.nv.computes(inputs) if outputs else {}
            for name, y in outputs.items():
                y[:] = (values[name] + self.engine.told.get("off", 0)).astype(y.dtype)

        cuda.push(stream, "enqueue", run)
        if self.profiler is not None:
            for layer in json.loads(self.engine.told["layers"])["Layers"]:
                self.profiler.report_layer_time(layer["Name"], layer.get("ms", 1.0))
        return True

    def _late(self, name: str, allocator: Any, x: np.ndarray) -> bool:
        """An output of the rows that begin above 0: how many, only running it tells."""
        cuda = self.nv.cuda
        cuda.wait_stream(self.stream)
        rows = x[x[:, 0] > 0].copy()
        memory = allocator.reallocate_output_async(name, 0, rows.nbytes, 256, self.stream)
        if not memory:
            return False
        cuda.at(memory, rows.nbytes)[:] = np.frombuffer(rows.tobytes(), np.uint8)
        allocator.notify_shape(name, list(rows.shape))
        return True

    def _array(self, name: str, shape: Sequence[int]) -> np.ndarray:
        dtype = np.dtype(WIDTHS[self.engine.tensors[name]["dtype"]])
        nbytes = dtype.itemsize * int(np.prod(shape))
        return self.nv.cuda.at(self.addresses[name], nbytes).view(dtype).reshape(shape)


# -- the builder


def _names(names: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: name for name in names.split()})


def _tensor(name: str, dtype: str, shape: tuple[int, ...]) -> SimpleNamespace:
    """`allowed_formats` begins with all, as TensorRT may choose any for inputs and outputs."""
    kind = SimpleNamespace(name=dtype)
    return SimpleNamespace(
        name=name, dtype=kind, shape=shape, is_shape_tensor=False, allowed_formats=0xFFFF
    )


class _Network:
    num_inputs = num_outputs = 1

    def __init__(self, does: Behaviour, flags: int) -> None:
        self.strong = flags == 1 << does.strong_number
        self.num_layers, self._dtypes = len(does.dtypes), does.dtypes
        ends = does.seen["ends"] = [_tensor(name, "FLOAT", (-1, 4)) for name in "xy"]
        self.get_input, self.get_output = (lambda number, end=end: end for end in ends)

    def get_layer(self, number: int) -> SimpleNamespace:
        tensor = _tensor("t", self._dtypes[number], (-1, 1000))
        return SimpleNamespace(num_outputs=1, get_output=lambda place: tensor)


class _Parser:
    num_errors = 0

    def __init__(self, does: Behaviour, log: Any) -> None:
        self.does, self.log = does, log

    def parse_from_file(self, path: str) -> bool:
        self.does.seen["parsed"] = Path(path).read_bytes()
        if self.does.needs_plugins and not self.does.seen.get("plugins"):
            self.log.log(Severity.ERROR, "Plugin not found, are the plugin name correct?")
            return False
        return True


@dataclass
class _Cache:
    content: bytes

    def serialize(self) -> bytes:
        return self.content


class _Config:
    cache: _Cache | None = None
    progress_monitor: Any = None

    def __init__(self, does: Behaviour, log: Any) -> None:
        self.does, self.log = does, log
        self.flags: list[str] = []
        does.seen["config"] = self

    def set_flag(self, flag: str) -> None:
        self.flags.append(flag)

    def clear_flag(self, flag: str) -> None:
        self.does.seen.setdefault("cleared", []).append(flag)

    def set_memory_pool_limit(self, pool: str, size: int) -> None:
        self.does.seen[pool] = size

    def create_timing_cache(self, content: bytes) -> _Cache:
        self.does.seen.setdefault("caches", []).append(content)
        if content and self.does.cache_refused == "create":
            self.log.log(Severity.WARNING, "Failed to deserialize timing cache.")
            return _Cache(b"")
        return _Cache(content)

    def set_timing_cache(self, cache: _Cache, ignore_mismatch: bool) -> bool:
        if cache.content and self.does.cache_refused == "set":
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> _Cache | None:
        return self.cache

    def add_optimization_profile(self, profile: SimpleNamespace) -> int:
        self.does.seen["shapes"] = profile.shapes
        return 0


class _Builder:
    def __init__(self, does: Behaviour, log: Any) -> None:
        if not does.driver:
            log.log(Severity.ERROR, "CUDA initialization failure (cudaError 35: no driver)")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self.does, self.log = does, log
        self.num_DLA_cores = does.dla_cores

    def create_network(self, flags: int) -> _Network:
        return _Network(self.does, flags)

    def create_builder_config(self) -> _Config:
        return _Config(self.does, self.log)

    def create_optimization_profile(self) -> SimpleNamespace:
        shapes: dict[str, Any] = {}
        return SimpleNamespace(
            shapes=shapes, set_shape=lambda name, *sizes: shapes.update({name: sizes})
        )

    def build_serialized_network(self, network: _Network, config: _Config) -> bytes | None:
        self.does.seen.setdefault("strong", []).append(network.strong)
        monitor = config.progress_monitor
        monitor.phase_start("Building engine", None, 2)
        with contextlib.suppress(BaseException):  # NVIDIA's bindings lose what a callback raises
            self.does.during_build()
        if not monitor.step_complete("Building engine", 0):
            self.log.log(Severity.ERROR, "Build canceled by user")
            return None
        monitor.phase_finish("Building engine")
        for line in self.does.warnings:
            self.log.log(Severity.WARNING, line)
        error = self.does.strong_error if network.strong else self.does.weak_error
        if error:
            self.log.log(Severity.ERROR, error)
            return None
        if config.cache is not None:
            config.cache.content += b"timed"
        return self.does.plan


class Rig:
    """A model, the place of its plan, and the TensorRT that stands in for the installed one."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.model, self.out = save(linear(), folder / "m.onnx"), folder / "m.trt"
        self._stack = stack

    def use(self, name: str = "tensorrt", **behaviour: Any) -> Behaviour:
        does = Behaviour(**behaviour)
        self._stack.enter_context(replaced(name, FakeTensorRt(does=does)))
        return does

    def build(
        self, model: Path | None = None, on_progress: Any = None, **given: Any
    ) -> BuildResult:
        progress = on_progress or (lambda *_: None)
        return build(model or self.model, self.out, options(**given), progress)
