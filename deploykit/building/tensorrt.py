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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deploykit.building.builder import (
    BuildResult,
    Options,
    ShapeRange,
    Shapes,
    check_graph,
    check_options,
    check_target,
    open_graph_file,
    parse_axis,
    parse_batch,
    ranges,
)
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput, DeploykitError, GateFailed, Unsupported, os_reason
from deploykit.core.extras import installed, require
from deploykit.core.files import atomic_write, cache_folder, check_data_file, make_folder, sha256
from deploykit.core.json_value import Record
from deploykit.core.machine import Machine, builder_bytes, this_machine, version_numbers
from deploykit.core.precision import ALL
from deploykit.core.profile import Profile, load_profile, with_gpu
from deploykit.core.subprocesses import run_apart
from deploykit.core.tensors import TensorSpec, axis_name
from deploykit.engines.tensorrt.compatibility import (
    LogLines,
    check_version,
    load_plugins,
    logger,
    read_machine,
)
from deploykit.evaluation.artefacts import Progress, no_progress
from deploykit.graph.graph import Graph
from deploykit.graph.parse import external_files, onnx_files, read_facts

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


def precision_flags(network: trt.INetworkDefinition) -> tuple[str, ...]:
    """Return the builder flags that a weakly typed network needs for its tensors' types."""
    layers = map(network.get_layer, range(network.num_layers))
    outputs = [layer.get_output(at) for layer in layers for at in range(layer.num_outputs)]
    tensors = [*map(network.get_input, range(network.num_inputs)), *outputs]
    present = {tensor.dtype.name for tensor in tensors if tensor is not None}  # None: unused
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

        driver = CudaDevice(options.shapes.device)
        driver.use()  # TensorRT builds for this thread's GPU
        options = replace(options, free_bytes=driver.memory()[0])
        facts = read_machine(driver).facts()
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
    started, made, refused = time.perf_counter(), None, tuple[DeploykitError, ...]()
    try:
        made = _build_plan(nv, model, options, on_progress, here, checking=True)
    except Refused as exc:
        refused = exc.reasons
        if any(isinstance(each, BadInput) for each in refused):
            raise error_of(str(model), refused) from exc
    plan = made.plan if made else b""
    return BuildCheck(
        path=model,
        profile=options.profile.name,
        accepted=made is not None,
        problems=tuple(each.message for each in refused),
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
    if options.shapes.dla is not None:
        check_graph(options, Graph.open(model))
    on_progress("parsing", 0.0)
    release = version_numbers(str(nv.__version__))[:2]
    attempt = partial(_Attempt, nv, start(nv), model, options, on_progress, here, checking)
    load_plugins(nv, map(Path, options.shapes.plugins))
    if options.shapes.dla is not None and release < (11,):  # its precision is a flag
        return attempt().run(strong=False)
    try:
        return attempt().run(strong=True)
    except Refused as exc:
        first, last = _WEAK_ALLOWED
        if not first <= release <= last or isinstance(exc.reasons[0], BadInput):
            raise
        with contextlib.suppress(Refused):
            weak = attempt().run(strong=False)
            weak.notes.insert(
                0,
                f"TensorRT {nv.__version__} refused the strongly typed network "
                f"({exc.reasons[0].message}): built with {', '.join(weak.flags) or 'no'} flags "
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
                raise Refused((build_refusal(lines.errors or [str(exc)]),)) from exc
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
        self.flags += [STRONG] if strong else precision_flags(network)
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


# TensorRT reports the condition that failed in its source ("false") or only writes to its log; the
# messages matched here were collected by giving it files that it refuses.

NO_DRIVER = "cudaError 35"  # follows every other error of a machine without a driver
NO_REASON = "TensorRT gave no reason in its log"


# pattern in an operator's name, the parser's message or the builder's log -> hint
_HINTS = {
    "must have same input types|must be of same type": (
        "write the precision into the file: deploykit quantize MODEL --to fp16"
    ),
    "QLinear|QGemm|QAttention|MatMulInteger|ConvInteger|type Int32 but must|Non-zero zero point"
    "|unsupported input type of UINT8": (
        "TensorRT takes symmetric Q/DQ pairs: deploykit quantize MODEL --to int8 --calib DATA"
    ),
    "Could not infer output types for dequantize": (  # 10.16.2 on Orin, with float16 scales
        "quantize again without `other_nodes` fp16, or build with another TensorRT"
    ),
    "workspace limit|insufficient workspace|increase the .*workspace": (
        "a larger `workspace_bytes` in the profile"
    ),
    "libnvinfer_lean|libnvinfer_builder|libnvinfer_dispatch": (
        "a version compatible plan needs TensorRT's lean runtime, which is not installed"
    ),
    "out of memory|OutOfMemory|Requested amount of GPU memory": (
        "stop other programs that use the GPU, or choose a smaller batch"
    ),
}
_DAMAGED = re.compile(
    "Failed to parse the ONNX model|Failed to import initializer|must have same input types"
    "|must be of same type"
)
_WARNINGS = 5  # number that a note repeats


def parser_refusal(error: trt.ParserError) -> DeploykitError:
    """Explain one parser error: its node and its own words; BadInput for a damaged file."""
    operator, message = error.node_operator(), error.desc()
    name = error.node_name() or (f"#{error.node()}" if operator else "")
    node = f"{operator or 'a node'} '{name}'" if name else operator
    own = [line for line in message.splitlines() if not line.startswith("Invalid Node - ")]
    # `Assertion failed: (the condition in C++): the reason`, or `the condition && "the reason"`
    why = re.sub(r'^.*(\): |&& "(?=.*"$))', "", first_sentence("\n".join(own))).rstrip('".')
    text = f"{node}: {why}" if node else why
    if str(error.code()).endswith("UNSUPPORTED_NODE") and node:
        reason = "" if why in ("", "false", NO_REASON) else f": {why}"
        text = f"operator {node} is not supported by TensorRT{reason}"
    kind = BadInput if _DAMAGED.search(message) else Unsupported
    return kind(text, hint=_hint(f"{operator} {message}"))


def build_refusal(errors: Sequence[str]) -> Unsupported:
    """Explain why a build produced no plan, from the error lines of its log, oldest first."""
    lines = [line for line in errors if NO_DRIVER not in line]
    if lines:
        cause = next(filter(_hint, lines), lines[0])
        return Unsupported(first_sentence(cause), hint=_hint(cause))
    if errors:
        return Unsupported("no NVIDIA driver on this machine", hint="see: deploykit doctor")
    return Unsupported(NO_REASON)


def _hint(text: str) -> str | None:
    found = (hint for pattern, hint in _HINTS.items() if re.search(pattern, text, re.IGNORECASE))
    return next(found, None)


def error_of(where: str, refusals: Sequence[DeploykitError]) -> DeploykitError:
    """Return an error of the first one's kind and hint, with all refusals in its message."""
    text = "; ".join(refusal.message for refusal in refusals)
    return type(refusals[0])(f"{where}: {text}", hint=refusals[0].hint)


def build_warnings(lines: Sequence[str]) -> list[str]:
    """Return TensorRT's warnings as notes, each once; those of the timing cache have their own."""
    found = [first_sentence(line) for line in lines if "timing cache" not in line.lower()]
    distinct = list(dict.fromkeys(line for line in found if NO_DRIVER not in line))
    notes = [f"TensorRT warns: {line}" for line in distinct[:_WARNINGS]]
    if len(distinct) > _WARNINGS:
        notes.append(f"TensorRT gave {len(distinct) - _WARNINGS} more warnings: see `--debug`")
    return notes


def first_sentence(text: str) -> str:
    """Return the first log line without TensorRT's function name, error code and position."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), NO_REASON)
    line = re.sub(r"^(\[\S+?\]|\w+::\w+:)\s*", "", line)
    line = re.sub(r"^Error Code \d+: [\w ]+ \((.*)\)$", r"\1", line)
    line = re.sub(r"\.? In \w+ at \S+:\d+\)?$", "", line)
    return re.sub(r"^Assertion failed: ", "", line)


RTX_MAGIC = b"vtrt"  # the first bytes of a plan of TensorRT for RTX, whatever the module's name
_T = TypeVar("_T")


def module(*, rtx: bool = False) -> Any:
    """Import `tensorrt`; with `rtx` TensorRT for RTX, where that alone is installed.

    Which library `tensorrt` wraps shows only in its plans. Raises MissingExtra when it is not
    installed, Unsupported when it does not load or is older than TensorRT 10.
    """
    if rtx and installed("tensorrt_rtx") and not installed("tensorrt"):
        return require("tensorrt_rtx")
    found = require("tensorrt")
    check_version(str(found.__version__))
    return found


@contextlib.contextmanager
def collect_log(nv: Any) -> Iterator[LogLines]:
    """Collect TensorRT's log lines during the block; one thread at a time."""
    lines = LogLines()
    with _busy:
        log = logger(nv)
        before, log.sink = log.sink, lines
        try:
            yield lines
        finally:
            log.sink = before


_busy = threading.RLock()

FAILURES = (RuntimeError, TypeError, ValueError)  # a null pointer, a failed call, a rank of -1


class Refused(Exception):  # noqa: N818 - a result of a check, not an error
    """TensorRT's reasons against a file or a build."""

    def __init__(self, reasons: tuple[DeploykitError, ...]) -> None:
        super().__init__(reasons[0].message)
        self.reasons = reasons


def given(value: _T | None) -> _T:
    """Return what TensorRT returned. Raises RuntimeError for None, by which it reports failure."""
    if value is None:
        raise RuntimeError(NO_REASON)
    return value


def start(nv: Any) -> trt.Builder:
    """Create a builder. Raises Unsupported where TensorRT cannot start, as without a driver."""
    with collect_log(nv) as lines:
        try:
            builder: trt.Builder = given(nv.Builder(logger(nv)))
            return builder
        except FAILURES as exc:
            reason = build_refusal(lines.errors or [str(exc)])
            raise Unsupported(
                f"TensorRT {nv.__version__} cannot start: {reason.message}", hint=reason.hint
            ) from exc


def parser_reasons(parser: trt.OnnxParser, lines: LogLines) -> tuple[DeploykitError, ...]:
    """Explain why `parser` refused a file: one reason or more, each once."""
    found = (parser_refusal(parser.get_error(number)) for number in range(parser.num_errors))
    return tuple({each.message: each for each in found}.values()) or (build_refusal(lines.errors),)


DEFAULT_BATCH = "1,8,32"


def build_engine(
    model: Artefact,
    out: Path,
    target: Profile,
    shapes: Shapes,
    on_progress: Progress | None = None,
) -> BuildResult:
    """Write the plan in a process of its own, as `build` does.

    So Ctrl-C acts while TensorRT computes, a crash is an error, and the builder's memory is free
    for the proof: on a Jetson, GPU and CPU share theirs.
    """
    options = options_of(target, shapes, model)
    built: BuildResult = run_apart(
        str(model), build, model.path, out, options, on_progress=on_progress
    )
    return built


def check_build(
    model: ArtefactLike,
    profile: str,
    *,
    shapes: Shapes | None = None,
    on_progress: Progress | None = None,
) -> BuildCheck:
    """Parse and build `model` for a target with whatever NVIDIA builder is here; keep nothing.

    It does so in a process of its own. Raises MissingExtra where there is no builder, BadInput for
    a profile that needs none.
    """
    target, source = load_profile(profile), open_graph_file(model)
    if target.runtime != "tensorrt":
        raise BadInput(f"profile '{target.name}' does not run TensorRT: there is nothing to check")
    options = options_of(target, shapes or Shapes(), source)
    found: BuildCheck = run_apart(str(source), check, source.path, options, on_progress=on_progress)
    return found


def options_of(target: Profile, shapes: Shapes, model: Artefact) -> Options:
    """Return the builder's options. Raises BadInput for invalid sizes."""
    batched = any(spec.batched for spec in Graph.open(model.path).inputs)
    batch = parse_batch(shapes.batch or (DEFAULT_BATCH if batched else "1"))
    debug = logging.getLogger(__name__).isEnabledFor(logging.DEBUG)
    return Options(target, shapes, batch, dict(map(parse_axis, shapes.axes)), debug=debug)
