"""Arguments and results of the functions that build an engine from an ONNX graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Layer
from deploykit.core.files import StrPath
from deploykit.core.json_value import Record, Shown
from deploykit.core.profile import Profile
from deploykit.core.runtime import RUNTIMES
from deploykit.engines.data.samples import Samples

if TYPE_CHECKING:  # it loads onnx, which `boot` does not need
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


Builder = Callable[
    [Artefact, Path, Profile, Shapes, "Callable[[str, float], None] | None"], BuildResult
]  # (graph, out, target, shapes, on_progress)


def find_builder(runtime: str) -> Builder:
    found: Builder = resolve_name(RUNTIMES[runtime].builder)
    return found
