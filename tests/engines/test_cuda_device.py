"""`CudaDevice` through NVIDIA's bindings: on the devices of our CUDA driver, and on real GPUs."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import DeploykitError, Unsupported
from tests.support.runtimes.own_cuda import (
    CudaDevice,
    FakeCuda,
    driver,
    driver_is_there,
    library,
    pipeline,
    rows,
)


@pytest.fixture
def a_new_machine() -> Iterator[None]:
    with driver_is_there():
        library().fakecuda_machine(1 << 30, 0)
        yield


@pytest.mark.usefixtures("a_new_machine")
def test_device_is_described_and_holds_its_primary_context_once() -> None:
    before = library().fakecuda_holders(1)
    for _ in range(3):
        found = CudaDevice(1).describe()
    assert library().fakecuda_holders(1) == before + 1
    assert (found["gpu"], found["compute_capability"]) == ("Test GPU 1", "9.0")
    assert (found["sm_count"], found["cuda"]) == (132, "13.0")


@pytest.mark.parametrize(
    ("number", "fails", "message"),
    [
        (7, "", "this machine has no such GPU"),
        (0, "cuInit:100", "cuInit: no CUDA-capable device"),
        (0, "cuDevicePrimaryCtxRetain:2", "out of memory in cuDevicePrimaryCtxRetain"),
        (0, "cuInit:803", "cuInit: .*CUDA error 803"),
    ],
)
@pytest.mark.usefixtures("a_new_machine")
def test_a_gpu_that_cannot_be_used_is_named_at_the_start(
    number: int, fails: str, message: str
) -> None:
    library().fakecuda_fail(fails.encode())
    with pytest.raises(Unsupported, match=f"^cuda:{number}: {message}"):
        CudaDevice(number)


@pytest.mark.usefixtures("a_new_machine")
def test_one_thread_serves_two_devices_in_turn() -> None:
    devices = [CudaDevice(0), CudaDevice(1)]
    runs = [pipeline(cuda, graphs=[2]) for cuda in devices]
    for n in range(6):
        tickets = [run.submit({"x": rows(2, start=n)}) for run in runs]
        for ticket in tickets:
            np.testing.assert_array_equal(ticket.result()["y"], rows(2, start=n))
    for run in runs:
        run.close()
    assert [library().fakecuda_held(kind) for kind in range(6)] == [0] * 6


def test_an_answer_may_be_waited_for_by_a_thread_that_never_used_cuda() -> None:
    """It has no current context, which only CUDA's runtime would set by itself."""
    with pipeline(FakeCuda()) as run:
        ticket = run.submit({"x": rows(2)})
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(ticket.result()["y"].size == 8))
        thread.start()
        thread.join()
        assert answers == [True]


def test_cuda_in_a_forked_process_is_refused_with_the_cause() -> None:
    cuda = FakeCuda()
    reader, writer = os.pipe()
    if not os.fork():
        try:
            cuda.use()
        except DeploykitError as exc:
            os.write(writer, f"{exc.message} ({exc.hint})".encode())
        os._exit(0)
    os.wait()
    assert re.search("CUDA error 3.*fork", os.read(reader, 1000).decode())
    cuda.use()


# a process ends while a daemon thread is inside CUDA: our driver's destructor ends the process by a
# signal then, as TensorRT for RTX 1.7 does

