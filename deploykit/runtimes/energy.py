"""Read energy meters: NVIDIA's counters, a Jetson's power rails, and RAPL for CPUs.

Device energy, not that at the wall: no power supply, no fan. Reading never raises; where there is
no meter, `why` has the reason. Sources: nvmlDeviceGetTotalEnergyConsumption (mJ since the driver
was loaded); docs.kernel.org/power/powercap. Where a GPU has no counter its power is integrated,
ten times a second. Tests pass a `root` in place of `/`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploykit.core.extras import installed
from deploykit.core.machine import file_text, natural_number
from deploykit.runtimes.devices import Devices
from deploykit.runtimes.engine import Closing
from deploykit.runtimes.gpu_state import GpuState

CPU = "cpu"  # what RAPL measures; a GPU is "cuda:N"
_POWERCAP = "sys/class/powercap"
_PACKAGE = re.compile(r"package-[0-9]{1,3}")
_EVERY_S = 0.1


@dataclass
class _Counter:
    """One RAPL package: microjoules that begin again at `range_uj`."""

    folder: Path
    range_uj: int
    last_uj: int
    joules: float = 0.0

    def read(self) -> bool:
        """Add what was used since the last time; whether the counter can still be read.

        It must be read more than once per wrap-around, which takes minutes at full power.
        """
        now = natural_number(file_text(self.folder / "energy_uj"))
        if now is None:
            return False
        self.joules += ((now - self.last_uj) % self.range_uj) / 1e6
        self.last_uj = now
        return True


@dataclass
class _Gpu:
    """A GPU's energy since the meter was opened: from its counter, else from its power."""

    source: str
    first_j: float | None = None
    joules: float = 0.0
    last: tuple[float, float] | None = None  # seconds, watts

    def add(self, state: GpuState, now_s: float) -> None:
        """Take up a new reading."""
        if state.energy_j is not None:
            self.first_j = state.energy_j if self.first_j is None else self.first_j
            self.joules = state.energy_j - self.first_j
        elif state.power_w is not None:
            if self.last is not None:
                since_s, before_w = now_s - self.last[0], self.last[1]
                self.joules += since_s * (before_w + state.power_w) / 2
            self.last = (now_s, state.power_w)


@dataclass
class EnergyMeter(Closing):
    """All meters of this machine, until `close`.

    `sources`: what each device is read from, "cpu" and "cuda:0"; a device that is not in it has
    no meter, and `why` says the reason. On a Jetson the rails are the whole module's: it is under
    both names.
    """

    root: Path = Path("/")
    devices: Devices | None = None
    clock: Callable[[], float] = time.perf_counter
    sources: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._devices = self.devices or Devices(self.root)
        self._packages = self._open_packages()
        self._gpus: dict[str, _Gpu] = {}
        self._open_gpus()
        if any(state.last is not None for state in self._gpus.values()):
            self._thread = threading.Thread(target=self._loop, name="energy", daemon=True)
            self._thread.start()

    def joules(self) -> Mapping[str, float]:
        """Joules since the meter was opened, by device."""
        with self._lock:
            self._read_gpus()
            found = {name: gpu.joules for name, gpu in self._gpus.items()}
            answers = [package.read() for package in self._packages]
            if not all(answers):
                self._packages = []
                self.sources.pop(CPU, None)
                self.why[CPU] = "the RAPL counters could no longer be read"
            if self._packages:
                found[CPU] = sum(package.joules for package in self._packages)
            return {name: value for name, value in found.items() if name in self.sources}

    def close(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            if self._thread is not None:
                self._thread.join()
            self._devices.close()

    def _open_packages(self) -> list[_Counter]:
        found, hidden = [], []
        for folder in _folders(self.root / _POWERCAP):
            name = file_text(folder / "name").strip()
            if not _PACKAGE.fullmatch(name):  # psys holds the packages, core and dram are inside
                continue
            now = natural_number(file_text(folder / "energy_uj"))
            highest = natural_number(file_text(folder / "max_energy_range_uj"))
            if now is None or not highest:
                hidden.append(name)
                continue
            found.append(_Counter(folder, highest + 1, now))
        if found and not hidden:
            self.sources[CPU] = f"RAPL, {len(found)} package{'s' * (len(found) > 1)}"
            return found
        self.why[CPU] = (
            f"{', '.join(hidden)} may not be read: most systems allow RAPL to root only"
            if hidden
            else f"no RAPL meter in /{_POWERCAP}, as on most virtual machines"
        )
        return []

    def _open_gpus(self) -> None:
        states = self._devices.read()
        self._read_gpus(states)
        if not states:
            driver = "NVML, the driver's library, reports no GPU"
            needs = "nvidia-ml-py is not installed, which reads NVML: pip install nvidia-ml-py"
            self.why["cuda:0"] = driver if installed("pynvml") else needs
        for state in states:
            name = f"cuda:{state.index}"
            if name not in self._gpus:
                self.why[name] = f"{state.name} reports neither energy nor power"
            elif state.source.endswith("sysfs"):
                self.sources[name] = self.sources[CPU] = "power rails of the whole module"
                self.why.pop(CPU, None)
                self._gpus[CPU] = self._gpus[name]
            else:
                self.sources[name] = f"NVML, {self._gpus[name].source} of the GPU"

    def _read_gpus(self, states: tuple[GpuState, ...] | None = None) -> None:
        now_s = self.clock()
        for state in self._devices.read() if states is None else states:
            if state.energy_j is None and state.power_w is None:
                continue
            name, kind = f"cuda:{state.index}", "counter" if state.energy_j is not None else "power"
            self._gpus.setdefault(name, _Gpu(kind)).add(state, now_s)

    def _loop(self) -> None:
        while not self._ended.wait(_EVERY_S):
            with self._lock:
                self._read_gpus()


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if re.fullmatch(r"[\w-]+:\d+", each.name))
    except OSError:
        return []
