"""Errors of the CUDA path: memory that runs out, a lost device, closing, and what codes mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from deploykit.core.errors import DeploykitError, OutOfMemory, Unsupported
from deploykit.engines.cuda import errors as codes
from deploykit.engines.cuda.errors import CaptureRefused, DeviceLost, cuda_error
from tests.support.runtimes.own_cuda import FakeCuda, driver, rows
from tests.support.runtimes.tensorrt_opened import Opened, opened_fixture, right  # noqa: F401

LARGE = ({"x": [[1, 4], [1, 4], [8192, 4]]},)


def test_out_of_memory_says_need_and_free_and_a_smaller_call_still_runs() -> None:
    with Opened(profiles=LARGE, cuda=FakeCuda(total_bytes=100_000)) as found:
        assert right(found.engine, 100)
        words = r"cuda:0: out of memory: .* MiB needed, .* MiB free"
        with pytest.raises(OutOfMemory, match=words) as caught:
            found.engine({"x": rows(5000)})
        assert (caught.value.exit_code, caught.value.http_status) == (3, 503)
        assert right(found.engine, 100)


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemHostAlloc"])
def test_memory_that_the_driver_refuses_is_an_error_and_nothing_is_held(call: str) -> None:
    with Opened(profiles=LARGE) as found:
        found.cuda.library.fakecuda_fail(f"{call}:2@2".encode())
        with pytest.raises(OutOfMemory, match="cuda:0: out of memory"):
            found.engine({"x": rows(5000)})
        assert right(found.engine, 5000)


@pytest.mark.parametrize("call", ["copy_in", "record", "wait", "begin_capture", "end_capture"])
def test_a_lost_device_has_its_own_error_and_stays_lost(call: str) -> None:
    with Opened(graphs=[1] if "capture" in call else []) as found:
        found.engine({"x": rows(1)})
        found.cuda.fail = {call: "IllegalAddress"}
        with pytest.raises(DeviceLost, match="cudaErrorIllegalAddress"):
            found.engine({"x": rows(1)})
        assert found.engine.notes == ()  # it is not a refused graph
        before = len(found.cuda.calls)
        with pytest.raises(DeviceLost):
            found.engine({"x": rows(1)})
        assert len(found.cuda.calls) == before  # CUDA is not asked again


def test_a_copy_of_one_byte_finds_the_lost_device_where_a_wait_does_not(opened: Opened) -> None:
    opened.engine({"x": rows(1)})
    opened.cuda.library.fakecuda_fail(b"cuEventRecord:1,cuStreamSynchronize:1,cuMemcpyDtoH:719")
    with pytest.raises(DeviceLost, match="cudaErrorLaunchFailure") as caught:
        opened.engine({"x": rows(1)})
    assert "cudaErrorInvalidValue" in str(caught.value.__cause__)


@pytest.mark.parametrize("code", ["copy_in:InvalidValue", "wait:InvalidResourceHandle"])
def test_a_call_that_fails_for_another_reason_costs_neither_the_device_nor_a_slot(
    opened: Opened, code: str
) -> None:
    call, _, name = code.partition(":")
    for _ in range(5):
        opened.cuda.fail = {call: name}
        with pytest.raises(DeploykitError, match=f"cudaError{name}") as caught:
            opened.engine({"x": rows(1)})
        assert not isinstance(caught.value, DeviceLost)
    assert right(opened.engine, 1)
    assert len(opened.cuda.streams) == 1


def test_closing_on_a_lost_device_does_not_raise() -> None:
    with Opened(graphs=[1], scratch=64) as found:
        assert all(right(found.engine, 1) for _ in range(3))
        ticket = found.engine.submit({"x": rows(1)})
        found.cuda.lost = "LaunchFailure"
    with pytest.raises(DeviceLost):
        ticket.result()


def test_closing_ends_the_calls_under_way() -> None:
    with Opened() as found:
        tickets = [found.engine.submit({"x": rows(2, start=n)}) for n in range(2)]
    for n, ticket in enumerate(tickets):
        np.testing.assert_array_equal(ticket.result()["y"], 2 * rows(2, start=n) + 1)


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
