"""What the TensorRT runtime adds to test_cuda.py and test_plan.py: tensors, profiles, contexts.

Here on a TensorRT made of Python and our CUDA driver; `make gpu-test` runs the real ones.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, DeploykitError, MissingExtra, OutOfMemory, Unsupported
from deploykit.core.extras import installed
from deploykit.core.manifest import Manifest
from deploykit.core.tensors import TensorSpec
from deploykit.engines.cuda.errors import CaptureRefused, DeviceLost
from deploykit.engines.tensorrt.engine import choose_profile
from deploykit.engines.tensorrt.log import logger, recorder
from tests.support.runtimes.fake_tensorrt import FakeTensorRt, replaced, tensor
from tests.support.runtimes.gpu_machine import (  # noqa: F401
    PROFILE,
    Opened,
    X,
    Y,
    opened_fixture,
    right,
)
from tests.support.runtimes.own_cuda import FakeCuda, rows

SIZES = (1, 2, 4, 8)
MEMORY = {"weights": 100_000, "context": 1000}


def calls(*sizes: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.zeros((size, 4), np.float32)} for size in sorted(sizes, reverse=True)]


# what an engine says of itself


def test_an_engine_describes_itself() -> None:
    with Opened(notes=("loaded on trust",)).engine as engine:
        assert engine.inputs == (TensorSpec("x", "float32", ("N", 4)),)
        assert engine.outputs == (TensorSpec("y", "float32", ("N", 4)),)
        assert (engine.max_batch, engine.device) == (32, "cuda:0")
        assert engine.runtime == "tensorrt 10.13.3.9"
        assert engine.notes == ("loaded on trust",)


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
        ({"x": [[32, 4], [8, 4], [1, 4]]},),
        (PROFILE, {"x": [[1, 4], [64, 4], [32, 4]]}),
    ],
    ids=["none", "rank", "negative", "falling", "optimum"],
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


def test_wrong_feeds_are_refused_before_tensorrt(opened: Opened) -> None:
    before = len(opened.cuda.calls)
    for batch in (0, 33):
        words = rf"m\.trt: input 'x': axis N is {batch}, built for 1 to 32"
        with pytest.raises(BadInput, match=words):
            opened.engine({"x": rows(batch)})
    for feeds in ({}, {"x": rows(1).astype(np.float64)}, {"x": rows(1), "z": rows(1)}):
        with pytest.raises(BadInput):
            opened.engine(feeds)
    assert len(opened.cuda.calls) == before
    assert right(opened.engine, 1)


def test_shapes_and_addresses_are_set_once_for_calls_of_the_same_size(opened: Opened) -> None:
    assert right(opened.engine, 2)
    (context,) = opened.nv.contexts
    changes = context.changes
    assert all(right(opened.engine, 2, start=n) for n in range(5))
    assert context.changes == changes


def test_the_copy_times_of_the_last_call_are_reported() -> None:
    """Four megabytes take more than a microsecond each way."""
    with Opened(profiles=({"x": [[1, 4], [8, 4], [1 << 18, 4]]},)).engine as engine:
        assert engine.last_copies_us == (0, 0)
        before_ns = time.perf_counter_ns()
        engine({"x": rows(1 << 18)})
        taken_us = (time.perf_counter_ns() - before_ns) // 1000
        assert min(engine.last_copies_us) > 0
        assert sum(engine.last_copies_us) <= taken_us


def test_layer_information_is_read_by_a_thread_that_never_used_cuda(opened: Opened) -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(opened.engine.layer_information).result() == ""  # the stand-in's


# several profiles


def test_profile_is_chosen_by_the_shapes() -> None:
    small = {"x": [[1, 4], [1, 4], [4, 4]]}
    large = {"x": [[3, 4], [64, 4], [64, 4]]}
    with Opened(profiles=(small, large)) as found:
        assert found.engine.max_batch == 64
        chosen = []
        for count in (1, 64, 2, 40, 4):
            assert right(found.engine, count)
            chosen.append(found.nv.contexts[0].profile)
        assert chosen == [0, 1, 0, 1, 0]
        with pytest.raises(BadInput, match="axis N is 65, built for 1 to 4 or 3 to 64"):
            found.engine({"x": rows(65)})


def test_of_two_profiles_that_fit_the_closer_one_is_used() -> None:
    near = {"x": ((1, 4), (8, 4), (32, 4))}
    far = {"x": ((1, 4), (32, 4), (32, 4))}
    assert choose_profile([far, near], {"x": (6, 4)}) == 1
    assert choose_profile([far, near], {"x": (30, 4)}) == 0
    assert choose_profile([near], {"x": (33, 4)}) is None


def test_sizes_that_only_fit_different_profiles_are_refused() -> None:
    one = {"x": [[1, 4]] * 3, "x2": [[5, 4]] * 3}
    two = {"x": [[5, 4]] * 3, "x2": [[1, 4]] * 3}
    x2 = tensor("x2", "INPUT", [-1, 4])
    together = pytest.raises(BadInput, match="optimisation profiles together")
    with Opened((X, x2, Y), (one, two)).engine as engine, together:
        engine({"x": rows(1), "x2": rows(1)})


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
    for engine in (found.engine, *others):
        with pytest.raises(DeploykitError, match="is closed"):
            engine({"x": rows(1)})


@pytest.mark.parametrize(("ended", "kind"), [("closed", DeploykitError), ("lost", DeviceLost)])
def test_an_engine_that_is_closed_or_lost_takes_no_memory(
    ended: str, kind: type[DeploykitError]
) -> None:
    with Opened(memory=MEMORY) as found:
        if ended == "closed":
            found.engine.close()
        else:
            found.cuda.fail = {"wait": "IllegalAddress"}
            with pytest.raises(DeviceLost):
                found.engine({"x": rows(1)})
        used = found.cuda.used_bytes
        with pytest.raises(kind, match=ended):
            found.engine.prepare(calls(8), joined=True)
        with pytest.raises(kind, match=ended):
            found.engine.share()
        assert found.cuda.used_bytes == used


def test_engines_that_share_weights_run_in_threads_of_their_own() -> None:
    """The stand-in fails when two threads use one context."""
    with Opened(graphs=SIZES, memory=MEMORY, scratch=512) as found:
        engines = [found.engine, *(found.engine.share(graphs=SIZES) for _ in range(2))]

        def run(number: int) -> bool:
            return all(right(engines[number], 1 + n % 9, start=100 * number + n) for n in range(60))

        with ThreadPoolExecutor(len(engines)) as pool:
            assert all(pool.map(run, range(len(engines))))
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
    ids=["plan", "scratch", "context"],
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


def test_a_graph_above_the_largest_batch_is_one_of_the_largest_batch() -> None:
    with Opened(profiles=({"x": [[1, 4], [2, 4], [6, 4]]},), graphs=(1, 2, 4, 8, 16)) as found:
        found.engine.prepare(calls(1, 2, 4, 6), joined=True)
        before = found.cuda.count["launch"]
        assert right(found.engine, 5)
        assert found.cuda.count["launch"] == before + 1
        with pytest.raises(BadInput, match="axis N is 7"):
            found.engine({"x": rows(7)})


def test_of_several_profiles_no_call_is_padded_out_of_its_own() -> None:
    """Rows of 4 fit the first profile, of 9 the second: 3 long rows padded to 8 would fit none."""
    many = {"x": [[1, 1], [8, 4], [8, 4]]}
    long = {"x": [[1, 5], [2, 9], [3, 9]]}
    ends = (tensor("x", "INPUT", [-1, -1]), tensor("y", "OUTPUT", [-1, 9]))

    def sums(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": feeds["x"].sum(1, keepdims=True)}

    with Opened(ends, (many, long), graphs=(8,), computes=sums) as found:
        found.engine.prepare([{"x": np.ones((8, 4), np.float32)}], joined=True)
        answer = found.engine({"x": np.ones((3, 9), np.float32)})["y"]
        np.testing.assert_array_equal(answer, np.full((3, 9), 9, np.float32))


def test_an_engine_of_fixed_shapes_has_no_batch_limit_and_one_graph() -> None:
    ends = (tensor("x", "INPUT", [2, 4]), tensor("y", "OUTPUT", [2, 4]))
    with Opened(ends, ({"x": [[2, 4]] * 3},), graphs=SIZES) as found:
        assert found.engine.max_batch is None
        found.engine.prepare(calls(2), joined=False)
        before = found.cuda.count["launch"]
        assert right(found.engine, 2)
        assert found.cuda.count["launch"] == before + 1


# what the TensorRT runtime refuses, at load and in a call, and what it says of it


NOISE = (
    "getDeviceMemorySizeV2 is only supported from TensorRT 10.1 onwards"  # lean 10.16.1, at load
)
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


@pytest.mark.parametrize("call", LOADS)
def test_refusal_at_load_gives_the_reason_from_the_log(call: str) -> None:
    line = "[runtime.cpp::deserialize::1] IRuntime: Error Code 1: the reason"
    with pytest.raises(Unsupported, match=rf"m\.trt: .*{LOADS[call]}.*: the reason") as caught:
        Opened(fail={call: line})
    assert "runtime.cpp" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("the reason", Unsupported),
        ("Cuda Runtime (out of memory)", OutOfMemory),
        ("Cuda Runtime (an illegal memory access was encountered)", DeviceLost),
        ("Cuda Runtime (operation not permitted when stream is capturing)", CaptureRefused),
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
    if kind is not DeviceLost:
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

    def use() -> None:
        found.engine.prepare()
        found.engine({"x": rows(2)})

    found.nv.report = lose  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(DeviceLost):
            use()
    found.engine.close()


@pytest.mark.parametrize(
    ("line", "kind"),
    [  # as TensorRT for RTX 1.7 and TensorRT 8.6 wrote them, and texts in the binaries of 10 and 11
        ("Myelin ([exec.cpp:1509: exec] CUDA error 700 launching __myl_Relu kernel", DeviceLost),
        ("initializing cuDNN: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", OutOfMemory),
        ("Error Code 2: OutOfMemory (Requested size was 1073741824 bytes.)", OutOfMemory),
        ("Requested amount of GPU memory (4096 bytes) could not be allocated.", OutOfMemory),
        ("CUDA initialization failure with error: 719", DeviceLost),
    ],
)
def test_errors_of_other_libraries_keep_their_meaning(
    opened: Opened, line: str, kind: type[Unsupported]
) -> None:
    opened.nv.fail = {RUNS: line}
    with pytest.raises(kind, match=r"m\.trt: cuda:0"):
        opened.engine({"x": rows(2)})


@pytest.mark.parametrize(
    "call", ["deserialize_cuda_engine", "set_input_shape", "set_tensor_address"]
)
def test_an_error_line_of_a_call_that_succeeded_is_not_the_reason(call: str) -> None:
    opened = Opened(noise={call: NOISE})
    opened.nv.fail = {RUNS: "the reason\n  followed by\n  a dump of the graph"}
    with pytest.raises(Unsupported, match=r"the reason$"):
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


def test_tensorrt_can_read_its_errors_back_from_the_recorder() -> None:
    """Its C++ side calls `get_num_errors`, where NVIDIA's documents have `num_errors`."""
    kept = recorder(FakeTensorRt())()
    kept.report_error("INTERNAL_ERROR", "the reason")
    assert kept.get_num_errors() == kept.num_errors() == 1
    assert [kept.get_error_code(0), kept.get_error_desc(0)] == ["INTERNAL_ERROR", "the reason"]
    assert not kept.has_overflowed()
    kept.clear()
    assert kept.get_num_errors() == 0


