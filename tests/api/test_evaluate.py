"""How much of the data goes through two engines at once."""

from __future__ import annotations

import numpy as np

from deploykit.api.evaluate import MOST_BYTES, MOST_SAMPLES, axis_sizes, batch_that_fits
from deploykit.core.tensors import parse_spec
from deploykit.onnx_graph.graph import Graph
from deploykit.runtimes.data.samples import Samples
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
