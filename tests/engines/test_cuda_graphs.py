"""CUDA graphs of the CUDA path: which batches get one, when it is refused or dropped, padding."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from deploykit.core.errors import Unsupported
from deploykit.core.tensors import TensorSpec
from deploykit.engines.cuda.execution import Pipeline
from tests.support.runtimes.cuda_runs import ONE_CALL, FakeCuda, X, pipeline, right, rows
from tests.support.runtimes.own_cuda import Affine


def test_batch_with_a_graph_is_enqueued_once_captured_once_then_launched() -> None:
    cuda = FakeCuda()
    with pipeline(cuda, graphs=[2]) as run:
        for n in range(4):
            assert right(run({"x": rows(2, start=n)}), rows(2, start=n))
        (stream,) = cuda.streams
        captured = ["begin_capture", "copy_in", "enqueue", "copy_out", "end_capture"]
        replay = ["launch", "record"]
        assert cuda.on(stream) == [*ONE_CALL, *captured, *replay, *replay, *replay]
        assert run.notes == ()


def test_batch_without_a_graph_is_never_captured() -> None:
    cuda = FakeCuda()
    with pipeline(cuda, graphs=[2, 4]) as run:
        for _ in range(3):
            assert right(run({"x": rows(3)}), rows(3))
        assert cuda.count["begin_capture"] == 0


def test_each_graph_has_work_of_its_own_so_that_other_shapes_do_not_change_it() -> None:
    """Affine fails when a graph is launched whose work was given other shapes since."""
    cuda, made = FakeCuda(), list[Affine]()
    with pipeline(cuda, made, graphs=[1, 2]) as run:
        for count in (1, 2, 3, 1, 2, 3, 1, 5, 2, 1):
            assert right(run({"x": rows(count)}), rows(count))
        assert len(made) == 3
        assert cuda.count["end_capture"] == 2


def test_growth_drops_the_graphs_that_point_into_the_old_buffers() -> None:
    cuda = FakeCuda()
    with pipeline(cuda, graphs=[1]) as run:
        for count in (1, 1, 1, 900, 1, 1, 1):
            assert right(run({"x": rows(count)}), rows(count))
        assert cuda.count["end_capture"] == 2
        assert len(cuda.graphs) == 1


@pytest.mark.parametrize("refusal", ["StreamCaptureUnsupported", "StreamCaptureInvalidated"])
@pytest.mark.parametrize("call", ["copy_out", "end_capture"])
def test_refused_capture_is_noted_and_the_call_still_answers(
    refusal: str, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda()
    with pipeline(cuda, graphs=[2]) as run:
        run({"x": rows(2)})
        cuda.fail = {call: refusal}
        for n in range(3):
            assert right(run({"x": rows(2, start=n)}), rows(2, start=n))
        assert cuda.count["begin_capture"] == 1  # not tried again
        assert cuda.count["launch"] == 0
        assert not cuda.capturing
        (note,) = run.notes
        assert "no CUDA graph for [2, 4]" in note
        assert refusal in note
        assert note in caplog.text


def test_work_that_refuses_capture_falls_back_too() -> None:
    cuda, made = FakeCuda(), list[Affine]()
    with pipeline(cuda, made, graphs=[2]) as run:
        run({"x": rows(2)})
        made[0].refuse = Unsupported("it synchronises")
        with pytest.raises(Unsupported, match="synchronises"):
            run({"x": rows(2)})  # refused as a graph, then as a plain call too
        made[0].refuse = None
        assert right(run({"x": rows(2)}), rows(2))
        assert "it synchronises" in run.notes[0]
        assert not cuda.capturing


def test_interrupted_capture_leaves_the_stream_usable() -> None:
    cuda, made = FakeCuda(), list[Affine]()
    with pipeline(cuda, made, graphs=[2]) as run:
        run({"x": rows(2)})
        made[0].refuse = KeyboardInterrupt()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            run({"x": rows(2)})
        made[0].refuse = None
        assert not cuda.capturing
        assert right(run({"x": rows(2)}), rows(2))


def test_no_more_graphs_are_made_than_memory_should_hold() -> None:
    cuda, made = FakeCuda(), list[Affine]()
    with pipeline(cuda, made, graphs=range(1, 40)) as run:
        for count in [*range(1, 40)] * 3:
            assert right(run({"x": rows(count)}), rows(count))
        assert len(cuda.graphs) <= 17
        assert len(made) <= 18


@pytest.mark.parametrize(
    ("rows_", "expected"),
    [(1, (1, True)), (2, (4, True)), (4, (4, True)), (5, (8, True)), (9, (9, False))],
)
def test_padding_takes_the_next_size_with_a_graph(rows_: int, expected: tuple[int, bool]) -> None:
    run = pipeline(FakeCuda(), graphs=[8, 1, 4])
    run.prepare([], pad=True)
    run.graphs = (1, 4, 8)  # all of which `prepare` would have captured
    assert run.bucket(rows_) == expected


@pytest.mark.parametrize(("rows_", "expected"), [(1, True), (2, False), (4, True), (None, True)])
def test_without_padding_only_the_same_size_has_a_graph(rows_: int | None, expected: bool) -> None:
    assert pipeline(FakeCuda(), graphs=[1, 4]).bucket(rows_) == (rows_, expected)


def test_a_padded_call_returns_its_own_rows_only() -> None:
    cuda = FakeCuda()
    seen = []
    with pipeline(cuda, graphs=[4]) as run:
        run.prepare([{"x": rows(4, start=1000)}], pad=True)
        for _ in range(3):
            assert right(run({"x": rows(3)}), rows(3))
            staged = next(iter(cuda.host_blocks.values())).view(np.float32)[:16].reshape(4, 4)
            seen.append(staged[3].copy())
    np.testing.assert_array_equal(seen, np.zeros((3, 4)))


def test_rows_are_not_padded_where_an_output_is_not_one_per_row() -> None:
    total = TensorSpec("y", "float32", (1,))
    run = Pipeline(FakeCuda(), functools.partial(Affine, FakeCuda()), [X], [total], graphs=[4])
    run.prepare([], pad=True)
    run.graphs = (4,)
    assert run.bucket(3) == (3, False)
