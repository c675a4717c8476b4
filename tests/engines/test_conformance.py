"""What every Engine promises, whatever runs it.

The fixture `engine` is y = 2x + 1 on float32[N,4]; the other models of `cases.py` are opened by
every runtime that takes any model. A new runtime is one line there and passes this file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Arrays, Engine
from tests.support.runtimes import cases
from tests.support.runtimes.cases import CASES, OPENERS, PRESENT, Case, absent, param

pytestmark = pytest.mark.conformance
DYNAMIC = [case for case in CASES if case is not cases.FIXED]

Open = Callable[[Case], Engine]


@pytest.mark.parametrize("name", [param(name) for name in OPENERS])
def test_runtime_is_on_this_machine(name: str) -> None:
    if absent(name):
        pytest.skip(f"{name}: {absent(name)}")


@pytest.fixture(params=[each for each in PRESENT if each.values != ("fake",)])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens cases in each runtime that takes any model, and closes them at the end."""
    engines: list[Engine] = []

    def open_case(case: Case) -> Engine:
        folder = tmp_path / str(len(engines))
        folder.mkdir()
        engines.append(OPENERS[request.param](folder, case))
        return engines[-1]

    yield open_case
    for engine in engines:
        engine.close()


def check(case: Case, engine: Engine, feeds: Arrays) -> None:
    """The answer is what `case` computes: names in order, dtypes, shapes and every bit."""
    given, wanted = engine(feeds), case.compute(feeds)
    assert list(given) == list(wanted)
    for name, array in wanted.items():
        assert given[name].dtype == array.dtype, name
        np.testing.assert_array_equal(given[name], array, err_msg=name, strict=True)


def rows(count: int, start: float = 0.0) -> np.ndarray:
    """Integers, so that 2x + 1 is exact in every precision: float32, shape (count, 4)."""
    return (np.arange(count * 4, dtype=np.float32) + np.float32(start)).reshape(count, 4)


def test_device_and_runtime_say_what_really_runs(engine: Engine) -> None:
    assert engine.inputs == (TensorSpec("x", "float32", ("N", 4)),)
    assert engine.outputs == (TensorSpec("y", "float32", ("N", 4)),)
    assert re.fullmatch(r"cpu|cuda:\d+", engine.device)
    assert re.fullmatch(r"fake|(onnxruntime|openvino|torch|tensorrt) \d+\.\d+.*", engine.runtime)


def test_answer_belongs_to_the_caller_and_the_input_may_be_read_only(engine: Engine) -> None:
    """The server's inputs are views of bytes received."""
    x = np.frombuffer(rows(2).tobytes(), np.float32).reshape(2, 4)
    first, second = engine({"x": x})["y"], engine({"x": rows(2, start=100)})["y"]
    np.testing.assert_array_equal(first, 2 * x + 1)
    first[:] = -1  # writable, and nobody else's
    np.testing.assert_array_equal(x, rows(2))
    np.testing.assert_array_equal(second, 2 * rows(2, start=100) + 1)


def test_zero_rows_give_zero_rows_or_are_refused_by_name(runtime: str, engine: Engine) -> None:
    if runtime.startswith("tensorrt"):  # its plans are built for batches of 1 or more
        with pytest.raises(BadInput, match=r"\b0\b"):
            engine({"x": rows(0)})
        return
    y = engine({"x": rows(0)})["y"]
    assert (y.shape, y.dtype) == ((0, 4), np.float32)


def test_batch_above_the_largest_is_refused_by_number(engine: Engine) -> None:
    most = engine.max_batch or 300  # without a largest: any batch that fits the memory
    if engine.max_batch:
        with pytest.raises(BadInput, match=str(most + 1)):
            engine({"x": rows(most + 1)})
    x = rows(most)
    np.testing.assert_array_equal(engine({"x": x})["y"], 2 * x + 1)


@pytest.mark.parametrize(
    ("feeds", "says"),
    [
        ({}, "missing input 'x'"),
        ({"x": rows(1), "z": rows(1)}, "unknown input 'z'"),
        ({"x": rows(1)[0]}, r"input 'x' is float32\[N,4\], got float32\[4\]"),
        ({"x": rows(1)[:, :3]}, r"input 'x' is float32\[N,4\], got float32\[1,3\]"),
        ({"x": rows(1).astype(np.float64)}, r"input 'x' .* got float64\[1,4\]"),
        ({"x": np.array([["a"] * 4])}, r"input 'x' .* got str"),
        ({"x": np.array([[None] * 4])}, r"input 'x' .* got object"),
        ({"x": rows(1).tolist()}, "input 'x' is a list, not a NumPy array"),
        ({"x": rows(1).astype(">f4")}, "input 'x' has the other byte order than this machine"),
    ],
    ids=lambda value: None if isinstance(value, dict) else re.sub(r"\W+", "-", value),
)
def test_wrong_feeds_are_refused_by_name(
    engine: Engine, feeds: dict[str, np.ndarray], says: str
) -> None:
    for _ in range(2):  # also after valid ones
        with pytest.raises(BadInput, match=says) as caught:
            engine(feeds)
        engine({"x": rows(1)})
    if not says.startswith("input"):  # but a name
        assert "x:float32[N,4]" in str(caught.value.hint)


