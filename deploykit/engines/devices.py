"""Read the state of this machine's GPUs: from NVML, and on a Jetson from sysfs.

Reading never raises: an unknown value is None. On a Jetson NVML is missing or incomplete (Thor:
load, but neither memory nor power), so each value comes from the first source that has it. Tests
pass another `root` than `/`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from deploykit.core.extras import installed
from deploykit.core.json_value import Record
from deploykit.core.machine import board_model, file_text, natural_number, power_mode
from deploykit.core.profile import cuda_order
from deploykit.engines.engine import Closing

# These bits of nvmlDeviceGetCurrentClocksEventReasons lower the clocks.
THROTTLES: Mapping[str, int] = {
    "power_cap": 0x04,
    "hw_slowdown": 0x08,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
}
_TRACED = 120  # the most states kept per run


@dataclass(frozen=True)
class GpuState:
    """The state of one GPU; unknown values are None.

    A Jetson has `rails`, watts by power rail; `zones`, degrees Celsius by thermal zone, which end
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
    """The conditions of one GPU during a measurement; None where its source reports nothing.

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
    """Summarise the states of one GPU, at least one, in order of time."""
    last, traced = states[-1], states[:: -(-len(states) // _TRACED)]

    def known(name: str, unit: float = 1.0) -> list[float]:
        values = (getattr(state, name) for state in states)
        return [value / unit for value in values if value is not None]

    clocks, watts = known("clock_hz", 1e6), known("power_w")
    reasons = [x.throttled for x in states if x.throttled is not None]
    return Conditions(
        name=last.name,
        source=last.source,
        samples=len(states),
        power_mode=", ".join(dict.fromkeys(x.power_mode for x in states if x.power_mode)) or None,
        clock_low_mhz=min(clocks, default=None),
        clock_high_mhz=max(clocks, default=None),
        clock_max_mhz=max(known("clock_max_hz", 1e6), default=None),
        power_mean_w=sum(watts) / len(watts) if watts else None,
        power_high_w=max(watts, default=None),
        temperature_c=max(filter(None, map(_hottest, states)), default=None),
        throttled=in_order(chain(*reasons)) if reasons else None,
        trace={
            "clock_mhz": tuple(state.clock_hz and state.clock_hz / 1e6 for state in traced),
            "power_w": tuple(state.power_w for state in traced),
            "temperature_c": tuple(map(_hottest, traced)),
        },
    )


def _hottest(state: GpuState) -> float | None:
    return max(filter(None, (state.temperature_c, *dict(state.zones).values())), default=None)


def in_order(reasons: Iterable[str]) -> tuple[str, ...]:
    """Return each reason once, in the order of THROTTLES."""
    found = set(reasons)
    return tuple(name for name in THROTTLES if name in found)


# The readers run no program and need no root: containers have /sys too. A file that is missing, not
# readable or damaged gives an unknown value, never an error. Sources of the layouts:
# docs.kernel.org/hwmon/ina3221, and each release's guide to power and performance by NVIDIA.

TOTAL_RAILS = ("VDD_IN", "POM_5V_IN", "VIN")  # the whole module, with all other rails
_SUMMED = {"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"}  # AGX Orin measures no total
_LOADS = ("sys/devices/platform/gpu.0/load", "sys/devices/gpu.0/load")  # load per mille
_GPU = re.compile(r"(^|[.])(gpu|ga10b|gv11b|gp10b|gm20b)$|^gpu-gpc")
_MOST_WATTS = 1000.0  # a module has 130; more is a damaged reading
_DEGREES = (-40.0, 150.0)  # a zone that is switched off reports -256


class JetsonReader:
    """Reads the state of a Jetson under `root`; keeps the counters of over-current events."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._events: int | None = None

    def read(self) -> GpuState | None:
        """Return the state, in about a millisecond; None if this machine is not a Jetson."""
        root = self._root
        clocks = [each for each in _list(root, "sys/class/devfreq/*") if _GPU.search(each.name)]
        loads = [*(entry / "device/load" for entry in clocks), *(root / path for path in _LOADS)]
        load = next((value for path in loads if (value := _number(path)) is not None), None)
        if load is None and not clocks:
            return None
        rails, power = read_rails(root)
        zones = read_zones(root)
        meminfo = file_text(root / "proc/meminfo")
        found = re.findall(r"^(\w+):\s+([0-9]{1,15}) kB", meminfo, re.MULTILINE)
        memory = {name: int(kib) * 1024 for name, kib in found}

        def hertz(file: str) -> int | None:
            found = (_number(each / file) for each in clocks)
            return next((n for n in found if n is not None and n >= 0), None)

        return GpuState(
            uuid="jetson-gpu.0",
            name=board_model(root) or "NVIDIA Jetson",
            index=0,
            source="sysfs",
            utilization=load / 1000 if load is not None and 0 <= load <= 1000 else None,
            power_w=power,
            memory_used_bytes=memory.get("NvMapMemUsed"),
            memory_total_bytes=memory.get("MemTotal"),
            clock_hz=hertz("cur_freq"),
            clock_max_hz=hertz("max_freq"),
            temperature_c=next((value for name, value in zones if name == "gpu"), None),
            throttled=self._throttled(),
            power_mode=power_mode(root),
            rails=rails,
            zones=zones,
        )

    def _throttled(self) -> tuple[str, ...] | None:
        """Return why clocks are lowered, as names of THROTTLES; None if nothing reports it.

        A `*-throttle-alert` cooling device is above 0 while a zone is too hot. The over-current
        events, under-voltage among them, count from the boot on: new ones lower the clocks.
        """

        def numbers(folder: str, kind: str, end: str, files: str) -> list[int]:
            parts = _list(self._root, f"sys/class/{folder}")
            right = [each for each in parts if file_text(each / kind).strip().endswith(end)]
            found = (_number(file) for each in right for file in _list(each, files))
            return [number for number in found if number is not None]

        alerts = numbers("thermal/cooling_device*", "type", "throttle-alert", "cur_state")
        counts = numbers("hwmon/hwmon*", "name", "soctherm_oc", "oc[1-9]_event_cnt")
        if not alerts and not counts:
            return None
        new = bool(counts) and self._events is not None and sum(counts) > self._events
        self._events = sum(counts) if counts else self._events
        return (*["hw_slowdown"] * new, *["sw_thermal"] * (max(alerts, default=0) > 0))


