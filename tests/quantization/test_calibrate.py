"""Calibration: ranges of all samples, the calibrator that loses least, and outliers smoothed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import deploykit as dk
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.evidence import CalibrationRecord
from deploykit.engines.data.samples import Samples
from deploykit.engines.engine import Arrays, Engine
from deploykit.engines.onnxruntime.engine import OnnxRuntimeEngine
from deploykit.graph.graph import Graph
from deploykit.quantization import calibrate as calibrating
from deploykit.quantization import scales
from deploykit.quantization.calibrate import METHODS, TensorHistogram
from deploykit.quantization.qdq import Range, fp8_numbers, to_pairs
from deploykit.quantization.scales import smooth
from tests.support.graphs.data import feeds, run, samples, sqnr_db, stored
from tests.support.graphs.protos import calibrate, to_proto
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import conv_relu, int64_ids, linear, mnist_like, save

ROWS = "(float[N,4] x) => (float[N,4] y)"


def gemm(batch: int | str) -> onnx.ModelProto:
    head = f"(float[{batch},4] x) => (float[{batch},3] y)"
    return parse(head, "y = Gemm(x, W, b)", **stored(linear()))


@pytest.mark.parametrize("batch_size", [1, 5, 32])
def test_ranges_are_of_all_samples_whatever_the_batch(tmp_path: Path, batch_size: int) -> None:
    data, weights = samples(linear(), 17), stored(linear())
    x = data.inputs["x"]
    y = x @ weights["W"] + weights["b"]
    found = calibrate(save(linear(), tmp_path / "m.onnx"), data, batch_size=batch_size)
    assert found.samples == 17
    assert (found.ranges["x"].low, found.ranges["x"].high) == (x.min(), x.max())
    assert found.ranges["y"].low == pytest.approx(y.min(), rel=1e-6)
    assert found.ranges["y"].high == pytest.approx(y.max(), rel=1e-6)


def test_a_tensor_between_two_fused_nodes_has_its_own_range(tmp_path: Path) -> None:
    data = samples(conv_relu())
    x = np.pad(data.inputs["x"], ((0, 0), (0, 0), (1, 1), (1, 1)))
    weight, bias = (numpy_helper.to_array(t) for t in conv_relu().graph.initializer)
    windows = np.lib.stride_tricks.sliding_window_view(x[:, 0], (3, 3), axis=(1, 2))
    c = np.einsum("nhwij,cij->nchw", windows, weight[:, 0]) + bias[:, None, None]
    found = calibrate(save(conv_relu(), tmp_path / "m.onnx"), data).ranges
    assert found["c"].low == pytest.approx(c.min(), rel=1e-5)
    assert found["c"].high == pytest.approx(c.max(), rel=1e-5)
    assert found["y"] == Range(0.0, found["c"].high)


def test_every_float_tensor_has_a_range_and_no_other(tmp_path: Path) -> None:
    path = save(int64_ids(), tmp_path / "m.onnx")
    assert list(calibrate(path, samples(int64_ids())).ranges) == ["embedded", "y"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_sees_masks_large_weights_and_nan(tmp_path: Path, method: str) -> None:
    model = parse(ROWS, "y = Add(x, mask)", mask=[0, 0, 0, -np.inf])
    data = samples(model)
    found = calibrate(save(model, tmp_path / "m.onnx"), data, method=method).ranges["y"]
    assert found == Range(-math.inf, float(data.inputs["x"][:, :3].max()))
    # 16 KiB of weights are fed to the session, not built in
    model = parse("(float[N,64] x) => (float[N,64] y)", "y = MatMul(x, W)", W=np.eye(64) * 3)
    data = samples(model)
    found = calibrate(save(model, tmp_path / "m.onnx"), data, method=method).ranges["y"]
    assert found.high == pytest.approx(3 * float(data.inputs["x"].max()), rel=1e-6)
    model = parse(ROWS, "root = Sqrt(x) y = Relu(root)")
    with pytest.raises(BadInput, match=r"m.onnx: tensor 'root' is NaN .*data.npz"):
        calibrate(save(model, tmp_path / "m.onnx"), samples(model), method=method)


def test_every_calibrator_comes_from_one_pass_and_clips_what_gets_a_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = save(mnist_like(), tmp_path / "m.onnx"), samples(mnist_like(), 64)
    # 1 x 28 x 28 in, 8 and 16 channels of 28 x 28 and 14 x 14 after it: 91 KB a sample
    monkeypatch.setattr(calibrating, "MOST_BYTES", 300_000)
    alone = {method: calibrate(path, data, method=method) for method in METHODS}
    runs = []
    batches = Samples.batches
    monkeypatch.setattr(
        Samples, "batches", lambda self, size, **_: runs.append(size) or batches(self, size)
    )
    found = calibrate(path, data)
    assert runs == [3]
    every = calibrate(path, data, method="minmax").ranges
    for method in METHODS:
        using = found.using(method)
        assert (using.clipped, using.method) == (alone[method].clipped, method)
        assert using.ranges == alone[method].ranges == every
        assert using.clipped.keys() == every.keys()
        for name, seen in using.clipped.items():
            assert every[name].low <= seen.low <= seen.high <= every[name].high
    cut = {name for name, seen in found.using("mse").clipped.items() if seen != every[name]}
    assert cut <= {"image", "r1", "p1", "r2", "flat"}  # not what is before a Relu, nor logits
    assert {"image", "p1"} <= cut  # p1 has a scale of its own for TensorRT only


OUTPUTS_KEPT = {
    "by sample": ("y = Relu(x)", 1 << 28, True),
    "too large": ("y = Relu(x)", 100, False),
    "of its neighbours": ("mean = ReduceMean<axes=[0]>(x) y = Sub(x, mean)", 1 << 28, False),
    "of all": ("y = ReduceSum<keepdims=1>(x)", 1 << 28, False),
}


@pytest.mark.parametrize("case", OUTPUTS_KEPT)
def test_outputs_are_kept_where_each_belongs_to_one_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    body, most, kept = OUTPUTS_KEPT[case]
    model = parse(ROWS, body, opset=13 if "axes" in body else 17)
    data = samples(model, 17)
    monkeypatch.setattr(calibrating, "MOST_BYTES", most)
    found = calibrate(save(model, tmp_path / "m.onnx"), data, batch_size=4).outputs
    assert list(found) == (["y"] if kept else [])
    if kept:
        np.testing.assert_array_equal(found["y"], np.maximum(data.inputs["x"], 0))


def test_an_output_that_is_no_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    head = "(float[N,4] x) => (float[N,4] y, seq(float[N,1]) parts)"
    model = parse(head, "y = Relu(x) parts = SplitToSequence<axis = 1>(y)")
    data = Samples({"x": normal(64).reshape(16, 4)}, None, "x.npy")
    with pytest.raises(dk.Unsupported, match="'parts' is a seq"):
        calibrate(save(model, tmp_path / "m.onnx"), data)


def test_a_fixed_batch_is_kept_and_the_remaining_samples_are_dropped(tmp_path: Path) -> None:
    data = samples(linear(), 10)
    found = calibrate(save(gemm(4), tmp_path / "m.onnx"), data)
    assert found.samples == 8
    assert found.ranges["x"].high == data.inputs["x"][:8].max()


def x_of(samples: int, *bad: float) -> np.ndarray:
    x = feeds(linear(), samples)["x"]
    if bad:
        x[5, 2] = x[9, 0] = bad[0]
    return x


@pytest.mark.parametrize(
    ("batch", "x", "why"),
    [
        ("N", x_of(7), r"data.npz: 7 samples"),
        (64, x_of(10), "do not fill the model's fixed batch of 64"),
        ("N", x_of(16, np.nan), "data.npz: input 'x' of sample 5 holds NaN"),
        ("N", np.repeat(x_of(1), 16, axis=0), "the same"),
    ],
    ids=["few", "fixed-batch", "nan", "equal"],
)
def test_bad_samples_are_refused(tmp_path: Path, batch: int | str, x: np.ndarray, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        calibrate(save(gemm(batch), tmp_path / "m.onnx"), Samples({"x": x}, None, "data.npz"))


def histogram(*batches: np.ndarray) -> TensorHistogram:
    counts = TensorHistogram()
    for batch in batches:
        counts.add(np.asarray(batch, np.float32))
    return counts


def normal(count: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(count) * scale).astype(np.float32)


def test_every_value_is_counted_in_its_place_while_the_limit_grows() -> None:
    batches = [normal(1000), normal(100_000, 3.0), normal(500, 40.0), np.zeros((3, 7))]
    counts = histogram(*batches)
    assert counts.counts.sum() == sum(batch.size for batch in batches)
    assert counts.limit >= max(np.abs(batch).max() for batch in batches)
    values = normal(100_000)
    most = 10 * np.abs(values).max()
    got = histogram(values, np.array([most])).percentile(99)
    np.testing.assert_allclose(got, np.percentile(values, [0.5, 99.5]), atol=4 * 1.6 * most / 4096)
    for share in (90.0, 99.0, 99.9):  # a bin is 0.001 wide, the outermost values lie further apart
        wanted = np.percentile(values, [(100 - share) / 2, (100 + share) / 2])
        np.testing.assert_allclose(histogram(values).percentile(share), wanted, atol=0.01)


def test_a_few_values_are_all_kept_and_a_dead_tensor_has_no_range() -> None:
    low, high = histogram(normal(100)).percentile()
    assert low <= normal(100).min()
    assert high >= normal(100).max()
    for values in ([], [0.0, 0.0], [1e-38, -1e-40]):
        assert histogram(np.array(values)).percentile() == (0.0, 0.0)
    assert histogram(np.zeros(1000)).least_error()[1] == 0.0


def test_infinities_and_nan_are_left_out_of_the_counts_and_the_ends_say_so() -> None:
    counts = histogram(np.array([1.0, np.inf, -np.inf, np.nan, -2.0]))
    assert (counts.counts.sum(), counts.limit) == (2, 2.0)
    batches = ([3, -2], [-np.inf, np.inf, 1], [])
    ends = [TensorHistogram().add(np.array(values, np.float32)) for values in batches]
    assert ends == [(-2.0, 3.0), (-np.inf, np.inf), (0.0, 0.0)]
    counts = TensorHistogram(np.ones(2))
    assert counts.add(np.array([[1, np.nan], [2, -3]], np.float32)) == (-3, 2)
    assert (counts.has_nan, counts.channel_peaks.tolist()) == (True, [2, 3])


def error(values: np.ndarray, peak: float, weights: np.ndarray | float = 1.0) -> float:
    step = peak / 127
    rounded = np.clip(np.rint(values / step), -127, 127) * step
    return float(np.sum(weights * (values - rounded) ** 2))


@pytest.mark.parametrize("tail", [1.0, 5.0, 30.0])
def test_the_least_error_is_that_of_real_rounding(tail: float) -> None:
    values = np.append(normal(100_000), normal(20, tail)).astype(np.float32)
    _, found = histogram(values).least_error()
    peaks = np.geomspace(np.abs(values).max() / 50, np.abs(values).max(), 200)
    assert error(values, found) <= 1.03 * min(error(values, peak) for peak in peaks)


def test_an_error_in_a_channel_counts_by_its_importance() -> None:
    values, importance = normal(200_000).reshape(-1, 20), np.ones(20)
    values[:, 7] *= 50.0
    importance[7] = 1 / 2500
    counts = TensorHistogram(importance)
    counts.add(values[:6000].reshape(10, 600, 20))
    counts.add(values[6000:])
    _, found = counts.least_error()
    assert error(values, found, importance) < 0.5 * error(values, np.abs(values).max(), importance)
    assert found < histogram(values).least_error()[1] / 2
    np.testing.assert_array_equal(counts.channel_peaks, np.abs(values).max(axis=0))
    counts = TensorHistogram(np.array([1.0, 0.25]))
    for scale in (1.0, 40.0, 3000.0):  # the weights are kept while the limit grows
        counts.add(normal(1000, scale).reshape(-1, 2))
    assert counts.weighted.sum() == pytest.approx(3 * 500 * 1.25)


def test_every_number_is_rounded_to_the_nearest_e4m3_number_and_ties_to_even() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    random = np.random.default_rng(0)
    values = np.exp2(random.uniform(-13, np.log2(448), 20_000)) * random.choice([-1, 1], 20_000)
    ties = np.arange(0, 449) / 1024  # halves between subnormals, and their like
    values = np.concatenate([values, ties, -ties, ties * 1024, [1e6, -449.0]]).astype(np.float32)
    wanted = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert fp8_numbers(values, np.float32(1)).tobytes() == wanted.tobytes()


WIDTH, OUTLIERS = 32, (3, 17)


def layer_norm(
    *, residual: bool = False, gemm: bool = False, peak: float = 100.0, axis: int = -1
) -> onnx.ModelProto:
    """A LayerNorm with outlier channels, of `peak`, and two MatMuls of its output, added up."""
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


def test_the_model_does_not_run_again_on_what_the_calibration_kept(
    outliers: Path, data: Path, monkeypatch: pytest.MonkeyPatch, unsmoothed: None
) -> None:
    rows: list[int] = []
    call = OnnxRuntimeEngine.__call__

    def counted(self: OnnxRuntimeEngine, feeds: Arrays) -> dict[str, np.ndarray]:
        rows.extend([len(feeds["x"])] * (self.path == outliers))
        return call(self, feeds)

    monkeypatch.setattr(OnnxRuntimeEngine, "__call__", counted)
    known, _ = quantize(outliers, "int8", data)
    assert rows == [4]  # golden samples
    monkeypatch.setattr(calibrating, "EQUAL", -1.0)  # nothing counts as the same
    again, _ = quantize(outliers, "int8", data)
    assert sum(rows) > 4 + 128
    assert known.evaluation.sqnr_db == pytest.approx(again.evaluation.sqnr_db, abs=0.01)
    monkeypatch.setattr(scales, "MOST_BYTES", 0)
    rows.clear()
    quantize(outliers, "int8", data)
    assert rows == [scales.FEW, 32, 32, 32, 32, 4]  # to choose on, to evaluate, golden samples


@pytest.mark.parametrize("head", ["float s, float[4,N,8] x", "float[4,N,8] x, float s"])
def test_known_samples_are_recognised_on_every_axis(tmp_path: Path, head: str) -> None:
    body = "m = MatMul(x, W) n = Mul(m, s) y = ReduceMean<axes = [0], keepdims = 0>(n)"
    model = parse(f"({head}) => (float[N,8] y)", body, 17, W=normal(64).reshape(8, 8))
    np.savez(tmp_path / "c.npz", x=normal(4 * 16 * 8).reshape(4, 16, 8), s=np.float32(2))
    made = dk.quantize(save(model, tmp_path / "m.onnx"), "int8", calib=tmp_path / "c.npz")
    assert made.evaluation.passed


def test_only_a_calibrator_that_gains_on_the_first_batch_is_run_on_more(
    outliers: Path, data: Path, monkeypatch: pytest.MonkeyPatch, unsmoothed: None
) -> None:
    runs: list[list[int]] = []
    noise = scales._noise

    def counted(engine: Engine, batches: scales.Batches) -> np.ndarray:
        runs.append([rows for rows, *_ in batches])
        return noise(engine, batches)

    monkeypatch.setattr(scales, "_noise", counted)
    monkeypatch.setattr(scales, "WORTH", 1.0)  # nothing gains that much
    record = quantize(outliers, "int8", data)[1]
    assert runs == [[scales.FEW]] * len(runs)
    assert record.method == "mixed"
    first = len(runs)
    monkeypatch.setattr(scales, "WORTH", -1e9)  # all gain
    assert set(quantize(outliers, "int8", data)[1].sqnr_db) == set(METHODS)
    assert [sum(rows) for rows in runs[first:]] == [8] * first + [120] * first


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


def test_bad_smoothing_is_not_used(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploykit.quantization.scales._multiply", lambda *_: None)
    residual = save(layer_norm(residual=True), tmp_path / "residual.onnx")
    assert quantize(residual, "int8", data)[1].smoothed == ()


def test_samples_to_choose_on_are_spread(outliers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of images is in the order of its classes: the first would all be of one class."""
    monkeypatch.setattr(scales, "OPERATIONS", 0)
    samples = Samples(feeds(layer_norm(), 320), None, "data.npz")
    batches = list(scales.places_to_choose_on(Graph.open(outliers), samples, 32))
    for places in (batches[0], np.concatenate(batches)):
        assert max(places) > 270
        assert min(places) < 40
    assert 32 <= sum(map(len, batches)) <= 64


