"""The background sampler of process and GPU metrics: it never blocks and hides stale values."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from deploykit.engines.devices import Devices, GpuState
from deploykit.serving.observe import metrics as process_module
from deploykit.serving.observe.metrics import KEEP_ON_S, STALE_S, Sampler, this_process
from tests.support.serving.running import WAIT_S

Eventually = Callable[[Callable[[], bool]], None]


class Gated(Devices):
    """Devices whose driver answers when the gate is open; counts how often it is read."""

    def __init__(self, *, opened: bool = True) -> None:
        self.gate = threading.Event()
        self.reads = 0
        self.closed = False
        if opened:
            self.gate.set()

    def read(self) -> tuple[GpuState, ...]:
        self.reads += 1
        assert self.gate.wait(WAIT_S)
        return (GpuState("GPU-1", "n", 0, "nvml", utilization=self.reads / 100),)

    def close(self) -> None:
        self.closed = True


@contextmanager
def sampling(sampler: Sampler) -> Iterator[Sampler]:
    try:
        yield sampler
    finally:
        sampler.close()


def test_this_process_reports_memory_files_threads_and_cpu_time() -> None:
    process = this_process()
    assert process.resident_bytes > 10 << 20
    assert 3 <= process.open_fds < process.max_fds
    assert process.threads >= 1
    assert process.cpu_s > 0
    assert process.started_s == this_process().started_s


def test_devices_are_read_only_after_the_first_request(eventually: Eventually) -> None:
    devices = Gated()
    with sampling(Sampler(devices)) as sampler:
        assert devices.reads == 0
        eventually(lambda: sampler.latest() is not None)
        assert devices.reads == 1
    assert devices.closed


def test_a_hanging_driver_does_not_block_a_scrape() -> None:
    devices = Gated(opened=False)
    with sampling(Sampler(devices)) as sampler:
        for _ in range(3):
            assert sampler.latest() is None
            assert sampler.samples() == []
        devices.gate.set()


def test_samples_are_of_the_process_and_the_gpus(eventually: Eventually) -> None:
    with sampling(Sampler(Gated())) as sampler:
        eventually(lambda: bool(sampler.samples()))
        found = {sample.name: sample for sample in sampler.samples()}
        assert found["nv_gpu_utilization"].labels == {"gpu_uuid": "GPU-1"}
        assert found["nv_gpu_utilization"].value == 0.01
        assert found["process_open_fds"].value >= 3


def test_a_thousand_requests_share_one_reading(
    eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Gated()
    monkeypatch.setattr(process_module, "INTERVAL_S", 3600.0)
    with sampling(Sampler(devices)) as sampler:
        eventually(lambda: sampler.latest() is not None)
        for _ in range(1000):
            sampler.latest()
        assert devices.reads == 1


def test_stale_samples_are_not_returned(eventually: Eventually) -> None:
    devices = Gated()
    now_s = [100.0]
    with sampling(Sampler(devices, lambda: now_s[0])) as sampler:
        eventually(lambda: sampler.latest() is not None)
        before = devices.reads
        devices.gate.clear()
        eventually(lambda: devices.reads > before)  # it hangs in the next reading
        now_s[0] += STALE_S + 0.1
        assert sampler.latest() is None
        assert sampler.samples() == []
        devices.gate.set()
        eventually(lambda: sampler.latest() is not None)


def test_the_thread_sleeps_without_requests_and_wakes_on_the_next(
    eventually: Eventually,
) -> None:
    devices = Gated()
    now_s = [100.0]
    with sampling(Sampler(devices, lambda: now_s[0])) as sampler:
        eventually(lambda: sampler.latest() is not None)
        now_s[0] += KEEP_ON_S + 1
        before = devices.reads
        assert sampler.latest() is None
        eventually(lambda: devices.reads > before)
        eventually(lambda: sampler.latest() is not None)


def test_the_sampler_survives_a_lack_of_file_descriptors() -> None:
    program = """
import os, resource, sys, time
from deploykit.serving.observe.metrics import Sampler
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sampler = Sampler()
end = time.monotonic() + 100
def until(reached):
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)
until(lambda: (s := sampler.latest()) and s.process)
descriptors = []
try:
    while True:
        descriptors.append(os.dup(0))
except OSError:
    pass
until(lambda: (s := sampler.latest()) and s.process is None)
for fd in descriptors:
    os.close(fd)
until(lambda: (s := sampler.latest()) and s.process)
sampler.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