def test_a_closed_engine_says_so_and_still_names_its_tensors(engine: Engine) -> None:
    """The server's metadata and error messages need them while it shuts down."""
    for _ in range(2):
        engine.close()
    assert [spec.name for spec in (*engine.inputs, *engine.outputs)] == ["x", "y"]
    with pytest.raises(DeploykitError, match="closed"):  # before it looks at the feeds
        engine({})


@pytest.mark.parametrize("case", DYNAMIC, ids=lambda case: case.name)
def test_every_dtype_and_batch_comes_back_bit_for_bit(opened: Open, case: Case) -> None:
    engine = opened(case)
    assert (engine.inputs, engine.outputs) == (case.input_specs, case.output_specs)
    for number, batch in enumerate((5, 1, 33, 2, 33, 8, 5)):  # none disturbs another
        check(case, engine, case.feeds(batch, start=7 * number))


def test_another_dynamic_axis_may_change_too(opened: Open) -> None:
    engine = opened(cases.SEQUENCE)
    for batch, steps in ((1, 1), (2, 7), (5, 3), (2, 32)):
        check(cases.SEQUENCE, engine, cases.SEQUENCE.feeds(batch, T=steps))


VIEWS: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
    lambda a: a[::2],
    lambda a: a[::-2],
    lambda a: np.asfortranarray(a[::2]),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_views_of_any_dtype_are_read_in_their_order(opened: Open, case: Case) -> None:
    engine = opened(case)
    batch = 2 if case is cases.FIXED else 3
    twice = {}
    for name, array in case.feeds(batch).items():
        change = np.arange(2 * batch).astype(array.dtype).reshape(-1, *[1] * (array.ndim - 1))
        twice[name] = np.repeat(array, 2, axis=0) + change
    if case is cases.IDS:
        twice["ids"] %= len(cases.TABLE)
    for view in VIEWS:
        feeds = {name: view(array) for name, array in twice.items()}
        assert not any(array.flags.c_contiguous for array in feeds.values())
        check(case, engine, feeds)


def test_feeds_may_come_in_any_order_and_be_one_array(opened: Open) -> None:
    engine, feeds = opened(cases.TWO_INPUTS), cases.TWO_INPUTS.feeds(3)
    check(cases.TWO_INPUTS, engine, dict(reversed(feeds.items())))
    x = rows(3)
    check(cases.TWO_INPUTS, engine, {"a": x, "b": x})


@pytest.mark.parametrize(
    ("case", "wrong", "says"),
    [
        (cases.HALF, {"x": rows(2)}, r"input 'x' is float16\[N,4\], got float32\[2,4\]"),
        (cases.IDS, {"ids": np.zeros((2, 5), np.int32)}, r"is int64\[N,5\], got int32\[2,5\]"),
        (cases.MASK, {"keep": np.ones((2, 4), np.uint8)}, r"input 'keep' is bool.* got uint8\[2,4"),
        (cases.MASK, {"keep": np.ones((3, 4), np.bool_)}, "axis N is 2 and 3 in the same call"),
        (cases.TWO_INPUTS, {"c": rows(2)}, "unknown input 'c'"),
        (cases.FIXED, {"x": rows(3)}, r"input 'x' is float32\[2,4\], got float32\[3,4\]"),
        (cases.SEQUENCE, {"x": np.zeros((2, 3, 3), np.float32)}, r"\[N,T,2\], got .*\[2,3,3\]"),
    ],
)
def test_wrong_dtype_shape_or_name_is_refused_by_name_and_forgotten(
    opened: Open, case: Case, wrong: Arrays, says: str
) -> None:
    engine, feeds = opened(case), case.feeds(2)
    with pytest.raises(BadInput, match=says):
        engine({**feeds, **wrong})
    check(case, engine, feeds)


def test_two_engines_run_in_two_threads_at_once_and_one_may_close(opened: Open) -> None:
    """Each is called by one thread at a time; what they share inside must not mix their rows."""
    case = cases.MASK
    engines = [opened(case), opened(case)]

    def work(number: int) -> None:
        for call in range(25):
            check(case, engines[number], case.feeds(1 + call % 9, start=100 * number + call))

    with ThreadPoolExecutor(max_workers=2) as pool:
        for done in [pool.submit(work, number) for number in range(2)]:
            done.result(timeout=120)
    engines[0].close()
    check(case, engines[1], case.feeds(3))
