"""What predictions assume of a target: ceilings, precisions, and how well these are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploykit.core.machine import memory_bytes as this_memory
from deploykit.core.profile import PowerMode, Profile
from deploykit.onnx_graph.cost import COMPILED, INTERPRETED, Fusion
from deploykit.onnx_graph.roofline import Ceilings
from deploykit.planning.probe import CpuCalibration

# Of the peaks and the bandwidth that vendors state, ResNet-50 in INT8 reaches 0.84 on an A100, 0.71
# on an H200 and 1.34 on an L4, whose cache holds what the roofline counts as traffic: about their
# geometric mean. benchmarks/plan-accuracy.md has what leaving one of them out changes.
REACHED = 0.9
LAUNCH_S = 1e-6  # of a kernel; fitted on ResNet-50 in INT8 at batch 1 on an L4
COPY_S = 6e-6  # of one small tensor: 5 to 7 us were measured (arXiv:2602.21548, section 5.2)
LINK_BYTES_PER_S = 31.5e9  # PCIe 4.0 with 16 lanes, one way, where CPU and GPU share no memory

_LANE_OPS = 256  # float32 operations per multiprocessor and clock: 128 lanes, multiply and add
_TENSOR_CORES = ("fp32", "fp16", "bf16", "int8", "fp8")  # what a graph can be written in


@dataclass(frozen=True)
class Target:
    """A profile, ready to be predicted for. `calibration`: of this machine's CPU.

    `basis`: where the figures are from. `checked`: whether a prediction for it was compared with a
    measurement on this target.
    """

    profile: Profile
    calibration: CpuCalibration | None
    basis: str
    checked: bool

    @property
    def fusion(self) -> Fusion:
        return INTERPRETED if self.calibration else COMPILED

    @property
    def call_s(self) -> float:
        """Seconds of a call whose graph does nothing."""
        return self.calibration.call_s if self.calibration else 0.0

    def copies_s(self, sizes: Sequence[int]) -> float:
        """Seconds to copy tensors of these bytes between host and GPU, one after the other."""
        if self.calibration:
            return 0.0
        shared = self.profile.unified_memory and self.profile.bandwidth_bytes_per_s
        return len(sizes) * COPY_S + sum(sizes) / ((shared or LINK_BYTES_PER_S) * REACHED)

    @property
    def precisions(self) -> tuple[str, ...]:
        """What a float32 model is predicted in. ONNX Runtime's CPU computes halves in float32."""
        if self.calibration:
            measured = {name.split(" ")[0] for name in self.calibration.curves}
            return tuple(name for name in self.profile.precisions if name in measured)
        return tuple(name for name in self.profile.precisions if name in _TENSOR_CORES)

    @property
    def memory_bytes(self) -> int | None:
        return this_memory() if self.calibration else self.profile.memory_bytes

    @property
    def power_w(self) -> float | None:
        """At most: of the power mode, else of the target."""
        mode = _mode(self.profile)
        return (mode.watts if mode else None) or self.profile.max_power_w

    def ceilings(self, weight_bytes: float) -> Ceilings:
        """`weight_bytes`: of the whole model; a cache that holds them all reads them faster."""
        if self.calibration:
            stream = self.calibration.stream
            weights = max(weight_bytes, stream.work[0])
            return Ceilings(
                self.calibration.ops_per_s,
                weights / stream.at(weights),
                self.calibration.launch_s,
                curves=self.calibration.curves,
            )
        profile, share = self.profile, REACHED * _clock_share(self.profile)
        peaks = dict(profile.peak_ops_per_s)
        peaks["fp32"] = peaks.get("tf32", peaks.get("fp32", 0.0))  # as TensorRT's default does
        return Ceilings(
            {name: peak * share for name, peak in peaks.items()},
            (profile.bandwidth_bytes_per_s or 0.0) * REACHED,
            LAUNCH_S,
        )


def target_of(profile: Profile, calibration: CpuCalibration | None) -> Target | str:
    """The target, or why nothing can be predicted for it."""
    if profile.device == "cpu":
        if profile.runtime != "onnxruntime":
            return "the probe measures only ONNX Runtime: `deploykit bench` measures others"
        if calibration is None:
            return "its ceilings are not measured: onnxruntime is not installed"
        basis = "one probe of this machine's CPU" + ", next to other work" * bool(calibration.doubt)
        return Target(profile, calibration, basis, checked=True)
    lacks = [
        name
        for name, value in (
            ("peak_ops_per_s.fp32", profile.peak_ops_per_s.get("fp32")),
            ("bandwidth_bytes_per_s", profile.bandwidth_bytes_per_s),
        )
        if not value
    ]
    if lacks:
        return f"the profile has no {' and no '.join(lacks)}"
    return Target(profile, None, "the vendor's figures; not yet checked on this GPU", checked=False)


def _mode(profile: Profile) -> PowerMode | None:
    return next((mode for mode in profile.power_modes if mode.name == profile.power_mode), None)


def _clock_share(profile: Profile) -> float:
    """Of the peaks, what the chosen power mode leaves: its clock and its multiprocessors."""
    mode, sms = _mode(profile), profile.sm_count
    if mode is None or not sms:
        return 1.0
    full_hz = profile.peak_ops_per_s["fp32"] / (sms * _LANE_OPS)
    clock_hz = mode.gpu_mhz * 1e6 if mode.gpu_mhz else full_hz
    return min(1.0, clock_hz * (mode.sms or sms) / (full_hz * sms))
