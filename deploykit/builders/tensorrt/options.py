"""The options of a TensorRT build, checked against the target before anything is parsed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploykit.builders.tensorrt.module import member, version
from deploykit.builders.tensorrt.shapes import AxisRange
from deploykit.core.errors import BadInput, NotFound, Unsupported
from deploykit.core.profile import Profile
from deploykit.runtimes.tensorrt.compatibility import version_numbers

LEVELS = range(6)  # builder optimisation levels; TensorRT's own default is 3
# hardware compatibility level -> the oldest compute capability that it covers
HARDWARE: Mapping[str, str] = {"ampere-plus": "8.0", "same-compute-capability": "0.0"}


@dataclass(frozen=True)
class Options:
    """Options of one build. `axes`: ranges of the dynamic axes other than the batch, by name.

    `workspace_bytes`, `level` (0 to 5): None for the profile's and TensorRT's defaults.
    `timing_cache`: a file to use instead of the one in the cache folder. `version_compatible`: run
    on later TensorRT of this major version, and 10's on 11. `hardware_compatible`: one of HARDWARE.
    `dla`: the number of a DLA core; layers that it does not support run on the GPU. `plugins`:
    libraries to load first. `tf32`: False multiplies float32 in float32. `flavour`: "tensorrt" or
    "rtx". `free_bytes`: free GPU memory, to which the workspace is cut. `device`: the GPU's number.
    """

    profile: Profile
    batch: AxisRange
    axes: Mapping[str, AxisRange] = field(default_factory=dict)
    workspace_bytes: int | None = None
    level: int | None = None
    timing_cache: Path | None = None
    version_compatible: bool = False
    hardware_compatible: str | None = None
    dla: int | None = None
    plugins: tuple[Path, ...] = ()
    tf32: bool = True
    flavour: str = "tensorrt"
    free_bytes: int | None = None
    device: int = 0

    @property
    def workspace(self) -> int | None:
        return self.workspace_bytes or self.profile.workspace_bytes

    def built_on(self) -> dict[str, object]:
        """The manifest's part that loading compares, and that building again needs."""
        return {
            "flavour": self.flavour,
            "profile": self.profile.name,
            "batch": self.batch,
            "axes": " ".join(f"{name}={axis}" for name, axis in sorted(self.axes.items())),
            "workspace_bytes": self.workspace,
            "optimization_level": self.level,
            "hardware_compatible": self.hardware_compatible,
            "dla": self.dla,
            "tf32": None if self.tf32 else "no",
        }


_UNITS: Mapping[str, int] = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_workspace(text: str) -> int:
    """Bytes of "512M" or "4G" (1024-based); a number alone is in MiB, as in trtexec."""
    match = re.fullmatch(r"(\d{1,9})([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper() or "M"] if match else 0
    if not size:
        raise BadInput(f"`workspace`: '{text}' is not a size", hint="write 512M or 4G, for example")
    return size


def check_options(options: Options) -> None:
    """Raise BadInput or Unsupported for options that the profile's target cannot have."""
    profile, level, hardware = options.profile, options.level, options.hardware_compatible
    if level is not None and level not in LEVELS:
        raise BadInput(f"`level` must be 0 to {LEVELS[-1]}, got {level}")
    if hardware is not None and hardware not in HARDWARE:
        raise BadInput(
            f"`hardware_compatible`: unknown level '{hardware}'",
            hint="one of: " + ", ".join(HARDWARE),
        )
    if options.device < 0:
        raise BadInput(f"`device` must be the number of a GPU, got {options.device}")
    for library in options.plugins:
        if not library.is_file():
            raise NotFound(f"{library}: no such plugin library")
    oldest = version_numbers(HARDWARE.get(hardware or "", ""))
    if (
        profile.compute_capability is not None
        and version_numbers(profile.compute_capability) < oldest
    ):
        raise Unsupported(
            f"`hardware_compatible` {hardware}: profile {profile.name} has compute capability "
            f"{profile.compute_capability}, {HARDWARE[str(hardware)]} or later is needed",
            hint="use `hardware_compatible` same-compute-capability",
        )
    if options.dla is not None and not 0 <= options.dla < profile.dla_cores:
        cores = profile.dla_cores
        raise Unsupported(
            f"`dla` {options.dla}: profile {profile.name} has "
            + (f"{cores} DLA core{'s'[: cores > 1]}, counted from 0" if cores else "no DLA"),
            hint="leave out `dla` to run everything on the GPU",
        )


def check_target(nv: Any, options: Options) -> None:
    """Raise Unsupported when the profile's target does not run this TensorRT."""
    low, high = options.profile.tensorrt_min, options.profile.tensorrt_max
    before = low is not None and version(nv) < version_numbers(low)
    after = high is not None and version(nv) > version_numbers(high)
    if options.flavour == "tensorrt" and (before or after):
        raise Unsupported(
            f"profile {options.profile.name}: runs TensorRT {low or '10.3'} to {high or 'newer'}, "
            f"the installed one is {nv.__version__}"
        )


def hardware_level(nv: Any, name: str) -> Any:
    """TensorRT's enum member for one of HARDWARE. Raises Unsupported where it lacks that."""
    levels = nv.HardwareCompatibilityLevel
    return member(levels, name.upper().replace("-", "_"), f"`hardware_compatible` {name}")
