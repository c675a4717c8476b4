"""INT8 pairs written for TensorRT and then placed for ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deploykit.building.onnxruntime import build
from deploykit.graph.graph import Graph
from deploykit.quantization import qdq
from deploykit.quantization.half_precision import to_half
from deploykit.quantization.moving import move_pairs
from tests.support.graphs.data import feeds, samples
from tests.support.graphs.protos import calibrate, to_proto
from tests.support.graphs.qdq_graphs import ZOO, Make, run
from tests.support.onnx_zoo import mnist_like, save

RUNTIMES = ("tensorrt", "onnxruntime")


def written(make: Make, tmp_path: Path, **options: object) -> dict[str, Graph]:
    model = make()
    path = save(model, tmp_path / "float.onnx")
    found = calibrate(path, samples(model, 64))
    source = Graph.open(path)
    return {name: qdq.to_pairs(source, found, runtime=name, **options) for name in RUNTIMES}


@pytest.mark.parametrize("make", ZOO)
def test_moved_pairs_give_what_was_written_for_that_runtime(make: Make, tmp_path: Path) -> None:
    graphs = written(make, tmp_path)
    moved = move_pairs(graphs["tensorrt"], "onnxruntime")
    assert moved is not None
    wanted = to_proto(graphs["onnxruntime"])
    inputs = feeds(make(), 16)
    np.testing.assert_allclose(
        run(to_proto(moved), inputs, tmp_path / "moved.onnx"),
        run(wanted, inputs, tmp_path / "wanted.onnx"),
        rtol=1e-5,
        atol=1e-6,
    )
    assert moved.summary.operators == graphs["onnxruntime"].summary.operators


def test_onnx_runtime_runs_moved_pairs_in_integers(tmp_path: Path) -> None:
    before = written(mnist_like, tmp_path)["tensorrt"].save(tmp_path / "typed.onnx")
    moved = move_pairs(before, "onnxruntime")
    assert moved is not None
    integers = {}
    for name, graph in (("before", before), ("moved", moved.save(tmp_path / "moved.onnx"))):
        build(graph.path, tmp_path / f"{name}.built.onnx")
        integers[name] = Graph.open(tmp_path / f"{name}.built.onnx").precision.get("int8", 0)
    assert integers["before"] == 0
    assert integers["moved"] >= 3


def test_the_ranges_survive_a_file(tmp_path: Path) -> None:
    written(mnist_like, tmp_path)["tensorrt"].save(tmp_path / "typed.onnx")
    assert move_pairs(Graph.open(tmp_path / "typed.onnx"), "onnxruntime") is not None


def test_nodes_in_float32_stay_there(tmp_path: Path) -> None:
    graphs = written(mnist_like, tmp_path, keep_float32=("conv2",))
    moved = move_pairs(graphs["tensorrt"], "onnxruntime")
    assert moved is not None
    assert moved.precision == graphs["onnxruntime"].precision


def test_a_graph_without_ranges_is_not_moved(tmp_path: Path) -> None:
    graph = written(mnist_like, tmp_path)["tensorrt"]
    del graph.model.metadata_props[:]
    assert move_pairs(graph, "onnxruntime") is None


def test_a_graph_with_half_nodes_is_not_moved(tmp_path: Path) -> None:
    graph = written(mnist_like, tmp_path)["tensorrt"]
    assert move_pairs(to_half(graph)[0], "onnxruntime") is None