def read_rails(root: Path) -> tuple[tuple[tuple[str, float], ...], float | None]:
    """Return watts by rail, and of the module: its total rail, or on an AGX Orin the sum.

    The rails are the connected channels of each INA3221. The sum is unknown if one of its rails is.
    A total that is not readable is not replaced by a sum, nor is another board's, whose rails may
    not cover all of its power.
    """
    rails: dict[str, float | None] = {}
    chips = _list(root, "sys/bus/i2c/devices/*")
    for chip in (each for each in chips if "ina3221" in file_text(each / "name")):
        for entry in _list(chip, "hwmon/hwmon*/in[1-3]_label"):  # in7 is the sum of the shunts
            name = file_text(entry).strip()
            mv, ma = (
                _number(entry.with_name(f"{kind}{entry.name[2]}_input")) for kind in ("in", "curr")
            )
            known = mv is not None and ma is not None and mv >= 0
            watts = max(0.0, (mv or 0) * (ma or 0) / 1e6) if known else None
            if not re.fullmatch(r"[\w .+-]{1,64}", name):  # it may be the total
                rails[str(entry)] = None
            elif name != "NC":
                rails[name] = watts if watts is not None and watts <= _MOST_WATTS else None
    found = {name: watts for name, watts in rails.items() if watts is not None}
    total = next((name for name in TOTAL_RAILS if name in rails), None)
    power = rails[total] if total else None
    if total is None and len(found) == len(rails) and found.keys() >= _SUMMED:
        power = sum(found.values())
    return tuple(sorted(found.items())), power


def read_zones(root: Path) -> tuple[tuple[str, float], ...]:
    """Return degrees Celsius by thermal zone: `cpu`, `gpu`, `soc0`, `tj` and any others."""
    zones: dict[str, float] = {}
    for zone in _list(root, "sys/class/thermal/thermal_zone*"):
        name = file_text(zone / "type").strip().lower()  # GPU-therm or gpu-thermal
        name = re.sub(r"[-_]therm(al)?$", "", name)
        milli = _number(zone / "temp")
        if name and milli is not None and _DEGREES[0] <= milli / 1000 <= _DEGREES[1]:
            zones.setdefault(name, milli / 1000)
    return tuple(sorted(zones.items()))


