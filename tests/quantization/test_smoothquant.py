from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from deploykit.engines.engine import load
from deploykit.graph.graph import Graph
from deploykit.quantization.calibrate import calibrate
from deploykit.quantization.qdq import to_pairs
from deploykit.quantization.smoothquant import smooth
from tests.support.graphs.data import feeds, samples, sqnr_db
from tests.support.graphs.layer_norm import OUTLIERS, layer_norm
from tests.support.onnx_zoo import mnist_like, save

SHAPES = [{}, {"residual": True}, {"gemm": True}, {"gemm": True, "residual": True}]


def smoothed(model: onnx.ModelProto, tmp_path: Path) -> tuple[Graph, Graph, tuple[str, ...]]:
    """The model's graph, the smoothed one, and what was smoothed."""
    graph = Graph.open(save(model, tmp_path / "model.onnx"))
    peaks = calibrate(graph, samples(model, 64)).channel_peaks
    other, names = smooth(graph, peaks)
    return graph, other.save(tmp_path / "smoothed.onnx"), names


def run(graph: Graph, inputs: dict[str, np.ndarray]) -> np.ndarray:
    with load(graph.path, "cpu") as engine:
        return next(iter(engine(inputs).values()))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_smoothed_graph_computes_the_same_to_the_last_bit(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    model = layer_norm(**shape)
    before, after, names = smoothed(model, tmp_path)
    inputs = feeds(model, 50, seed=1)
    assert names == ("normal",)
    np.testing.assert_array_equal(run(after, inputs), run(before, inputs))


def test_the_axis_of_a_layer_norm_may_be_counted_from_the_front(tmp_path: Path) -> None:
    model = layer_norm()
    model.graph.node[0].attribute[0].i = 1
    before, after, names = smoothed(model, tmp_path)
    assert names == ("normal",)
    np.testing.assert_array_equal(run(after, feeds(model, 9)), run(before, feeds(model, 9)))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_smoothed_graph_loses_far_less_to_int8(tmp_path: Path, shape: dict[str, Any]) -> None:
    model = layer_norm(**shape)
    before, after, _ = smoothed(model, tmp_path)
    inputs = feeds(model, 50, seed=1)
    wanted = run(before, inputs)
    quality = []
    for graph in (before, after):
        pairs = to_pairs(graph, calibrate(graph, samples(model, 64)))
        quality.append(sqnr_db(wanted, run(pairs.save(tmp_path / "int8.onnx"), inputs)))
    assert quality[1] > quality[0] + (10 if not shape.get("residual") else 0)


def test_the_factors_go_into_the_layer_norm_where_nothing_else_reads_it(tmp_path: Path) -> None:
    before, after, _ = smoothed(layer_norm(), tmp_path)
    assert [n.op_type for n in after.model.graph.node] == [
        n.op_type for n in before.model.graph.node
    ]


def test_a_gemm_with_transposed_weights_gives_the_factors_of_a_matmul(tmp_path: Path) -> None:
    scales = []
    for gemm in (False, True):
        _, after, _ = smoothed(layer_norm(gemm=gemm, peak=64.0), tmp_path)
        weights = {t.name: t for t in after.model.graph.initializer}
        scales.append(onnx.numpy_helper.to_array(weights["scale_smoothed"]))
    np.testing.assert_array_equal(scales[1], scales[0])


def test_one_multiplication_serves_all_readers_where_another_node_reads_it(tmp_path: Path) -> None:
    _, after, _ = smoothed(layer_norm(residual=True), tmp_path)
    nodes = {node.name: node for node in after.model.graph.node}
    (product,) = [node for node in nodes.values() if node.op_type == "Mul"]
    readers = {name for name, node in nodes.items() if product.output[0] in node.input}
    assert readers == {"query", "key"}
    assert "normal" in nodes["residual"].input


def test_channels_are_alike_afterwards(tmp_path: Path) -> None:
    model = layer_norm(peak=1000.0)
    before, after, _ = smoothed(model, tmp_path)
    spread = []
    for graph in (before, after):
        (peaks,) = calibrate(graph, samples(model, 64)).channel_peaks.values()
        spread.append(max(peaks) / np.median(peaks))
    assert spread[0] > 500
    assert spread[1] < 8


def test_a_layer_norm_without_outliers_keeps_its_weights(tmp_path: Path) -> None:
    graph = Graph.open(save(layer_norm(), tmp_path / "model.onnx"))
    even = {"normal": [1.0] * 32}
    flat = smooth(graph, even)[1]
    peaks = dict(calibrate(graph, samples(layer_norm(), 64)).channel_peaks)
    assert flat == ("normal",)  # the weights differ although the activations do not
    assert smooth(graph, {})[1] == ()
    dead = list(peaks["normal"])
    for channel in OUTLIERS:
        dead[channel] = 0.0  # never active: any factor would be a guess
    weights = {t.name: t for t in smooth(graph, {"normal": dead})[0].model.graph.initializer}
    assert np.isfinite(onnx.numpy_helper.to_array(weights["scale_smoothed"])).all()


def test_a_network_without_layer_norms_has_nothing_to_smooth(tmp_path: Path) -> None:
    assert smoothed(mnist_like(), tmp_path)[2] == ()
