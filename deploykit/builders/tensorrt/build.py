"""Build a TensorRT plan from an ONNX file, or check that NVIDIA's builder accepts the file.

Networks are strongly typed: the file's types are the precision. TensorRT 10.0 to 10.11 lacks
strongly typed kernels for some networks; those are built with the older precision flags that the
types ask for, and a note says so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.builders.builder import BuildResult
from deploykit.builders.tensorrt.dla import check_dla, check_graph, note_dla, weakly_typed
from deploykit.builders.tensorrt.errors import (
    Reason,
    build_warnings,
    error_of,
    refuses_strong_typing,
)
from deploykit.builders.tensorrt.inspector import read_layers
from deploykit.builders.tensorrt.memory import mib, workspace_that_fits
from deploykit.builders.tensorrt.module import (
    RTX_MAGIC,
    collect_log,
    maybe,
    module,
    refusals,
    start,
    version,
)
from deploykit.builders.tensorrt.network import (
    add_profile,
    element_types,
    inputs_of,
    memory_need,
    pin_linear,
    precision_flags,
)
from deploykit.builders.tensorrt.options import Options, check_options, check_target, hardware_level
from deploykit.builders.tensorrt.progress import BuildProgress, OnProgress, interruptible, monitor
from deploykit.builders.tensorrt.shapes import ranges
from deploykit.builders.tensorrt.timing_cache import cache_path, keep_cache, use_cache
from deploykit.core.artefact import sniff
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.evidence import Layer
from deploykit.core.files import atomic_write, check_data_file, check_writable, sha256
from deploykit.core.json_value import Record
from deploykit.core.machine import Machine, this_machine
from deploykit.runtimes.onnxruntime.file import external_files
from deploykit.runtimes.tensorrt.log import logger
from deploykit.runtimes.tensorrt.plugins import load_plugins

if TYPE_CHECKING:
    import tensorrt as trt

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
    """Whether TensorRT accepts a file. `problems`: each refusal; empty when accepted.

    `flavour`: "tensorrt" or "rtx", the library that built the plan; without a plan, the requested
    flavour, as only a plan shows it. `layers`: number of layers in the parsed network.
    """

    accepted: bool
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    flavour: str
    layers: int
    plan_bytes: int
    build_s: float


@dataclass(frozen=True)
class _Attempt:
    """One attempt at a build: a plan, or the reasons why there is none."""

    plan: bytes | None
    refusals: tuple[Reason, ...] = ()
    errors: tuple[str, ...] = ()
    layers: int = 0
    notes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    timing_read_sha256: str = ""
    timing_sha256: str = ""


def build(
    model: Path, out: Path, options: Options, on_progress: OnProgress | None = None
) -> BuildResult:
    """Write the plan of `model` to `out`, completely or not at all. Takes seconds to hours.

    `on_progress(phase, share)`: the share is from 0 to 1. Raises NotFound or BadInput for a damaged
    file, options that contradict the file, an `out` that cannot be written; Unsupported for what
    this TensorRT or GPU cannot do, for too little free memory, and for TensorRT for RTX in place of
    TensorRT; KeyboardInterrupt after Ctrl-C; MissingExtra.
    """
    check_writable(out)
    if out.resolve() == model.resolve():
        raise BadInput(f"{out}: is the model itself", hint="choose another path for `out`")
    here = this_machine()
    nv = module(options.flavour)
    check_target(nv, options)
    check_dla(nv, options)
    progress = BuildProgress(on_progress)
    attempt = _build_plan(nv, model, options, progress, here, checking=False)
    if attempt.plan is None:
        raise error_of(str(model), attempt.refusals)
    _check_flavour(attempt.plan, out, options)
    layers, notes = read_back(attempt.plan, options)
    notes += note_dla(layers, options, str(model))
    with atomic_write(out) as tmp:
        tmp.write_bytes(attempt.plan)
    progress.complete("built")
    return BuildResult(
        _built_on(nv, model, options, here, attempt),
        layers,
        attempt.notes + notes,
        attempt.timing_sha256,
        attempt.flags,
        {str(library.resolve()): sha256(library) for library in options.plugins},
    )


def check(model: Path, options: Options, on_progress: OnProgress | None = None) -> BuildCheck:
    """Parse and build `model` with the installed builder, and write nothing.

    A refused graph is a result (`problems` lists every refused node), not an error; a damaged file
    and contradictory options raise as in `build`.
    """
    nv = module(options.flavour)
    started = time.perf_counter()
    attempt = _build_plan(
        nv, model, options, BuildProgress(on_progress), this_machine(), checking=True
    )
    taken = time.perf_counter() - started
    if any(refusal.damaged for refusal in attempt.refusals):
        raise error_of(str(model), attempt.refusals)
    flavour = flavour_of(attempt.plan) if attempt.plan is not None else options.flavour
    return BuildCheck(
        accepted=attempt.plan is not None,
        problems=tuple(refusal.text for refusal in attempt.refusals),
        notes=(*attempt.notes, _NOT_PROVEN[flavour]) if attempt.plan is not None else attempt.notes,
        flavour=flavour,
        layers=attempt.layers,
        plan_bytes=len(attempt.plan or b""),
        build_s=taken,
    )


def read_back(plan: bytes, options: Options) -> tuple[tuple[Layer, ...] | None, tuple[str, ...]]:
    """The layers of a plan as TensorRT's engine inspector reports them, or None and why not.

    Loads the plan, which can run code: pass only one that was just built with these options.
    """
    nv = module(options.flavour)
    with collect_log(nv) as lines:
        try:
            runtime: trt.Runtime = nv.Runtime(logger(nv))
            runtime.engine_host_code_allowed = options.version_compatible
            if options.dla is not None:
                runtime.DLA_core = options.dla
            engine = maybe(runtime.deserialize_cuda_engine(plan))
        except (TypeError, RuntimeError):  # pybind11: the factory returned nullptr
            engine = None
        if engine is None:
            why = refusals(lines)[0].text
            return None, (f"the plan could not be read back: {why}",)
        inspector = engine.create_engine_inspector()
        text = inspector.get_engine_information(nv.LayerInformationFormat.JSON)
    try:
        return read_layers(text), ()
    except ValueError as exc:
        return None, (f"the engine inspector's JSON cannot be read: {exc}",)


def flavour_of(plan: bytes) -> str:
    """The library that wrote a plan, whatever its module's name: "tensorrt" or "rtx"."""
    return "rtx" if plan.startswith(RTX_MAGIC) else "tensorrt"


