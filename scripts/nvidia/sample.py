"""A build and a run as one would write them for TensorRT 10.3 to 11.4; only type-checked.

It holds the stubs to what is right: mypy must find nothing here with any version.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorrt as trt


class Log(trt.ILogger):
    def __init__(self, sink: list[str]) -> None:
        trt.ILogger.__init__(self)
        self.sink = sink

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
            self.sink.append(msg)


class Monitor(trt.IProgressMonitor):
    def __init__(self, step: Callable[[str], bool]) -> None:
        trt.IProgressMonitor.__init__(self)
        self.step = step

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None: ...

    def step_complete(self, phase_name: str, step: int) -> bool:
        return self.step(f"{phase_name} {step}")

    def phase_finish(self, phase_name: str) -> None: ...


class Allocator(trt.IOutputAllocator):
    def __init__(self) -> None:
        trt.IOutputAllocator.__init__(self)
        self.shape: tuple[int, ...] = ()

    def notify_shape(self, tensor_name: str, shape: trt.Dims) -> None:
        self.shape = tuple(shape) if tensor_name else ()


def build(model: Path, sink: list[str], shapes: tuple[tuple[int, ...], ...]) -> bytes:
    logger = Log(sink)
    builder = trt.Builder(logger)
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(typed)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model)):
        error = parser.get_error(0)
        raise ValueError(f"{error.code()} {error.node_operator()} {error.node_name()}")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 1 << 30)
    config.builder_optimization_level = 3
    config.progress_monitor = Monitor(bool)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.NONE
    config.clear_flag(trt.BuilderFlag.TF32)
    cache = config.create_timing_cache(b"")
    config.set_timing_cache(cache, False)
    if builder.num_DLA_cores:
        config.default_device_type = trt.DeviceType.DLA
        config.DLA_core = 0
        config.set_flag(trt.BuilderFlag.GPU_FALLBACK)
    profile = builder.create_optimization_profile()
    for number in range(network.num_inputs):
        profile.set_shape(network.get_input(number).name, *shapes)
    if config.add_optimization_profile(profile) < 0:
        raise ValueError("profile")
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ValueError(sink[0])
    return bytes(memoryview(plan))


def run(plan: bytes, feeds: dict[str, tuple[int, np.ndarray]], stream: int) -> bool:
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise ValueError("not loaded")
    context = engine.create_execution_context()
    if context is None:
        raise ValueError("no context")
    inputs = []
    for number in range(engine.num_io_tensors):
        name = engine.get_tensor_name(number)
        if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
            inputs.append(name)
            low, _, high = engine.get_tensor_profile_shape(name, 0)
            if tuple(low) > tuple(high) or engine.get_tensor_dtype(name) == trt.DataType.BOOL:
                raise ValueError(name)
    for name in inputs:
        address, array = feeds[name]
        context.set_input_shape(name, array.shape)
        context.set_tensor_address(name, address)
    context.set_output_allocator("y", Allocator())
    inspector = engine.create_engine_inspector()
    inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    return context.execute_async_v3(stream)
