"""Buffers, streams, overlap and CUDA graphs, on a CUDA driver of our own that runs late."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from deploykit.core.errors import DeploykitError, OutOfMemory, Unsupported
from deploykit.engines.cuda import errors as codes
from deploykit.engines.cuda.errors import CaptureRefused, DeviceLost, cuda_error
from deploykit.engines.cuda.execution import round_up
from tests.support.campaign import rounds
from tests.support.runtimes.fake_tensorrt import affine, tensor
from tests.support.runtimes.gpu_machine import (
    Opened,
    X,
    opened_fixture,  # noqa: F401
    right,
)
from tests.support.runtimes.own_cuda import FakeCuda, driver, rows

ONE_CALL = ["copy_in", "enqueue", "copy_out", "record"]
LARGE = ({"x": [[1, 4], [2, 4], [8192, 4]]},)
LATE = tensor("y", "OUTPUT", [-1, 4], late=True)


def test_call_copies_in_computes_copies_out_in_this_order_on_one_stream() -> None:
    with Opened(slots=3) as found:
        found.cuda.calls.clear()
        assert all(right(found.engine, 3, start=n) for n in range(3))
        (stream,) = found.cuda.streams  # no call waited for another
        assert found.cuda.on(stream) == ONE_CALL * 3
        # the device is chosen for every call, as another thread may make it
        assert found.cuda.names("use", "enqueue", "wait") == ["use", "enqueue", "use", "wait"] * 3


def test_larger_batch_replaces_the_buffers_and_frees_the_old_ones_first() -> None:
    with Opened(profiles=LARGE) as found:
        assert all(right(found.engine, count) for count in (10, 7, 10, 1000, 3))
        assert len(found.cuda.device_blocks) == 2
    held = found.cuda.names("allocate", "free")
    assert held[:6] == ["allocate", "allocate", *["free", "allocate"] * 2]


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 4097, 10**6, 123_456_789])
def test_sizes_are_rounded_up_by_a_quarter_at_most(nbytes: int) -> None:
    assert nbytes <= round_up(nbytes) <= nbytes * 1.25 + 512
    assert round_up(nbytes) % 512 == 0


def test_third_call_waits_for_the_first_of_two_slots_and_keeps_its_answer() -> None:
    with Opened(slots=2) as found:
        tickets = [found.engine.submit({"x": rows(2, start=100 * n)}) for n in range(5)]
        steps = found.cuda.names("enqueue", "wait")
        assert steps == ["enqueue", "enqueue", *["wait", "enqueue"] * 3]
        order = [stream for name, stream in found.cuda.calls if name == "enqueue"]
        assert order == [*order[:2] * 2, order[0]]  # reused in the order of their start
        assert len(found.nv.contexts) == len(set(order)) == 2
        for n in (4, 0, 2, 1, 3):
            np.testing.assert_array_equal(tickets[n].result()["y"], 2 * rows(2, start=100 * n) + 1)


def test_growth_of_one_slot_leaves_the_call_under_way_in_another_alone() -> None:
    with Opened(profiles=LARGE) as found:
        small, large = (found.engine.submit({"x": rows(n)}) for n in (3, 3000))
        np.testing.assert_array_equal(large.result()["y"], 2 * rows(3000) + 1)
        np.testing.assert_array_equal(small.result()["y"], 2 * rows(3) + 1)


@pytest.mark.parametrize("integrated", [False, True])
def test_output_whose_shape_depends_on_the_data_is_fetched_by_its_allocator(
    integrated: bool,
) -> None:
    with Opened((X, LATE), cuda=FakeCuda(integrated=integrated), graphs=[3]) as found:
        for start in (-1, -100, 5, -5):
            x = rows(3, start=start)
            np.testing.assert_array_equal(found.engine({"x": x})["y"], x[x[:, 0] > 0])
        assert found.cuda.count["begin_capture"] == 0  # its size would be frozen in
        if not integrated:
            found.cuda.total_bytes = found.cuda.used_bytes + 100
            with pytest.raises(OutOfMemory, match="needed"):
                found.engine({"x": rows(32, start=1)})
            found.cuda.total_bytes = 1 << 30
        assert found.engine({"x": rows(32, start=1)})["y"].shape == (32, 4)


def test_integrated_gpu_copies_nothing() -> None:
    with Opened(cuda=FakeCuda(integrated=True), graphs=[2]) as found:
        assert all(right(found.engine, 2, start=n) for n in range(4))
        assert found.cuda.names("copy_in", "copy_out", "allocate") == []
        assert found.cuda.count["device_address"] == 2


@pytest.mark.parametrize("integrated", [False, True])
def test_many_calls_hold_no_more_than_a_hundred_and_give_all_back(integrated: bool) -> None:
    cuda, sizes = FakeCuda(integrated=integrated), np.random.default_rng(0)
    with Opened(cuda=cuda, graphs=[1, 2, 4], scratch=1 << 10) as found:
        held = {}
        for n in range(rounds(1_000, 100_000)):
            x = rows(int(sizes.integers(1, 9)), start=n % 7)
            ticket = found.engine.submit({"x": x})
            if n % 7:  # else nobody asks for its answer
                np.testing.assert_array_equal(ticket.result()["y"], 2 * x + 1)
            held = held or (cuda.held() if n > 500 else {})
            cuda.calls.clear()
        assert cuda.held() == held
        # two slots: three graphs and one for all other sizes
        assert len(found.nv.contexts) == 8
        assert len({context.scratch for context in found.nv.contexts}) == 2


# CUDA graphs


def test_batch_with_a_graph_is_enqueued_once_captured_once_then_launched() -> None:
    with Opened(graphs=[2, 4]) as found:
        assert all(right(found.engine, 2, start=n) for n in range(4))
        (stream,) = found.cuda.streams
        captured = ["begin_capture", "copy_in", "enqueue", "copy_out", "end_capture"]
        assert found.cuda.on(stream) == [*ONE_CALL, *captured, *["launch", "record"] * 3]
        assert found.engine.notes == ()
        assert all(right(found.engine, 3) for _ in range(3))
        assert found.cuda.count["begin_capture"] == 1  # 3 rows have no graph


def test_each_graph_has_a_context_of_its_own_and_growth_drops_it() -> None:
    """The stand-in fails when a graph runs whose context was changed since."""
    with Opened(profiles=LARGE, graphs=[1, 2], scratch=4096) as found:
        assert all(right(found.engine, count) for count in (1, 2, 3, 1, 2, 3, 1, 5, 2, 1))
        assert (len(found.nv.contexts), found.cuda.count["end_capture"]) == (3, 2)
        assert len({context.scratch for context in found.nv.contexts}) == 1
        # the graphs point into the old buffers
        assert all(right(found.engine, count) for count in (900, 1, 1, 1))
        assert (len(found.cuda.graphs), found.cuda.count["end_capture"]) == (1, 3)
        assert found.engine.notes == ()


@pytest.mark.parametrize("refusal", ["StreamCaptureUnsupported", "StreamCaptureInvalidated"])
@pytest.mark.parametrize("call", ["copy_out", "end_capture", "execute_async_v3"])
def test_refused_capture_is_noted_and_the_call_still_answers(
    refusal: str, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Opened(graphs=[2]) as found:
        found.engine({"x": rows(2)})
        if call.startswith("execute"):
            refusal = "StreamCaptureUnsupported"
            line = "Cuda Runtime (operation not permitted when stream is capturing)"
            found.nv.fail = {call: f"[a.cpp::b::1] Error Code 1: {line}"}
        else:
            found.cuda.fail = {call: refusal}
        assert all(right(found.engine, 2, start=n) for n in range(3))
        count = found.cuda.count
        assert (count["begin_capture"], count["launch"]) == (1, 0)  # not tried again
        assert not found.cuda.capturing
        (note,) = found.engine.notes
        assert "no CUDA graph for [2, 4]" in note
        assert refusal in note
        assert note in caplog.text


def test_interrupted_capture_leaves_the_stream_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with Opened(graphs=[2]) as found:
        found.engine({"x": rows(2)})
        monkeypatch.setattr(found.cuda, "copy_out", interrupt)
        with pytest.raises(KeyboardInterrupt):
            found.engine({"x": rows(2)})
        monkeypatch.undo()
        assert not found.cuda.capturing
        assert right(found.engine, 2)


def test_no_more_graphs_are_made_than_memory_should_hold() -> None:
    with Opened(graphs=range(1, 33)) as found:
        assert all(right(found.engine, count) for count in [*range(1, 33)] * 3)
        assert len(found.cuda.graphs) <= 17
        assert len(found.nv.contexts) <= 18


def test_a_padded_call_is_filled_with_zeros_and_returns_its_own_rows_only() -> None:
    seen = []

    def computes(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen.append(inputs["x"].copy())
        return affine(inputs)

    with Opened(graphs=[4], computes=computes) as found:
        found.engine.prepare([{"x": rows(4, start=1000)}], joined=True)
        assert all(right(found.engine, 3) for _ in range(3))
    np.testing.assert_array_equal([x[3] for x in seen[-3:]], np.zeros((3, 4)))


def test_rows_are_not_padded_where_an_output_is_not_one_per_row() -> None:
    ends = (X, tensor("y", "OUTPUT", [1, 4]))
    with Opened(ends, graphs=[4], computes=lambda feeds: {"y": feeds["x"][:1]}) as found:
        found.engine.prepare([{"x": rows(4)}], joined=True)
        launches = found.cuda.count["launch"]
        np.testing.assert_array_equal(found.engine({"x": rows(3)})["y"], rows(1))
        assert found.cuda.count["launch"] == launches


# errors of the CUDA path: memory that runs out, a lost device, closing, and what codes mean


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
        found.cuda.lose("LaunchFailure")
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