def _list(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:  # no file descriptors are left, or the device is gone
        return []


def _number(path: Path) -> int | None:
    text = file_text(path).strip()
    return int(text) if re.fullmatch(r"-?[0-9]{1,15}", text) else None


class Devices(Closing):
    """The GPUs of this machine; NVML is opened once and kept."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._jetson = JetsonReader(root)
        self._nvml: Any = import_module("pynvml") if installed("pynvml") else None
        self._open = False

    def read(self) -> tuple[GpuState, ...]:
        """Return the state of every GPU, in about a millisecond each. Never raises."""
        gpus = self._from_nvml() if self._nvml is not None else ()
        tegra = self._jetson.read()
        if tegra is None:
            return gpus
        if not gpus:
            return (tegra,)
        known = {name: value for name, value in vars(gpus[0]).items() if value is not None}
        more = {name: value for name, value in vars(tegra).items() if name not in known}
        apart = {"rails": tegra.rails, "zones": tegra.zones, "source": "nvml+sysfs"}
        return (replace(gpus[0], **(more | apart)), *gpus[1:])

    def close(self) -> None:
        if self._open:
            self._open = False
            self._ask("nvmlShutdown")

    def _ask(self, name: str, *args: Any) -> Any:
        """Call NVML; return None if the GPU or driver does not support the call."""
        try:
            return getattr(self._nvml, name)(*args)
        except (self._nvml.NVMLError, AttributeError):  # an older nvidia-ml-py lacks it
            return None

    def _from_nvml(self) -> tuple[GpuState, ...]:
        try:
            if not self._open:  # retry each time: the driver may load later
                self._nvml.nvmlInit()
                self._open = True
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as exc:
            if self._open and exc.value == self._nvml.NVML_ERROR_UNINITIALIZED:
                self._open = False
            return ()
        handles = [(i, self._ask("nvmlDeviceGetHandleByIndex", i)) for i in range(count)]
        return tuple(self._gpu(index, handle) for index, handle in handles if handle is not None)

    def _gpu(self, index: int, handle: Any) -> GpuState:
        def ask(name: str, *args: Any, factor: float | None = None) -> Any:
            value = self._ask(f"nvmlDeviceGet{name}", handle, *args)
            return value if factor is None or value is None else value * factor

        nvml = self._nvml
        busy, memory = ask("UtilizationRates"), ask("MemoryInfo")
        reasons = ask("CurrentClocksEventReasons")
        if reasons is None:  # the name before driver 535
            reasons = ask("CurrentClocksThrottleReasons")
        throttled = tuple(name for name, bit in THROTTLES.items() if (reasons or 0) & bit)
        return GpuState(
            uuid=str(ask("UUID") or f"gpu-{index}"),
            name=str(ask("Name") or "NVIDIA GPU"),
            index=index,
            source="nvml",
            utilization=None if busy is None else busy.gpu / 100,
            power_w=ask("PowerUsage", factor=1e-3),
            power_limit_w=ask("EnforcedPowerLimit", factor=1e-3),
            energy_j=ask("TotalEnergyConsumption", factor=1e-3),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            clock_hz=ask("ClockInfo", nvml.NVML_CLOCK_SM, factor=1_000_000),
            memory_clock_hz=ask("ClockInfo", nvml.NVML_CLOCK_MEM, factor=1_000_000),
            temperature_c=ask("Temperature", nvml.NVML_TEMPERATURE_GPU),
            throttled=None if reasons is None else throttled,
        )


def read_gpus(root: Path = Path("/")) -> tuple[GpuState, ...]:
    """Return the state of every GPU once, some 10 ms slower than an open `Devices`."""
    with Devices(root) as devices:
        return devices.read()


def cuda_names(gpus: Sequence[GpuState]) -> dict[str, str]:
    """Return CUDA's name in this process, "cuda:0", by the UUID of each GPU that it shows."""
    if any(gpu.source.endswith("sysfs") for gpu in gpus):  # a Jetson has one
        return {gpu.uuid: f"cuda:{number}" for number, gpu in enumerate(gpus)}
    order = cuda_order([gpu.uuid for gpu in gpus])
    return {gpus[at].uuid: f"cuda:{number}" for number, at in enumerate(order) if at is not None}


# The energy is that of the devices, without power supply and fan. A GPU's power is integrated if it
# has no counter. Sources: nvmlDeviceGetTotalEnergyConsumption (mJ since the driver was loaded);
# docs.kernel.org/power/powercap.

CPU = "cpu"  # the device that RAPL measures; a GPU is "cuda:N"
_POWERCAP = "sys/class/powercap"
_PACKAGE = re.compile(r"package-[0-9]{1,3}")
_EVERY_S = 0.2


class DeviceWatch(Closing):
    """The GPUs that CUDA shows to this process and all meters, read until `close`.

    `only`: CUDA's names of the GPUs whose `conditions` are kept; all if it is empty. `sources`:
    device ("cpu", "cuda:0") -> the meter that it is read from; `why` has the reason for a device
    without one. A Jetson's rails are the whole module's, under both names. Reading never raises.
    """

    def __init__(
        self,
        devices: Devices | None = None,
        *,
        root: Path = Path("/"),
        only: Sequence[str] = (),
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._devices, self._only, self._clock = devices or Devices(root), only, clock
        self.sources: dict[str, str] = {}
        self.why: dict[str, str] = {}
        self._names: dict[str, str] = {}  # CUDA's, by UUID
        self._states: dict[str, list[GpuState]] = {}
        self._last: dict[str, tuple[float, GpuState]] = {}
        self._used: dict[str, float] = {}  # joules by device
        self._packages = self._open_packages(root)
        self._name_sources(self._look())
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._loop, args=(every_s,), daemon=True)
        if self._last:
            self._thread.start()

    @property
    def conditions(self) -> tuple[Conditions, ...]:
        return tuple(map(conditions_of, self._states.values()))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why any GPU was throttled: names of THROTTLES, in their order there."""
        return in_order(name for each in self.conditions for name in each.throttled or ())

    def joules(self) -> Mapping[str, float]:
        """Return the joules since the watch began, by device."""
        with self._lock:
            self._look()
            return {name: self._used[name] for name in self.sources}

    def close(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            if self._last:
                self._thread.join()
            self._look()
            self._devices.close()

    def _loop(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            with self._lock:
                self._look()

    def _look(self) -> tuple[GpuState, ...]:
        """Read all devices once; return the states of all GPUs."""
        now_s, seen = self._clock(), self._devices.read()
        self._names = self._names or (cuda_names(seen) if seen else {})
        for state in seen:
            name = self._names.get(state.uuid, "")
            if not name:
                continue
            if not self._only or name in self._only:
                self._states.setdefault(name, []).append(state)
            before_s, before = self._last.get(name, (now_s, state))
            if state.energy_j is not None and before.energy_j is not None:
                used = state.energy_j - before.energy_j
            else:
                used = (now_s - before_s) * ((state.power_w or 0.0) + (before.power_w or 0.0)) / 2
            self._last[name] = now_s, state
            self._used[name] = self._used.get(name, 0.0) + used
            if state.source.endswith("sysfs"):
                self._used[CPU] = self._used[name]
        for folder, (span_uj, last_uj) in self._packages.items():
            now_uj = natural_number(file_text(folder / "energy_uj"))
            if now_uj is None:
                self._packages = {}
                self.sources.pop(CPU, None)
                self.why[CPU] = "the RAPL counters could no longer be read"
                break
            self._packages[folder] = span_uj, now_uj
            self._used[CPU] = self._used.get(CPU, 0.0) + (now_uj - last_uj) % span_uj / 1e6
        return seen

    def _open_packages(self, root: Path) -> dict[Path, tuple[int, int]]:
        """Return RAPL's packages: the microjoules at which each wraps around, and its counter.

        It must be read more than once per wrap-around, which takes minutes at full power.
        """
        found: dict[Path, tuple[int, int]] = {}
        hidden = []
        for folder in _list(root, f"{_POWERCAP}/*:*"):
            name = file_text(folder / "name").strip()
            if not _PACKAGE.fullmatch(name):  # psys sums packages, which hold core, dram
                continue
            now = natural_number(file_text(folder / "energy_uj"))
            highest = natural_number(file_text(folder / "max_energy_range_uj"))
            if now is None or not highest:
                hidden.append(name)
            else:
                found[folder] = highest + 1, now
        if found and not hidden:
            self.sources[CPU] = f"RAPL, {len(found)} package{'s' * (len(found) > 1)}"
            return found
        self.why[CPU] = (
            f"{', '.join(hidden)} may not be read: most systems allow RAPL to root only"
            if hidden
            else f"no RAPL meter in /{_POWERCAP}, as on most virtual machines"
        )
        return {}

    def _name_sources(self, seen: Sequence[GpuState]) -> None:
        if "cuda:0" not in self._names.values():
            self.why["cuda:0"] = (
                "it is none of NVML's GPUs: a part of a GPU (MIG) has no meter of its own"
                if seen
                else "NVML, the driver's library, reports no GPU"
                if installed("pynvml")
                else "nvidia-ml-py is not installed, which reads NVML: pip install nvidia-ml-py"
            )
        for name, (_, state) in self._last.items():
            if state.energy_j is None and state.power_w is None:
                self.why[name] = f"{state.name} reports neither energy nor power"
            elif state.source.endswith("sysfs"):
                self.sources[name] = self.sources[CPU] = "power rails of the whole module"
                self.why.pop(CPU, None)
            else:
                kind = "power" if state.energy_j is None else "counter"
                self.sources[name] = f"NVML, {kind} of the GPU"