def test_runtime_engine_and_context_report_each_to_a_recorder_of_its_own(opened: Opened) -> None:
    """TensorRT ignores every logger but the first: there is one for the process."""
    nv = FakeTensorRt(FakeCuda(new_machine=False))
    assert logger(nv) is logger(nv)
    opened.engine({"x": rows(2)})
    owners = (opened.engine._runtime, opened.engine._engine, opened.nv.contexts[0])
    assert None not in [owner.error_recorder for owner in owners]
    for owner in owners:
        opened.nv.report(NOISE, owner)
    opened.nv.fail = {RUNS: "the reason"}
    with pytest.raises(Unsupported, match=r"the reason$"):
        opened.engine({"x": rows(2)})


def test_an_engine_built_for_a_dla_core_runs_on_it(opened: Opened) -> None:
    assert opened.nv.does.seen["runtime_dla"] == -1
    other = Opened(dla=1)
    assert other.nv.does.seen["runtime_dla"] == 1
    other.engine.close()


@pytest.mark.parametrize(
    ("line", "says"), [("Error Code 1: Myelin (it failed)", "it failed"), ("", "no reason in its")]
)
def test_a_library_below_tensorrt_writes_to_the_logger_or_says_nothing(
    opened: Opened, line: str, says: str
) -> None:
    opened.nv.fail = {RUNS: line or " "}
    opened.nv.recorded = False
    if not line:
        opened.nv.report = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(Unsupported, match=says):
        opened.engine({"x": rows(2)})


