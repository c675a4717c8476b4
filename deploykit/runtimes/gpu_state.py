"""The state of one GPU, whichever source it was read from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploykit.core.json_value import Record

# bits of nvmlDeviceGetCurrentClocksEventReasons that lower the clocks
THROTTLES: Mapping[str, int] = {
    "power_cap": 0x04,
    "hw_slowdown": 0x08,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
}
_TRACED = 120  # states kept of a run, at most


@dataclass(frozen=True)
class GpuState:
    """The state of one GPU; None where unknown.

    Of a Jetson: `rails`, watts by power rail; `zones`, degrees Celsius by thermal zone, which end
    in `tj`, the junction; `power_mode`, nvpmodel's name of the mode.
    """

    uuid: str
    name: str
    index: int
    source: str  # nvml, sysfs or nvml+sysfs
    utilization: float | None = None  # 0 to 1
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    clock_hz: int | None = None
    memory_clock_hz: int | None = None
    temperature_c: float | None = None
    throttled: tuple[str, ...] | None = None
    rails: tuple[tuple[str, float], ...] = ()
    zones: tuple[tuple[str, float], ...] = ()
    clock_max_hz: int | None = None
    power_mode: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "rails": dict(self.rails), "zones": dict(self.zones)}


@dataclass(frozen=True)
class Conditions(Record):
    """What held for one GPU while it was measured; None where its source does not report it.

    `power_mode`: nvpmodel's name of a Jetson's mode, two with a comma where it changed. Clocks in
    MHz, lowest and highest seen, and the highest that is allowed. `power_w`: of the GPU, of the
    whole module on a Jetson. `temperature_c`: the highest of any zone. `throttled`: names of
    THROTTLES. `trace`: clock_mhz, power_w and temperature_c over the run, at equal intervals.
    """

    name: str
    source: str
    samples: int
    power_mode: str | None
    clock_low_mhz: float | None
    clock_high_mhz: float | None
    clock_max_mhz: float | None
    power_mean_w: float | None
    power_high_w: float | None
    temperature_c: float | None
    throttled: tuple[str, ...] | None
    trace: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)


def conditions_of(states: Sequence[GpuState]) -> Conditions:
    """Sum up the states of one GPU, at least one, in their order in time."""
    last = states[-1]
    clocks = [state.clock_hz / 1e6 for state in states if state.clock_hz is not None]
    watts = [state.power_w for state in states if state.power_w is not None]
    allowed = [state.clock_max_hz / 1e6 for state in states if state.clock_max_hz]
    heat = [each.temperature_c for each in states if each.temperature_c is not None]
    heat += [degrees for state in states for _, degrees in state.zones]
    modes = dict.fromkeys(state.power_mode for state in states if state.power_mode)
    known = [state.throttled for state in states if state.throttled is not None]
    return Conditions(
        name=last.name,
        source=last.source,
        samples=len(states),
        power_mode=", ".join(modes) or None,
        clock_low_mhz=min(clocks, default=None),
        clock_high_mhz=max(clocks, default=None),
        clock_max_mhz=max(allowed, default=None),
        power_mean_w=sum(watts) / len(watts) if watts else None,
        power_high_w=max(watts, default=None),
        temperature_c=max(heat, default=None),
        throttled=in_order(reason for each in known for reason in each) if known else None,
        trace=_trace(states[:: -(-len(states) // _TRACED)]),
    )


def _trace(states: Sequence[GpuState]) -> dict[str, tuple[float | None, ...]]:
    return {
        "clock_mhz": tuple(_mega(state.clock_hz) for state in states),
        "power_w": tuple(state.power_w for state in states),
        "temperature_c": tuple(
            max(filter(None, (state.temperature_c, *dict(state.zones).values())), default=None)
            for state in states
        ),
    }


def _mega(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def in_order(reasons: Iterable[str]) -> tuple[str, ...]:
    """Each reason once, in the order of THROTTLES."""
    found = set(reasons)
    return tuple(name for name in THROTTLES if name in found)
