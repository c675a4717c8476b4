"""A stand-in for the module `tensorrt`: the members that the builder uses, and what it was told.

It parses nothing: its network has one input, `x` float32[-1, 4], and layers of the given types. So
what needs a GPU, or a TensorRT that is not here, can be followed on any machine.
"""

# ruff: noqa: ARG002, ARG005 - members take what those of NVIDIA take

from __future__ import annotations

import contextlib
import enum
import importlib.machinery
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from deploykit.building.tensorrt.options import AxisRange, Options
from deploykit.core.profile import load_profile
from tests.support.runtimes.fake_tensorrt import ILogger, Severity

BATCH = AxisRange(1, 4, 8)
NO_FORMATS = (
    "IBuilder::buildSerializedNetwork: Error Code 9: Internal Error (conv: could not find any "
    "supported formats consistent with input/output data types)"
)


def options(profile: str = "l4", batch: AxisRange = BATCH, **more: Any) -> Options:
    return Options(load_profile(profile), batch, **more)


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
    hardware: str = "NONE AMPERE_PLUS"  # compatibility levels; TensorRT 10.13 has one more
    layers: str | None = None  # the inspector's answer; None: the plan cannot be read back
    strong_number: int = 1  # STRONGLY_TYPED is 1 in TensorRT 10, 0 in 11
    cache_refused: bool = False
    cache_driver: bool = True  # False: it is refused for want of a driver
    driver: bool = True
    during_build: Callable[[], None] = lambda: None
    seen: dict[str, Any] = field(default_factory=dict)


Use = Callable[..., Behaviour]  # puts such a TensorRT in place of the installed one


class IProgressMonitor:
    pass


def make(does: Behaviour) -> ModuleType:
    """A module to put at `sys.modules["tensorrt"]`."""
    nv = ModuleType("tensorrt")
    nv.__spec__ = importlib.machinery.ModuleSpec("tensorrt", None)
    members: dict[str, Any] = {
        "__version__": does.version,
        "ILogger": ILogger,
        "IProgressMonitor": IProgressMonitor,
        "NetworkDefinitionCreationFlag": enum.IntEnum(
            "NetworkDefinitionCreationFlag", {"STRONGLY_TYPED": does.strong_number}
        ),
        "BuilderFlag": _names("FP16 BF16 INT8 FP8 INT4 TF32 GPU_FALLBACK VERSION_COMPATIBLE"),
        "TensorFormat": enum.IntEnum("TensorFormat", {"LINEAR": 0, "CHW4": 2}),
        "init_libnvinfer_plugins": lambda log, space: _init_plugins(does, log, space),
        "get_plugin_registry": lambda: SimpleNamespace(
            load_library=lambda path: does.seen.setdefault("libraries", []).append(path) or path
        ),
        "MemoryPoolType": _names("WORKSPACE"),
        "ProfilingVerbosity": _names("DETAILED"),
        "HardwareCompatibilityLevel": _names(does.hardware),
        "DeviceType": _names("GPU DLA"),
        "LayerInformationFormat": _names("ONELINE JSON"),
        "Builder": lambda log: _Builder(does, log),
        "OnnxParser": lambda network, log: _Parser(does, log),
        "Runtime": lambda log: _Runtime(does),
    }
    for name, member in members.items():
        setattr(nv, name, member)
    return nv


def _init_plugins(does: Behaviour, log: Any, space: str) -> bool:
    assert isinstance(log, ILogger)
    does.seen["plugins"] = True
    return True


def _names(names: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: name for name in names.split()})


def _tensor(name: str, dtype: str, shape: tuple[int, ...]) -> SimpleNamespace:
    """`allowed_formats` begins with all, as TensorRT may choose any for inputs and outputs."""
    kind = SimpleNamespace(name=dtype)
    return SimpleNamespace(
        name=name, dtype=kind, shape=shape, is_shape_tensor=False, allowed_formats=0xFFFF
    )


class _Network:
    def __init__(self, does: Behaviour, flags: int) -> None:
        self.strong = flags == 1 << does.strong_number
        self.num_inputs, self.num_outputs, self.num_layers = 1, 1, len(does.dtypes)
        self._dtypes = does.dtypes
        self.ends = (_tensor("x", "FLOAT", (-1, 4)), _tensor("y", "FLOAT", (-1, 4)))
        does.seen["ends"] = self.ends

    def get_input(self, number: int) -> SimpleNamespace:
        return self.ends[0]

    def get_output(self, number: int) -> SimpleNamespace:
        return self.ends[1]

    def get_layer(self, number: int) -> SimpleNamespace:
        tensor = _tensor("t", self._dtypes[number], (-1, 1000))
        return SimpleNamespace(num_outputs=1, get_output=lambda place: tensor)


class _Parser:
    num_errors = 0

    def __init__(self, does: Behaviour, log: Any) -> None:
        self.does, self.log = does, log

    def parse_from_file(self, path: str) -> bool:
        if self.does.needs_plugins and not self.does.seen.get("plugins"):
            self.log.log(Severity.ERROR, "Plugin not found, are the plugin name correct?")
            return False
        return True


class _Cache:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def serialize(self) -> bytes:
        return self.content


class _Config:
    def __init__(self, does: Behaviour, log: Any) -> None:
        self.does, self.log = does, log
        self.flags: list[str] = []
        self.cache: _Cache | None = None
        self.progress_monitor: Any = None
        does.seen["config"] = self

    def set_flag(self, flag: str) -> None:
        self.flags.append(flag)

    def clear_flag(self, flag: str) -> None:
        self.does.seen.setdefault("cleared", []).append(flag)

    def set_memory_pool_limit(self, pool: str, size: int) -> None:
        self.does.seen[pool] = size

    def create_timing_cache(self, content: bytes) -> _Cache:
        self.does.seen.setdefault("caches", []).append(content)
        if content and self.does.cache_refused:
            if not self.does.cache_driver:
                self.log.log(Severity.ERROR, "In f (cudaError 35: CUDA driver version)")
            self.log.log(Severity.WARNING, "Failed to deserialize timing cache.")
            return _Cache(b"")
        return _Cache(content)

    def set_timing_cache(self, cache: _Cache, ignore_mismatch: bool) -> bool:
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


class _Runtime:
    def __init__(self, does: Behaviour) -> None:
        self.does = does
        self.engine_host_code_allowed = False
        self.DLA_core = -1  # "-1: this runtime uses no DLA"

    def deserialize_cuda_engine(self, plan: bytes) -> SimpleNamespace | None:
        if self.does.layers is None:
            return None
        self.does.seen["host_code"] = self.engine_host_code_allowed
        self.does.seen["runtime_dla"] = self.DLA_core
        inspector = SimpleNamespace(get_engine_information=lambda form: self.does.layers)
        return SimpleNamespace(create_engine_inspector=lambda: inspector)
