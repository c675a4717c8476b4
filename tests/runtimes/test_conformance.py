"""What every Engine promises, whatever runs it. The fixture `engine` is y = 2x + 1 on float32[N,4].

A new runtime is one line in conftest.py and passes this file.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.engine import Engine


def rows(count: int, start: float = 0.0) -> np.ndarray:
    """Whole numbers, so that 2x + 1 is exact in every precision: float32, shape (count, 4)."""
    return (np.arange(count * 4, dtype=np.float32) + np.float32(start)).reshape(count, 4)


def test_specs_name_the_tensors(engine: Engine) -> None:
    assert engine.inputs == (TensorSpec("x", "float32", ("N", 4)),)
    assert engine.outputs == (TensorSpec("y", "float32", ("N", 4)),)


def test_device_and_runtime_say_what_really_runs(engine: Engine) -> None:
    assert re.fullmatch(r"cpu|cuda:\d+", engine.device)
    assert re.fullmatch(r"fake|(onnxruntime|torch|tensorrt) \d+\.\d+.*", engine.runtime)


@pytest.mark.parametrize("batch", [1, 2, 7, 33])
def test_every_batch_size_gives_the_right_rows(engine: Engine, batch: int) -> None:
    x = rows(batch)
    np.testing.assert_array_equal(engine({"x": x})["y"], 2 * x + 1)


def test_batch_may_shrink_and_grow_between_calls(engine: Engine) -> None:
    shapes = [engine({"x": rows(batch)})["y"].shape for batch in (7, 1, 33, 2)]
    assert shapes == [(7, 4), (1, 4), (33, 4), (2, 4)]


def test_outputs_are_what_the_specs_say(engine: Engine) -> None:
    outputs = engine({"x": rows(3)})
    assert {name: (array.dtype.name, array.shape) for name, array in outputs.items()} == {
        "y": ("float32", (3, 4))
    }


@pytest.mark.parametrize(
    "view",
    [lambda x: x.T, lambda x: x[::-1, ::-1], lambda x: np.asfortranarray(x)],
    ids=["transposed", "reversed", "fortran"],
)
def test_memory_layout_of_the_input_does_not_matter(engine: Engine, view: object) -> None:
    assert callable(view)
    x = view(rows(4))
    assert not x.flags.c_contiguous
    np.testing.assert_array_equal(engine({"x": x})["y"], 2 * x + 1)


def test_read_only_input_is_taken(engine: Engine) -> None:
    """The server's inputs are views of bytes received."""
    x = np.frombuffer(rows(2).tobytes(), np.float32).reshape(2, 4)
    assert not x.flags.writeable
    np.testing.assert_array_equal(engine({"x": x})["y"], 2 * x + 1)


def test_zero_rows_give_zero_rows_or_are_refused(engine: Engine) -> None:
    try:
        outputs = engine({"x": rows(0)})
    except BadInput:
        return
    assert outputs["y"].shape == (0, 4)


@pytest.mark.parametrize(
    ("feeds", "says"),
    [
        ({}, "missing input 'x'"),
        ({"x": rows(1), "z": rows(1)}, "unknown input 'z'"),
        ({"x": rows(1)[0]}, r"input 'x' is float32\[N,4\], got float32\[4\]"),
        ({"x": rows(1)[:, :3]}, r"input 'x' is float32\[N,4\], got float32\[1,3\]"),
        ({"x": rows(1)[None]}, r"got float32\[1,1,4\]"),
        ({"x": rows(1).astype(np.float64)}, r"input 'x' .* got float64\[1,4\]"),
        ({"x": rows(1).astype(np.int64)}, r"input 'x' .* got int64\[1,4\]"),
        ({"x": np.array([["a"] * 4])}, r"input 'x' .* got str"),
        ({"x": np.array([[None] * 4])}, r"input 'x' .* got object"),
        ({"x": rows(1).tolist()}, "input 'x' is a list, not a NumPy array"),
        ({"x": rows(1).astype(">f4")}, "input 'x' is not in this machine's byte order"),
    ],
    ids=lambda value: None if isinstance(value, dict) else re.sub(r"\W+", "-", value),
)
def test_wrong_feeds_are_refused_by_name(
    engine: Engine, feeds: dict[str, np.ndarray], says: str
) -> None:
    with pytest.raises(BadInput, match=says):
        engine(feeds)


def test_refused_call_leaves_the_engine_usable(engine: Engine) -> None:
    with pytest.raises(BadInput):
        engine({"x": rows(1)[:, :3]})
    np.testing.assert_array_equal(engine({"x": rows(1)})["y"], 2 * rows(1) + 1)


def test_second_call_does_not_change_the_first_answer(engine: Engine) -> None:
    first = engine({"x": rows(2)})["y"]
    second = engine({"x": rows(2, start=100)})["y"]
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, 2 * rows(2) + 1)


def test_answer_belongs_to_the_caller(engine: Engine) -> None:
    x = rows(2)
    y = engine({"x": x})["y"]
    y[:] = -1  # writable, and nobody else's
    np.testing.assert_array_equal(x, rows(2))
    np.testing.assert_array_equal(engine({"x": x})["y"], 2 * rows(2) + 1)


def test_another_thread_may_call_it(engine: Engine) -> None:
    """The server calls an engine from its batcher's thread, not from the one that opened it."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        y = pool.submit(lambda: engine({"x": rows(5)})["y"]).result(timeout=60)
    np.testing.assert_array_equal(y, 2 * rows(5) + 1)


def test_closing_twice_is_harmless(engine: Engine) -> None:
    engine.close()
    engine.close()


def test_closed_engine_says_so(engine: Engine) -> None:
    with engine:
        engine({"x": rows(1)})
    with pytest.raises(DeploykitError, match="closed"):
        engine({"x": rows(1)})
