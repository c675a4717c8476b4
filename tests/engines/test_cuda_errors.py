"""Errors of the CUDA path: memory that runs out, a lost device, closing, and what codes mean."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from deploykit.core.errors import DeploykitError, OutOfMemory, Unsupported
from deploykit.engines.cuda import errors as codes
from deploykit.engines.cuda.errors import CaptureRefused, DeviceLost, cuda_error
from tests.support.runtimes.own_cuda import Affine, FakeCuda, driver, pipeline, right, rows


def test_out_of_memory_says_need_and_free_and_a_smaller_call_still_runs() -> None:
    cuda = FakeCuda(total_bytes=100_000)
    with pipeline(cuda) as run:
        assert right(run({"x": rows(100)}), rows(100))
        words = r"cuda:0: out of memory: .* MiB needed, .* MiB free"
        with pytest.raises(OutOfMemory, match=words) as caught:
            run({"x": rows(5000)})
        assert (caught.value.exit_code, caught.value.http_status) == (3, 503)
        assert right(run({"x": rows(100)}), rows(100))
    assert cuda.held() == {}


def test_too_little_memory_for_the_first_slot_is_reported_at_once_and_frees_all() -> None:
    cuda = FakeCuda(total_bytes=1000)
    run = pipeline(cuda, scratch_bytes=2000)
    with pytest.raises(OutOfMemory):
        run.reserve([(1, 4)])
    run.close()
    assert cuda.held() == {}


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemHostAlloc"])
def test_memory_that_the_driver_refuses_is_an_error_and_nothing_is_held(call: str) -> None:
    cuda = FakeCuda()
    with pipeline(cuda) as run:
        cuda.library.fakecuda_fail(f"{call}:2@2".encode())
        with pytest.raises(OutOfMemory, match="cuda:0: out of memory"):
            run({"x": rows(2)})
        assert right(run({"x": rows(2)}), rows(2))
    assert cuda.held() == {}


@pytest.mark.parametrize("call", ["copy_in", "record", "wait", "begin_capture", "end_capture"])
def test_a_lost_device_has_its_own_error_and_stays_lost(call: str) -> None:
    cuda = FakeCuda()
    run = pipeline(cuda, graphs=[1] if "capture" in call else [])
    run({"x": rows(1)})
    cuda.fail = {call: "IllegalAddress"}
    with pytest.raises(DeviceLost, match="cudaErrorIllegalAddress"):
        run({"x": rows(1)})
    assert run.notes == ()  # it is not a refused graph
    before = len(cuda.calls)
    with pytest.raises(DeviceLost):
        run({"x": rows(1)})
    assert len(cuda.calls) == before  # CUDA is not asked again
    run.close()


@pytest.mark.parametrize("lost", [True, False])
def test_an_unknown_failure_on_a_lost_device_is_a_lost_device(lost: bool) -> None:
    """TensorRT gives a reason of its own, whatever CUDA's is."""
    cuda, made = FakeCuda(), list[Affine]()
    run = pipeline(cuda, made)
    run({"x": rows(1)})

    def refuse(_stream: int) -> None:
        if lost:
            cuda.lost = "IllegalAddress"
        raise Unsupported("m.trt: TensorRT refused it")

    made[0].enqueue = refuse  # type: ignore[method-assign]
    kind = DeviceLost if lost else Unsupported
    with pytest.raises(kind) as caught:
        run({"x": rows(1)})
    assert type(caught.value) is kind
    assert "refused it" in str(caught.value.__cause__ if lost else caught.value)
    with pytest.raises(kind):
        run({"x": rows(1)})
    run.close()


def test_a_copy_of_one_byte_finds_the_lost_device_where_a_wait_does_not() -> None:
    cuda = FakeCuda()
    run = pipeline(cuda)
    run({"x": rows(1)})
    cuda.library.fakecuda_fail(b"cuEventRecord:1,cuStreamSynchronize:1,cuMemcpyDtoH:719")
    with pytest.raises(DeviceLost, match="cudaErrorLaunchFailure") as caught:
        run({"x": rows(1)})
    assert "cudaErrorInvalidValue" in str(caught.value.__cause__)
    run.close()


