"""The TensorRT runtime: tensors, profiles, contexts, buffers, streams, graphs, and its errors.

Here on a TensorRT made of Python and our CUDA driver; `make gpu-test` runs the real ones.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.artefact import Manifest
from deploykit.core.errors import (
    BadInput,
    DeploykitError,
    DeviceLost,
    OutOfMemory,
    Unsupported,
    cuda_error,
)
from deploykit.core.extras import installed
from deploykit.core.tensors import TensorSpec
from deploykit.engines.tensorrt import engine
from deploykit.engines.tensorrt.compatibility import check_version, logger
from deploykit.engines.tensorrt.engine import LogErrors
from tests.support.campaign import rounds
from tests.support.runtimes.fake_tensorrt import FakeTensorRt, affine, tensor
from tests.support.runtimes.gpu_machine import Opened, X, Y, right
from tests.support.runtimes.own_cuda import FakeCuda, driver, rows

ONE_CALL = ["copy_in", "enqueue", "copy_out", "record"]
LARGE = ({"x": [[1, 4], [2, 4], [8192, 4]]},)
LATE = tensor("y", "OUTPUT", [-1, 4], late=True)
SIZES = (1, 2, 4, 8)
MEMORY = {"weights": 100_000, "context": 1000}


def calls(*sizes: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.zeros((size, 4), np.float32)} for size in sorted(sizes, reverse=True)]


@pytest.fixture(name="opened")
def opened_fixture() -> Iterator[Opened]:
    """The model y = 2x + 1 on float32[N,4], batches 1 to 32."""
    with Opened() as opened:
        yield opened


# what an engine says of itself


@pytest.mark.parametrize(
    ("shape", "declared", "named"),
    [
        ([-1, 4, -1], ("rows", 4, "T"), "x:float32[rows,4,T]"),
        ([-1, 4, -1], None, "x:float32[N,4,x_2]"),  # no manifest
        ([-1, 4], (7, "C"), "x:float32[x_0,4]"),  # of other tensors: the sizes stay
    ],
)
def test_names_of_axes_come_from_the_manifest(
    shape: list[int], declared: tuple[int | str, ...] | None, named: str
) -> None:
    sizes = [[1 if n < 0 else n for n in shape]] * 3
    specs = tuple(TensorSpec(name, "float32", declared or ()) for name in "xy")
    manifest = Manifest("tensorrt", specs[:1], specs[1:]) if declared else None
    ends = (tensor("x", "INPUT", shape), tensor("y", "OUTPUT", shape))
    assert str(Opened(ends, ({"x": sizes},), manifest).engine.inputs[0]) == named


@pytest.mark.parametrize(
    "profiles",
    [
        (),
        ({"x": [[1], [8], [32]]},),
        ({"x": [[-1, 4], [-1, 4], [-1, 4]]},),
        ({"x": [[1, 4], [64, 4], [32, 4]]},),
    ],
    ids=["none", "rank", "negative", "optimum"],
)
def test_profiles_that_are_none_are_refused(profiles: tuple[Any, ...]) -> None:
    """As TensorRT may answer of a damaged plan that was opened on trust."""
    with pytest.raises(BadInput, match=r"m\.trt: .*optimisation profile"):
        Opened(profiles=profiles)


def test_an_engine_may_have_no_input() -> None:
    with Opened((tensor("y", "OUTPUT", [2, 4]),), ({},)).engine as e:
        assert e.inputs == ()
        assert e.max_batch is None


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (tensor("x", "INPUT", [-1, 4], "BF16"), "tensor 'x' is BF16"),
        (tensor("x", "INPUT", [-1, 4], location="HOST"), "'x' is a shape tensor"),
        (tensor("x", "INPUT", [-1, 4], shape_io=True), "'x' is a shape tensor"),
        (tensor("x", "INPUT", [-1, 4], format="CHW4"), "'x' has no linear memory format"),
    ],
)
def test_tensor_that_numpy_cannot_carry_is_unsupported(item: Any, says: str) -> None:
    with pytest.raises(Unsupported, match=rf"m\.trt: .*{says}"):
        Opened((item, Y))


# calls


def test_the_copy_times_of_the_last_call_are_reported() -> None:
    """Four megabytes take more than a microsecond each way."""
    with Opened(profiles=({"x": [[1, 4], [8, 4], [1 << 18, 4]]},)).engine as engine:
        assert engine.last_copies_us == (0, 0)
        before_ns = time.perf_counter_ns()
        engine({"x": rows(1 << 18)})
        taken_us = (time.perf_counter_ns() - before_ns) // 1000
        assert min(engine.last_copies_us) > 0
        assert sum(engine.last_copies_us) <= taken_us


def test_of_several_profiles_the_first_is_used_with_a_note() -> None:
    small, large = ({"x": [[1, 4], [1, 4], [most, 4]]} for most in (4, 64))
    with Opened(profiles=(small, large)) as found:
        assert found.engine.max_batch == 4
        assert right(found.engine, 4)
        assert "first of its 2 optimisation profiles" in found.engine.notes[0]
        with pytest.raises(BadInput, match="axis N is 65, built for 1 to 4"):
            found.engine({"x": rows(65)})


# weights are shared


def test_engines_that_share_weights_take_memory_for_contexts_only() -> None:
    with Opened(memory=MEMORY) as found:
        before = found.cuda.library_bytes
        assert before == 101_000
        others = [found.engine.share() for _ in range(3)]
        assert found.cuda.library_bytes == before + 3 * 1000
        assert len(found.nv.contexts) == 4
        found.engine.close()
        for other in others:  # the weights stay until the last one is closed
            assert right(other, 5)
            other.close()
    for each in (found.engine, *others):
        with pytest.raises(DeploykitError, match="is closed"):
            each({"x": rows(1)})


@pytest.mark.parametrize("ended", ["closed", "lost"])
def test_an_engine_that_is_closed_or_lost_takes_no_memory(ended: str) -> None:
    with Opened(memory=MEMORY) as found:
        if ended == "closed":
            found.engine.close()
        else:
            found.cuda.fail = {"wait": "IllegalAddress"}
            with pytest.raises(DeviceLost):
                found.engine({"x": rows(1)})
        used = found.cuda.used_bytes
        for take in (lambda: found.engine.prepare(calls(8), joined=True), found.engine.share):
            with pytest.raises(DeploykitError, match=ended):
                take()
        assert found.cuda.used_bytes == used


def test_engines_that_share_weights_run_in_threads_of_their_own() -> None:
    """The stand-in fails when two threads use one context."""
    with Opened(graphs=SIZES, memory=MEMORY, scratch=512) as found:
        engines = [found.engine, *(found.engine.share(graphs=SIZES) for _ in range(2))]

        def run(number: int) -> bool:
            engine = engines[number // 2]  # and two threads take turns on each
            return all(right(engine, 1 + n % 9, start=100 * number + n) for n in range(60))

        with ThreadPoolExecutor(2 * len(engines)) as pool:
            assert all(pool.map(run, range(2 * len(engines))))
        for engine in engines:
            engine.close()


# memory is taken before the first call


def test_opening_makes_the_context_of_the_optimum() -> None:
    with Opened(memory=MEMORY) as found:
        contexts, used = found.nv.contexts, found.cuda.used_bytes
        assert [context.shapes for context in contexts] == [{"x": (8, 4)}]
        assert right(found.engine, 8)
        assert (found.nv.contexts, found.cuda.used_bytes) == (contexts, used)
        found.cuda.total_bytes = used + 100
        with pytest.raises(OutOfMemory, match=r"free of"):
            found.engine.share()
        assert right(found.engine, 8)
        found.cuda.total_bytes = 1 << 30
        found.engine.prepare()  # makes every slot ready for it
        assert [each.shapes for each in found.nv.contexts] == [{"x": (8, 4)}] * 2
        del contexts


@pytest.mark.parametrize(
    ("total", "memory", "says"),
    [
        # before it is loaded
        (10, {"fail": {"deserialize_cuda_engine": "loaded"}}, "out of memory: .*needed.*free"),
        (5000, {"scratch": 50_000}, "needed"),
        (100_500, {"memory": MEMORY}, r"create_execution_context.*free of"),
    ],
)
def test_too_little_memory_is_refused_at_load(
    total: int, memory: Mapping[str, Any], says: str
) -> None:
    cuda = FakeCuda(total_bytes=total)
    with pytest.raises(OutOfMemory, match=rf"cuda:0: .*{says}") as caught:
        Opened(cuda=cuda, **memory)
    assert caught.value.exit_code == 3
    assert cuda.held() == {}


@pytest.mark.parametrize("left", [100, 4000], ids=["slot", "graph"])
def test_too_little_memory_is_refused_by_prepare_with_the_sizes(left: int) -> None:
    with Opened(graphs=SIZES, memory=MEMORY, scratch=512) as found:
        found.cuda.total_bytes = found.cuda.used_bytes + left
        with pytest.raises(OutOfMemory, match="free of") as caught:
            found.engine.prepare(calls(*SIZES), joined=True)
        assert "`max_batch`" in str(caught.value.hint)
        del caught  # its frames keep the engine alive


@pytest.mark.parametrize("graphs", [(), SIZES], ids=["plain", "graphs"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_call_takes_memory_after_prepare(graphs: tuple[int, ...], slots: int) -> None:
    with Opened(graphs=graphs, slots=slots, memory=MEMORY, scratch=512) as found:
        engine, count = found.engine, found.cuda.count
        assert engine.slots == slots
        engine.prepare(calls(1, 3, *SIZES), joined=True)
        found.cuda.total_bytes = used = found.cuda.used_bytes  # not a byte is left
        contexts, before = len(found.nv.contexts), count.copy()
        for _ in range(3):
            tickets = [engine.submit({"x": rows(n)}) for n in range(1, 9)]
            for n, ticket in enumerate(tickets, 1):
                np.testing.assert_array_equal(ticket.result()["y"], 2 * rows(n) + 1)
        assert (found.cuda.used_bytes, len(found.nv.contexts)) == (used, contexts)
        assert all(count[call] == before[call] for call in ("pin", "begin_capture"))
        if graphs:  # each batch up to the largest graph is one launch
            assert count["launch"] - before["launch"] == 24
            assert count["enqueue"] == before["enqueue"]
        assert engine.notes == ()


# graphs


def test_sizes_that_were_not_prepared_are_not_captured_later() -> None:
    """Each would take a context, and its memory, during a request."""
    ends = (tensor("x", "INPUT", [-1, 4, -1]), tensor("y", "OUTPUT", [-1, 4, 2]))
    with Opened(ends, ({"x": [[1, 4, 1], [8, 4, 2], [8, 4, 2]]},), graphs=SIZES) as found:
        found.engine.prepare()  # no size of the third axis is known
        contexts = len(found.nv.contexts)
        for n in (*range(1, 9), *range(1, 9)):
            found.engine.submit({"x": np.zeros((n, 4, 2), np.float32)})
        assert len(found.nv.contexts) == contexts == 2


def test_rows_that_depend_on_each_other_have_graphs_of_what_was_prepared_alone() -> None:
    with Opened(graphs=SIZES, memory=MEMORY) as found:
        found.engine.prepare(calls(1), joined=False)
        launches = found.cuda.count["launch"]
        assert all(right(found.engine, n) for n in (2, 4, 8, 3) * 3)
        assert found.cuda.count["launch"] == launches  # nor are they padded
        assert right(found.engine, 1)
        assert found.cuda.count["launch"] == launches + 1
        # in both slots: one for the graph, one for all other sizes
        assert len(found.nv.contexts) == 4


def test_an_engine_of_fixed_shapes_has_no_batch_limit_and_one_graph() -> None:
    ends = (tensor("x", "INPUT", [2, 4]), tensor("y", "OUTPUT", [2, 4]))
    with Opened(ends, ({"x": [[2, 4]] * 3},), graphs=SIZES) as found:
        assert found.engine.max_batch is None
        found.engine.prepare(calls(2), joined=False)
        before = found.cuda.count["launch"]
        assert right(found.engine, 2)
        assert found.cuda.count["launch"] == before + 1


def test_a_graph_above_the_largest_batch_is_one_of_the_largest_batch() -> None:
    with Opened(profiles=({"x": [[1, 4], [2, 4], [6, 4]]},), graphs=(1, 2, 4, 8, 16)) as found:
        found.engine.prepare(calls(1, 2, 4, 6), joined=True)
        before = found.cuda.count["launch"]
        assert right(found.engine, 5)
        assert found.cuda.count["launch"] == before + 1
        with pytest.raises(BadInput, match="axis N is 7"):
            found.engine({"x": rows(7)})


# what the TensorRT runtime refuses, at load and in a call, and what it says of it

NOISE = "getDeviceMemorySizeV2 is only supported from TensorRT 10.1 onwards"  # lean 10.16.1
RUNS = "execute_async_v3"
LOADS = {
    "deserialize_cuda_engine": "deserialize_cuda_engine",
    "Runtime": "Runtime",
    "create_execution_context": "create_execution_context",
    "set_optimization_profile_async": "optimisation profile 0",
    "set_input_shape": "shape .* of input 'x'",
    "infer_shapes": "shapes",
    "set_tensor_address": "address of tensor",
}
CALLS = [*[*LOADS][2:], "get_tensor_shape", RUNS]


@pytest.mark.parametrize(("call", "words"), LOADS.items())
def test_refusal_at_load_gives_the_reason_from_the_log(call: str, words: str) -> None:
    line = "[runtime.cpp::deserialize::1] IRuntime: Error Code 1: the reason"
    with pytest.raises(Unsupported, match=rf"m\.trt: .*{words}.*: the reason") as caught:
        Opened(fail={call: line})
    assert "runtime.cpp" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("the reason", Unsupported),
        ("Cuda Runtime (out of memory)", OutOfMemory),
    ],
)
@pytest.mark.parametrize("call", CALLS)
def test_a_refused_call_has_the_reason_of_the_log_and_the_next_call_works(
    opened: Opened, call: str, text: str, kind: type[Unsupported]
) -> None:
    """Whether the bindings of this member return None, False or raise.

    In the slot of a second call, as the first one has its context since the engine is open.
    """
    first = opened.engine.submit({"x": rows(3)})
    opened.nv.fail = {call: f"[a.cpp::enqueue::1] Error Code 1: {text}"}
    with pytest.raises(kind, match=r"m\.trt: ") as caught:
        opened.engine({"x": rows(2)})
    assert type(caught.value) is kind
    if kind is Unsupported:
        assert caught.value.message.endswith("the reason")
    np.testing.assert_array_equal(first.result()["y"], 2 * rows(3) + 1)
    np.testing.assert_array_equal(opened.engine({"x": rows(2)})["y"], 2 * rows(2) + 1)


@pytest.mark.parametrize("line", ["", "[a.cpp::b::1] Error Code 1: Myelin (it failed)"])
@pytest.mark.parametrize("call", CALLS)
def test_a_lost_device_is_found_whatever_tensorrt_gives_as_reason(call: str, line: str) -> None:
    found = Opened()
    found.engine.submit({"x": rows(3)})
    found.nv.fail = {call: line or "?"}
    report = found.nv.report

    def lose(text: str, owner: Any = None) -> None:
        if text:
            found.cuda.lose("IllegalAddress")
            report(line, owner)

    found.nv.report = lose  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(DeviceLost):
            found.engine({"x": rows(2)})
    found.engine.close()


@pytest.mark.parametrize(
    "line",
    [  # as TensorRT for RTX 1.7 and TensorRT 8.6 wrote them, and texts in the binaries of 10 and 11
        "initializing cuDNN: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "Error Code 2: OutOfMemory (Requested size was 1073741824 bytes.)",
        "Requested amount of GPU memory (4096 bytes) could not be allocated.",
    ],
)
def test_memory_that_a_library_lacks_keeps_its_meaning(opened: Opened, line: str) -> None:
    opened.nv.fail = {RUNS: line}
    with pytest.raises(OutOfMemory, match=r"m\.trt: cuda:0"):
        opened.engine({"x": rows(2)})


def test_an_inspector_or_an_allocator_that_is_refused_is_a_deploykit_error() -> None:
    late = Opened((X, tensor("y", "OUTPUT", [-1, 4], late=True)))
    late.nv.fail = {"create_engine_inspector": "the reason"}
    with pytest.raises(Unsupported, match="the reason"):
        late.engine.layer_information()
    late.engine.submit({"x": rows(2)})
    late.nv.fail = {"set_output_allocator": "the reason"}
    with pytest.raises(Unsupported, match=r"depends on the data.*the reason"):
        late.engine({"x": rows(3)})
    late.engine.close()


def test_lines_of_earlier_calls_and_other_threads_are_not_the_reason(opened: Opened) -> None:
    """TensorRT ignores every logger but the first, and logs errors in calls that succeed."""
    nv = FakeTensorRt(FakeCuda(new_machine=False))
    assert logger(nv) is logger(nv)
    opened.nv.report(NOISE)
    opened.nv.fail = {RUNS: "the reason"}
    with pytest.raises(Unsupported, match=r"the reason$"):
        opened.engine({"x": rows(2)})
    report = opened.nv.report

    def elsewhere(line: str, _owner: Any = None) -> None:
        thread = threading.Thread(target=report, args=(line,))
        thread.start()
        thread.join()

    opened.nv.fail, opened.nv.report = {RUNS: NOISE}, elsewhere  # type: ignore[method-assign]
    with pytest.raises(Unsupported, match=r"no reason in its log$"):
        opened.engine({"x": rows(2)})


def test_threads_that_fail_at_once_have_each_its_own_reason() -> None:
    nv, together = FakeTensorRt(FakeCuda(new_machine=False)), threading.Barrier(3)

    def fails(number: int) -> None:
        logger(nv).log(nv.ILogger.Severity.ERROR, f"reason {number}")
        together.wait(20)

    def reason(number: int) -> str:
        with pytest.raises(Unsupported) as caught:
            LogErrors(nv, Path("m.trt"), FakeCuda()).call("call", fails, number)
        return caught.value.message.rpartition(": ")[2]

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(reason, range(3))) == ["reason 0", "reason 1", "reason 2"]


def test_an_engine_built_for_a_dla_core_runs_on_it() -> None:
    with Opened(dla=1, notes=("loaded on trust",)) as found:
        assert found.engine.notes == ("loaded on trust",)
        assert found.nv.does.seen["runtime_dla"] == 1


# buffers and streams, on a driver that runs nothing before it is waited for


def test_call_copies_in_computes_copies_out_in_this_order_on_one_stream() -> None:
    with Opened(slots=3) as found:
        found.cuda.calls.clear()
        assert right(found.engine, 3)
        (context,) = found.nv.contexts
        changes = context.changes
        assert all(right(found.engine, 3, start=n) for n in range(2))
        assert context.changes == changes  # shapes and addresses are set once
        (stream,) = found.cuda.streams  # no call waited for another
        assert found.cuda.on(stream) == ONE_CALL * 3
        # the device is chosen for every call, as another thread may make it
        assert found.cuda.names("use", "enqueue", "wait") == ["use", "enqueue", "use", "wait"] * 3


def test_larger_batch_replaces_the_buffers_and_frees_the_old_ones_first() -> None:
    with Opened(profiles=LARGE) as found:
        assert all(right(found.engine, count) for count in (10, 7, 10, 1000, 3))
        assert found.cuda.held()["device"] == 2
    held = found.cuda.names("allocate", "free")
    assert held[:6] == ["allocate", "allocate", *["free", "allocate"] * 2]


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
        assert (found.cuda.held()["executable graphs"], found.cuda.count["end_capture"]) == (1, 3)
        assert found.engine.notes == ()


@pytest.mark.parametrize("refusal", ["StreamCaptureUnsupported", "StreamCaptureInvalidated"])
@pytest.mark.parametrize("call", ["copy_out", "end_capture", "execute_async_v3"])
def test_refused_capture_is_noted_and_the_call_still_answers(
    refusal: str, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Opened(graphs=[2]) as found:
        found.engine({"x": rows(2)})
        if call.startswith("execute"):
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
        assert "captur" in note
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
        assert found.cuda.held()["executable graphs"] <= 17
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


@pytest.mark.parametrize(
    ("call", "says"),
    [("cuMemAlloc", ": .* MiB needed, .* MiB free"), ("cuMemHostAlloc", " in cuMemHostAlloc")],
)
def test_memory_that_the_driver_refuses_is_an_error_and_nothing_is_held(
    call: str, says: str
) -> None:
    with Opened(profiles=LARGE) as found:
        found.cuda.library.fakecuda_fail(f"{call}:2@2".encode())
        with pytest.raises(OutOfMemory, match=f"cuda:0: out of memory{says}") as caught:
            found.engine({"x": rows(5000)})
        assert (caught.value.exit_code, caught.value.http_status) == (3, 503)
        assert right(found.engine, 5000)


@pytest.mark.parametrize("call", ["copy_in", "wait", "begin_capture", "end_capture"])
def test_a_lost_device_has_its_own_error_and_stays_lost(call: str) -> None:
    with Opened(graphs=[1] if "capture" in call else []) as found:
        found.engine({"x": rows(1)})
        found.cuda.fail = {call: "IllegalAddress"}
        with pytest.raises(DeviceLost, match=r"illegal memory access.*CUDA error 700"):
            found.engine({"x": rows(1)})
        assert found.engine.notes == ()  # it is not a refused graph
        before = len(found.cuda.calls)
        with pytest.raises(DeviceLost):
            found.engine({"x": rows(1)})
        assert len(found.cuda.calls) == before  # CUDA is not asked again


def test_a_copy_of_one_byte_finds_the_lost_device_where_a_wait_does_not(opened: Opened) -> None:
    opened.engine({"x": rows(1)})
    opened.cuda.library.fakecuda_fail(b"cuEventRecord:1,cuStreamSynchronize:1,cuMemcpyDtoH:719")
    with pytest.raises(DeviceLost, match="CUDA error 719") as caught:
        opened.engine({"x": rows(1)})
    assert "CUDA error 1)" in str(caught.value.__cause__)


@pytest.mark.parametrize("code", ["copy_in:InvalidValue", "wait:InvalidResourceHandle"])
def test_a_call_that_fails_for_another_reason_costs_neither_the_device_nor_a_slot(
    opened: Opened, code: str
) -> None:
    call, _, name = code.partition(":")
    for _ in range(5):
        opened.cuda.fail = {call: name}
        with pytest.raises(DeploykitError, match=r"invalid .*CUDA error") as caught:
            opened.engine({"x": rows(1)})
        assert not isinstance(caught.value, DeviceLost)
    assert right(opened.engine, 1)
    assert len(opened.cuda.streams) == 1


@pytest.mark.parametrize("lost", [False, True])
def test_closing_ends_the_calls_under_way_and_does_not_raise_on_a_lost_device(lost: bool) -> None:
    with Opened(graphs=[1], scratch=64) as found:
        assert all(right(found.engine, 1) for _ in range(3))
        ticket = found.engine.submit({"x": rows(1)})
        if lost:
            found.cuda.lose("LaunchFailure")
    with pytest.raises(DeviceLost) if lost else nullcontext():
        np.testing.assert_array_equal(ticket.result()["y"], 2 * rows(1) + 1)


# what CUDA's codes mean


@pytest.mark.parametrize(
    ("names", "kind", "hint"),
    [
        ("OUT_OF_MEMORY", OutOfMemory, "smaller batch"),
        ("ILLEGAL_ADDRESS LAUNCH_FAILED ECC_UNCORRECTABLE ASSERT UNKNOWN", DeviceLost, "restart"),
        ("STREAM_CAPTURE_UNSUPPORTED NO_DEVICE INVALID_DEVICE", Unsupported, "deploykit doctor"),
        ("NOT_INITIALIZED", Unsupported, "fork"),
        ("NO_BINARY_FOR_GPU UNSUPPORTED_PTX_VERSION", Unsupported, "build it on this"),
        ("INVALID_VALUE INVALID_HANDLE", DeploykitError, ""),
    ],
)
def test_each_code_is_mapped_to_its_error(
    names: str, kind: type[DeploykitError], hint: str
) -> None:
    for name in names.split():
        code = int(getattr(driver.cuda.CUresult, f"CUDA_ERROR_{name}"))
        error = cuda_error("cuda:1", "call", code, "text")
        assert error.message.startswith("cuda:1: ")
        assert type(error) is kind
        assert hint in (error.hint or "")


@pytest.mark.parametrize(("code", "kind"), [(12345, Unsupported), (53, DeviceLost)])
def test_a_code_newer_than_the_bindings_is_a_deploykit_error(
    code: int, kind: type[DeploykitError]
) -> None:
    cuda = FakeCuda()
    cuda.library.fakecuda_fail(f"cuMemAlloc:{code}".encode())
    with pytest.raises(DeploykitError, match=r"cuMemAlloc.*unknown to the installed") as caught:
        cuda.allocate(1)
    assert type(caught.value) is kind


# the module that owns TensorRT


@pytest.mark.nvidia
def test_what_the_real_module_refuses(tmp_path: Path) -> None:
    if not installed("tensorrt"):
        pytest.skip("tensorrt is not installed")
    with pytest.raises(Unsupported, match=r"TensorRT 8\.6\.1 is installed"):
        check_version("8.6.1")
    for version in ("10.3.0", "10.13.3.9.post1", "11.4.0.106"):
        check_version(version)
    with pytest.raises(Unsupported, match="runs on a GPU only"):
        engine.open_engine(tmp_path / "m.trt", "cpu")
    if not shutil.which("nvidia-smi"):  # before the plan is read
        with pytest.raises(Unsupported, match="no NVIDIA driver"):
            engine.open_engine(tmp_path / "m.trt")