def test_a_calibrator_has_to_win_by_more_than_chance() -> None:
    """One sample on which the first is bad says nothing: it would be bad with the others too."""
    once = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0])
    always = np.full(8, 1.25)
    for first, chosen in ((once, "mixed"), (always, "mse")):
        assert scales.least_noise({"mixed": first, "mse": np.full(8, 1.1)}) == chosen
    assert scales.least_noise({"mixed": np.full(8, np.inf), "mse": once}) == "mse"
    assert scales.least_noise({"mixed": always, "mse": np.full(8, np.inf)}) == "mixed"


@pytest.mark.parametrize("kept", [["y", "top"], ["top"]])
def test_integers_have_no_signal_to_noise(data: Path, tmp_path: Path, kept: list[str]) -> None:
    model = layer_norm()
    model.graph.node.append(helper.make_node("ArgMax", ["y"], ["top"], axis=1, keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("top", TensorProto.INT64, ["N"]))
    if "y" not in kept:
        del model.graph.output[0]
    record = quantize(save(model, tmp_path / "m.onnx"), "int8", data, max_drop=1.0)[1]
    alone = quantize(save(layer_norm(), tmp_path / "y.onnx"), "int8", data)[1]
    assert record.sqnr_db == (alone.sqnr_db if "y" in kept else {})
    assert record.method in METHODS


def smoothed(model: onnx.ModelProto, tmp_path: Path) -> tuple[Graph, Graph, tuple[str, ...]]:
    graph = Graph.open(save(model, tmp_path / "model.onnx"))
    peaks = calibrating.calibrate(graph, samples(model, 64)).channel_peaks
    other, names = smooth(graph, peaks)
    return graph, other.save(tmp_path / "smoothed.onnx"), names


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
    if not shape.get("residual"):  # the factors go into the LayerNorm
        assert after.summary.operators == before.summary.operators
    quality = []
    for graph in (before, after):
        pairs = to_pairs(graph, calibrating.calibrate(graph, samples(model, 64)))
        got = answer(pairs.save(tmp_path / "int8.onnx"), inputs, tmp_path)
        quality.append(sqnr_db(wanted, got))
    assert quality[1] > quality[0] + (10 if not shape.get("residual") else 0)


def test_channels_that_are_never_active_give_no_factor(tmp_path: Path) -> None:
    graph = Graph.open(save(layer_norm(), tmp_path / "model.onnx"))
    # the weights differ although the activations do not
    assert smooth(graph, {"normal": [1.0] * WIDTH})[1] == ("normal",)
    assert smooth(graph, {})[1] == ()
    dead = list(calibrating.calibrate(graph, samples(layer_norm(), 64)).channel_peaks["normal"])
    for channel in OUTLIERS:
        dead[channel] = 0.0  # any factor would be a guess
    assert np.isfinite(stored(to_proto(smooth(graph, {"normal": dead})[0]))["scale_smoothed"]).all()
    assert smoothed(mnist_like(), tmp_path)[2] == ()  # nothing to smooth
