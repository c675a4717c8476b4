"""Buffers, streams, overlap and CUDA graphs, on a CUDA driver of our own that runs late."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import pytest

from deploykit.core.errors import Unsupported
from deploykit.core.tensors import TensorSpec
from deploykit.engines.cuda.execution import Pipeline, Shape, byte_count, round_up
from tests.support.campaign import rounds
from tests.support.runtimes.own_cuda import (
    ONE_CALL,
    Affine,
    FakeCuda,
    X,
    Y,
    pipeline,
    right,
    rows,
)


def test_call_copies_in_computes_copies_out_in_this_order_on_one_stream() -> None:
    cuda = FakeCuda()
    with pipeline(cuda, slots=3) as run:
        for _ in range(3):
            assert right(run({"x": rows(3)}), rows(3))
        (stream,) = cuda.streams  # no call waited for another
        assert cuda.on(stream) == ONE_CALL * 3
        # the device is chosen for every call, as another thread may make it
        assert cuda.names("use", "enqueue", "wait") == ["use", "enqueue", "use", "wait"] * 3
        assert run({"x": rows(0)})["y"].shape == (0, 4)
    assert cuda.count["copy_in"] == 3  # nothing to copy of no rows


def test_a_context_of_tensorrt_may_be_collected_while_work_on_the_device_runs() -> None:
    cuda = FakeCuda()
    cuda.use()
    taken, stream = list[bool](), cuda.open_stream()
    cuda.push(stream, "enqueue", lambda: taken.append(cuda.take(64)))
    cuda.wait_stream(stream)
    cuda.close_stream(stream)
    assert taken == [True]


def test_larger_batch_replaces_the_buffers_and_frees_the_old_ones_first() -> None:
    cuda = FakeCuda()
    with pipeline(cuda) as run:
        for count in (10, 7, 10, 1000, 3):
            assert right(run({"x": rows(count)}), rows(count))
        assert len(cuda.device_blocks) == 2
    held = cuda.names("allocate", "free")
    assert held[:6] == ["allocate", "allocate", "free", "allocate", "free", "allocate"]


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 4096, 4097, 10**6, 123_456_789])
def test_sizes_are_rounded_up_by_a_quarter_at_most(nbytes: int) -> None:
    assert nbytes <= round_up(nbytes) <= nbytes * 1.25 + 512
    assert round_up(nbytes) % 512 == 0


def test_third_call_waits_for_the_first_of_two_slots_and_keeps_its_answer() -> None:
    cuda = FakeCuda()
    with pipeline(cuda, slots=2) as run:
        tickets = [run.submit({"x": rows(2, start=100 * n)}) for n in range(5)]
        assert cuda.names("enqueue", "wait") == ["enqueue", "enqueue", *["wait", "enqueue"] * 3]
        order = [stream for name, stream in cuda.calls if name == "enqueue"]
        assert order == [*order[:2] * 2, order[0]]  # reused in the order of their start
        assert len(set(order)) == 2
        for n in (4, 0, 2, 1, 3):
            assert right(tickets[n].result(), rows(2, start=100 * n))
        assert tickets[0].result() is tickets[0].result()


def test_growth_of_one_slot_leaves_the_call_under_way_in_another_alone() -> None:
    with pipeline(FakeCuda()) as run:
        run.submit({"x": rows(3)}).result()
        small, large = run.submit({"x": rows(3)}), run.submit({"x": rows(3000)})
        assert right(large.result(), rows(3000))
        assert right(small.result(), rows(3))


class Positive(Affine):
    """y = the rows of x whose first number is above 0: how many, only running it tells."""

    memory = 0
    found: np.ndarray

    def shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape | None]:
        super().shapes(inputs)
        return {"y": None}

    def enqueue(self, stream: int) -> None:
        self.cuda.wait_stream(stream)  # as TensorRT does to learn the size
        shape = self.inputs["x"]
        x = self.cuda.at(self.addresses["x"], byte_count("float32", shape))
        found = x.view(np.float32).reshape(shape)
        self.found = found[found[:, 0] > 0].copy()
        if self.memory:
            self.cuda.free(self.memory)
        self.memory = self.cuda.allocate(max(1, self.found.nbytes))
        target = self.cuda.at(self.memory, self.found.nbytes)
        raw = self.found.tobytes()
        self.cuda.push(stream, "enqueue", lambda: np.copyto(target, np.frombuffer(raw, np.uint8)))

    def late(self, name: str) -> tuple[int, Shape]:
        assert name == "y"
        return self.memory, self.found.shape

    def close(self) -> None:
        super().close()
        self.cuda.free(self.memory)


@pytest.mark.parametrize("integrated", [False, True])
def test_output_whose_shape_depends_on_the_data(integrated: bool) -> None:
    cuda = FakeCuda(integrated=integrated)
    with Pipeline(cuda, functools.partial(Positive, cuda), [X], [Y], graphs=[3]) as run:
        for start in (-1, -5, -100, 1, -5):
            x = rows(3, start=start)
            np.testing.assert_array_equal(run({"x": x})["y"], x[x[:, 0] > 0])
        assert cuda.count["begin_capture"] == 0  # its size would be frozen in
    assert cuda.held() == {}


def test_integrated_gpu_copies_nothing() -> None:
    cuda = FakeCuda(integrated=True)
    with pipeline(cuda, graphs=[2]) as run:
        for n in range(4):
            assert right(run({"x": rows(2, start=n)}), rows(2, start=n))
    assert cuda.names("copy_in", "copy_out", "allocate") == []
    assert cuda.count["device_address"] == 2
    assert cuda.held() == {}


@pytest.mark.parametrize("integrated", [False, True])
def test_many_calls_hold_no_more_than_a_hundred_and_give_all_back(integrated: bool) -> None:
    cuda, made = FakeCuda(integrated=integrated), list[Affine]()
    run = pipeline(cuda, made, slots=2, graphs=[1, 2, 4], scratch_bytes=1 << 10)
    sizes = np.random.default_rng(0).integers(0, 9, rounds(2_000, 100_000))
    after: dict[int, dict[str, int]] = {}
    waiting = []
    for n, count in enumerate(sizes):
        x = rows(int(count), start=n % 7)
        waiting.append((run.submit({"x": x}), x))
        if n % 3 == 0:
            waiting = [item for item in waiting if not right(item[0].result(), item[1])]
            assert waiting == []
        if n % 300 == 0:
            run.submit({"x": rows(1)})  # nobody asks for its answer
        if n in (100, len(sizes) - 1):
            after[n] = cuda.held()
        cuda.calls.clear()
    assert after[100] == after[len(sizes) - 1]
    scratch = {work.stream: work.scratch for work in made}  # one memory for a slot's works
    assert len(set(scratch.values())) == len(scratch) == 2
    assert all(scratch[work.stream] == work.scratch for work in made)
    run.close()
    assert cuda.held() == {}
    assert all(work.closed for work in made)


# CUDA graphs


def test_batch_with_a_graph_is_enqueued_once_captured_once_then_launched() -> None:
    cuda = FakeCuda()
    with pipeline(cuda, graphs=[2, 4]) as run:
        for n in range(4):
            assert right(run({"x": rows(2, start=n)}), rows(2, start=n))
        (stream,) = cuda.streams
        captured = ["begin_capture", "copy_in", "enqueue", "copy_out", "end_capture"]
        assert cuda.on(stream) == [*ONE_CALL, *captured, *["launch", "record"] * 3]
        assert run.notes == ()
        for _ in range(3):
            assert right(run({"x": rows(3)}), rows(3))
        assert cuda.count["begin_capture"] == 1  # 3 rows have no graph


def test_each_graph_has_work_of_its_own_and_growth_drops_it() -> None:
    """Affine fails when a graph is launched whose work was given other shapes since."""
    cuda, made = FakeCuda(), list[Affine]()
    with pipeline(cuda, made, graphs=[1, 2]) as run:
        for count in (1, 2, 3, 1, 2, 3, 1, 5, 2, 1):
            assert right(run({"x": rows(count)}), rows(count))
        assert (len(made), cuda.count["end_capture"]) == (3, 2)
        for count in (900, 1, 1, 1):  # the graphs point into the old buffers
            assert right(run({"x": rows(count)}), rows(count))
        assert (len(cuda.graphs), cuda.count["end_capture"]) == (1, 3)


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
        assert (cuda.count["begin_capture"], cuda.count["launch"]) == (1, 0)  # not tried again
        assert not cuda.capturing
        (note,) = run.notes
        assert "no CUDA graph for [2, 4]" in note
        assert refusal in note
        assert note in caplog.text


@pytest.mark.parametrize("kind", [Unsupported, KeyboardInterrupt])
def test_work_that_fails_or_is_interrupted_in_a_capture_leaves_the_stream_usable(
    kind: type[Exception],
) -> None:
    cuda, made = FakeCuda(), list[Affine]()
    with pipeline(cuda, made, graphs=[2]) as run:
        run({"x": rows(2)})
        made[0].refuse = kind("it synchronises")
        with pytest.raises(kind, match="synchronises"):
            run({"x": rows(2)})  # refused as a graph, then as a plain call too
        made[0].refuse = None
        assert not cuda.capturing
        assert right(run({"x": rows(2)}), rows(2))
        assert "it synchronises" in "".join(run.notes) or kind is KeyboardInterrupt


def test_no_more_graphs_are_made_than_memory_should_hold() -> None:
    cuda, made = FakeCuda(), list[Affine]()
    with pipeline(cuda, made, graphs=range(1, 40)) as run:
        for count in [*range(1, 40)] * 3:
            assert right(run({"x": rows(count)}), rows(count))
        assert len(cuda.graphs) <= 17
        assert len(made) <= 18


@pytest.mark.parametrize(
    ("pad", "count", "expected"),
    [
        *(
            (True, *row)
            for row in ((1, (1, True)), (2, (4, True)), (5, (8, True)), (9, (9, False)))
        ),
        *((False, n, (n, fits)) for n, fits in ((1, True), (2, False), (4, True), (None, True))),
    ],
)
def test_padding_takes_the_next_size_with_a_graph(
    pad: bool, count: int | None, expected: tuple[int | None, bool]
) -> None:
    run = pipeline(FakeCuda(), graphs=[8, 1, 4])
    run.prepare([], pad=pad)
    run.graphs = (1, 4, 8)  # all of which `prepare` would have captured
    assert run.bucket(count) == expected


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
