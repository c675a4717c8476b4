"""How `quantize` chooses the calibrator, and smooths outliers of a LayerNorm (SmoothQuant)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import deploykit as dk
from deploykit.core.artefact import Artefact
from deploykit.core.evidence import CalibrationRecord
from deploykit.engines.data.samples import Samples
from deploykit.graph.graph import Graph
from deploykit.quantization import calibrate, scales
from deploykit.quantization.calibrate import METHODS, Range
from deploykit.quantization.qdq import to_pairs
from deploykit.quantization.smoothquant import smooth
from tests.support.graphs.data import feeds, samples, sqnr_db
from tests.support.graphs.protos import to_proto
from tests.support.graphs.qdq_graphs import run, stored
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import mnist_like, save

WIDTH, OUTLIERS = 32, (3, 17)


def layer_norm(
    *, residual: bool = False, gemm: bool = False, peak: float = 100.0, axis: int = -1
) -> onnx.ModelProto:
    """A LayerNorm with outlier channels and two MatMuls of its output, added up.

    `residual`: an Add reads the LayerNorm, too. `gemm`: the second of them is a Gemm with
    transposed weights. `peak`: of the outlier channels, which the MatMuls meet with small weights.
    """
    rng = np.random.default_rng(0)
    weights = {
        "scale": rng.uniform(0.5, 1.5, WIDTH).astype(np.float32),
        "bias": rng.standard_normal(WIDTH).astype(np.float32) / 10,
        "Q": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32),
        "K": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32),
    }
    for channel in OUTLIERS:
        for name, factor in (("scale", peak), ("bias", peak), ("Q", 1 / peak), ("K", 1 / peak)):
            weights[name][channel] *= factor
    weights["KT"] = weights["K"].T.copy()
    return parse(
        f"(float[N,{WIDTH}] x) => (float[N,{WIDTH}] y)",
        f"""normal = LayerNormalization<axis = {axis}>(x, scale, bias) q = MatMul(normal, Q)
            k = {"Gemm<transB = 1>(normal, KT)" if gemm else "MatMul(normal, K)"}
            {"sum = Add(q, k) y = Add(sum, normal)" if residual else "y = Add(q, k)"}""",
        **weights,
    )


@pytest.fixture
def outliers(tmp_path: Path) -> Path:
    return save(layer_norm(), tmp_path / "outliers.onnx")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.savez(tmp_path / "calib.npz", **feeds(layer_norm(), 128))
    return tmp_path / "calib.npz"


@pytest.fixture
def unsmoothed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scales, "OUTLIERS", np.inf)


def quantize(model: Path, to: str, data: Path, **given: Any) -> tuple[dk.Made, CalibrationRecord]:
    """The result, also where its signal-to-noise ratio is below the bound."""
    try:
        made = dk.quantize(model, to, model.with_name("out.onnx"), calib=data, **given)
    except dk.GateFailed as exc:
        made = exc.result
    assert made.evidence.calibration is not None
    return made, made.evidence.calibration


@pytest.mark.parametrize("runtime", ["tensorrt", "onnxruntime"])
@pytest.mark.parametrize("to", ["int8", "fp8"])
def test_the_calibrator_that_loses_least_is_kept_and_reported(
    outliers: Path, data: Path, unsmoothed: None, runtime: str, to: str
) -> None:
    made, record = quantize(outliers, to, data, runtime=runtime)
    assert {"mixed", "percentile", "mse"} <= set(record.sqnr_db)
    worth = 10 * np.log10(1 / (1 - scales.WORTH))
    assert record.sqnr_db[record.method] > max(record.sqnr_db.values()) - worth
    assert made.evaluation.sqnr_db == pytest.approx(record.sqnr_db[record.method], abs=2.0)
    assert Artefact(made.path).manifest.evidence.calibration == record


@pytest.mark.parametrize("runtime", ["tensorrt", "onnxruntime"])
def test_outliers_are_smoothed_where_that_loses_less(
    outliers: Path, data: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    smoothed, record = quantize(outliers, "int8", data, runtime=runtime)
    assert record.smoothed == ("normal",)
    assert smoothed.evaluation.passed
    monkeypatch.setattr(scales, "OUTLIERS", np.inf)
    plain, record = quantize(outliers, "int8", data, runtime=runtime)
    assert record.smoothed == ()
    assert smoothed.evaluation.sqnr_db > plain.evaluation.sqnr_db + 5


def test_a_graph_that_smoothing_broke_is_not_used(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploykit.quantization.smoothquant._multiply", lambda *_: None)
    residual = save(layer_norm(residual=True), tmp_path / "residual.onnx")
    assert quantize(residual, "int8", data)[1].smoothed == ()


def test_the_samples_to_choose_on_are_spread_over_the_data(
    outliers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of images is in the order of its classes: the first would all be of one class."""
    monkeypatch.setattr(scales, "OPERATIONS", 0)
    samples = Samples(feeds(layer_norm(), 320), None, "data.npz")
    batches = list(scales.places_to_choose_on(Graph.open(outliers), samples, 32))
    for places in (batches[0], np.concatenate(batches)):
        assert max(places) > 270
        assert min(places) < 40
    assert 32 <= sum(map(len, batches)) <= 64


