"""Arguments and results of the functions that build an engine, and checks of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.core.artefact import Artefact, ArtefactLike, wrong_format
from deploykit.core.errors import BadInput, NotFound, Unsupported
from deploykit.core.evidence import Layer
from deploykit.core.files import StrPath
from deploykit.core.json_value import Record, Shown
from deploykit.core.machine import version_numbers
from deploykit.core.precision import narrowest
from deploykit.core.profile import Profile
from deploykit.core.runtime import RUNTIMES
from deploykit.core.tensors import BATCH, TensorSpec
from deploykit.engines.data.samples import Samples
from deploykit.graph.parse import onnx_files

if TYPE_CHECKING:
    from deploykit.graph.graph import Graph
    from deploykit.quantization.job import QuantizeRequest


@dataclass(frozen=True)
class Shapes(Shown):
    """Sizes and options of an engine: `dk.build(m, "l4", shapes=dk.Shapes(batch="1,8,32"))`.

    `batch`: the smallest, usual and largest batch, "1,8,32", or one size. `axes`: the same for
    other dynamic axes, ["T=16,128,512"]. They are what TensorRT builds for, and any other target
    is compared at. None and () stand for the defaults.
    """

    batch: str | None = None
    axes: Sequence[str] = ()
    version_compatible: bool = False
    hardware_compatible: str | None = None  # "ampere-plus" or "same-compute-capability"
    dla: int | None = None
    plugins: Sequence[StrPath] = ()  # libraries of TensorRT plugins
    device: int = 0  # the number of the GPU
    timing_cache: StrPath | None = None  # in place of the one in the cache folder
    tf32: bool = True  # float32 products may be rounded to TF32

    def refuse(self, target: Profile) -> None:
        """Raise BadInput for options of TensorRT; sizes (`batch`, `axes`) are for all."""
        given = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        given = [name for name in given if name not in ("batch", "axes")]
        if given:
            names = ", ".join(f"`{key}`" for key in given)
            title = RUNTIMES[target.runtime].title
            raise BadInput(
                f"profile '{target.name}' runs {title}, which has no such options",
                hint=f"leave out {names}, for TensorRT only",
            )


@dataclass(frozen=True)
class BuildResult(Record):
    """Facts about a built engine. `layers` is None where this machine cannot read them back.

    `flags_used`: names of builder and network flags.
    """

    built_on: Mapping[str, str]
    layers: tuple[Layer, ...] | None = None
    notes: tuple[str, ...] = ()
    flags_used: tuple[str, ...] = ()
    plugins: Mapping[str, str] = field(default_factory=dict)  # path -> SHA-256


def open_graph_file(model: ArtefactLike) -> Artefact:
    source = Artefact.open(model)
    if source.format != "onnx":
        raise wrong_format(source, source.format, "an ONNX file")
    return source


@dataclass(frozen=True)
class BuildJob:
    """One build: `source` for `target`, staged as `tmp`, and kept at `place` once it is proven."""

    source: Artefact
    target: Profile
    request: QuantizeRequest
    shapes: Shapes
    tmp: Path
    place: Path
    max_error: float = 0.0
    samples: Samples | None = None  # to compare on, in place of random inputs

    @property
    def quantizes(self) -> bool:
        return self.request.to != "fp32"


_MOST_BYTES = (1 << 31) - (1 << 20)  # protobuf's limit, less room for tensors' names


def check_one_file(path: Path) -> None:
    """Raise Unsupported where the result, which is one file, could not hold the weights."""
    size = sum(file.stat().st_size for file in onnx_files(path) if file.is_file())
    if size > _MOST_BYTES:
        raise Unsupported(
            f"{path}: has {size:,} bytes with its weights; a build for a CPU is one ONNX file, "
            f"which holds at most {_MOST_BYTES:,}",
            hint="serve, bench and predict need no build; a lower precision is smaller (quantize)",
        )


def count_precisions(layers: Sequence[Layer]) -> dict[str, int]:
    """Count the layers by the type that they compute in."""
    return dict(sorted(Counter(each.precision for each in layers if each.precision).items()))


Builder = Callable[
    [Artefact, Path, Profile, Shapes, "Callable[[str, float], None] | None"], BuildResult
]  # (graph, out, target, shapes, on_progress)


# All checks of size ranges are made here, as TensorRT reports its own late and only in its log.

Shape = tuple[int, ...]
ShapeRange = tuple[Shape, Shape, Shape]  # smallest, optimum, largest

LARGEST = (1 << 31) - 1  # TensorRT computes a tensor's offsets from 32-bit sizes
_NUMBER = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True)
class AxisRange:
    """Sizes of a dynamic axis: any from `minimum` to `maximum`, fastest at `optimum`."""

    minimum: int
    optimum: int
    maximum: int

    def __str__(self) -> str:
        return f"{self.minimum},{self.optimum},{self.maximum}"


def parse_batch(text: str, parameter: str = "`batch`") -> AxisRange:
    """Parse "MIN,OPT,MAX", or one number for all three. Raises BadInput naming `parameter`."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) in (1, 3) and all(map(_NUMBER.fullmatch, parts)):
        sizes = [int(part) for part in parts]
        axis = AxisRange(sizes[0], sizes[len(sizes) // 2], sizes[-1])
        if axis.minimum <= axis.optimum <= axis.maximum <= LARGEST and axis.optimum > 0:
            return axis
    raise BadInput(
        f"{parameter}: '{text}' is not a range of sizes: MIN <= OPT <= MAX, OPT 1 or more",
        hint="write MIN,OPT,MAX, for example 1,8,32, or one size",
    )


def parse_axis(text: str) -> tuple[str, AxisRange]:
    """Parse "NAME=MIN,OPT,MAX", one of `axes`. Raises BadInput."""
    name, equals, sizes = text.partition("=")
    if not equals or not name.strip():
        raise BadInput(
            f"`axes`: '{text}' names no axis", hint="write NAME=MIN,OPT,MAX, such as T=16,128,512"
        )
    return name.strip(), parse_batch(sizes, f"`axes` {name.strip()}")


def ranges(
    inputs: Sequence[TensorSpec], batch: AxisRange, others: Mapping[str, AxisRange]
) -> dict[str, ShapeRange]:
    """Return the smallest, optimum and largest shape of every input, by name.

    A dynamic axis takes its range from `others` by name, else from `batch` if it is axis 0 of an
    input or shares its name. Without such an axis `batch` must be 1 or the fixed size of axis 0.
    Raises BadInput naming the input, the axis and the parameter: a name that no input has, an axis
    without a range.
    """
    dynamic = {axis for spec in inputs for axis in spec.shape if isinstance(axis, str)}
    for name in others:
        if name == BATCH:
            raise BadInput(
                f"`axes`: {BATCH} is the batch", hint=f"write it as `batch` {others[name]}"
            )
        if name not in dynamic:
            known = ", ".join(sorted(dynamic - {BATCH})) or "none but the batch"
            raise BadInput(
                f"`axes`: no input has a dynamic axis '{name}'", hint=f"dynamic axes: {known}"
            )
    batches = {str(spec.shape[0]) for spec in inputs if spec.batched} - set(others)
    if not batches:
        _check_fixed(inputs, batch)
    sizes = {**dict.fromkeys(batches | {BATCH}, batch), **others}
    return {spec.name: _shapes(spec, sizes) for spec in inputs}


def check_samples(inputs: Sequence[TensorSpec], samples: Samples, options: Options) -> None:
    """Raise BadInput for samples of sizes that an engine of these options does not take."""
    spans = ranges(inputs, options.batch, options.axes)
    for spec in inputs:
        low, _, high = spans[spec.name]
        found, own = samples.inputs[spec.name].shape, samples.axis(spec.name)
        for at, (axis, size) in enumerate(zip(spec.shape, found, strict=True)):
            if size < low[at] or (size > high[at] and at != own):
                raise BadInput(
                    f"{samples.where}: axis {axis} of '{spec.name}' has {size}, the engine is "
                    f"built for {low[at]} to {high[at]}",
                    hint="choose a `batch` and `axes` that hold the samples, or other samples",
                )


def _shapes(spec: TensorSpec, sizes: Mapping[str, AxisRange]) -> ShapeRange:
    for place, axis in enumerate(spec.shape):
        if isinstance(axis, str) and axis not in sizes:
            raise BadInput(
                f"input '{spec.name}': axis {place}, '{axis}', is dynamic and has no range",
                hint=f"give it one: `axes` {axis}=MIN,OPT,MAX",
            )

    def at(bound: str) -> Shape:
        return tuple(
            getattr(sizes[axis], bound) if isinstance(axis, str) else axis for axis in spec.shape
        )

    return at("minimum"), at("optimum"), at("maximum")


def _check_fixed(inputs: Sequence[TensorSpec], batch: AxisRange) -> None:
    fixed = {spec.shape[0] for spec in inputs if spec.shape and isinstance(spec.shape[0], int)}
    if batch.minimum != batch.maximum or batch.minimum not in {1, *fixed}:
        size = " or ".join(map(str, fixed))
        raise BadInput(
            f"`batch` {batch}: no input has a dynamic batch",
            hint=f"use `batch` {size}, or export again" if fixed else "leave `batch` out",
        )


HARDWARE = ("ampere-plus", "same-compute-capability")


@dataclass(frozen=True)
class Options:
    """Options of one build: `shapes` as the user gave them, and its sizes as ranges.

    `free_bytes`: free GPU memory, to which the workspace is cut. `debug`: show TensorRT's log.
    """

    profile: Profile
    shapes: Shapes
    batch: AxisRange
    axes: Mapping[str, AxisRange]  # of the other dynamic axes, by name
    free_bytes: int | None = None
    debug: bool = False

    def built_on(self) -> dict[str, object]:
        """Return the manifest's part that loading compares, and that building again needs."""
        return {
            "flavour": "tensorrt",
            "profile": self.profile.name,
            "batch": self.batch,
            "axes": " ".join(f"{name}={axis}" for name, axis in sorted(self.axes.items())),
            "workspace_bytes": self.profile.workspace_bytes,
            "hardware_compatible": self.shapes.hardware_compatible,
            "dla": self.shapes.dla,
            "tf32": None if self.shapes.tf32 else "no",
        }


def check_options(options: Options) -> None:
    """Raise BadInput or Unsupported for options that the profile's target cannot have."""
    profile, hardware = options.profile, options.shapes.hardware_compatible
    if hardware is not None and hardware not in HARDWARE:
        raise BadInput(
            f"`hardware_compatible`: unknown level '{hardware}'",
            hint="one of: " + ", ".join(HARDWARE),
        )
    if options.shapes.device < 0:
        raise BadInput(f"`device` must be the number of a GPU, got {options.shapes.device}")
    for library in map(Path, options.shapes.plugins):
        if not library.is_file():
            raise NotFound(f"{library}: no such plugin library")
    if profile.boards and hardware == "ampere-plus":
        raise Unsupported(
            f"`hardware_compatible` {hardware}: profile {profile.name} is a Jetson, where TensorRT "
            "has no such engines",
            hint="build it on each board",
        )
    if options.shapes.dla is not None and not 0 <= options.shapes.dla < profile.dla_cores:
        cores = profile.dla_cores
        raise Unsupported(
            f"`dla` {options.shapes.dla}: profile {profile.name} has "
            + (f"{cores} DLA core{'s'[: cores > 1]}, counted from 0" if cores else "no DLA"),
            hint=_ON_GPU,
        )


def check_target(nv: Any, options: Options) -> None:
    """Raise Unsupported when the profile's target, or its DLA, does not run this TensorRT."""
    profile, core = options.profile, options.shapes.dla
    low, high = profile.tensorrt_min, profile.tensorrt_max
    here = version_numbers(str(nv.__version__))
    before = low is not None and here[:2] < version_numbers(low)
    if before or (high is not None and here[:2] > version_numbers(high)):
        raise Unsupported(
            f"profile {profile.name}: runs TensorRT {low or '10.3'} to {high or 'newer'}, "
            f"the installed one is {nv.__version__}"
        )
    if core is not None and (10, 8) <= here < (11, 4, 1):
        raise Unsupported(
            f"`dla` {core}: TensorRT {nv.__version__} has no DLA: it exists up to 10.7 (JetPack 6) "
            "and from 11.4.1 (AGX Orin with JetPack 7.2.2 or later)",
            hint=_ON_GPU,
        )


# Source of the checks for a Jetson's deep learning accelerator (DLA): NVIDIA's TensorRT
# documentation 10.7 to 11.4.1, "Working with DLA", "Strongly Typed Networks for DLA". Not yet run
# on a DLA.
_ON_GPU = "leave out `dla` to run everything on the GPU"


def check_graph(options: Options, graph: Graph) -> None:
    """Raise BadInput for sizes that vary and Unsupported for a precision that a DLA lacks."""
    for name, axis in {"batch": options.batch, **options.axes}.items():
        if axis.minimum != axis.maximum:
            raise BadInput(
                f"`dla` {options.shapes.dla}: a DLA takes no dynamic sizes, and {name} is {axis}",
                hint=f"build one size: {name} {axis.optimum}",
            )
    found = narrowest(graph.precision)
    if found not in ("fp16", "int8"):
        raise Unsupported(
            f"{graph.path}: `dla` {options.shapes.dla}: a DLA computes in FP16 and INT8 only, the "
            f"graph is {found}",
            hint="`precision` fp16",
        )


def note_dla(layers: Sequence[Layer] | None, core: int | None, where: str) -> tuple[str, ...]:
    """Return how many layers run on DLA core `core`. Raises Unsupported where none does."""
    if core is None:
        return ()
    if layers is None:
        return ("how many layers run on the DLA is not known: no layers could be read back",)
    count = sum(map(runs_on_dla, layers))
    if not count:
        raise Unsupported(
            f"{where}: none of its {len(layers)} layers runs on DLA core {core}: TensorRT put all "
            "of them on the GPU",
            hint=_ON_GPU,
        )
    return (f"{count} of {len(layers)} layers run on DLA core {core}, the others on the GPU",)


def runs_on_dla(layer: Layer) -> bool:
    """Return whether it is a DLA's one foreign node (NVIDIA/TensorRT issue 3143), not Myelin's."""
    kind = layer.kind.lower()
    foreign = layer.name.startswith("{ForeignNode[") and not kind.startswith(("myelin", "kgen"))
    return "dla" in kind or foreign