# the module that owns TensorRT


@pytest.mark.parametrize(
    ("content", "major"),
    [(b"\0libcudart.so.12\0", "12"), (b"libcudart.so.13", "13"), (b"static", "")],
)
def test_tensorrt_that_is_not_from_pip_names_its_cuda_by_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, major: str
) -> None:
    """As NVIDIA's Debian packages and images have it: no record of pip's is there."""
    library = tmp_path / "libnvinfer.so.10.3.0"
    library.write_bytes(content)
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 0000 08:01 12   {library}\n7f02-7f03 rw-p 0 0:0 0 [heap]\n")
    with replaced("tensorrt", FakeTensorRt()):
        opening = importlib.import_module("deploykit.engines.tensorrt.open")
        monkeypatch.setattr(opening, "_MAPS", maps)
        assert opening.tensorrt_cuda() == major
        machine = opening.here(FakeCuda())
    assert machine.facts().get("cuda", "") == major  # never that of the driver


def test_without_tensorrt_the_error_says_how_to_install_it() -> None:
    if installed("tensorrt"):
        pytest.skip("tensorrt is installed")
    with pytest.raises(MissingExtra, match="tensorrt is not installed"):
        importlib.import_module("deploykit.engines.tensorrt.open")


@pytest.mark.nvidia
def test_what_the_real_module_refuses(tmp_path: Path) -> None:
    if not installed("tensorrt"):
        pytest.skip("tensorrt is not installed")
    module = importlib.import_module("deploykit.engines.tensorrt.open")
    with pytest.raises(Unsupported, match=r"TensorRT 8\.6\.1 is installed"):
        module.check_version("8.6.1")
    for version in ("10.3.0", "10.13.3.9.post1", "11.4.0.106"):
        module.check_version(version)
    with pytest.raises(Unsupported, match="runs on a GPU only"):
        module.open_engine(tmp_path / "m.trt", "cpu")
    if not shutil.which("nvidia-smi"):  # before the plan is read
        with pytest.raises(Unsupported, match="no NVIDIA driver"):
            module.open_engine(tmp_path / "m.trt")
