"""How `quantize` chooses the calibrator, and whether it smooths outliers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import deploykit as dk
from deploykit.core.artefact import Artefact
from deploykit.core.evidence import CalibrationRecord
from deploykit.engines.data.samples import Samples
from deploykit.graph.graph import Graph
from deploykit.quantization import calibrate, scales
from deploykit.quantization.calibrate import METHODS, Range
from tests.support.graphs.data import feeds
from tests.support.graphs.layer_norm import layer_norm
from tests.support.onnx_zoo import save


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


@pytest.mark.parametrize(
    ("few", "others", "chosen"),
    [
        pytest.param(
            {"mixed": 1.0, "percentile": 1.02, "mse": 0.99}, {}, "mixed", id="nearly-equal"
        ),
        pytest.param(
            {"mixed": 1.2, "percentile": 1.0, "mse": 1.5, "minmax": 1.9},
            {"mixed": 2.0, "percentile": 3.0},
            "mixed",
            id="not-on-the-others",
        ),
        pytest.param(
            {"mixed": 2.4, "percentile": 3.0, "mse": 1.0},
            {"mixed": 2.0, "mse": 1.0},
            "mse",
            id="better",
        ),
        pytest.param(dict.fromkeys(METHODS, np.inf), {}, "mixed", id="none-works"),
    ],
)
def test_calibrators_that_may_be_better_than_the_first_are_tried_on(
    outliers: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    unsmoothed: None,
    few: dict[str, float],
    others: dict[str, float],
    chosen: str,
) -> None:
    """Nor is minmax where the percentile lost: it goes further that way."""
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
    outputs = [value for value in model.graph.output if value.name in kept]
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    record = quantize(save(model, tmp_path / "m.onnx"), "int8", data, max_drop=1.0)[1]
    alone = quantize(save(layer_norm(), tmp_path / "y.onnx"), "int8", data)[1]
    assert record.sqnr_db == (alone.sqnr_db if "y" in kept else {})
    assert record.method in METHODS
