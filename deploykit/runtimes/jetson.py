"""Read a Jetson's GPU, power rails, clocks, heat and throttling from files anyone may read.

Nothing here runs a program or needs root: containers have /sys too. A file that is missing, not
readable, damaged or gone since it was listed gives an unknown value, never an error. Layouts:
docs.kernel.org/hwmon/ina3221, and NVIDIA's guide to power and performance of each release.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from deploykit.core.machine import board_model, file_text, power_mode
from deploykit.runtimes.gpu_state import GpuState

TOTAL_RAILS = ("VDD_IN", "POM_5V_IN", "VIN")  # of the whole module: all other rails are parts of it
_SUMMED = {"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"}  # AGX Orin's, which measures no total
_LOADS = ("sys/devices/platform/gpu.0/load", "sys/devices/gpu.0/load")  # per mille
_GPU = re.compile(r"(^|[.])(gpu|ga10b|gv11b|gp10b|gm20b)$|^gpu-gpc")
_MOST_WATTS = 1000.0  # a module has 130; more is a damaged reading
_DEGREES = (-40.0, 150.0)  # a zone that is switched off reports -256


class JetsonReader:
    """The state of a Jetson under `root`; keeps the counters of over-current events."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._events: int | None = None

    def read(self) -> GpuState | None:
        """The state now; None on a machine that is no Jetson. Takes about a millisecond."""
        root = self._root
        clocks = [each for each in _list(root, "sys/class/devfreq/*") if _GPU.search(each.name)]
        loads = [*(entry / "device/load" for entry in clocks), *(root / path for path in _LOADS)]
        load = next((value for path in loads if (value := _number(path)) is not None), None)
        if load is None and not clocks:
            return None
        rails, power = read_rails(root)
        zones = read_zones(root)
        memory = _meminfo(root)
        return GpuState(
            uuid="jetson-gpu.0",
            name=board_model(root) or "NVIDIA Jetson",
            index=0,
            source="sysfs",
            utilization=load / 1000 if load is not None and 0 <= load <= 1000 else None,
            power_w=power,
            memory_used_bytes=memory.get("NvMapMemUsed"),
            memory_total_bytes=memory.get("MemTotal"),
            clock_hz=_clock(clocks, "cur_freq"),
            clock_max_hz=_clock(clocks, "max_freq"),
            temperature_c=next((value for name, value in zones if name == "gpu"), None),
            throttled=self._throttled(),
            power_mode=power_mode(root),
            rails=rails,
            zones=zones,
        )

    def _throttled(self) -> tuple[str, ...] | None:
        """Why clocks are lowered, with the names of THROTTLES; None where nothing reports it.

        A `*-throttle-alert` cooling device is above 0 while a zone is too hot. The over-current
        events, under-voltage among them, count from the boot on: new ones lower the clocks.
        """
        hot = _cooling(self._root)
        events = _over_current(self._root)
        new = events is not None and self._events is not None and events > self._events
        self._events = events if events is not None else self._events
        if hot is None and events is None:
            return None
        return (*["hw_slowdown"] * new, *["sw_thermal"] * bool(hot))


def read_rails(root: Path) -> tuple[tuple[tuple[str, float], ...], float | None]:
    """Watts by rail, and of the module: its total rail; of an AGX Orin, which has none, the sum.

    The sum is unknown as soon as one of its rails is; no sum replaces a total that is not readable,
    nor stands for another board's, whose rails may not be all that it takes.
    """
    rails = dict(_rails(root))
    known = {name: watts for name, watts in rails.items() if watts is not None}
    total = next((name for name in TOTAL_RAILS if name in rails), None)
    power = rails[total] if total else None
    if total is None and len(known) == len(rails) and known.keys() >= _SUMMED:
        power = sum(known.values())
    return tuple(sorted(known.items())), power


def _rails(root: Path) -> Iterator[tuple[str, float | None]]:
    """Every INA3221 channel that is connected: millivolts times milliamperes."""
    for chip in _list(root, "sys/bus/i2c/devices/*"):
        if "ina3221" not in file_text(chip / "name"):
            continue
        for entry in _list(chip, "hwmon/hwmon*/in[1-3]_label"):  # in7 is the sum of the shunts
            name = file_text(entry).strip()
            if name == "NC":
                continue
            if not re.fullmatch(r"[\w .+-]{1,64}", name):
                yield str(entry), None  # it may be the total
                continue
            mv, ma = (
                _number(entry.with_name(f"{kind}{entry.name[2]}_input")) for kind in ("in", "curr")
            )
            watts = None if mv is None or ma is None or mv < 0 else max(0.0, mv * ma / 1e6)
            yield name, watts if watts is None or watts <= _MOST_WATTS else None


def read_zones(root: Path) -> tuple[tuple[str, float], ...]:
    """Degrees Celsius by thermal zone: `cpu`, `gpu`, `soc0`, `tj`, whatever the release adds."""
    zones: dict[str, float] = {}
    for zone in _list(root, "sys/class/thermal/thermal_zone*"):
        name = file_text(zone / "type").strip().lower()  # GPU-therm, gpu-thermal
        name = re.sub(r"[-_]therm(al)?$", "", name)
        milli = _number(zone / "temp")
        if name and milli is not None and _DEGREES[0] <= milli / 1000 <= _DEGREES[1]:
            zones.setdefault(name, milli / 1000)
    return tuple(sorted(zones.items()))


def _cooling(root: Path) -> list[str] | None:
    """The alerts that are on; None where there is none to read."""
    states = {}
    for device in _list(root, "sys/class/thermal/cooling_device*"):
        name = file_text(device / "type").strip()
        state = _number(device / "cur_state")
        if name.endswith("throttle-alert") and state is not None:
            states[name] = state
    return [name for name, state in states.items() if state > 0] if states else None


def _over_current(root: Path) -> int | None:
    """Over-current and under-voltage events since boot, of all kinds; None where not counted."""
    counts = [
        count
        for chip in _list(root, "sys/class/hwmon/hwmon*")
        if file_text(chip / "name").strip() == "soctherm_oc"
        for entry in _list(chip, "oc[1-9]_event_cnt")
        if (count := _number(entry)) is not None and count >= 0
    ]
    return sum(counts) if counts else None


def _clock(clocks: list[Path], name: str) -> int | None:
    found = (_number(entry / name) for entry in clocks)
    return next((hertz for hertz in found if hertz is not None and hertz >= 0), None)


def _list(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:  # out of file descriptors, or a device that is gone meanwhile
        return []


def _number(path: Path) -> int | None:
    text = file_text(path).strip()
    return int(text) if re.fullmatch(r"-?[0-9]{1,15}", text) else None


def _meminfo(root: Path) -> dict[str, int]:
    text = file_text(root / "proc/meminfo")
    found = re.findall(r"^(\w+):\s+([0-9]{1,15}) kB", text, re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}
