"""ONNX Runtime on the CPU gives the memory of large runs back."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import onnxruntime as ort

from deploykit.engines.batching import prove_rows
from deploykit.engines.onnxruntime.engine import SHRINK_S, Arena, open_engine
from deploykit.serving.models.warmup import WarmUp
from deploykit.serving.observe.metrics import this_process
from tests.support.serving.loops import Clock

WIDTH = 1 << 20  # float32: 4 MiB a row
ROWS = 32


class Seconds(Clock):
    def __call__(self) -> float:  # type: ignore[override]
        return self.us / 1e6


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y[N, WIDTH] = x[N, 1] * w."""
    weights = numpy_helper.from_array(np.ones((1, WIDTH), np.float32), "w")
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size])
        for name, size in (("x", 1), ("y", WIDTH))
    ]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"])], "g", values[:1], values[1:], [weights]
    )
    opset = [helper.make_opsetid("", 18)]
    path = tmp_path_factory.mktemp("wide") / "wide.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()
    )
    return path


def feeds(rows: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((rows, 1), np.float32)}


def test_memory_is_given_back_now_and_then_and_before_larger_runs() -> None:
    clock = Seconds()
    arena = Arena(ort, clock)
    assert arena.options(feeds(2)) is not None  # the first
    assert arena.options(feeds(2)) is None
    assert arena.options(feeds(1)) is None
    assert arena.options(feeds(3)) is not None  # larger
    assert arena.options(feeds(3), repeated=True) is None
    clock.us += int(SHRINK_S * 1e6)
    assert arena.options(feeds(1), repeated=True) is not None  # later
    assert arena.options(feeds(1)) is None
    assert arena.options(feeds(2)) is not None  # larger than what followed


def test_a_session_does_not_keep_its_largest_outputs_for_ever(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 32 rows has outputs of 128 MiB; other tests run in this process too."""
    engine, clock = open_engine(wide, "cpu"), Seconds()
    monkeypatch.setattr(engine, "_arena", Arena(ort, clock))
    for rows in (1, 2, 4, 8, 16, ROWS):
        assert engine(feeds(rows))["y"].shape == (rows, WIDTH)
    before = this_process()["resident_bytes"]
    clock.us += int(SHRINK_S * 1e6)
    assert engine(feeds(1))["y"][0, 0] == 1
    freed = before - this_process()["resident_bytes"]
    assert freed > (ROWS - 2) * WIDTH * 4
    assert freed < ROWS * WIDTH * 4 * 1.5  # smaller runs' blocks were given back before
    engine.close()


def resident_bytes() -> int:
    """Without what malloc keeps: a server has it return large blocks (`return_large_blocks`)."""
    ctypes.CDLL(None).malloc_trim(0)
    return this_process()["resident_bytes"]


def test_a_server_that_is_ready_keeps_nothing_of_its_warm_up(wide: Path) -> None:
    """Its largest batch has outputs of 64 MiB: it kept 190 MiB, more with larger ones."""
    with open_engine(wide, "cpu") as engine:
        assert engine(feeds(1))["y"][0, 0] == 1
        before = resident_bytes()
        assert prove_rows(engine, 16).passed
        times, _ = WarmUp("m", engine, Clock(), max_batch=16).run()
        assert max(times) == 16
        assert resident_bytes() - before < 4 * WIDTH * 4
