"""How much of the data goes through two engines at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploykit.benchmarking.bench import bench
from deploykit.core.tensors import parse_spec
from deploykit.engines.data.samples import Samples
from deploykit.evaluation.compare import compare
from deploykit.evaluation.feeds import (
    MOST_BYTES,
    MOST_SAMPLES,
    axis_sizes,
    batch_that_fits,
    first_rows,
    rows_that_fit,
)
from deploykit.graph.graph import Graph
from tests.support.onnx_zoo import conv_relu, linear, make


def test_small_models_are_evaluated_in_full_batches() -> None:
    assert batch_that_fits(Graph(linear()), {"N": 1}) == MOST_SAMPLES


def test_large_tensors_are_evaluated_in_smaller_batches() -> None:
    from onnx import helper

    node = helper.make_node("Relu", ["x"], ["y"], name="relu")
    model = make([node], {"x": ("N", "T")}, {"y": ("N", "T")}, {})
    quarter = MOST_BYTES // 4 // 4  # float32 values of a quarter of the bound
    assert batch_that_fits(Graph(model), {"N": 1, "T": quarter}) == 4
    assert batch_that_fits(Graph(model), {"N": 1, "T": quarter * 100}) == 1


def test_axis_sizes_come_from_the_samples() -> None:
    specs = [parse_spec("ids:int64[N,T]"), parse_spec("x:float32[N,3]")]
    inputs = {"ids": np.zeros((9, 5), np.int64), "x": np.zeros((9, 3), np.float32)}
    assert axis_sizes(Samples(inputs, None, "here"), specs, 2) == {"N": 2, "T": 5}
    assert axis_sizes(None, specs, 2) == {"N": 2}
    assert batch_that_fits(Graph(conv_relu()), {"N": 1}) == MOST_SAMPLES


def wide(path: Path, side: int, weight: float = 0.0) -> Path:
    """A convolution to 64 channels, 67 MB for each row of 512 x 512, and the channels' maxima.

    Outputs of that size would only take time: the bound is on the largest tensor in the graph.
    """
    weights = numpy_helper.from_array(np.full((64, 1, 1, 1), weight, np.float32), "w")
    shape = ["N", 1, side, side]
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["y"]),
            helper.make_node("GlobalMaxPool", ["y"], ["z"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["N", 64, 1, 1])],
        [weights],
    )
    found = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(found, path)
    return path


@pytest.mark.parametrize(("side", "rows"), [(16, 32), (256, 8), (512, 2), (4096, 2)])
def test_no_more_rows_are_compared_at_once_than_fit_into_memory(
    tmp_path: Path, side: int, rows: int
) -> None:
    model = wide(tmp_path / "m.onnx", side)
    feeds = [{"x": np.empty((n, 1, side, side), np.uint8)} for n in (1, 2, 7, 32)]
    assert rows_that_fit(feeds, model) == rows
    sizes = [len(each["x"]) for each in first_rows(feeds, rows, Graph.open(model).inputs)]
    assert sizes == [min(n, rows) for n in (1, 2, 7, 32)]


@pytest.mark.parametrize("given", [False, True])
def test_compare_and_bench_use_as_many_rows_as_fit_and_say_so(tmp_path: Path, given: bool) -> None:
    first, second = wide(tmp_path / "a.onnx", 256, 1.0), wide(tmp_path / "b.onnx", 256, 1.0001)
    data = tmp_path / "data.npz" if given else None
    if data:
        np.savez(data, x=np.random.default_rng(0).random((11, 1, 256, 256), np.float32))
    note = "compared at batches of up to 8: larger ones take too much memory"
    found = compare(first, second, data=data)
    batches = [row.batch for row in found.parity.rows]
    assert (batches, found.note) == ([8, 3] if given else [1, 2, 7, 8], note)
    if data is None:
        far = compare(first, wide(tmp_path / "c.onnx", 256, 1.5)).divergence
        assert far is not None
        assert (far.operator, far.tensor) == ("Conv", "y")
        short: dict[str, Any] = {"batches": (1,), "seconds": 0.02}
        report = bench([first, second], out=tmp_path, device="cpu", **short)
        assert max(row["batch"] for row in report.parity[0]["rows"]) == 8
        assert f"parity: {note}" in report.notes


def test_a_small_model_is_compared_at_32_rows_without_a_note(tmp_path: Path) -> None:
    found = compare(wide(tmp_path / "a.onnx", 8, 1.0), wide(tmp_path / "b.onnx", 8, 1.0))
    assert (max(row.batch for row in found.parity.rows), found.note) == (32, "")
