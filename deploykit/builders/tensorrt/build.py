"""Build a TensorRT plan from a typed ONNX file, or see whether NVIDIA's builder takes the file.

In: an `.onnx` file whose types are its precision, a hardware profile and the sizes to build for.
Out: the raw plan and what it was built on. There is no precision option: networks are strongly
typed. Where TensorRT 10.0 to 10.11 has no strongly typed kernels for a network, the same file is
built with the older precision flags that its types ask for, and the facts say so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.builders.builder import Built
from deploykit.builders.tensorrt.errors import Refusal, error_of, refuses_strong_typing
from deploykit.builders.tensorrt.inspector import Layer, read_layers
from deploykit.builders.tensorrt.memory import mib, workspace_that_fits
from deploykit.builders.tensorrt.module import (
    RTX_MAGIC,
    collected,
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
    precision_flags,
)
from deploykit.builders.tensorrt.options import Options, check_options, check_target, hardware_level
from deploykit.builders.tensorrt.progress import OnProgress, Progress, interruptible, monitor
from deploykit.builders.tensorrt.shapes import ranges
from deploykit.builders.tensorrt.timing_cache import cache_path, keep_cache, use_cache
from deploykit.core.artefact import sniff
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.files import atomic_write, check_inside, check_writable, sha256
from deploykit.core.machine import Machine, this_machine
from deploykit.runtimes.onnxruntime.file import external_files
from deploykit.runtimes.tensorrt.log import logger

if TYPE_CHECKING:
    import tensorrt as trt

STRONG = "STRONGLY_TYPED"
_WEAK_ALLOWED = ((10, 0), (10, 11))  # first and last TensorRT whose strong typing has gaps
_NOT_PROVEN: Mapping[str, str] = {
    "tensorrt": "built with the TensorRT of this machine: what the target's own GPU and TensorRT "
    "make of the file, its speed, memory and accuracy there, is not proven",
    "rtx": "built with TensorRT for RTX: operators, types and shapes are taken; which kernels "
    "TensorRT has for the target, INT8 ones above all, their speed and accuracy is not proven",
}


@dataclass(frozen=True)
class Checked:
    """What a check found. `problems`: each thing that was refused; empty when accepted.

    `flavour`: "tensorrt" or "rtx", of the library that answered; it shows in a plan only, so
    without one it is the flavour asked for. `layers`: of the network as parsed.
    """

    accepted: bool
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    flavour: str
    layers: int
    plan_bytes: int
    build_s: float

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "problems": list(self.problems), "notes": list(self.notes)}


@dataclass(frozen=True)
class _Made:
    """One attempt: a plan, or why there is none."""

    plan: bytes | None
    refusals: tuple[Refusal, ...] = ()
    errors: tuple[str, ...] = ()
    layers: int = 0
    notes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    timing_read_sha256: str = ""
    timing_sha256: str = ""


def build(model: Path, out: Path, options: Options, on_progress: OnProgress | None = None) -> Built:
    """Write the plan of `model` to `out`, whole or not at all. Takes seconds to hours.

    `on_progress(text, share)`: the share is from 0 to 1. Raises NotFound or BadInput for a damaged
    file, options that contradict the file, an `out` that cannot be written; Unsupported for what
    this TensorRT or GPU cannot do, for too little free memory, and when the library turns out to be
    TensorRT for RTX where TensorRT was asked for; KeyboardInterrupt after Ctrl-C; MissingExtra.
    """
    check_writable(out)
    if out.resolve() == model.resolve():
        raise BadInput(f"{out}: is the model itself", hint="choose another -o")
    here = this_machine()
    nv = module(options.flavour)
    check_target(nv, options)
    progress = Progress(on_progress)
    made = _made(nv, model, options, progress, here, checking=False)
    if made.plan is None:
        raise error_of(str(model), made.refusals)
    _check_flavour(made.plan, out, options)
    with atomic_write(out) as tmp:
        tmp.write_bytes(made.plan)
    layers, notes = read_back(made.plan, options.flavour, host_code=options.version_compatible)
    progress.done("built")
    return Built(
        _built_on(nv, model, options, here, made),
        layers,
        made.notes + notes,
        made.timing_sha256,
        made.flags,
    )


def check(model: Path, options: Options, on_progress: OnProgress | None = None) -> Checked:
    """Parse and build `model` with whatever builder is here and keep nothing.

    A graph that is refused is an answer (`problems`, every refused node in one pass), not an error;
    a damaged file and contradictory options raise as in `build`.
    """
    nv = module(options.flavour)
    started = time.perf_counter()
    made = _made(nv, model, options, Progress(on_progress), this_machine(), checking=True)
    taken = time.perf_counter() - started
    if any(refusal.damaged for refusal in made.refusals):
        raise error_of(str(model), made.refusals)
    flavour = flavour_of(made.plan) if made.plan is not None else options.flavour
    return Checked(
        accepted=made.plan is not None,
        problems=tuple(refusal.text for refusal in made.refusals),
        notes=(*made.notes, _NOT_PROVEN[flavour]) if made.plan is not None else made.notes,
        flavour=flavour,
        layers=made.layers,
        plan_bytes=len(made.plan or b""),
        build_s=taken,
    )


def read_back(
    plan: bytes, flavour: str = "tensorrt", *, host_code: bool = False
) -> tuple[tuple[Layer, ...] | None, tuple[str, ...]]:
    """The layers of a plan as its inspector tells them, or None and why not.

    Loads the plan: only one that was built here, or that its manifest describes. `host_code`: it is
    version compatible, and brings the code of its runtime along.
    """
    nv = module(flavour)
    with collected(nv) as lines:
        try:
            runtime: trt.Runtime = nv.Runtime(logger(nv))
            runtime.engine_host_code_allowed = host_code
            engine = maybe(runtime.deserialize_cuda_engine(plan))
        except (TypeError, RuntimeError):  # pybind11: the factory returned nullptr
            engine = None
        if engine is None:
            why = refusals(lines)[0].text
            return None, (f"the plan was not read back: {why}",)
        inspector = engine.create_engine_inspector()
        text = inspector.get_engine_information(nv.LayerInformationFormat.JSON)
    try:
        return read_layers(text), ()
    except ValueError as exc:
        return None, (f"the engine inspector's answer cannot be read: {exc}",)


def flavour_of(plan: bytes) -> str:
    """Which library wrote a plan, whatever the module was called: "tensorrt" or "rtx"."""
    return "rtx" if plan.startswith(RTX_MAGIC) else "tensorrt"


def _made(
    nv: Any, model: Path, options: Options, progress: Progress, here: Machine, checking: bool
) -> _Made:
    """Strongly typed; weakly only where this TensorRT may and its log blames strong typing."""
    _check_model(model)
    check_options(options)
    progress.tell("parsing")
    progress.raise_if_stopped()
    job = _Job(nv, start(nv), model, options, progress, here, checking)
    made = job.attempt(strong=True)
    first, last = _WEAK_ALLOWED
    if made.plan is None and first <= version(nv) <= last and refuses_strong_typing(made.errors):
        weak = job.attempt(strong=False)
        if weak.plan is not None:
            note = (
                f"TensorRT {nv.__version__} refused the strongly typed network "
                f"({made.refusals[0].text}): built with {', '.join(weak.flags) or 'no'} flags "
                "instead, so a layer may run in a wider type than the file's"
            )
            return replace(weak, notes=(note, *weak.notes))
    return made


@dataclass(frozen=True)
class _Job:
    nv: Any
    builder: trt.Builder
    model: Path
    options: Options
    progress: Progress
    here: Machine
    checking: bool

    def attempt(self, strong: bool) -> _Made:
        nv, options = self.nv, self.options
        typed = 1 << int(getattr(nv.NetworkDefinitionCreationFlag, STRONG)) if strong else 0
        network = self.builder.create_network(typed)
        parser: trt.OnnxParser = nv.OnnxParser(network, logger(nv))  # owns the weights: keep it
        with collected(nv) as lines:
            parsed = parser.parse_from_file(str(self.model))
        if not parsed:
            return _Made(None, refusals(lines, parser), tuple(lines.errors))
        inputs = inputs_of(network, self.model)
        sizes = ranges(inputs, options.batch, options.axes)
        asked = space = options.workspace
        if asked is not None:
            need = memory_need(network, self.model, asked, options.batch, options.axes)
            space = workspace_that_fits(need, options.free_bytes, str(self.model))
        config = self.builder.create_builder_config()
        flags, notes = self._configure(config, space)
        if asked is not None and space is not None and space < asked:
            notes.append(f"workspace: {mib(space)} for want of free memory, {mib(asked)} asked for")
        precision = () if strong else precision_flags(element_types(network))
        for name in precision:
            config.set_flag(getattr(nv.BuilderFlag, name))
        flags = [STRONG, *flags] if strong else [*precision, *flags]
        cache = options.timing_cache or cache_path(f"{options.flavour}-{nv.__version__}", self.here)
        keep, read = False, ""
        if cache is not None:
            keep, read, more = use_cache(nv, config, cache)
            notes += more
        with collected(nv) as lines:
            add_profile(self.builder, config, inputs, sizes)
            watch = monitor(nv, self.progress)  # the config does not keep it alive
            config.progress_monitor = watch
            with interruptible(self.progress):
                plan = maybe(self.builder.build_serialized_network(network, config))
        self.progress.raise_if_stopped()
        layers = int(network.num_layers)
        if plan is None:
            return _Made(None, refusals(lines), tuple(lines.errors), layers, tuple(notes))
        content, digest = bytes(memoryview(plan)), ""
        if cache is not None and keep and not self.checking:
            digest, more = keep_cache(config, cache)
            notes += more
        return _Made(content, (), (), layers, tuple(notes), tuple(flags), read, digest)

    def _configure(
        self, config: trt.IBuilderConfig, workspace: int | None
    ) -> tuple[list[str], list[str]]:
        """Set what the options ask for; returns the flags by name, and notes."""
        nv, options = self.nv, self.options
        names = []
        config.profiling_verbosity = nv.ProfilingVerbosity.DETAILED  # or no layer can be read back
        if workspace is not None:
            config.set_memory_pool_limit(nv.MemoryPoolType.WORKSPACE, workspace)
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
        text = f"DLA core {wanted}: TensorRT finds {cores} of them on this machine"
        if self.checking:
            return [], [f"{text}: checked for the GPU alone"]
        raise Unsupported(text)


def _check_model(model: Path) -> None:
    """Refuse what is no ONNX file, and weights outside the model's folder, before it is parsed."""
    kind = sniff(model)
    if kind != "onnx":
        raise BadInput(f"{model}: is a {kind} file, an ONNX file is needed")
    for location in external_files(model):
        check_inside(model.parent, location, str(model))


def _check_flavour(plan: bytes, out: Path, options: Options) -> None:
    found = flavour_of(plan)
    if found == "rtx" and options.profile.runtime == "tensorrt" and out.suffix == ".trt":
        raise Unsupported(
            f"{out}: not kept: the library here is TensorRT for RTX, whose plans the TensorRT of "
            f"profile {options.profile.name} cannot load",
            hint="build on the target; here it can only be checked: deploykit build --check",
        )
    if found != options.flavour:
        raise Unsupported(
            f"{out}: not kept: {options.flavour} was asked for, the library here is {found}"
        )


def _built_on(nv: Any, model: Path, options: Options, here: Machine, made: _Made) -> dict[str, str]:
    """For the manifest.

    `timing_cache_read_sha256` is of the cache as the build found it: where it is also the one that
    it left, every kernel was chosen by times that were already there.
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
        "typing": "strong" if STRONG in made.flags else "weak",
        "timing_cache_read_sha256": made.timing_read_sha256,
        "timing_cache_sha256": made.timing_sha256,
    }
    return {key: str(value) for key, value in facts.items() if value not in (None, "")}
