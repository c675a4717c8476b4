"""Build a TensorRT plan from an ONNX file, or check that NVIDIA's builder accepts the file.

Networks are strongly typed: the file's types are the precision. TensorRT 10.0 to 10.11 lacks
strongly typed kernels for some networks; those are built with the older precision flags that the
types ask for, and a note says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.building.builder import BuildResult
from deploykit.building.tensorrt.module import (
    FAILURES,
    RTX_MAGIC,
    Reason,
    Refused,
    build_warnings,
    collect_log,
    error_of,
    given,
    module,
    parser_reasons,
    reason_of,
    start,
    version,
)
from deploykit.building.tensorrt.options import (
    Options,
    ShapeRange,
    check_graph,
    check_options,
    check_target,
    ranges,
)
from deploykit.core.errors import BadInput, DeploykitError, GateFailed, Unsupported, os_reason
from deploykit.core.files import atomic_write, cache_folder, check_data_file, make_folder, sha256
from deploykit.core.json_value import Record
from deploykit.core.machine import Machine, builder_bytes, this_machine
from deploykit.core.precision import ALL
from deploykit.core.profile import with_gpu
from deploykit.core.tensors import TensorSpec, axis_name
from deploykit.engines.tensorrt.compatibility import load_plugins
from deploykit.engines.tensorrt.log import LogLines, logger
from deploykit.evaluation.artefacts import Progress, no_progress
from deploykit.graph.facts import external_files, onnx_files, read_facts
from deploykit.graph.graph import Graph

if TYPE_CHECKING:
    import tensorrt as trt

LEAST_WORKSPACE = 64 << 20  # with less, TensorRT drops common kernels or finds none


def workspace_that_fits(model: Path, options: Options) -> int | None:
    """Return the profile's workspace, or what the weights leave of the free memory.

    A build that runs out of memory takes minutes to fail, and where CPU and GPU share their memory
    the system may end it instead. Raises Unsupported for less than LEAST_WORKSPACE.
    """
    asked, free = options.profile.workspace_bytes, options.free_bytes
    shared = options.profile.unified_memory
    if asked is None or free is None:
        return asked
    weights = sum(file.stat().st_size for file in onnx_files(model))
    held = builder_bytes(weights, shared)
    if free - held < min(asked, LEAST_WORKSPACE):
        raise Unsupported(
            f"{model}: building needs {mib(held)} of GPU memory for "
            f"{'the builder and three copies of the weights' if shared else 'weights'} and "
            f"{mib(LEAST_WORKSPACE)} of workspace, but only {mib(free)} are free",
            hint="stop other programs that use the GPU",
        )
    return min(asked, free - held)


def mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def check_inputs(network: trt.INetworkDefinition, model: Path) -> None:
    """Raise Unsupported for an input whose values TensorRT needs while it builds."""
    for tensor in map(network.get_input, range(network.num_inputs)):
        if tensor.is_shape_tensor:
            raise Unsupported(
                f"{model}: input '{tensor.name}' determines a shape inside the graph by its values",
                hint="export the model again with that value as a constant",
            )


@contextlib.contextmanager
def _with_own_axes(model: Path) -> Iterator[Path]:
    """Yield the file, or a copy if it gives several axes one word for "unknown".

    TensorRT takes axes of one name for axes of one size.
    """
    axes = [axis for value in read_facts(model).inputs for axis in value.shape or ()]
    words = [each for each in axes if isinstance(each, str) and axis_name("", 0, each) != each]
    if len(set(words)) == len(words):
        yield model
        return
    graph = Graph.open(model)
    named = type(graph.model)()
    named.CopyFrom(graph.model)
    shapes = {spec.name: spec.shape for spec in graph.inputs}
    for value in named.graph.input:
        dims = value.type.tensor_type.shape.dim
        for dim, axis in zip(dims, shapes.get(value.name, ()), strict=False):
            if isinstance(axis, str):
                dim.dim_param = axis
    with tempfile.TemporaryDirectory() as folder:
        Graph(named, graph.path).save(Path(folder, model.name))
        yield Path(folder, model.name)


def element_types(network: trt.INetworkDefinition) -> set[str]:
    """Return the names of the TensorRT DataTypes of all tensors, such as {"FLOAT", "HALF"}."""
    inputs = map(network.get_input, range(network.num_inputs))
    return {tensor.dtype.name for tensor in (*inputs, *_tensors(network))}


def precision_flags(dtypes: Iterable[str]) -> tuple[str, ...]:
    """Return the builder flags that a weakly typed network of these element types needs."""
    present = set(dtypes)
    return tuple(x.builder_flag for x in ALL if x.builder_flag and x.tensorrt_type in present)


def pin_linear(nv: Any, network: trt.INetworkDefinition) -> None:
    """Fix inputs and outputs in row-major order, as our buffers are; TensorRT may differ."""
    linear = 1 << int(nv.TensorFormat.LINEAR)
    tensors = [*map(network.get_input, range(network.num_inputs))]
    tensors += map(network.get_output, range(network.num_outputs))
    with contextlib.suppress(NotImplementedError):  # TensorRT's bindings on RTX's library
        for tensor in tensors:
            tensor.allowed_formats = linear


def add_profile(
    builder: trt.Builder,
    config: trt.IBuilderConfig,
    inputs: Sequence[TensorSpec],
    sizes: Mapping[str, ShapeRange],
) -> None:
    """Add an optimisation profile with the sizes of the inputs that have a dynamic axis."""
    dynamic = [spec for spec in inputs if any(isinstance(axis, str) for axis in spec.shape)]
    if not dynamic:
        return
    profile = given(builder.create_optimization_profile())
    for spec in dynamic:
        profile.set_shape(spec.name, *sizes[spec.name])
    config.add_optimization_profile(profile)  # a refused one fails the build, with a reason


def _tensors(network: trt.INetworkDefinition) -> Iterator[trt.ITensor]:
    """Return the outputs of every layer; TensorRT gives None for an unused one."""
    for number in range(network.num_layers):
        layer = network.get_layer(number)
        for place in range(layer.num_outputs):
            tensor: trt.ITensor | None = layer.get_output(place)
            if tensor is not None:
                yield tensor


# TensorRT's timing cache keeps its measurements of kernels between builds. Two builds that start
# from one cache choose the same kernels, unless one meets a kernel that was not timed before.

SUFFIX = ".cache"


def cache_path(tensorrt: str, here: Machine) -> Path | None:
    """Return the cache file of this TensorRT, GPU and driver; None where there is no GPU."""
    gpu = here.gpus[0] if here.gpus else None
    name = gpu.name if gpu else here.board  # an older Jetson has no nvidia-smi
    driver = gpu.driver if gpu else here.l4t
    if name is None or driver is None:
        return None
    parts = (tensorrt, name, driver, here.power_mode or "")
    file = "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts if part)
    return cache_folder() / "timing" / f"{file}{SUFFIX}"


def use_cache(nv: Any, config: trt.IBuilderConfig, path: Path) -> tuple[str, bool]:
    """Set the cache at `path` on `config`, an empty one if there is no file or it is refused.

    Returns the SHA-256 of the cache in use, empty without one, and whether the file was refused:
    TensorRT refuses a damaged one and that of another TensorRT or GPU. Raises BadInput when the
    file cannot be read.
    """
    try:
        content = path.read_bytes() if path.is_file() else b""
    except OSError as exc:
        raise BadInput(f"{path}: the timing cache cannot be read: {os_reason(exc)}") from exc
    taken = False
    with collect_log(nv) as lines, contextlib.suppress(*FAILURES):
        taken = config.set_timing_cache(given(config.create_timing_cache(content)), False)
        if not taken and content:
            config.set_timing_cache(config.create_timing_cache(b""), False)
    log = (*lines.errors, *lines.warnings)  # TensorRT reports it nowhere else
    refused = not taken or any("timing cache" in line.lower() for line in log)
    used = content and not refused
    return hashlib.sha256(content).hexdigest() if used else "", bool(content and refused)


def keep_cache(config: trt.IBuilderConfig, path: Path) -> str:
    """Write the build's timings to `path`; return their SHA-256, empty if TensorRT gives none."""
    try:
        content = bytes(memoryview(given(given(config.get_timing_cache()).serialize())))
    except FAILURES:
        return ""
    make_folder(path.parent)
    with atomic_write(path) as tmp:
        tmp.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def monitor(nv: Any, on_progress: Progress) -> Any:
    """An IProgressMonitor that calls `on_progress`; keep it alive until the build has ended.

    TensorRT's phases nest, and each has a number of steps; the share reported never falls. TensorRT
    calls it from several threads, and prints and drops an exception: one stops the build.
    """
    base: Any = nv.IProgressMonitor
    lock = threading.RLock()

    class Monitor(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.share, self.stopped = 0.0, False
            self.phases: dict[str, tuple[str | None, int, int]] = {}  # parent, steps, steps done

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            with lock:
                self.phases[name] = parent, max(1, steps), 0
                self.report(name)

        def step_complete(self, name: str, number: int) -> bool:
            with lock:
                if name in self.phases:
                    self.phases[name] = (*self.phases[name][:2], number + 1)
                    self.report(name)
            return not self.stopped

        def phase_finish(self, name: str) -> None:
            with lock:
                self.phases.pop(name, None)

        def report(self, phase: str) -> None:
            self.share = min(1.0, max(self.share, self.share_of(None)))
            try:
                on_progress(phase, self.share)
            except BaseException:  # noqa: BLE001 - the process that asked has ended, or interrupts
                self.stopped = True

        def share_of(self, parent: str | None) -> float:
            """Share of the newest phase below `parent`; its current step counts in part."""
            for name, (above, steps, done) in reversed(self.phases.items()):
                if above == parent:
                    return (done + (self.share_of(name) if done < steps else 0.0)) / steps
            return 0.0

    return Monitor()


STRONG = "STRONGLY_TYPED"
_WEAK_ALLOWED = ((10, 0), (10, 11))  # first and last TensorRT whose strong typing has gaps
_NOT_PROVEN: Mapping[str, str] = {
    "tensorrt": "built with this machine's TensorRT: speed, memory and accuracy on the target's "
    "own GPU and TensorRT are not proven",
    "rtx": "built with TensorRT for RTX, which accepts the operators, types and shapes: which "
    "kernels TensorRT has for the target (INT8 above all), their speed and accuracy are not proven",
}


@dataclass(frozen=True)
class BuildCheck(Record):
    """The builder's verdict on a file; nothing was kept. `problems`: each refusal.

    `flavour`: "tensorrt" or "rtx", the library that built the plan, as only a plan shows it.
    `layers`: number of layers in the parsed network.
    """

    path: Path
    profile: str
    accepted: bool
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    flavour: str
    layers: int
    plan_bytes: int
    build_s: float

    def raise_if_refused(self) -> None:
        """Raise GateFailed naming the first node that was refused."""
        if not self.accepted:
            others = len(self.problems) - 1
            more = f" (and {others} more)" if others else ""
            raise GateFailed(f"{self.path}: refused: {self.problems[0]}{more}", result=self)


def build(
    model: Path, out: Path, options: Options, on_progress: Progress = no_progress
) -> BuildResult:
    """Write the plan of `model` to `out`, completely or not at all. Takes seconds to hours.

    It is built on the GPU of `options`, within its free memory.

    `on_progress(phase, share)`: the share is from 0 to 1. Raises NotFound or BadInput for a damaged
    file and for options that contradict it; Unsupported for what this TensorRT or GPU cannot do,
    for too little free memory, and for TensorRT for RTX in place of TensorRT; MissingExtra.
    """
    facts: dict[str, str] = {}
    try:
        from deploykit.engines.cuda.driver import CudaDevice
        from deploykit.engines.tensorrt.open import here as facts_of

        driver = CudaDevice(options.shapes.device)
        driver.use()  # TensorRT builds for this thread's GPU
        options = replace(options, free_bytes=driver.memory()[0])
        facts = facts_of(driver).facts()
    except DeploykitError:  # without CUDA TensorRT itself reports what is missing
        if options.shapes.device:  # it would build for the first GPU
            raise
    here = with_gpu(this_machine(), options.shapes.device)
    nv = module()
    check_target(nv, options)
    try:
        made = _build_plan(nv, model, options, on_progress, here, checking=False)
    except Refused as exc:
        raise error_of(str(model), exc.reasons) from exc
    if flavour_of(made.plan) == "rtx":
        raise Unsupported(
            f"{out}: not written: the installed library is TensorRT for RTX, whose plans the "
            f"TensorRT of profile {options.profile.name} cannot load",
            hint="build on the target; on this machine use `check`",
        )
    on_progress("built", 1.0)
    with atomic_write(out) as tmp:
        tmp.write_bytes(made.plan)
    return BuildResult(
        {**made.built_on(), **facts},
        notes=tuple(made.notes),
        flags_used=tuple(made.flags),
        plugins={str(each.resolve()): sha256(each) for each in map(Path, options.shapes.plugins)},
    )


def check(model: Path, options: Options, on_progress: Progress = no_progress) -> BuildCheck:
    """Parse and build `model` with the installed builder; a refused graph is a result."""
    nv, here = module(rtx=True), with_gpu(this_machine(), options.shapes.device)
    started, made, refused = time.perf_counter(), None, tuple[Reason, ...]()
    try:
        made = _build_plan(nv, model, options, on_progress, here, checking=True)
    except Refused as exc:
        refused = exc.reasons
        if any(reason.damaged for reason in refused):
            raise error_of(str(model), refused) from exc
    plan = made.plan if made else b""
    return BuildCheck(
        path=model,
        profile=options.profile.name,
        accepted=made is not None,
        problems=tuple(reason.text for reason in refused),
        notes=(*made.notes, _NOT_PROVEN[flavour_of(plan)]) if made else (),
        flavour=flavour_of(plan),
        layers=made.layers if made else 0,
        plan_bytes=len(plan),
        build_s=time.perf_counter() - started,
    )


def flavour_of(plan: bytes) -> str:
    """Return the library that wrote a plan, whatever its module's name: "tensorrt" or "rtx"."""
    return "rtx" if plan.startswith(RTX_MAGIC) else "tensorrt"


def _build_plan(
    nv: Any, model: Path, options: Options, on_progress: Progress, here: Machine, checking: bool
) -> _Attempt:
    """Build strongly typed; else weakly typed, where this TensorRT's strong typing has gaps."""
    if options.debug:  # this process is a child, whose log nobody has set up
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s: %(message)s")
    for location in external_files(model):
        check_data_file(model, location, str(model))
    check_options(options)
    check_graph(options, model)
    on_progress("parsing", 0.0)
    attempt = partial(_Attempt, nv, start(nv), model, options, on_progress, here, checking)
    load_plugins(nv, map(Path, options.shapes.plugins))
    if options.shapes.dla is not None and version(nv) < (11,):  # its precision is a flag
        return attempt().run(strong=False)
    try:
        return attempt().run(strong=True)
    except Refused as exc:
        first, last = _WEAK_ALLOWED
        if not first <= version(nv) <= last or exc.reasons[0].damaged:
            raise
        with contextlib.suppress(Refused):
            weak = attempt().run(strong=False)
            weak.notes.insert(
                0,
                f"TensorRT {nv.__version__} refused the strongly typed network "
                f"({exc.reasons[0].text}): built with {', '.join(weak.flags) or 'no'} flags "
                "instead, so a layer may run in a higher precision than the file's",
            )
            return weak
        raise


@dataclass
class _Attempt:
    """One build: its `plan`, the `flags` set, `notes`, and SHA-256 of its `timings`."""

    nv: Any
    builder: trt.Builder
    model: Path
    options: Options
    on_progress: Progress
    here: Machine
    checking: bool
    plan: bytes = b""
    layers: int = 0
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timings: dict[str, str] = field(default_factory=dict)

    def run(self, strong: bool) -> _Attempt:
        with collect_log(self.nv) as lines:
            try:
                self._run(strong, lines)
            except FAILURES as exc:
                raise Refused((reason_of(exc, lines),)) from exc
        return self

    def _run(self, strong: bool, lines: LogLines) -> None:
        nv, options = self.nv, self.options
        typed = 1 << int(getattr(nv.NetworkDefinitionCreationFlag, STRONG)) if strong else 0
        network = given(self.builder.create_network(typed))
        parser: trt.OnnxParser = given(nv.OnnxParser(network, logger(nv)))  # it owns the weights
        with _with_own_axes(self.model) as model:
            if not parser.parse_from_file(str(model)):
                raise Refused(parser_reasons(parser, lines))
        self.layers = int(network.num_layers)
        pin_linear(nv, network)
        check_inputs(network, self.model)
        inputs = Graph.open(self.model).inputs
        sizes = ranges(inputs, options.batch, options.axes)
        config = given(self.builder.create_builder_config())
        if (space := workspace_that_fits(self.model, options)) is not None:
            config.set_memory_pool_limit(nv.MemoryPoolType.WORKSPACE, space)
            asked = options.profile.workspace_bytes or 0
            if space < asked:
                text = f"workspace: {mib(space)} instead of {mib(asked)}, as free memory is short"
                self.notes.append(text)
        self.flags += [STRONG] if strong else precision_flags(element_types(network))
        self._configure(config)
        named = options.shapes.timing_cache
        cache = Path(named) if named else cache_path(f"tensorrt-{nv.__version__}", self.here)
        if cache:
            self.timings["timing_cache_read_sha256"], refused = use_cache(nv, config, cache)
            if refused and cache.suffix != SUFFIX:  # it is replaced after the build
                raise BadInput(f"{cache}: is not a timing cache, whose name ends with {SUFFIX}")
            if refused:  # damaged, or from another TensorRT or GPU
                self.notes.append(f"{cache}: TensorRT refused the timing cache; it starts anew")
        add_profile(self.builder, config, inputs, sizes)
        watch = monitor(nv, self.on_progress)  # the config does not keep it alive
        config.progress_monitor = watch
        self.plan = bytes(memoryview(given(self.builder.build_serialized_network(network, config))))
        self.notes += build_warnings(lines.warnings)
        if cache and not self.checking:
            try:
                self.timings["timing_cache_sha256"] = keep_cache(config, cache)
            except DeploykitError as exc:
                self.notes.append(f"the timing cache was not written: {exc.message}")

    def _configure(self, config: trt.IBuilderConfig) -> None:
        nv, shapes = self.nv, self.options.shapes
        config.profiling_verbosity = nv.ProfilingVerbosity.DETAILED  # layers are read back
        if not shapes.tf32:
            config.clear_flag(nv.BuilderFlag.TF32)  # set by default
        if level := shapes.hardware_compatible:
            member = level.upper().replace("-", "_")
            if not hasattr(nv.HardwareCompatibilityLevel, member):
                needs = f"needs a newer TensorRT, with {member}"
                raise Unsupported(f"`hardware_compatible` {level}: {needs}")
            config.hardware_compatibility_level = getattr(nv.HardwareCompatibilityLevel, member)
        self.flags += ["VERSION_COMPATIBLE"] * shapes.version_compatible
        cores = int(self.builder.num_DLA_cores)
        if shapes.dla is not None and 0 <= shapes.dla < cores:
            config.default_device_type = nv.DeviceType.DLA
            config.DLA_core = shapes.dla
            self.flags.append("GPU_FALLBACK")
        elif shapes.dla is not None:
            text = f"`dla` {shapes.dla}: TensorRT finds {cores} DLA cores on this machine"
            if not self.checking:
                raise Unsupported(text)
            self.notes.append(f"{text}: checked for the GPU alone")
        for name in self.flags:
            if name != STRONG:
                config.set_flag(getattr(nv.BuilderFlag, name))

    def built_on(self) -> dict[str, str]:
        """Return the manifest's `built_on`.

        Where `timing_cache_read_sha256` (before the build) equals `timing_cache_sha256` (after it),
        every kernel was chosen by timings that were already in the cache.
        """
        gpu = self.here.gpus[0] if self.here.gpus else None
        facts: dict[str, object] = {
            "tensorrt": self.nv.__version__,
            "gpu": gpu and gpu.name,
            "compute_capability": gpu and gpu.compute_capability,
            "driver": gpu and gpu.driver,
            "power_mode": self.here.power_mode,
            "model": self.model.name,
            "onnx_sha256": sha256(self.model),
            **self.options.built_on(),
            "typing": "strong" if STRONG in self.flags else "weak",
            **self.timings,
        }
        return {key: str(value) for key, value in facts.items() if value not in (None, "")}