ENDING = """
import sys, threading, time
from deploykit.core import subprocesses as ending
ending.LIMIT_S = {limit_s}
inside = threading.Event()
def start(work):
    def loop():
        while True:
            inside.set()
            work()
    threading.Thread(target=loop, daemon=True).start()
    inside.wait()
    time.sleep(0.05)
"""
A_PIPELINE = """
from tests.support.runtimes.own_cuda import pipeline, rows, FakeCuda
run = pipeline(FakeCuda())
run({"x": rows(1)})
run.driver.library.fakecuda_wait_ms(%s)
start(lambda: run({"x": rows(1)}))
sys.exit(3)
"""
AN_ENGINE_OF_THE_SERVER = """
from deploykit.serving.batching.batcher import Batcher
from deploykit.serving.batching.queue import BatchPolicy, Pending
NEVER_US = 1 << 62
from tests.support.fake_engine import FakeEngine
from tests.support.runtimes.own_cuda import library, rows
class Slow(FakeEngine):
    def __call__(self, feeds):
        inside.set()
        library().fakecuda_stay(%s)
        return super().__call__(feeds)
batcher = Batcher([Slow()], BatchPolicy(max_batch=1))
for n in range(100):
    batcher.submit(Pending({"x": rows(1)}, 1, (), print, 0, NEVER_US, NEVER_US))
inside.wait()
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("code", "limit_s", "call_ms"),
    [(A_PIPELINE, 60, 100), (AN_ENGINE_OF_THE_SERVER, 60, 100), (A_PIPELINE, 0.1, 120_000)],
    ids=["pipeline", "server", "hangs"],
)
def test_a_call_under_way_at_the_end_of_a_process_is_waited_for_within_a_limit(
    code: str, limit_s: float, call_ms: int
) -> None:
    library()  # skips where there is none
    command = [sys.executable, "-c", ENDING.format(limit_s=limit_s) + code % call_ms]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (3, "")


# what needs no device, and what needs a real one


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12", "580.65.06"),
        ("x86_64 Kernel Module  535.104.05  Sat Aug 19", "535.104.05"),
    ],
)
def test_driver_version_is_read_from_the_kernel(tmp_path: Path, line: str, version: str) -> None:
    assert driver.driver_version(tmp_path / "version") == ""
    (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX {line}\n")
    assert driver.driver_version(tmp_path / "version") == version


def test_memory_that_caches_hold_is_free_where_cpu_and_gpu_share_it() -> None:
    assert FakeCuda().memory() == (1 << 30, 1 << 30)
    cuda = FakeCuda(total_bytes=10, integrated=True)
    assert cuda.memory()[0] > 1 << 20


def has_driver() -> bool:
    try:
        return int(driver.cuda.cuInit(0)[0]) == 0
    except RuntimeError:
        return False


def test_a_machine_without_a_driver_gets_that_message() -> None:
    if has_driver():
        pytest.skip("this machine has a driver")
    with pytest.raises(Unsupported, match="cuda:0: no NVIDIA driver is loaded") as caught:
        CudaDevice(0)
    assert "deploykit doctor" in (caught.value.hint or "")


@pytest.fixture
def gpu() -> CudaDevice:
    if not has_driver():
        pytest.skip("no NVIDIA driver")
    return CudaDevice(0)


@pytest.mark.gpu
def test_waiting_for_the_gpu_leaves_python_to_other_threads(gpu: CudaDevice) -> None:
    event, stream = gpu.open_event(), gpu.open_stream()
    enqueue = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc  # that of the bindings takes the lock
    enqueue.argtypes = [ctypes.c_void_p] * 3
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
    for wait in (lambda: gpu.wait(event), lambda: gpu.wait_stream(stream)):
        ticks, ended = [0], threading.Event()

        def tick(ticks: list[int] = ticks, ended: threading.Event = ended) -> None:
            while not ended.is_set():
                time.sleep(0.001)
                ticks[0] += 1

        other = threading.Thread(target=tick)
        other.start()
        assert enqueue(stream, sleep, 200_000) == 0  # microseconds
        gpu.record(event, stream)
        before = ticks[0]
        wait()
        during = ticks[0] - before
        ended.set()
        other.join()
        assert during > 5  # 1 at most where the wait holds Python's lock
    gpu.close_event(event)
    gpu.close_stream(stream)


@pytest.mark.gpu
def test_copies_and_graphs_on_the_real_gpu(gpu: CudaDevice) -> None:
    free = gpu.memory()[0]
    with pipeline(gpu, graphs=[2], slots=2) as run:
        batches = [{"x": rows(1 + n % 3, start=n)} for n in range(200)]
        tickets = [run.submit(feeds) for feeds in batches]
        for feeds, ticket in zip(batches, tickets, strict=True):
            np.testing.assert_array_equal(ticket.result()["y"], feeds["x"])
        assert run.notes == ()
    assert abs(gpu.memory()[0] - free) < 64 << 20
