"""What the TensorRT runtime adds to test_cuda.py and test_plan.py: tensors, profiles, words.

The engine runs on a TensorRT and a CUDA made of Python; `make gpu-test` runs the real ones.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, OutOfMemory, Unsupported
from deploykit.core.manifest import Manifest
from deploykit.core.tensors import TensorSpec
from deploykit.engines.tensorrt.engine import choose_profile
from deploykit.engines.tensorrt.log import logger
from tests.support.campaign import rounds
from tests.support.runtimes.cuda_runs import FakeCuda
from tests.support.runtimes.fake_tensorrt import FakeTensorRt, tensor
from tests.support.runtimes.tensorrt_opened import (  # noqa: F401
    PROFILE,
    Opened,
    X,
    Y,
    opened_fixture,
    rows,
)

# what an engine says of itself


def test_specs_are_read_from_the_engine(opened: Opened) -> None:
    assert opened.engine.inputs == (TensorSpec("x", "float32", ("N", 4)),)
    assert opened.engine.outputs == (TensorSpec("y", "float32", ("N", 4)),)
    assert opened.engine.max_batch == 32
    assert opened.engine.device == "cuda:0"
    assert opened.engine.runtime == "tensorrt 10.13.3.9"


def test_names_of_axes_come_from_the_manifest() -> None:
    x, y = (TensorSpec(name, "float32", ("rows", 4, "T")) for name in "xy")
    found = Opened(
        (tensor("x", "INPUT", [-1, 4, -1]), tensor("y", "OUTPUT", [-1, 4, -1])),
        ({"x": [[1, 4, 1], [1, 4, 1], [2, 4, 9]]},),
        Manifest("tensorrt", (x,), (y,)),
    )
    assert found.engine.inputs == (x,)
    assert found.engine.outputs == (y,)


def test_axes_without_a_manifest_get_generated_names() -> None:
    found = Opened(
        (tensor("x", "INPUT", [-1, 4, -1]), Y), ({"x": [[1, 4, 1], [1, 4, 1], [2, 4, 9]]},)
    )
    assert str(found.engine.inputs[0]) == "x:float32[N,4,x_2]"


def test_manifest_of_other_tensors_does_not_change_the_sizes() -> None:
    wrong = TensorSpec("x", "float32", (7, "C"))
    found = Opened(manifest=Manifest("tensorrt", (wrong,), ()))
    assert str(found.engine.inputs[0]) == "x:float32[x_0,4]"


def test_engine_of_fixed_shapes_has_no_batch_limit() -> None:
    fixed = {"x": [[2, 4]] * 3}
    with Opened(
        (tensor("x", "INPUT", [2, 4]), tensor("y", "OUTPUT", [2, 4])), (fixed,)
    ).engine as e:
        assert e.max_batch is None
        np.testing.assert_array_equal(e({"x": rows(2)})["y"], 2 * rows(2) + 1)


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
        (tensor("x", "INPUT", [-1, 4], "FP8"), "tensor 'x' is FP8"),
        (tensor("x", "INPUT", [-1, 4], location="HOST"), "'x' is a shape tensor"),
        (tensor("x", "INPUT", [-1, 4], shape_io=True), "'x' is a shape tensor"),
        (tensor("x", "INPUT", [-1, 4], format="CHW4"), "'x' has no linear memory format"),
    ],
)
def test_tensor_that_numpy_cannot_carry_is_unsupported(item: Any, says: str) -> None:
    with pytest.raises(Unsupported, match=rf"m\.trt: .*{says}"):
        Opened((item, Y))


# calls


@pytest.mark.parametrize(("batch", "says"), [(0, "axis N is 0"), (33, "axis N is 33")])
def test_batch_out_of_range_names_the_range(opened: Opened, batch: int, says: str) -> None:
    with pytest.raises(BadInput, match=rf"m\.trt: input 'x': {says}, built for 1 to 32"):
        opened.engine({"x": rows(batch)})
    np.testing.assert_array_equal(opened.engine({"x": rows(1)})["y"], 2 * rows(1) + 1)


def test_wrong_feeds_do_not_reach_tensorrt(opened: Opened) -> None:
    before = len(opened.cuda.calls)
    for feeds in ({}, {"x": rows(1).astype(np.float64)}, {"x": rows(1), "z": rows(1)}):
        with pytest.raises(BadInput):
            opened.engine(feeds)
    assert len(opened.cuda.calls) == before


def test_two_calls_run_in_two_contexts(opened: Opened) -> None:
    tickets = [opened.engine.submit({"x": rows(2, start=n)}) for n in range(2)]
    assert len(opened.nv.contexts) == 2
    assert opened.cuda.names("enqueue", "wait") == ["enqueue", "enqueue"]
    for n, ticket in enumerate(tickets):
        np.testing.assert_array_equal(ticket.result()["y"], 2 * rows(2, start=n) + 1)


def test_more_calls_than_slots_answer_in_order(opened: Opened) -> None:
    tickets = [opened.engine.submit({"x": rows(1 + n % 4, start=n)}) for n in range(9)]
    for n, ticket in enumerate(tickets):
        np.testing.assert_array_equal(ticket.result()["y"], 2 * rows(1 + n % 4, start=n) + 1)


def test_shapes_and_addresses_are_set_once_for_calls_of_the_same_size(opened: Opened) -> None:
    opened.engine({"x": rows(2)})
    (context,) = opened.nv.contexts
    changes = context.changes
    for n in range(5):
        opened.engine({"x": rows(2, start=n)})
    assert context.changes == changes


# graphs, scratch memory, several profiles, data-dependent shapes


def test_graphs_have_contexts_of_their_own() -> None:
    """The stand-in fails when a graph runs whose context was changed since."""
    found = Opened(graphs=[1, 2], scratch=4096)
    with found.engine as engine:
        for count in (1, 2, 1, 2, 3, 1, 2, 32, 1, 2):
            np.testing.assert_array_equal(engine({"x": rows(count)})["y"], 2 * rows(count) + 1)
        assert len(found.nv.contexts) == 3
        assert len({context.scratch for context in found.nv.contexts}) == 1
        assert found.cuda.count["launch"] > 2
        assert engine.notes == ()
    assert found.cuda.held() == {}


def test_refused_graph_is_a_note_and_the_call_answers() -> None:
    found = Opened(graphs=[2])
    with found.engine as engine:
        engine({"x": rows(2)})
        found.nv.fail = {
            "execute_async_v3": "[a.cpp::b::1] Error Code 1: Cuda Runtime (operation not permitted "
            "when stream is capturing)"
        }
        np.testing.assert_array_equal(engine({"x": rows(2)})["y"], 2 * rows(2) + 1)
        assert "no CUDA graph for [2, 4]" in engine.notes[0]
        assert "cudaErrorStreamCaptureUnsupported" in engine.notes[0]


def test_profile_is_chosen_by_the_shapes() -> None:
    small = {"x": [[1, 4], [1, 4], [4, 4]]}
    large = {"x": [[3, 4], [64, 4], [64, 4]]}
    found = Opened(profiles=(small, large))
    with found.engine as engine:
        assert engine.max_batch == 64
        chosen = []
        for count in (1, 64, 2, 40, 4):
            np.testing.assert_array_equal(engine({"x": rows(count)})["y"], 2 * rows(count) + 1)
            chosen.append(found.nv.contexts[0].profile)
        assert chosen == [0, 1, 0, 1, 0]
        with pytest.raises(BadInput, match="axis N is 65, built for 1 to 4 or 3 to 64"):
            engine({"x": rows(65)})


def test_of_two_profiles_that_fit_the_closer_one_is_used() -> None:
    near = {"x": ((1, 4), (8, 4), (32, 4))}
    far = {"x": ((1, 4), (32, 4), (32, 4))}
    assert choose_profile([far, near], {"x": (6, 4)}) == 1
    assert choose_profile([far, near], {"x": (30, 4)}) == 0
    assert choose_profile([near], {"x": (33, 4)}) is None


def test_sizes_that_only_fit_different_profiles_are_refused() -> None:
    one = {"x": [[1, 4], [1, 4], [1, 4]], "x2": [[5, 4], [5, 4], [5, 4]]}
    two = {"x": [[5, 4], [5, 4], [5, 4]], "x2": [[1, 4], [1, 4], [1, 4]]}
    x2 = tensor("x2", "INPUT", [-1, 4])
    together = pytest.raises(BadInput, match="optimisation profiles together")
    with Opened((X, x2, Y), (one, two)).engine as engine, together:
        engine({"x": rows(1), "x2": rows(1)})


def test_output_whose_shape_depends_on_the_data_is_fetched_by_its_allocator() -> None:
    found = Opened((X, tensor("y", "OUTPUT", [-1, 4], late=True)), graphs=[3])
    with found.engine as engine:
        for start in (-1, -100, 5, -5):
            x = rows(3, start=start)
            np.testing.assert_array_equal(engine({"x": x})["y"], x[x[:, 0] > 0])
        assert found.cuda.count["begin_capture"] == 0
    assert found.cuda.held() == {}


def test_no_memory_for_such_an_output_says_how_much_was_needed() -> None:
    found = Opened((X, tensor("y", "OUTPUT", [-1, 4], late=True)))
    with found.engine as engine:
        engine({"x": rows(1)})
        found.cuda.total_bytes = found.cuda.used_bytes + 100
        with pytest.raises(OutOfMemory, match="needed"):
            engine({"x": rows(32, start=1)})
        found.cuda.total_bytes = 1 << 30
        assert engine({"x": rows(32, start=1)})["y"].shape == (32, 4)
    assert found.cuda.held() == {}


# the engine as a whole


def test_the_copy_times_of_the_last_call_are_reported() -> None:
    """Four megabytes take more than a microsecond each way."""
    with Opened(profiles=({"x": [[1, 4], [8, 4], [1 << 18, 4]]},)).engine as engine:
        assert engine.last_copies_us == (0, 0)
        before_ns = time.perf_counter_ns()
        engine({"x": rows(1 << 18)})
        taken_us = (time.perf_counter_ns() - before_ns) // 1000
        copied_in_us, copied_out_us = engine.last_copies_us
        assert copied_in_us > 0
        assert copied_out_us > 0
        assert copied_in_us + copied_out_us <= taken_us


def test_an_engine_has_the_notes_of_its_plan() -> None:
    with Opened(notes=("loaded on trust",)).engine as engine:
        assert engine.notes == ("loaded on trust",)


def test_one_logger_for_the_process() -> None:
    """TensorRT ignores every logger but the first."""
    nv = FakeTensorRt(FakeCuda())
    assert logger(nv) is logger(nv)


def test_layer_information_is_read_by_a_thread_that_never_used_cuda(opened: Opened) -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(opened.engine.layer_information).result() == ""  # the stand-in's


def test_many_calls_leak_nothing() -> None:
    found = Opened(graphs=[1, 2], scratch=1024)
    for n in range(rounds(2_000, 100_000)):
        found.engine.submit({"x": rows(1 + n % 5)})
        found.cuda.calls.clear()
    assert len(found.nv.contexts) == 6  # two slots: two graphs and one for all other sizes
    found.engine.close()
    assert found.cuda.held() == {}
