"""`CudaDevice` through NVIDIA's bindings, on the two devices of our CUDA driver."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import DeploykitError, OutOfMemory, Unsupported
from deploykit.engines.cuda.driver import CudaDevice
from deploykit.engines.cuda.errors import CaptureRefused, DeviceLost
from deploykit.engines.cuda.execution import Pipeline
from tests.support.campaign import rounds
from tests.support.runtimes.cuda_runs import X, Y, pipeline, right, rows
from tests.support.runtimes.own_cuda import Copy, FakeCuda, driver_is_there, library

CALLS = rounds(3_000, 100_000)
# the allocators of C and Python settle within these; a loss of 100 bytes a call is 6.7 MB
BOUND_BYTES = 4 << 20


@pytest.fixture(autouse=True)
def a_new_machine() -> Iterator[None]:
    with driver_is_there():
        library().fakecuda_machine(1 << 30, 0)
        yield


def test_device_is_described() -> None:
    found = CudaDevice(1).describe()
    assert (found["gpu"], found["compute_capability"]) == ("Test GPU 1", "9.0")
    assert (found["sm_count"], found["cuda"]) == (132, "13.0")


def test_a_device_opened_often_holds_its_primary_context_once() -> None:
    before = library().fakecuda_holders(1)
    for _ in range(3):
        CudaDevice(1)
    assert library().fakecuda_holders(1) == before + 1


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(Unsupported, match="cuda:7: this machine has no such GPU"):
        CudaDevice(7)


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("cuInit:100", "no usable GPU: cudaErrorNoDevice: no CUDA-capable device"),
        ("cuDevicePrimaryCtxRetain:2", "out of memory in cuDevicePrimaryCtxRetain"),
        ("cuInit:803", "no usable GPU: cudaErrorSystemDriverMismatch"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_named_at_the_start(fails: str, message: str) -> None:
    library().fakecuda_fail(fails.encode())
    with pytest.raises(Unsupported, match=f"^cuda:0: {message}"):
        CudaDevice(0)


def test_two_threads_use_two_devices_at_once() -> None:
    """Each call sets its thread's device; a stream of the other one would be an invalid handle."""
    wrong: list[object] = []
    together = threading.Barrier(2)

    def use(number: int) -> None:
        cuda = CudaDevice(number)
        stream, event = cuda.open_stream(), cuda.open_event()
        host, device = cuda.pin(4096), cuda.allocate(4096)
        try:
            for n in range(100):
                together.wait()
                cuda.array(host, 4096)[:] = number * 100 + n % 100
                cuda.copy_in(device, host, 4096, stream)
                cuda.copy_out(host, device, 4096, stream)
                cuda.record(event, stream)
                cuda.wait(event)
                if set(cuda.array(host, 4096).tolist()) != {number * 100 + n % 100}:
                    wrong.append((number, n))
        except BaseException as exc:  # noqa: BLE001 - shown below
            wrong.append(exc)
            together.abort()

    threads = [threading.Thread(target=use, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_one_thread_serves_two_devices_in_turn() -> None:
    devices = [CudaDevice(0), CudaDevice(1)]
    runs = [Pipeline(cuda, functools.partial(Copy, cuda), [X], [Y], graphs=[2]) for cuda in devices]
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
        answers: list[object] = []

        def wait() -> None:
            try:
                answers.append(right(ticket.result(), rows(2)))
            except DeploykitError as exc:
                answers.append(exc)

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        assert answers == [True]


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemHostAlloc"])
def test_memory_that_the_driver_refuses_is_a_deploykit_error_and_nothing_is_held(
    call: str,
) -> None:
    cuda = FakeCuda()
    with pipeline(cuda) as run:
        cuda.library.fakecuda_fail(f"{call}:2@2".encode())
        with pytest.raises(OutOfMemory, match="cuda:0: out of memory"):
            run({"x": rows(2)})
        assert right(run({"x": rows(2)}), rows(2))
    assert cuda.held() == {}


def test_a_copy_into_memory_that_is_gone_is_a_lost_device_at_the_wait() -> None:
    """As a wild pointer in a kernel: CUDA reports it later, with another call."""
    cuda = FakeCuda()
    stream, host, device = cuda.open_stream(), cuda.pin(512), cuda.allocate(512)
    cuda.begin_capture(stream)
    cuda.copy_in(device, host, 512, stream)
    graph = cuda.end_capture(stream)
    cuda.free(device)
    cuda.launch(graph, stream)
    with pytest.raises(DeviceLost, match="cudaErrorIllegalAddress in cuStreamSynchronize"):
        cuda.wait_stream(stream)
    for call in (cuda.memory, functools.partial(cuda.pin, 1), cuda.check):
        with pytest.raises(DeviceLost, match="illegal memory access"):
            call()


def test_allocating_while_capturing_is_refused_to_this_thread_only() -> None:
    cuda = FakeCuda()
    stream = cuda.open_stream()
    cuda.begin_capture(stream)
    other: list[int] = []
    thread = threading.Thread(target=lambda: (cuda.use(), other.append(cuda.allocate(1))))
    thread.start()
    thread.join()
    assert len(other) == 1
    with pytest.raises(CaptureRefused):
        cuda.allocate(1)
    with pytest.raises(CaptureRefused, match="Invalidated"):
        cuda.end_capture(stream)
    assert cuda.allocate(1)


def test_a_copy_of_one_byte_finds_the_lost_device_where_a_wait_does_not() -> None:
    cuda = FakeCuda()
    run = pipeline(cuda)
    run({"x": rows(1)})
    cuda.library.fakecuda_fail(b"cuEventRecord:1,cuStreamSynchronize:1,cuMemcpyDtoH:719")
    with pytest.raises(DeviceLost, match="cudaErrorLaunchFailure") as caught:
        run({"x": rows(1)})
    assert "cudaErrorInvalidValue" in str(caught.value.__cause__)
    with pytest.raises(DeviceLost):
        run({"x": rows(1)})
    run.close()


def test_a_wait_that_fails_for_another_reason_does_not_lose_the_device() -> None:
    cuda = FakeCuda()
    with pipeline(cuda) as run:
        cuda.library.fakecuda_fail(b"cuEventSynchronize:400")
        with pytest.raises(DeploykitError, match="cudaErrorInvalidResourceHandle") as caught:
            run({"x": rows(1)})
        assert not isinstance(caught.value, DeviceLost)
        assert right(run({"x": rows(1)}), rows(1))


@pytest.mark.parametrize(("code", "kind"), [(12345, DeploykitError), (53, DeviceLost)])
def test_a_code_newer_than_the_bindings_is_a_deploykit_error(
    code: int, kind: type[DeploykitError]
) -> None:
    cuda = FakeCuda()
    cuda.library.fakecuda_fail(f"cuMemAlloc:{code}".encode())
    with pytest.raises(DeploykitError, match=r"cuMemAlloc.*unknown to the installed") as caught:
        cuda.allocate(1)
    assert type(caught.value) is kind


def test_cuda_in_a_forked_process_is_refused_with_the_cause() -> None:
    cuda = FakeCuda()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            cuda.use()
        except DeploykitError as exc:
            os.write(writer, f"{exc.message} ({exc.hint})".encode())
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reader, 1000).decode()
    assert "cudaErrorInitializationError" in text
    assert "fork" in text
    cuda.use()


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_many_calls_leave_no_memory_behind() -> None:
    """Of this process too: the bindings make an object for each handle."""
    cuda = CudaDevice(0)
    with Pipeline(cuda, functools.partial(Copy, cuda), [X], [Y], graphs=[1, 2]) as run:
        batches = [{"x": rows(count)} for count in (1, 2, 5, 1, 3)]
        before = 0
        for n in range(CALLS):
            run(batches[n % 5])
            if n == CALLS // 3:
                before = rss_bytes()
        assert rss_bytes() - before < BOUND_BYTES
    assert [library().fakecuda_held(kind) for kind in range(6)] == [0] * 6
