"""Read the state of this machine's GPUs: from NVML, and on a Jetson from sysfs.

Reading never raises: an unknown value is None. On a Jetson NVML is missing or incomplete (Thor:
load, but neither memory nor power), so each value comes from the first source that has it. Tests
pass a `root` in place of `/`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from deploykit.core.extras import installed
from deploykit.core.machine import file_text
from deploykit.runtimes.engine import Closing

# bits of nvmlDeviceGetCurrentClocksEventReasons that lower the clocks
THROTTLES: Mapping[str, int] = {
    "power_cap": 0x04,
    "hw_slowdown": 0x08,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
}
TOTAL_RAILS = ("VDD_IN", "POM_5V_IN", "VIN")  # sums of all other rails
_LOADS = ("sys/devices/platform/gpu.0/load", "sys/devices/gpu.0/load")  # per mille
_TEGRA_GPU = re.compile(r"(^|[.])(gpu|ga10b|gv11b|gp10b|gm20b)$|^gpu-gpc")


@dataclass(frozen=True)
class GpuState:
    """The state of one GPU; None where unknown. `rails`: a Jetson's watts by power rail."""

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

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "rails": dict(self.rails)}


class Devices:
    """The GPUs of this machine; NVML is opened once and kept."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._nvml: Any = import_module("pynvml") if installed("pynvml") else None
        self._open = False

    def read(self) -> tuple[GpuState, ...]:
        """The state of every GPU. Takes about a millisecond each; never raises."""
        gpus = self._from_nvml()
        try:
            tegra = jetson(self._root)
        except OSError:  # out of file descriptors
            tegra = None
        if tegra is None:
            return gpus
        if not gpus:
            return (tegra,)
        known = {name: value for name, value in vars(gpus[0]).items() if value is not None}
        more = {name: value for name, value in vars(tegra).items() if name not in known}
        merged = replace(gpus[0], **more, rails=tegra.rails, source="nvml+sysfs")
        return (merged, *gpus[1:])

    def close(self) -> None:
        if self._open:
            self._open = False
            self._ask("nvmlShutdown")

    def _ask(self, name: str, *args: Any) -> Any:
        """One call of NVML; None where the GPU or driver does not support it."""
        try:
            return getattr(self._nvml, name)(*args)
        except (self._nvml.NVMLError, AttributeError):  # AttributeError: an older nvidia-ml-py
            return None

    def _from_nvml(self) -> tuple[GpuState, ...]:
        if self._nvml is None:
            return ()
        try:
            if not self._open:  # retried each time: the driver may load later
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
        nvml = self._nvml
        busy = self._ask("nvmlDeviceGetUtilizationRates", handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # its name before driver 535
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        throttled = tuple(name for name, bit in THROTTLES.items() if (reasons or 0) & bit)
        return GpuState(
            uuid=str(self._ask("nvmlDeviceGetUUID", handle) or f"gpu-{index}"),
            name=str(self._ask("nvmlDeviceGetName", handle) or "NVIDIA GPU"),
            index=index,
            source="nvml",
            utilization=None if busy is None else busy.gpu / 100,
            power_w=_scaled(self._ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
            power_limit_w=_scaled(self._ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3),
            energy_j=_scaled(self._ask("nvmlDeviceGetTotalEnergyConsumption", handle), 1e-3),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            clock_hz=_hertz(self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM)),
            memory_clock_hz=_hertz(
                self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM)
            ),
            temperature_c=self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            throttled=None if reasons is None else throttled,
        )


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _hertz(mhz: int | None) -> int | None:
    return None if mhz is None else mhz * 1_000_000


# -- a Jetson, from files that every process may read ---------------------------------------------


def jetson(root: Path) -> GpuState | None:
    """A Jetson's GPU; None on another machine. Memory is shared; used is the GPU's part."""
    found = sorted(root.glob("sys/class/devfreq/*"))
    clocks = [entry for entry in found if _TEGRA_GPU.search(entry.name)]
    loads = [*(entry / "device/load" for entry in clocks), *(root / path for path in _LOADS)]
    load = next((value for path in loads if (value := _number(path)) is not None), None)
    if load is None and not clocks:
        return None
    rails = dict(_rails(root))
    total = next((rails[name] for name in TOTAL_RAILS if name in rails), None)
    if total is None and rails:
        total = sum(rails.values())  # AGX Orin has no total rail
    memory = _meminfo(root)
    model = file_text(root / "proc/device-tree/model").strip("\0 \n")
    return GpuState(
        uuid="jetson-gpu.0",
        name=model or "NVIDIA Jetson",
        index=0,
        source="sysfs",
        utilization=None if load is None else load / 1000,
        power_w=total,
        memory_used_bytes=memory.get("NvMapMemUsed"),
        memory_total_bytes=memory.get("MemTotal"),
        clock_hz=next((hz for e in clocks if (hz := _number(e / "cur_freq")) is not None), None),
        temperature_c=_temperature(root),
        rails=tuple(sorted(rails.items())),
    )


def _number(path: Path) -> int | None:
    try:
        return int(file_text(path))
    except ValueError:
        return None


def _rails(root: Path) -> dict[str, float]:
    """Watts by rail, from every INA3221: millivolts times milliamperes."""
    rails = {}
    for chip in root.glob("sys/bus/i2c/devices/*"):
        if "ina3221" not in file_text(chip / "name"):
            continue
        for entry in chip.glob("hwmon/hwmon*/in[1-3]_label"):  # in7 is the sum of the shunts
            number = entry.name[2]
            name = file_text(entry).strip()
            mv, ma = (_number(entry.with_name(f"{kind}{number}_input")) for kind in ("in", "curr"))
            if name and name != "NC" and mv is not None and ma is not None:
                rails[name] = mv * ma / 1e6
    return rails


def _meminfo(root: Path) -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB", file_text(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def _temperature(root: Path) -> float | None:
    for zone in sorted(root.glob("sys/class/thermal/thermal_zone*")):
        if file_text(zone / "type").strip().lower().startswith("gpu"):  # GPU-therm, gpu-thermal
            milli = _number(zone / "temp")
            return None if milli is None else milli / 1000
    return None


class ThrottleWatch(Closing):
    """Collects why GPUs throttle, in a thread that reads them every `every_s` until `close`."""

    def __init__(self, devices: Devices | None = None, *, every_s: float = 0.5) -> None:
        self._devices = devices or Devices()
        self._every_s = every_s
        self._seen: set[str] = set()
        self._ended = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._loop, name="throttle", daemon=True)
        self._thread.start()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Names of THROTTLES, in their order there."""
        return tuple(name for name in THROTTLES if name in self._seen)

    def close(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self._look()
            self._devices.close()

    def _loop(self) -> None:
        while not self._ended.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        for gpu in self._devices.read():
            self._seen.update(gpu.throttled or ())
