"""What a plan is built for, checked against the target before anything is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploykit.builders.tensorrt.module import member, numbers, version
from deploykit.builders.tensorrt.shapes import AxisRange
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.profile import Profile

LEVELS = range(6)  # builder optimisation levels; TensorRT's own default is 3
# name of a hardware compatibility level -> the oldest compute capability that can be built for
HARDWARE: Mapping[str, str] = {"ampere-plus": "8.0", "same-compute-capability": "0.0"}


@dataclass(frozen=True)
class Options:
    """What to build for. `axes`: dynamic axes other than the batch, by name.

    `workspace_bytes` and `level` (0 to 5): the profile's and TensorRT's own where None.
    `timing_cache`: a file to use instead of the one in the cache folder. `version_compatible`: for
    later TensorRT of the same major. `hardware_compatible`: one of HARDWARE, for GPUs from Ampere
    on or for any of the same compute capability. `dla`: the number of a DLA core; layers that it
    does not take fall back to the GPU. `flavour`: "tensorrt" or "rtx". `free_bytes` of GPU memory:
    where given, the prediction is held to it and the workspace is cut to what it leaves.
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
    flavour: str = "tensorrt"
    free_bytes: int | None = None

    @property
    def workspace(self) -> int | None:
        return self.workspace_bytes or self.profile.workspace_bytes

    def built_on(self) -> dict[str, object]:
        """For the manifest. Compared on loading, or needed to build again: `runtimes.plan`."""
        return {
            "flavour": self.flavour,
            "profile": self.profile.name,
            "batch": self.batch,
            "axes": " ".join(f"{name}={axis}" for name, axis in sorted(self.axes.items())),
            "workspace_bytes": self.workspace,
            "optimization_level": self.level,
            "hardware_compatible": self.hardware_compatible,
            "dla": self.dla,
        }


def check_options(options: Options) -> None:
    """Raise BadInput or Unsupported for what no TensorRT gives this profile's target."""
    profile, level, hardware = options.profile, options.level, options.hardware_compatible
    if level is not None and level not in LEVELS:
        raise BadInput(f"the optimisation level is 0 to {LEVELS[-1]}, got {level}")
    if hardware is not None and hardware not in HARDWARE:
        raise BadInput(
            f"`hardware_compatible` {hardware}: is not a level",
            hint="one of: " + ", ".join(HARDWARE),
        )
    oldest = numbers(HARDWARE.get(hardware or "", ""))
    if profile.compute_capability is not None and numbers(profile.compute_capability) < oldest:
        raise Unsupported(
            f"`hardware_compatible` {hardware}: profile {profile.name} has compute capability "
            f"{profile.compute_capability}, {HARDWARE[str(hardware)]} or later is needed",
            hint="`hardware_compatible` same-compute-capability",
        )
    if options.dla is not None and not 0 <= options.dla < profile.dla_cores:
        cores = profile.dla_cores
        raise Unsupported(
            f"`dla` {options.dla}: profile {profile.name} has "
            + (f"{cores} DLA core{'s'[: cores > 1]}, counted from 0" if cores else "no DLA"),
            hint="without `dla` the build runs everything on the GPU",
        )


def check_target(nv: Any, options: Options) -> None:
    """Raise Unsupported when the profile's target does not run this TensorRT."""
    low, high = options.profile.tensorrt_min, options.profile.tensorrt_max
    before = low is not None and version(nv) < numbers(low)
    after = high is not None and version(nv) > numbers(high)
    if options.flavour == "tensorrt" and (before or after):
        raise Unsupported(
            f"profile {options.profile.name}: runs TensorRT {low or '10.3'} to {high or 'newer'}, "
            f"here is {nv.__version__}"
        )


def hardware_level(nv: Any, name: str) -> Any:
    """TensorRT's member for one of HARDWARE. Raises Unsupported where this one has it not."""
    levels = nv.HardwareCompatibilityLevel
    return member(levels, name.upper().replace("-", "_"), f"`hardware_compatible` {name}")
