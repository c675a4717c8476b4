"""Sample the process and the GPUs in the background: no scrape waits for a driver.

`Sampler.latest` returns the newest `Snapshot` without waiting. While it is called now and then, a
thread takes one every second; otherwise the thread sleeps. Old snapshots are not returned.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from deploykit.runtimes.devices import Devices
from deploykit.runtimes.gpu_state import THROTTLES, GpuState
from deploykit.serving.observe.prometheus import Sample

INTERVAL_S = 1.0
KEEP_ON_S = 90.0  # after the last call; longer than the usual scrape interval
STALE_S = 5.0
_PROCESS = {
    "process_resident_memory_bytes": "resident_bytes",
    "process_cpu_seconds_total": "cpu_s",
    "process_start_time_seconds": "started_s",
    "process_open_fds": "open_fds",
    "process_max_fds": "max_fds",
    "process_threads": "threads",
}


@dataclass(frozen=True)
class Process:
    """This process now. `started_s`: seconds since 1970."""

    resident_bytes: int
    cpu_s: float
    started_s: float
    open_fds: int
    max_fds: int
    threads: int


@dataclass(frozen=True)
class Snapshot:
    """The state at `at_s` of the monotonic clock. `process` None: it could not be read."""

    at_s: float
    process: Process | None
    gpus: tuple[GpuState, ...]


class Sampler:
    """Thread-safe. Its own thread starts on the first call."""

    def __init__(
        self, devices: Devices | None = None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._devices = devices
        self._clock_s = clock_s
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._newest: Snapshot | None = None
        self._called_s = clock_s()
        self._closing = False

    def latest(self) -> Snapshot | None:
        """The newest snapshot, None if there is no recent one. Never waits."""
        with self._changed:
            now_s = self._called_s = self._clock_s()
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._loop, name="sampler", daemon=True)
                self._thread.start()
            self._changed.notify()
            fresh = self._newest is not None and now_s - self._newest.at_s <= STALE_S
            return self._newest if fresh else None

    def samples(self) -> list[Sample]:
        """The process and the GPUs for Prometheus."""
        latest = self.latest()
        if latest is None:
            return []
        process = vars(latest.process) if latest.process else {}
        return [
            *(Sample(name, {}, process[field]) for name, field in _PROCESS.items() if process),
            *(sample for gpu in latest.gpus for sample in gpu_samples(gpu)),
        ]

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(INTERVAL_S)  # it is a daemon: does not wait for a driver that hangs

    def _loop(self) -> None:
        devices = self._devices or Devices()
        try:
            while True:
                at_s = self._clock_s()
                try:
                    process = this_process()
                except OSError:  # no file descriptor is left
                    process = None
                snapshot = Snapshot(at_s, process, devices.read())
                with self._changed:
                    self._newest = snapshot
                    self._changed.wait_for(lambda: self._closing, INTERVAL_S)
                    while not self._closing and self._clock_s() - self._called_s > KEEP_ON_S:
                        self._changed.wait()
                    if self._closing:
                        return
        finally:
            devices.close()


def this_process() -> Process:
    """Read /proc for this process. Raises OSError. Slow with many open files."""
    root = Path("/proc/self")
    fields = (root / "stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return Process(
        resident_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        cpu_s=(int(fields[11]) + int(fields[12])) / ticks,
        started_s=_since_1970_s(int(fields[19]) / ticks),
        open_fds=sum(1 for _ in (root / "fd").iterdir()),
        max_fds=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        threads=int(fields[17]),
    )


@lru_cache(maxsize=1)
def _since_1970_s(since_boot_s: float) -> float:
    """Cached, as it must not change when the wall clock is set."""
    return round(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s, 2)


_GAUGES: Mapping[str, Callable[[GpuState], float | None]] = {
    "nv_gpu_utilization": lambda gpu: gpu.utilization,
    "nv_gpu_power_usage": lambda gpu: gpu.power_w,
    "nv_gpu_power_limit": lambda gpu: gpu.power_limit_w,
    "nv_energy_consumption": lambda gpu: gpu.energy_j,
    "nv_gpu_memory_total_bytes": lambda gpu: gpu.memory_total_bytes,
    "nv_gpu_memory_used_bytes": lambda gpu: gpu.memory_used_bytes,
    "deploykit_gpu_temperature_celsius": lambda gpu: gpu.temperature_c,
}


def gpu_samples(gpu: GpuState) -> Iterator[Sample]:
    """One GPU for Prometheus; values that its source does not report are left out."""
    uuid = {"gpu_uuid": gpu.uuid}
    about = {"name": gpu.name, "index": str(gpu.index), "source": gpu.source}
    about |= {"power_mode": gpu.power_mode} if gpu.power_mode else {}
    yield Sample("deploykit_gpu_info", {**uuid, **about}, 1)
    for name, read in _GAUGES.items():
        value = read(gpu)
        if value is not None:
            yield Sample(name, uuid, value)
    for domain, hertz in (("compute", gpu.clock_hz), ("memory", gpu.memory_clock_hz)):
        if hertz is not None:
            yield Sample("deploykit_gpu_clock_hertz", {**uuid, "domain": domain}, hertz)
    if gpu.throttled is not None:
        for reason in THROTTLES:
            value = int(reason in gpu.throttled)
            yield Sample("deploykit_gpu_throttled", {**uuid, "reason": reason}, value)
    for rail, watts in gpu.rails:
        yield Sample("deploykit_board_power_watts", {**uuid, "rail": rail}, watts)
    for zone, degrees in gpu.zones:
        yield Sample("deploykit_board_temperature_celsius", {**uuid, "zone": zone}, degrees)
