"""The background look at process and GPUs: nobody waits for it, and what is old is not shown."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deploykit.runtimes.devices import Devices, Gpu
from deploykit.serving.observe.process import KEEP_ON_S, STALE_S, Sampler, this_process
from tests.support.serving.running import WAIT_S

Eventually = Callable[[Callable[[], bool]], None]


class Gated(Devices):
    """Devices whose driver answers when the gate is open; counts how often it is asked."""

    def __init__(self, *, opened: bool = True) -> None:
        self.gate = threading.Event()
        self.asked = 0
        self.closed = False
        if opened:
            self.gate.set()

    def read(self) -> tuple[Gpu, ...]:
        self.asked += 1
        assert self.gate.wait(WAIT_S)
        return (Gpu("GPU-1", "n", 0, "nvml", utilization=self.asked / 100),)

    def close(self) -> None:
        self.closed = True


@contextmanager
def sampling(sampler: Sampler) -> Iterator[Sampler]:
    try:
        yield sampler
    finally:
        sampler.close()


def test_the_process_is_this_one() -> None:
    process = this_process()
    assert process.resident_bytes > 10 << 20
    assert 3 <= process.open_fds < process.max_fds
    assert process.threads >= 1
    assert process.cpu_s > 0
    assert process.started_s == this_process().started_s


def test_nothing_is_looked_at_before_someone_asks(eventually: Eventually) -> None:
    devices = Gated()
    with sampling(Sampler(devices)) as sampler:
        assert devices.asked == 0
        eventually(lambda: sampler.latest() is not None)
        assert devices.asked == 1
    assert devices.closed


def test_a_driver_that_hangs_holds_nobody_up() -> None:
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


def test_a_thousand_questions_are_one_look(eventually: Eventually) -> None:
    devices = Gated()
    now_s = [100.0]
    with sampling(Sampler(devices, lambda: now_s[0])) as sampler:
        eventually(lambda: sampler.latest() is not None)
        for _ in range(1000):
            sampler.latest()
        assert devices.asked <= 2  # the second of the loop's own clock may have passed


def test_what_is_old_is_not_shown(eventually: Eventually) -> None:
    devices = Gated()
    now_s = [100.0]
    with sampling(Sampler(devices, lambda: now_s[0])) as sampler:
        eventually(lambda: sampler.latest() is not None)
        devices.gate.clear()
        before = devices.asked
        eventually(lambda: devices.asked > before)  # it hangs in the next look
        now_s[0] += STALE_S + 0.1
        assert sampler.latest() is None
        assert sampler.samples() == []
        devices.gate.set()
        eventually(lambda: sampler.latest() is not None)


def test_the_thread_rests_when_nobody_asks_and_wakes_when_someone_does(
    eventually: Eventually,
) -> None:
    devices = Gated()
    now_s = [100.0]
    with sampling(Sampler(devices, lambda: now_s[0])) as sampler:
        eventually(lambda: sampler.latest() is not None)
        now_s[0] += KEEP_ON_S + 1
        before = devices.asked
        assert sampler.latest() is None
        eventually(lambda: devices.asked > before)
        eventually(lambda: sampler.latest() is not None)


def test_it_lives_on_when_no_file_descriptor_is_left() -> None:
    program = """
import os, resource, sys, time
from deploykit.serving.observe.process import Sampler
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sampler = Sampler()
end = time.monotonic() + 20
def until(reached):
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)
until(lambda: (s := sampler.latest()) and s.process)
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
until(lambda: (s := sampler.latest()) and s.process is None)
for fd in held:
    os.close(fd)
until(lambda: (s := sampler.latest()) and s.process)
sampler.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
