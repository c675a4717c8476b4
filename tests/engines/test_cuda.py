"""Buffers, streams and overlap, on a CUDA made of NumPy that runs as late as it may."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import pytest

from deploykit.core.errors import OutOfMemory
from deploykit.engines.cuda.execution import Buffer, Pipeline, Shape, byte_count, round_up
from tests.support.campaign import rounds
from tests.support.runtimes.cuda_runs import ONE_CALL, FakeCuda, X, Y, pipeline, right, rows
from tests.support.runtimes.own_cuda import Affine

# one call


def test_call_copies_in_computes_copies_out_in_this_order_on_one_stream() -> None:
    cuda = FakeCuda()
    with pipeline(cuda) as run:
        assert right(run({"x": rows(3)}), rows(3))
        (stream,) = cuda.streams
        assert cuda.on(stream) == ONE_CALL
    assert cuda.names("record", "wait") == ["record", "wait"]


def test_device_is_chosen_anew_for_every_call_as_another_thread_may_make_it() -> None:
    cuda = FakeCuda()
    with pipeline(cuda) as run:
        for _ in range(3):
            run({"x": rows(1)})
        assert cuda.names("use", "enqueue", "wait") == ["use", "enqueue", "use", "wait"] * 3


def test_a_context_of_tensorrt_may_be_collected_while_work_on_the_device_runs() -> None:
    cuda = FakeCuda()
    cuda.use()
    taken, stream = list[bool](), cuda.open_stream()
    cuda.push(stream, "enqueue", lambda: taken.append(cuda.take(64)))
    cuda.wait_stream(stream)
    cuda.close_stream(stream)
    assert taken == [True]


def test_no_rows_are_computed_without_a_copy() -> None:
    cuda = FakeCuda()
    with pipeline(cuda) as run:
        assert run({"x": rows(0)})["y"].shape == (0, 4)
    assert cuda.names("copy_in", "copy_out") == []


# growth


def test_buffers_are_made_once_for_the_same_and_for_smaller_batches() -> None:
    cuda = FakeCuda()
    with pipeline(cuda) as run:
        for count in (200, 200, 7, 200):
            assert right(run({"x": rows(count)}), rows(count))
        assert cuda.count["allocate"] == 2  # x and y
        assert cuda.count["pin"] == 2


def test_larger_batch_replaces_the_buffers_and_frees_the_old_ones_first() -> None:
    cuda = FakeCuda()
    with pipeline(cuda) as run:
        for count in (10, 1000, 3):
            assert right(run({"x": rows(count)}), rows(count))
        assert len(cuda.device_blocks) == 2
    held = [name for name in cuda.names() if name in ("allocate", "free")]
    assert held[:4] == ["allocate", "allocate", "free", "allocate"]


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 4096, 4097, 10**6, 123_456_789])
def test_sizes_are_rounded_up_by_a_quarter_at_most(nbytes: int) -> None:
    assert nbytes <= round_up(nbytes) <= nbytes * 1.25 + 512
    assert round_up(nbytes) % 512 == 0


def test_growing_byte_by_byte_allocates_seldom() -> None:
    cuda = FakeCuda()
    held = Buffer(cuda)
    for nbytes in range(1, 100_000, 100):
        held.reserve(nbytes)
    assert cuda.count["allocate"] < 40
    held.release()
    assert cuda.held() == {}


def test_buffer_that_finds_no_memory_holds_none() -> None:
    cuda = FakeCuda(total_bytes=1000)
    with pytest.raises(OutOfMemory):
        Buffer(cuda).reserve(2000)
    assert cuda.held() == {}


# overlap


def test_second_call_is_enqueued_before_the_first_is_waited_for() -> None:
    cuda = FakeCuda()
    with pipeline(cuda) as run:
        one, two = run.submit({"x": rows(2)}), run.submit({"x": rows(2, start=9)})
        assert cuda.names("enqueue", "wait") == ["enqueue", "enqueue"]
        first, second = cuda.streams
        assert cuda.on(first) == cuda.on(second) == ONE_CALL
        assert right(two.result(), rows(2, start=9))
        assert right(one.result(), rows(2))


def test_call_that_waits_for_no_other_uses_one_slot_only() -> None:
    cuda = FakeCuda()
    with pipeline(cuda, slots=3) as run:
        for _ in range(5):
            run({"x": rows(2)})
        assert len(cuda.streams) == 1


def test_third_call_waits_for_the_first_of_two_slots_and_keeps_its_answer() -> None:
    cuda = FakeCuda()
    with pipeline(cuda, slots=2) as run:
        tickets = [run.submit({"x": rows(2, start=100 * n)}) for n in range(5)]
        assert cuda.names("enqueue", "wait") == [
            *["enqueue", "enqueue"],
            *["wait", "enqueue"] * 3,
        ]
        assert len(cuda.streams) == 2
        for n in (4, 0, 2, 1, 3):
            assert right(tickets[n].result(), rows(2, start=100 * n))


def test_slots_are_reused_in_the_order_in_which_they_were_started() -> None:
    cuda = FakeCuda()
    with pipeline(cuda, slots=3) as run:
        for n in range(9):
            run.submit({"x": rows(1, start=n)})
        order = [stream for name, stream in cuda.calls if name == "enqueue"]
        assert order == order[:3] * 3
        assert len(set(order)) == 3


def test_map_keeps_the_slots_busy_and_the_order() -> None:
    cuda = FakeCuda()
    with pipeline(cuda, slots=2) as run:
        tickets = [run.submit({"x": rows(1 + n % 3, start=n)}) for n in range(7)]
        answers = [ticket.result() for ticket in tickets]
        assert all(right(a, rows(1 + n % 3, start=n)) for n, a in enumerate(answers))
        assert len(answers) == 7
        steps = cuda.names("enqueue", "wait")
        assert steps[:4] == ["enqueue", "enqueue", "wait", "enqueue"]


def test_result_may_be_asked_for_twice() -> None:
    with pipeline(FakeCuda()) as run:
        ticket = run.submit({"x": rows(1)})
        assert ticket.result() is ticket.result()


def test_growth_of_one_slot_leaves_the_call_under_way_in_another_alone() -> None:
    with pipeline(FakeCuda()) as run:
        run.submit({"x": rows(3)}).result()
        small, large = run.submit({"x": rows(3)}), run.submit({"x": rows(3000)})
        assert right(large.result(), rows(3000))
        assert right(small.result(), rows(3))


# data-dependent shapes


class Positive(Affine):
    """y = the rows of x whose first number is above 0: how many, only running it tells."""

    def __init__(self, cuda: FakeCuda, stream: int, scratch: int) -> None:
        super().__init__(cuda, stream, scratch)
        self.memory = 0
        self.found: np.ndarray = np.empty(0)

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


# memory that the GPU shares with the host


def test_integrated_gpu_copies_nothing() -> None:
    cuda = FakeCuda(integrated=True)
    with pipeline(cuda, graphs=[2]) as run:
        for n in range(4):
            assert right(run({"x": rows(2, start=n)}), rows(2, start=n))
    assert cuda.names("copy_in", "copy_out", "allocate") == []
    assert cuda.count["device_address"] == 2
    assert cuda.held() == {}


# leaks


@pytest.mark.parametrize("integrated", [False, True])
def test_many_calls_hold_no_more_than_a_hundred_and_give_all_back(integrated: bool) -> None:
    cuda, made = FakeCuda(integrated=integrated), list[Affine]()
    random = np.random.default_rng(0)
    run = pipeline(cuda, made, slots=2, graphs=[1, 2, 4], scratch_bytes=1 << 10)
    sizes = random.integers(0, 9, rounds(2_000, 100_000))
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
    run.close()
    assert cuda.held() == {}
    assert all(work.closed for work in made)
    for get, give in (("allocate", "free"), ("pin", "unpin"), ("open_event", "close_event")):
        assert cuda.count[get] == cuda.count[give]
