"""Buffers, streams, overlap and CUDA graphs, on a CUDA driver of our own that runs late."""

from __future__ import annotations

import numpy as np
import pytest

from deploykit.core.errors import OutOfMemory
from deploykit.engines.cuda.execution import round_up
from tests.support.campaign import rounds
from tests.support.runtimes.fake_tensorrt import affine, tensor
from tests.support.runtimes.own_cuda import FakeCuda, rows
from tests.support.runtimes.tensorrt_opened import Opened, X, right

ONE_CALL = ["copy_in", "enqueue", "copy_out", "record"]
LARGE = ({"x": [[1, 4], [2, 4], [4096, 4]]},)
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