def _build_plan(
    nv: Any, model: Path, options: Options, progress: BuildProgress, here: Machine, checking: bool
) -> _Attempt:
    """Build strongly typed; weakly typed only where this TensorRT's log blames strong typing."""
    _check_model(model)
    check_options(options)
    check_graph(options, model)
    progress.report("parsing")
    progress.raise_if_stopped()
    job = _Job(nv, start(nv), model, options, progress, here, checking)
    load_plugins(nv, options.plugins)
    if weakly_typed(nv, options):
        return job.run(strong=False)
    attempt = job.run(strong=True)
    first, last = _WEAK_ALLOWED
    if (
        attempt.plan is None
        and first <= version(nv) <= last
        and refuses_strong_typing(attempt.errors)
    ):
        weak = job.run(strong=False)
        if weak.plan is not None:
            note = (
                f"TensorRT {nv.__version__} refused the strongly typed network "
                f"({attempt.refusals[0].text}): built with {', '.join(weak.flags) or 'no'} flags "
                "instead, so a layer may run in a higher precision than the file's"
            )
            return replace(weak, notes=(note, *weak.notes))
    return attempt


@dataclass(frozen=True)
class _Job:
    nv: Any
    builder: trt.Builder
    model: Path
    options: Options
    progress: BuildProgress
    here: Machine
    checking: bool

    def run(self, strong: bool) -> _Attempt:
        nv, options = self.nv, self.options
        typed = 1 << int(getattr(nv.NetworkDefinitionCreationFlag, STRONG)) if strong else 0
        network = self.builder.create_network(typed)
        parser: trt.OnnxParser = nv.OnnxParser(network, logger(nv))  # owns the weights: keep it
        with collect_log(nv) as lines:
            parsed = parser.parse_from_file(str(self.model))
        if not parsed:
            return _Attempt(None, refusals(lines, parser), tuple(lines.errors))
        warnings = lines.warnings
        pin_linear(nv, network)
        inputs = inputs_of(network, self.model)
        sizes = ranges(inputs, options.batch, options.axes)
        asked = space = options.workspace
        if asked is not None:
            shared = options.profile.unified_memory
            need = memory_need(network, self.model, asked, options.batch, options.axes, shared)
            space = workspace_that_fits(need, options.free_bytes, str(self.model))
        config = self.builder.create_builder_config()
        flags, notes = self._configure(config, space)
        if asked is not None and space is not None and space < asked:
            notes.append(
                f"workspace: {mib(space)} instead of {mib(asked)}, as free memory is short"
            )
        precision = () if strong else precision_flags(element_types(network))
        for name in precision:
            config.set_flag(getattr(nv.BuilderFlag, name))
        flags = [STRONG, *flags] if strong else [*precision, *flags]
        cache = options.timing_cache or cache_path(f"{options.flavour}-{nv.__version__}", self.here)
        keep, read = False, ""
        if cache is not None:
            keep, read, more = use_cache(nv, config, cache)
            notes += more
        with collect_log(nv) as lines:
            add_profile(self.builder, config, inputs, sizes)
            watch = monitor(nv, self.progress)  # the config does not keep it alive
            config.progress_monitor = watch
            with interruptible(self.progress):
                plan = maybe(self.builder.build_serialized_network(network, config))
        self.progress.raise_if_stopped()
        notes += build_warnings([*warnings, *lines.warnings])
        layers = int(network.num_layers)
        if plan is None:
            return _Attempt(None, refusals(lines), tuple(lines.errors), layers, tuple(notes))
        content, digest = bytes(memoryview(plan)), ""
        if cache is not None and keep and not self.checking:
            digest, more = keep_cache(config, cache)
            notes += more
        return _Attempt(content, (), (), layers, tuple(notes), tuple(flags), read, digest)

    def _configure(
        self, config: trt.IBuilderConfig, workspace: int | None
    ) -> tuple[list[str], list[str]]:
        """Set the options on `config`; returns the names of the flags set, and notes."""
        nv, options = self.nv, self.options
        names = []
        config.profiling_verbosity = nv.ProfilingVerbosity.DETAILED  # layers are read back
        if workspace is not None:
            config.set_memory_pool_limit(nv.MemoryPoolType.WORKSPACE, workspace)
        if not options.tf32:
            config.clear_flag(nv.BuilderFlag.TF32)  # set by default
        if options.level is not None:
            config.builder_optimization_level = options.level
        if options.version_compatible:
            names.append("VERSION_COMPATIBLE")
        if options.hardware_compatible:
            level = hardware_level(nv, options.hardware_compatible)
            config.hardware_compatibility_level = level
        on_dla, notes = self._dla(config)
        names += on_dla
        for name in names:
            config.set_flag(getattr(nv.BuilderFlag, name))
        return names, notes

    def _dla(self, config: trt.IBuilderConfig) -> tuple[list[str], list[str]]:
        wanted, cores = self.options.dla, int(self.builder.num_DLA_cores)
        if wanted is None:
            return [], []
        if 0 <= wanted < cores:
            config.default_device_type = self.nv.DeviceType.DLA
            config.DLA_core = wanted
            return ["GPU_FALLBACK"], []
        text = f"`dla` {wanted}: TensorRT finds {cores} DLA cores on this machine"
        if self.checking:
            return [], [f"{text}: checked for the GPU alone"]
        raise Unsupported(text)