@pytest.mark.parametrize("code", ["copy_in:InvalidValue", "wait:InvalidResourceHandle"])
def test_a_call_that_fails_for_another_reason_costs_neither_the_device_nor_a_slot(
    code: str,
) -> None:
    cuda = FakeCuda()
    call, _, name = code.partition(":")
    with pipeline(cuda, slots=2) as run:
        for _ in range(5):
            cuda.fail = {call: name}
            with pytest.raises(DeploykitError, match=f"cudaError{name}") as caught:
                run({"x": rows(1)})
            assert not isinstance(caught.value, DeviceLost)
        assert right(run({"x": rows(1)}), rows(1))
        assert len(cuda.streams) == 1


def test_closing_on_a_lost_device_does_not_raise() -> None:
    cuda = FakeCuda()
    run = pipeline(cuda, graphs=[1], scratch_bytes=64)
    for _ in range(3):
        run({"x": rows(1)})
    ticket = run.submit({"x": rows(1)})
    cuda.lost = "LaunchFailure"
    run.close()
    with pytest.raises(DeviceLost):
        ticket.result()


def test_closing_ends_the_calls_under_way_and_may_come_twice() -> None:
    run = pipeline(FakeCuda())
    tickets = [run.submit({"x": rows(2, start=n)}) for n in range(2)]
    run.close()
    run.close()
    assert all(right(ticket.result(), rows(2, start=n)) for n, ticket in enumerate(tickets))
    with pytest.raises(DeploykitError, match="closed"):
        run({"x": rows(1)})


# what CUDA's codes mean


def test_codes_are_those_of_the_bindings_and_each_has_an_error_in_one_line() -> None:
    """Numbers, names and messages, which other libraries log; the driver's numbers are the same."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    found = {int(code): code for code in runtime.cudaError_t if int(code)}
    for number, name in codes.CODES.items():
        if number in found:  # an older CUDA has fewer
            assert found[number].name == f"cudaError{name}"
            message = runtime.cudaGetErrorString(found[number])[1].decode()
            assert codes.MESSAGES[message] in (name, "InvalidKernelImage")
    assert len(set(codes.CODES.values())) == len(codes.CODES)
    results = {int(code): code.name for code in driver.cuda.CUresult}
    for number, name in {2: "OUT_OF_MEMORY", 700: "ILLEGAL_ADDRESS", 719: "LAUNCH_FAILED"}.items():
        assert results[number] == f"CUDA_ERROR_{name}"
    for code in found.values():
        error = cuda_error("cuda:1", "cudaMalloc", code.name, "text")
        assert error.message.startswith("cuda:1: ")
        assert "\n" not in error.message
        assert error.exit_code in (3, 70)


@pytest.mark.parametrize(
    ("names", "kind", "hint"),
    [
        (["MemoryAllocation"], OutOfMemory, "smaller batch"),
        (["IllegalAddress", "LaunchFailure", "ECCUncorrectable", "Assert"], DeviceLost, "restart"),
        (["StreamCaptureUnsupported", "StreamCaptureInvalidated"], CaptureRefused, ""),
        (["NoDevice", "InsufficientDriver", "InvalidDevice"], Unsupported, "deploykit doctor"),
        (["NoKernelImageForDevice", "UnsupportedPtxVersion"], Unsupported, "build it on this"),
        (["InvalidValue", "InvalidResourceHandle", "SomethingNew"], DeploykitError, ""),
    ],
)
def test_each_code_is_mapped_to_its_error(
    names: Sequence[str], kind: type[DeploykitError], hint: str
) -> None:
    for name in names:
        error = cuda_error("cuda:0", "call", f"cudaError{name}", "text")
        assert type(error) is kind
        assert hint in (error.hint or "")


@pytest.mark.parametrize(("code", "kind"), [(12345, DeploykitError), (53, DeviceLost)])
def test_a_code_newer_than_the_bindings_is_a_deploykit_error(
    code: int, kind: type[DeploykitError]
) -> None:
    cuda = FakeCuda()
    cuda.library.fakecuda_fail(f"cuMemAlloc:{code}".encode())
    with pytest.raises(DeploykitError, match=r"cuMemAlloc.*unknown to the installed") as caught:
        cuda.allocate(1)
    assert type(caught.value) is kind


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
