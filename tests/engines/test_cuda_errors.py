"""Errors of the CUDA path: memory that runs out, a lost device, closing, and what codes mean."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from deploykit.core.errors import DeploykitError, OutOfMemory, Unsupported
from deploykit.engines.cuda import errors as codes
from deploykit.engines.cuda.errors import CaptureRefused, DeviceLost, cuda_error
from deploykit.engines.cuda.execution import Pipeline
from tests.support.runtimes.cuda_runs import CODES, FakeCuda, X, Y, pipeline, right, rows
from tests.support.runtimes.own_cuda import Affine


def test_out_of_memory_says_need_and_free_and_a_smaller_call_still_runs() -> None:
    cuda = FakeCuda(total_bytes=100_000)
    with pipeline(cuda) as run:
        assert right(run({"x": rows(100)}), rows(100))
        with pytest.raises(
            OutOfMemory, match=r"cuda:0: out of memory: .* MiB needed, .* MiB free"
        ) as e:
            run({"x": rows(5000)})
        assert (e.value.exit_code, e.value.http_status) == (3, 503)
        assert right(run({"x": rows(100)}), rows(100))
    assert cuda.held() == {}


def test_too_little_memory_for_the_first_slot_is_reported_at_once_and_frees_all() -> None:
    cuda = FakeCuda(total_bytes=1000)
    run = pipeline(cuda, scratch_bytes=2000)
    with pytest.raises(OutOfMemory):
        run.reserve([(1, 4)])
    run.close()
    assert cuda.held() == {}


def test_works_of_one_slot_share_its_scratch_memory() -> None:
    cuda, made = FakeCuda(), list[Affine]()
    with pipeline(cuda, made, scratch_bytes=4096, graphs=[1, 2]) as run:
        tickets = [run.submit({"x": rows(n)}) for n in (1, 2, 3, 1, 2, 3)]
        assert len(tickets) == 6
        scratch = {work.stream: work.scratch for work in made}
        assert len(set(scratch.values())) == len(scratch) == 2
        assert all(scratch[work.stream] == work.scratch for work in made)


@pytest.mark.parametrize("call", ["copy_in", "record", "wait"])
def test_a_lost_device_has_its_own_error_and_stays_lost(call: str) -> None:
    cuda = FakeCuda()
    run = pipeline(cuda)
    run({"x": rows(1)})
    cuda.fail = {call: "IllegalAddress"}
    with pytest.raises(DeviceLost, match="cudaErrorIllegalAddress"):
        run({"x": rows(1)})
    before = len(cuda.calls)
    with pytest.raises(DeviceLost):
        run({"x": rows(1)})
    assert len(cuda.calls) == before  # CUDA is not asked again
    run.close()


@pytest.mark.parametrize("call", ["begin_capture", "copy_in", "end_capture"])
def test_a_device_lost_while_capturing_is_not_a_refused_graph(call: str) -> None:
    cuda = FakeCuda()
    run = pipeline(cuda, graphs=[1])
    run({"x": rows(1)})
    cuda.fail = {call: "LaunchFailure"}
    with pytest.raises(DeviceLost):
        run({"x": rows(1)})
    assert run.notes == ()
    run.close()


class Refusing(Affine):
    """Fails as TensorRT does: with a reason of its own, whatever CUDA's is."""

    def enqueue(self, _stream: int) -> None:
        raise Unsupported("m.trt: TensorRT refused it (execute_async_v3): no reason in its log")


@pytest.mark.parametrize("lost", [True, False])
def test_an_unknown_failure_on_a_lost_device_is_a_lost_device(lost: bool) -> None:
    cuda = FakeCuda()
    run = Pipeline(cuda, functools.partial(Refusing, cuda), [X], [Y])
    with pytest.raises(Unsupported, match="refused it") as first:
        run({"x": rows(1)})
    assert not isinstance(first.value, DeviceLost)
    if lost:
        enqueue = Refusing.enqueue

        def loses(self: Refusing, stream: int) -> None:
            cuda.lost = "IllegalAddress"
            enqueue(self, stream)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Refusing, "enqueue", loses)
            with pytest.raises(DeviceLost, match="cudaErrorIllegalAddress") as caught:
                run({"x": rows(1)})
        assert "refused it" in str(caught.value.__cause__)
    kind = DeviceLost if lost else Unsupported
    with pytest.raises(kind):
        run({"x": rows(1)})
    run.close()


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


def test_failed_call_does_not_cost_a_slot() -> None:
    cuda = FakeCuda()
    with pipeline(cuda, slots=2) as run:
        for _ in range(5):
            cuda.fail = {"copy_in": "InvalidValue"}
            with pytest.raises(DeploykitError, match="cudaErrorInvalidValue"):
                run({"x": rows(1)})
        assert right(run({"x": rows(1)}), rows(1))
        assert len(cuda.streams) == 1


def test_closed_pipeline_says_so_and_closing_twice_does_nothing() -> None:
    run = pipeline(FakeCuda())
    run.close()
    run.close()
    with pytest.raises(DeploykitError, match="closed"):
        run({"x": rows(1)})


def test_closing_ends_the_calls_under_way() -> None:
    run = pipeline(FakeCuda())
    tickets = [run.submit({"x": rows(2, start=n)}) for n in range(2)]
    run.close()
    assert all(right(ticket.result(), rows(2, start=n)) for n, ticket in enumerate(tickets))


# what CUDA's codes mean


@pytest.mark.parametrize("name", CODES)
def test_every_code_has_an_error_that_names_device_and_call(name: str) -> None:
    error = cuda_error("cuda:1", "cudaMalloc", f"cudaError{name}", "text")
    assert error.message.startswith("cuda:1: ")
    assert "\n" not in error.message
    assert error.exit_code in (3, 70)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["MemoryAllocation"], OutOfMemory),
        (["IllegalAddress", "LaunchFailure", "ECCUncorrectable", "Assert"], DeviceLost),
        (["StreamCaptureUnsupported", "StreamCaptureInvalidated"], CaptureRefused),
        (["NoDevice", "InsufficientDriver", "SystemDriverMismatch", "InvalidDevice"], Unsupported),
        (["NoKernelImageForDevice", "UnsupportedPtxVersion", "NotSupported"], Unsupported),
        (["InvalidValue", "InvalidResourceHandle", "SomethingNew"], DeploykitError),
    ],
)
def test_each_code_is_mapped_to_its_error(names: Sequence[str], kind: type[DeploykitError]) -> None:
    for name in names:
        assert type(cuda_error("cuda:0", "call", f"cudaError{name}", "text")) is kind


def test_no_code_has_two_names_or_two_meanings() -> None:
    names = list(codes.CODES.values())
    assert len(names) == len(set(names)) == len(codes._ROWS)
    assert set(names) <= set(CODES)


@pytest.mark.parametrize("name", ["NoDevice", "InsufficientDriver", "InvalidDevice"])
def test_missing_gpu_points_to_doctor(name: str) -> None:
    error = cuda_error("cuda:0", "cudaSetDevice", f"cudaError{name}", "text")
    assert "deploykit doctor" in (error.hint or "")
