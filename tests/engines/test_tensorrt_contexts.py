"""Contexts of one TensorRT engine: shared weights, memory taken at the start, padded graphs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, DeploykitError, OutOfMemory
from deploykit.engines.cuda.errors import DeviceLost
from deploykit.engines.tensorrt.engine import TensorRtEngine
from tests.support.runtimes.fake_tensorrt import tensor
from tests.support.runtimes.own_cuda import FakeCuda
from tests.support.runtimes.tensorrt_opened import PROFILE, Opened, X, Y, rows

SIZES = (1, 2, 4, 8)
MEMORY = {"weights": 100_000, "context": 1000}


def calls(*sizes: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.zeros((size, 4), np.float32)} for size in sorted(sizes, reverse=True)]


def right(engine: TensorRtEngine, count: int, start: float = 0.0) -> bool:
    x = rows(count, start=start)
    return np.array_equal(engine({"x": x})["y"], 2 * x + 1)


# weights are shared


def test_an_engine_that_shares_weights_takes_memory_for_contexts_only() -> None:
    found = Opened(memory=MEMORY)
    before = found.cuda.library_bytes
    assert before == 101_000
    others = [found.engine.share() for _ in range(3)]
    assert found.cuda.library_bytes == before + 3 * 1000
    assert len(found.nv.contexts) == 4
    for other in (*others, found.engine):
        assert right(other, 5)
        other.close()
    assert found.cuda.held() == {}


def test_weights_stay_until_the_last_engine_is_closed() -> None:
    found = Opened(memory=MEMORY)
    other = found.engine.share()
    found.engine.close()
    assert found.cuda.library_bytes == 101_000
    assert right(other, 3)
    other.close()
    assert found.cuda.held() == {}
    for engine in (found.engine, other):
        with pytest.raises(DeploykitError, match="is closed"):
            engine({"x": rows(1)})


@pytest.mark.parametrize("ended", ["closed", "lost"])
def test_an_engine_that_is_closed_or_lost_takes_no_memory(ended: str) -> None:
    found = Opened(memory=MEMORY)
    if ended == "closed":
        found.engine.close()
    else:
        found.cuda.fail = {"wait": "IllegalAddress"}
        with pytest.raises(DeviceLost):
            found.engine({"x": rows(1)})
    used = found.cuda.used_bytes
    kind: type[DeploykitError] = DeploykitError if ended == "closed" else DeviceLost
    with pytest.raises(kind, match=ended):
        found.engine.prepare(calls(8), joined=True)
    with pytest.raises(kind, match=ended):
        found.engine.share()
    assert found.cuda.used_bytes == used
    found.engine.close()


def test_engines_that_share_weights_run_in_threads_of_their_own() -> None:
    """The stand-in fails when two threads use one context."""
    found = Opened(graphs=SIZES, memory=MEMORY, scratch=512)
    engines = [found.engine, *(found.engine.share(graphs=SIZES) for _ in range(2))]

    def run(number: int) -> bool:
        return all(right(engines[number], 1 + n % 9, start=100 * number + n) for n in range(60))

    with ThreadPoolExecutor(len(engines)) as pool:
        assert all(pool.map(run, range(len(engines))))
    for engine in engines:
        engine.close()
    assert found.cuda.held() == {}


def test_a_share_that_finds_no_memory_leaves_the_engine_as_it_is() -> None:
    found = Opened(memory=MEMORY)
    found.cuda.total_bytes = found.cuda.used_bytes + 100
    with pytest.raises(OutOfMemory, match=r"free of"):
        found.engine.share()
    assert right(found.engine, 8)
    found.engine.close()
    assert found.cuda.held() == {}


# memory is taken before the first call


def test_opening_makes_the_context_of_the_optimum() -> None:
    found = Opened(memory=MEMORY)
    (context,) = found.nv.contexts
    assert context.shapes == {"x": (8, 4)}
    used = found.cuda.used_bytes
    assert right(found.engine, 8)
    assert (found.nv.contexts, found.cuda.used_bytes) == ([context], used)
    found.engine.close()


def test_too_little_memory_for_the_context_of_the_optimum_is_refused_at_load() -> None:
    cuda = FakeCuda(total_bytes=100_500)
    with pytest.raises(
        OutOfMemory, match=r"m\.trt: cuda:0: .*create_execution_context.*free of"
    ) as e:
        Opened(cuda=cuda, memory=MEMORY)
    assert e.value.exit_code == 3
    assert cuda.held() == {}


@pytest.mark.parametrize("graphs", [(), SIZES], ids=["plain", "graphs"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_call_takes_memory_after_prepare(graphs: tuple[int, ...], slots: int) -> None:
    found = Opened(graphs=graphs, slots=slots, memory=MEMORY, scratch=512)
    engine = found.engine
    engine.prepare(calls(1, 3, *SIZES), joined=True)
    used, contexts = found.cuda.used_bytes, len(found.nv.contexts)
    found.cuda.total_bytes = used  # not a byte is left
    pins, captures = found.cuda.count["pin"], found.cuda.count["begin_capture"]
    for _ in range(3):
        tickets = [engine.submit({"x": rows(n)}) for n in range(1, 9)]
        for n, ticket in enumerate(tickets, 1):
            np.testing.assert_array_equal(ticket.result()["y"], 2 * rows(n) + 1)
    assert (found.cuda.used_bytes, len(found.nv.contexts)) == (used, contexts)
    assert (found.cuda.count["pin"], found.cuda.count["begin_capture"]) == (pins, captures)
    assert engine.notes == ()
    engine.close()
    assert found.cuda.held() == {}


def test_prepare_without_calls_makes_every_slot_ready_for_the_optimum() -> None:
    found = Opened(memory=MEMORY)
    found.engine.prepare()
    assert [context.shapes for context in found.nv.contexts] == [{"x": (8, 4)}] * 2
    assert len(found.cuda.streams) == 2
    found.engine.close()
    assert found.cuda.held() == {}


def test_sizes_that_were_not_prepared_are_not_captured_later() -> None:
    """Each would take a context, and its memory, during a request."""
    x, y = (tensor(name, mode, [-1, 4, -1]) for name, mode in (("x", "INPUT"), ("y", "OUTPUT")))
    found = Opened(
        (x, {**y, "shape": [-1, 4, 2]}), ({"x": [[1, 4, 1], [8, 4, 2], [8, 4, 2]]},), graphs=SIZES
    )
    found.engine.prepare()  # no size of the third axis is known
    contexts = found.nv.contexts
    for _ in range(3):
        for n in range(1, 9):
            found.engine.submit({"x": np.zeros((n, 4, 2), np.float32)})
    assert found.nv.contexts == contexts
    assert len(contexts) == 2
    found.engine.close()


def test_a_model_that_is_not_batched_has_graphs_of_what_was_prepared_alone() -> None:
    found = Opened(graphs=SIZES, memory=MEMORY)
    found.engine.prepare(calls(1), joined=False)
    used, contexts = found.cuda.used_bytes, found.nv.contexts
    for n in (1, 2, 4, 8, 3) * 3:
        assert right(found.engine, n)
    assert (found.cuda.used_bytes, found.nv.contexts) == (used, contexts)
    assert len(contexts) == 4  # in both slots: one for the graph, one for all other sizes
    found.engine.close()


@pytest.mark.parametrize("short", ["slot", "graph"])
def test_too_little_memory_is_refused_by_prepare_with_the_sizes(short: str) -> None:
    found = Opened(graphs=SIZES, memory=MEMORY, scratch=512)
    left = 100 if short == "slot" else 4000
    found.cuda.total_bytes = found.cuda.used_bytes + left
    with pytest.raises(OutOfMemory, match="free of") as caught:
        found.engine.prepare(calls(*SIZES), joined=True)
    assert "`max_batch`" in str(caught.value.hint)
    found.engine.close()
    assert found.cuda.held() == {}


# graphs


def test_after_prepare_every_batch_up_to_the_largest_graph_is_one_launch() -> None:
    found = Opened(graphs=SIZES)
    found.engine.prepare(calls(*SIZES), joined=True)
    before = found.cuda.count.copy()
    for n in range(1, 9):
        assert right(found.engine, n, start=n)
    assert found.cuda.count["launch"] - before["launch"] == 8
    assert found.cuda.count["enqueue"] == before["enqueue"]
    found.engine.close()


def test_rows_that_depend_on_each_other_are_not_padded() -> None:
    found = Opened(graphs=SIZES)
    found.engine.prepare(calls(*SIZES), joined=False)
    before = found.cuda.count["launch"]
    assert right(found.engine, 3)
    assert found.cuda.count["launch"] == before
    found.engine.close()


def test_a_graph_above_the_largest_batch_is_one_of_the_largest_batch() -> None:
    profile = {"x": [[1, 4], [2, 4], [6, 4]]}
    found = Opened(profiles=(profile,), graphs=(1, 2, 4, 8, 16))
    found.engine.prepare(calls(1, 2, 4, 6), joined=True)
    before = found.cuda.count["launch"]
    assert right(found.engine, 5)
    assert found.cuda.count["launch"] == before + 1
    with pytest.raises(BadInput, match="axis N is 7"):
        found.engine({"x": rows(7)})
    found.engine.close()


def test_of_several_profiles_no_call_is_padded_out_of_its_own() -> None:
    """Rows of 4 fit the first profile, of 9 the second: 3 long rows padded to 8 would fit none."""
    x, y = (tensor(name, mode, [-1, -1]) for name, mode in (("x", "INPUT"), ("y", "OUTPUT")))
    many = {"x": [[1, 1], [8, 4], [8, 4]]}
    long: Any = {"x": [[1, 5], [2, 9], [3, 9]]}
    found = Opened((x, {**y, "shape": [-1, 9]}), (many, long), graphs=(8,))
    found.engine.prepare(joined=True)
    answer = found.engine({"x": np.ones((3, 9), np.float32)})["y"]
    np.testing.assert_array_equal(answer, np.full((3, 9), 3, np.float32))
    found.engine.close()


def test_an_engine_of_fixed_shapes_has_one_graph() -> None:
    fixed = {"x": [[2, 4]] * 3}
    found = Opened(
        (tensor("x", "INPUT", [2, 4]), tensor("y", "OUTPUT", [2, 4])), (fixed,), graphs=SIZES
    )
    found.engine.prepare(calls(2), joined=False)
    before = found.cuda.count["launch"]
    assert right(found.engine, 2)
    assert found.cuda.count["launch"] == before + 1
    found.engine.close()


def test_slots_are_what_was_asked_for() -> None:
    for slots in (1, 2):
        with Opened((X, Y), (PROFILE,), slots=slots).engine as engine:
            assert engine.slots == slots