FIRST = {  # what is found -> noise on the first samples, on the others, and what is chosen
    "nearly-equal": ({"mixed": 1.0, "percentile": 1.02, "mse": 0.99}, {}, "mixed"),
    "not-on-the-others": (
        {"mixed": 1.2, "percentile": 1.0, "mse": 1.5, "minmax": 1.9},
        *({"mixed": 2.0, "percentile": 3.0}, "mixed"),
    ),
    "better": (
        *({"mixed": 2.4, "percentile": 3.0, "mse": 1.0}, {"mixed": 2.0, "mse": 1.0}, "mse"),
    ),
    "none-works": (dict.fromkeys(METHODS, np.inf), {}, "mixed"),
}


@pytest.mark.parametrize("case", FIRST)
def test_calibrators_that_may_be_better_than_the_first_are_tried_on(
    outliers: Path, data: Path, monkeypatch: pytest.MonkeyPatch, unsmoothed: None, case: str
) -> None:
    """Nor is minmax where the percentile lost: it goes further that way."""
    few, others, chosen = FIRST[case]
    tried: list[tuple[str, int]] = []

    def noise(_: Any, trial: scales.Scales, batches: scales.Batches) -> np.ndarray:
        assert trial.calibration is not None
        method, rows = trial.calibration.method, sum(len(inputs["x"]) for _, inputs, _ in batches)
        known = others if method in [each for each, _ in tried] else few
        tried.append((method, rows))
        return np.full(rows, known[method])

    monkeypatch.setattr("deploykit.quantization.scales._Trials.noise", noise)
    real = calibrate._choose_ranges

    def distinct(*given: Any) -> Any:
        found = real(*given)
        ends = itertools.count(1.0)
        return replace(found, cut={m: {"x": Range(0.0, next(ends))} for m in found.cut})

    monkeypatch.setattr(calibrate, "_choose_ranges", distinct)
    record = quantize(outliers, "int8", data)[1]
    wanted = [(each, scales.FEW) for each in few]
    assert tried == wanted + [(each, 128 - scales.FEW) for each in others]
    assert record.method == chosen


def test_calibrators_with_the_same_ranges_are_tried_once(
    outliers: Path, data: Path, monkeypatch: pytest.MonkeyPatch, unsmoothed: None
) -> None:
    monkeypatch.setattr("deploykit.quantization.calibrate._cut", lambda *_: Range(-3.0, 3.0))
    tried: list[str] = []
    real = scales.convert
    monkeypatch.setattr(
        scales, "convert", lambda *a, **b: tried.append(a[2].method) or real(*a, **b)
    )
    record = quantize(outliers, "int8", data)[1]
    assert tried == ["mixed"] * 2  # the trial, and what is written
    assert record.method == "mixed"
    assert set(record.sqnr_db) == set(METHODS)


def test_a_calibrator_has_to_win_by_more_than_chance() -> None:
    """One sample on which the first is bad says nothing: it would be bad with the others too."""
    once = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0])
    always = np.full(8, 1.25)
    for first, chosen in ((once, "mixed"), (always, "mse")):
        assert scales.least_noise({"mixed": first, "mse": np.full(8, 1.2)}) == chosen
    assert scales.least_noise({"mixed": np.full(8, np.inf), "mse": once}) == "mse"
    assert scales.least_noise({"mixed": always, "mse": np.full(8, np.inf)}) == "mixed"


def test_the_noise_of_each_sample_is_its_part_of_the_batchs() -> None:
    wanted = np.array([[1.0, 2.0], [3.0, -np.inf], [1.0, 1.0]])
    got = wanted + np.array([[0.0], [1.0], [2.0]])
    found = scales.noise_by_row(wanted, got, 3)
    assert found == pytest.approx(np.array([0.0, 1.0, 8.0]) / 16.0 * 3)
    assert scales.noise_by_row(wanted, got[:2], 3).tolist() == [1.0, 1.0, 1.0]
    labels = np.array([1, 2, 3])
    assert scales.noise_by_row(labels, np.array([1, 0, 3]), 3) == pytest.approx([0.0, 1.0, 0.0])