def _check_model(model: Path) -> None:
    """Raise BadInput for another format, or for weights outside the model's folder."""
    kind = sniff(model)
    if kind != "onnx":
        raise BadInput(f"{model}: expected an ONNX file, got a {kind} file")
    for location in external_files(model):
        check_data_file(model, location, str(model))


def _check_flavour(plan: bytes, out: Path, options: Options) -> None:
    found = flavour_of(plan)
    if found == "rtx" and options.profile.runtime == "tensorrt" and out.suffix == ".trt":
        raise Unsupported(
            f"{out}: not written: the installed library is TensorRT for RTX, whose plans the "
            f"TensorRT of profile {options.profile.name} cannot load",
            hint="build on the target; on this machine use `check`",
        )
    if found != options.flavour:
        raise Unsupported(
            f"{out}: not written: `flavour` is {options.flavour}, the installed library is {found}"
        )


def _built_on(
    nv: Any, model: Path, options: Options, here: Machine, attempt: _Attempt
) -> dict[str, str]:
    """The manifest's `built_on`.

    Where `timing_cache_read_sha256` (before the build) equals `timing_cache_sha256` (after it),
    every kernel was chosen by timings that were already in the cache.
    """
    gpu = here.gpus[0] if here.gpus else None
    facts: dict[str, object] = {
        "tensorrt": nv.__version__,
        "gpu": gpu.name if gpu else None,
        "compute_capability": gpu.compute_capability if gpu else None,
        "driver": gpu.driver if gpu else None,
        "power_mode": here.power_mode,
        "model": model.name,
        "onnx_sha256": sha256(model),
        **options.built_on(),
        "typing": "strong" if STRONG in attempt.flags else "weak",
        "timing_cache_read_sha256": attempt.timing_read_sha256,
        "timing_cache_sha256": attempt.timing_sha256,
    }
    return {key: str(value) for key, value in facts.items() if value not in (None, "")}
