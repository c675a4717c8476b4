"""CUDA's own bindings, as far as they go without a driver, and a pipeline on the real GPU."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import Unsupported
from deploykit.engines.cuda import errors
from deploykit.engines.cuda.execution import Pipeline
from tests.support.runtimes.cuda_runs import X, Y, rows
from tests.support.runtimes.own_cuda import Copy


def bindings() -> Any:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    from deploykit.engines.cuda import driver as cuda_driver

    return cuda_driver


def test_codes_are_those_of_the_bindings() -> None:
    """Numbers, names and messages, which other libraries log; the driver's numbers are the same."""
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    found = {int(code): code for code in runtime.cudaError_t}
    for number, name in errors.CODES.items():
        if number in found:  # an older CUDA has fewer
            assert found[number].name == f"cudaError{name}"
            message = runtime.cudaGetErrorString(found[number])[1].decode()
            assert errors.MESSAGES[message] in (name, "InvalidKernelImage")
    driver = {int(code): code.name for code in bindings().cuda.CUresult}
    for number, name in {2: "OUT_OF_MEMORY", 700: "ILLEGAL_ADDRESS", 719: "LAUNCH_FAILED"}.items():
        assert driver[number] == f"CUDA_ERROR_{name}"


WAIT_US = 200_000


def has_driver(driver: Any) -> bool:
    """Whether there is a libcuda."""
    try:
        return int(driver.cuda.cuInit(0)[0]) == 0
    except RuntimeError:
        return False


def test_versions_are_read() -> None:
    assert bindings().cuda_version(12060) == "12.6"


def test_driver_version_is_read_from_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    assert bindings().driver_version(file) == "580.65.06"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    assert bindings().driver_version(file) == "535.104.05"
    assert bindings().driver_version(tmp_path / "none") == ""


def test_memory_that_caches_hold_is_free_where_cpu_and_gpu_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = bindings()
    cuda = object.__new__(driver.CudaDevice)  # without a device
    monkeypatch.setattr(cuda, "_all", lambda _call: (10, 1 << 50), raising=False)
    cuda.integrated = False
    assert cuda.memory() == (10, 1 << 50)
    cuda.integrated = True
    assert cuda.memory()[0] > 1 << 20


def test_a_machine_without_a_driver_gets_that_message() -> None:
    driver = bindings()
    if has_driver(driver):
        pytest.skip("this machine has a driver")
    with pytest.raises(Unsupported, match="cuda:0: no NVIDIA driver is loaded") as caught:
        driver.CudaDevice(0)
    assert "deploykit doctor" in (caught.value.hint or "")


@pytest.mark.gpu
def test_waiting_for_the_gpu_leaves_python_to_other_threads() -> None:
    driver = bindings()
    if not has_driver(driver):
        pytest.skip("no NVIDIA driver")
    cuda = driver.CudaDevice(0)
    event, stream = cuda.open_event(), cuda.open_stream()
    enqueue = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc  # that of the bindings takes the lock
    enqueue.argtypes = [ctypes.c_void_p] * 3
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
    for wait in (lambda: cuda.wait(event), lambda: cuda.wait_stream(stream)):
        ticks, ended = [0], threading.Event()

        def tick(ticks: list[int] = ticks, ended: threading.Event = ended) -> None:
            while not ended.is_set():
                time.sleep(0.001)
                ticks[0] += 1

        other = threading.Thread(target=tick)
        other.start()
        assert enqueue(stream, sleep, WAIT_US) == 0
        cuda.record(event, stream)
        before = ticks[0]
        wait()
        during = ticks[0] - before
        ended.set()
        other.join()
        assert during > 5  # 1 at most where the wait holds Python's lock
    cuda.close_event(event)
    cuda.close_stream(stream)


@pytest.mark.gpu
def test_affine_on_the_real_gpu() -> None:
    """Memory, streams, events, graphs of the real driver; the work is a copy on the device."""
    driver = bindings()
    if not has_driver(driver):
        pytest.skip("no NVIDIA driver")
    cuda = driver.CudaDevice(0)
    free = cuda.memory()[0]

    with Pipeline(cuda, functools.partial(Copy, cuda), [X], [Y], graphs=[2], slots=2) as run:
        batches = [{"x": rows(1 + n % 3, start=n)} for n in range(200)]
        tickets = [run.submit(feeds) for feeds in batches]
        for feeds, answer in zip(batches, [t.result() for t in tickets], strict=True):
            np.testing.assert_array_equal(answer["y"], feeds["x"])
        assert run.notes == ()
    assert abs(cuda.memory()[0] - free) < 64 << 20