@pytest.mark.parametrize("kept", [["y", "top"], ["top"]])
def test_integer_outputs_have_no_signal_to_noise_ratio(
    data: Path, tmp_path: Path, kept: list[str]
) -> None:
    model = layer_norm()
    model.graph.node.append(helper.make_node("ArgMax", ["y"], ["top"], axis=1, keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("top", TensorProto.INT64, ["N"]))
    if "y" not in kept:
        del model.graph.output[0]
    record = quantize(save(model, tmp_path / "m.onnx"), "int8", data, max_drop=1.0)[1]
    alone = quantize(save(layer_norm(), tmp_path / "y.onnx"), "int8", data)[1]
    assert record.sqnr_db == (alone.sqnr_db if "y" in kept else {})
    assert record.method in METHODS


# What smoothing does to a graph


def smoothed(model: onnx.ModelProto, tmp_path: Path) -> tuple[Graph, Graph, tuple[str, ...]]:
    """The model's graph, the smoothed one, and what was smoothed."""
    graph = Graph.open(save(model, tmp_path / "model.onnx"))
    peaks = calibrate.calibrate(graph, samples(model, 64)).channel_peaks
    other, names = smooth(graph, peaks)
    return graph, other.save(tmp_path / "smoothed.onnx"), names


def weights_of(graph: Graph) -> dict[str, np.ndarray]:
    return stored(to_proto(graph))


def answer(graph: Graph, inputs: dict[str, np.ndarray], tmp_path: Path) -> np.ndarray:
    return run(to_proto(graph), inputs, tmp_path / "answer.onnx")


SHAPES = [{}, {"residual": True}, {"gemm": True}, {"gemm": True, "residual": True}, {"axis": 1}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_smoothed_graph_computes_the_same_to_the_last_bit_and_loses_far_less_to_int8(
    tmp_path: Path, shape: dict[str, Any]
) -> None:
    model = layer_norm(**shape)
    before, after, names = smoothed(model, tmp_path)
    assert names == ("normal",)
    inputs = feeds(model, 50, seed=1)
    wanted = answer(before, inputs, tmp_path)
    np.testing.assert_array_equal(answer(after, inputs, tmp_path), wanted)
    quality = []
    for graph in (before, after):
        pairs = to_pairs(graph, calibrate.calibrate(graph, samples(model, 64)))
        got = answer(pairs.save(tmp_path / "int8.onnx"), inputs, tmp_path)
        quality.append(sqnr_db(wanted, got))
    assert quality[1] > quality[0] + (10 if not shape.get("residual") else 0)


def test_the_factors_go_into_the_layer_norm_where_nothing_else_reads_it(tmp_path: Path) -> None:
    before, after, _ = smoothed(layer_norm(), tmp_path)
    kinds = [[node.op_type for node in graph.model.graph.node] for graph in (before, after)]
    assert kinds[1] == kinds[0]
    factors = [
        weights_of(smoothed(layer_norm(gemm=gemm, peak=64.0), tmp_path)[1])["scale_smoothed"]
        for gemm in (False, True)
    ]
    np.testing.assert_array_equal(*factors)


def test_one_multiplication_serves_all_readers_where_another_node_reads_it(tmp_path: Path) -> None:
    _, after, _ = smoothed(layer_norm(residual=True), tmp_path)
    nodes = {node.name: node for node in after.model.graph.node}
    (product,) = [node for node in nodes.values() if node.op_type == "Mul"]
    readers = {name for name, node in nodes.items() if product.output[0] in node.input}
    assert readers == {"q", "k"}
    assert "normal" in nodes["y"].input


def test_channels_are_alike_afterwards(tmp_path: Path) -> None:
    model = layer_norm(peak=1000.0)
    spread = []
    for graph in smoothed(model, tmp_path)[:2]:
        (peaks,) = calibrate.calibrate(graph, samples(model, 64)).channel_peaks.values()
        spread.append(max(peaks) / np.median(peaks))
    assert spread[0] > 500
    assert spread[1] < 8


def test_channels_that_are_never_active_give_no_factor(tmp_path: Path) -> None:
    graph = Graph.open(save(layer_norm(), tmp_path / "model.onnx"))
    # the weights differ although the activations do not
    assert smooth(graph, {"normal": [1.0] * WIDTH})[1] == ("normal",)
    assert smooth(graph, {})[1] == ()
    dead = list(calibrate.calibrate(graph, samples(layer_norm(), 64)).channel_peaks["normal"])
    for channel in OUTLIERS:
        dead[channel] = 0.0  # any factor would be a guess
    assert np.isfinite(weights_of(smooth(graph, {"normal": dead})[0])["scale_smoothed"]).all()
    assert smoothed(mnist_like(), tmp_path)[2] == ()  # nothing to smooth
