"""Read the state of this machine's GPUs: from NVML, and on a Jetson from sysfs.

Reading never raises: an unknown value is None. On a Jetson NVML is missing or incomplete (Thor:
load, but neither memory nor power), so each value comes from the first source that has it. Tests
pass a `root` in place of `/`.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from deploykit.core.extras import installed
from deploykit.runtimes.engine import Closing
from deploykit.runtimes.gpu_state import (
    THROTTLES,
    Conditions,
    GpuState,
    conditions_of,
    in_order,
)
from deploykit.runtimes.jetson import JetsonReader


class Devices:
    """The GPUs of this machine; NVML is opened once and kept."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._jetson = JetsonReader(root)
        self._nvml: Any = import_module("pynvml") if installed("pynvml") else None
        self._open = False

    def read(self) -> tuple[GpuState, ...]:
        """The state of every GPU. Takes about a millisecond each; never raises."""
        gpus = self._from_nvml()
        tegra = self._jetson.read()
        if tegra is None:
            return gpus
        if not gpus:
            return (tegra,)
        known = {name: value for name, value in vars(gpus[0]).items() if value is not None}
        more = {name: value for name, value in vars(tegra).items() if name not in known}
        apart = {"rails": tegra.rails, "zones": tegra.zones, "source": "nvml+sysfs"}
        merged = replace(gpus[0], **(more | apart))
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
            power_w=_scale(self._ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
            power_limit_w=_scale(self._ask("nvmlDeviceGetEnforcedPowerLimit", handle), 1e-3),
            energy_j=_scale(self._ask("nvmlDeviceGetTotalEnergyConsumption", handle), 1e-3),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            clock_hz=_hertz(self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM)),
            memory_clock_hz=_hertz(
                self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM)
            ),
            temperature_c=self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            throttled=None if reasons is None else throttled,
        )


def _scale(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _hertz(mhz: int | None) -> int | None:
    return None if mhz is None else mhz * 1_000_000


def read_gpus(root: Path = Path("/")) -> tuple[GpuState, ...]:
    """The state of every GPU, once. Takes some 10 ms more than `Devices.read`, which stays open."""
    devices = Devices(root)
    try:
        return devices.read()
    finally:
        devices.close()


class GpuWatch(Closing):
    """Reads every GPU each `every_s` in a thread, until `close`."""

    def __init__(self, devices: Devices | None = None, *, every_s: float = 0.5) -> None:
        self._devices = devices or Devices()
        self._every_s = every_s
        self._states: dict[str, list[GpuState]] = {}  # by the GPU's uuid
        self._ended = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._loop, name="gpu-watch", daemon=True)
        self._thread.start()

    @property
    def conditions(self) -> tuple[Conditions, ...]:
        """What held for each GPU so far."""
        return tuple(map(conditions_of, self._states.values()))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why any GPU was throttled: names of THROTTLES, in their order there."""
        return in_order(name for each in self.conditions for name in each.throttled or ())

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
            self._states.setdefault(gpu.uuid, []).append(gpu)
