"""How `quantize` chooses the calibrator, and smooths outliers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import deploykit as dk
from deploykit.core.artefact import Artefact, read_manifest
from deploykit.evaluation.artefacts import no_progress
from deploykit.quantization import calibrate
from deploykit.quantization import evaluate as calibration
from deploykit.quantization.calibrate import METHODS, Range
from deploykit.quantization.evaluate import QuantizeRequest, prepare, write_graph
from deploykit.quantization.search import Budget, OutOfTime
from tests.support.graphs.data import feeds
from tests.support.graphs.layer_norm import layer_norm
from tests.support.onnx_zoo import mnist_like, save


@pytest.fixture
def outliers(tmp_path: Path) -> Path:
    return save(layer_norm(), tmp_path / "outliers.onnx")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.savez(tmp_path / "calib.npz", **feeds(layer_norm(), 128))
    return tmp_path / "calib.npz"


def sqnr_db(made: dk.Made) -> float:
    assert made.evaluation is not None
    assert made.evaluation.sqnr_db is not None
    return made.evaluation.sqnr_db


@pytest.mark.parametrize("runtime", ["tensorrt", "onnxruntime"])
@pytest.mark.parametrize("to", ["int8", "fp8"])
def test_the_calibrator_that_loses_least_is_kept_and_reported(
    outliers: Path, data: Path, tmp_path: Path, runtime: str, to: str
) -> None:
    out, bound = tmp_path / "out.onnx", {"calib": data, "runtime": runtime, "min_sqnr_db": 1.0}
    alone = {
        method: sqnr_db(dk.quantize(outliers, to, out, calibrator=method, **bound))
        for method in METHODS
    }
    made = dk.quantize(outliers, to, out, **bound)
    record = made.evidence.calibration
    assert record is not None
    assert {"mixed", "percentile", "mse"} <= set(record.sqnr_db)
    worth = 10 * np.log10(1 / (1 - calibration.WORTH))
    assert record.sqnr_db[record.method] > max(record.sqnr_db.values()) - worth
    assert sqnr_db(made) == alone[record.method]
    assert sqnr_db(made) > max(alone.values()) - worth
    assert read_manifest(out).evidence.calibration == record


def test_a_calibrator_that_is_named_is_not_chosen(
    outliers: Path, data: Path, tmp_path: Path
) -> None:
    made = dk.quantize(
        outliers, "int8", tmp_path / "o.onnx", calib=data, calibrator="minmax", min_sqnr_db=1.0
    )
    record = made.evidence.calibration
    assert record is not None
    assert (record.method, dict(record.sqnr_db)) == ("minmax", {})


def test_outliers_are_smoothed_where_asked(outliers: Path, data: Path, tmp_path: Path) -> None:
    plain = dk.quantize(outliers, "int8", tmp_path / "a.onnx", calib=data, min_sqnr_db=1.0)
    for method in (None, "minmax"):
        smoothed = dk.quantize(
            outliers,
            "int8",
            tmp_path / "b.onnx",
            calib=data,
            smoothquant=True,
            calibrator=method,
        )
        record = smoothed.evidence.calibration
        assert record is not None
        assert record.smoothed == ("normal",)
        assert sqnr_db(smoothed) > sqnr_db(plain) + 5


def test_auto_smooths_before_it_keeps_nodes_in_float32(
    outliers: Path, data: Path, tmp_path: Path
) -> None:
    made = dk.quantize(
        outliers,
        "auto",
        tmp_path / "auto.onnx",
        calib=data,
        runtime="onnxruntime",
        min_sqnr_db=32.0,
    )
    assert made.search is not None
    tried = [(step.precision, len(step.float32_nodes), step.passed) for step in made.search.steps]
    assert tried[:2] == [("int8", 0, False), ("int8+smoothquant", 0, True)]


def test_smoothing_needs_outliers_and_a_precision_with_scales(
    outliers: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(dk.BadInput, match="`smoothquant` goes with int8, fp8 and auto, not"):
        dk.quantize(outliers, "fp16", calib=data, smoothquant=True)
    model, calib = save(mnist_like(), tmp_path / "mnist.onnx"), tmp_path / "images.npz"
    np.savez(calib, **feeds(mnist_like(), 64))
    with pytest.raises(dk.BadInput, match="no LayerNormalization before a MatMul or Gemm"):
        dk.quantize(model, "int8", tmp_path / "o.onnx", calib=calib, smoothquant=True)


def test_a_graph_that_smoothing_broke_is_refused(
    outliers: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploykit.quantization.smoothquant._multiply", lambda *_: None)
    residual = save(layer_norm(residual=True), tmp_path / "residual.onnx")
    with pytest.raises(dk.BadInput, match=r"does not compute what residual\.onnx does"):
        dk.quantize(residual, "int8", tmp_path / "o.onnx", calib=data, smoothquant=True)


def test_the_samples_to_choose_on_are_spread_over_the_data(
    outliers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of images is in the order of its classes: the first would all be of one class."""
    seen: list[float] = []
    real = calibration._reference

    def spy(job: object) -> object:
        found = real(job)  # type: ignore[arg-type]
        seen.extend(row for batch, _ in found for row in batch["x"][:, 0])
        return found

    monkeypatch.setattr(calibration, "_reference", spy)
    monkeypatch.setattr(calibration, "OPERATIONS", 0)
    x = feeds(layer_norm(), 320)["x"]
    np.savez(tmp_path / "calib.npz", x=x)
    dk.quantize(outliers, "int8", tmp_path / "o.onnx", calib=tmp_path / "calib.npz", min_sqnr_db=1)
    places = [int(np.flatnonzero(x[:, 0] == value)[0]) for value in seen]
    assert 32 <= len(places) <= 64
    assert max(places) > 280
    assert min(places) < 40


@pytest.mark.parametrize(
    ("few", "others", "chosen"),
    [
        pytest.param(
            {"mixed": 1.0, "percentile": 1.02, "mse": 0.99},
            {},
            "mixed",
            id="nearly-equal",
        ),
        pytest.param(
            {"mixed": 1.2, "percentile": 1.0, "mse": 1.5, "minmax": 1.9},
            {"mixed": 2.0, "percentile": 3.0},
            "mixed",
            id="not-on-the-others",
        ),
        pytest.param(
            {"mixed": 2.4, "percentile": 3.0, "mse": 1.0, "entropy": 0.9},
            {"mixed": 2.0, "mse": 1.0, "entropy": 3.0},
            "mse",
            id="better",
        ),
        pytest.param(dict.fromkeys(METHODS, np.inf), {}, "mixed", id="none-works"),
    ],
)
def test_calibrators_that_may_be_better_than_the_first_are_tried_on(
    outliers: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    few: dict[str, float],
    others: dict[str, float],
    chosen: str,
) -> None:
    """Nor is entropy where mse, or minmax where the percentile, lost: they go further that way."""
    tried: list[tuple[str, int]] = []

    def trial(job: Any, _: str, __: str, reference: Any, ___: Path) -> np.ndarray:
        method, rows = job.calibration.method, sum(len(batch["x"]) for batch, _ in reference)
        known = others if method in [each for each, _ in tried] else few
        tried.append((method, rows))
        return np.full(rows, known[method])

    monkeypatch.setattr(calibration, "_trial", trial)
    real = calibrate._choose_ranges

    def distinct(*given: Any) -> Any:
        found = real(*given)
        ends = itertools.count(1.0)
        return replace(found, cut={m: {"x": Range(0.0, next(ends))} for m in found.cut})

    monkeypatch.setattr(calibrate, "_choose_ranges", distinct)
    made = dk.quantize(outliers, "int8", tmp_path / "o.onnx", calib=data, min_sqnr_db=1e-9)
    wanted = [(each, calibration.FEW) for each in few]
    assert tried == wanted + [(each, 128 - calibration.FEW) for each in others]
    assert made.evidence.calibration is not None
    assert made.evidence.calibration.method == chosen


def test_calibrators_with_the_same_ranges_are_tried_once(
    outliers: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    real = calibration._trial

    def trial(job: Any, *rest: Any) -> np.ndarray:
        tried.append(job.calibration.method)
        return real(job, *rest)

    monkeypatch.setattr(calibration, "_trial", trial)
    monkeypatch.setattr("deploykit.quantization.calibrate._cut", lambda *_: Range(-3.0, 3.0))
    made = dk.quantize(outliers, "int8", tmp_path / "o.onnx", calib=data, min_sqnr_db=1.0)
    assert tried == ["mixed"]
    assert made.evidence.calibration is not None
    assert made.evidence.calibration.method == "mixed"
    assert set(made.evidence.calibration.sqnr_db) == set(METHODS)


def test_a_calibrator_has_to_win_by_more_than_chance() -> None:
    """One sample on which the first is bad says nothing: it would be bad with the others too."""
    once = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0])
    always = np.full(8, 1.25)
    for first, chosen in ((once, "mixed"), (always, "mse")):
        assert calibration._least_noise({"mixed": first, "mse": np.full(8, 1.2)}) == chosen
    assert calibration._least_noise({"mixed": np.full(8, np.inf), "mse": once}) == "mse"
    assert calibration._least_noise({"mixed": always, "mse": np.full(8, np.inf)}) == "mixed"
    assert calibration._least_noise({}) is None


def test_the_noise_of_each_sample_is_its_part_of_the_batchs() -> None:
    wanted = np.array([[1.0, 2.0], [3.0, -np.inf], [1.0, 1.0]])
    got = wanted + np.array([[0.0], [1.0], [2.0]])
    found = calibration._by_row(wanted, got, 3)
    assert found == pytest.approx(np.array([0.0, 1.0, 8.0]) / 16.0 * 3)
    assert calibration._by_row(wanted, got[:2], 3).tolist() == [1.0, 1.0, 1.0]
    labels = np.array([1, 2, 3])
    assert calibration._by_row(labels, np.array([1, 0, 3]), 3) == pytest.approx([0.0, 1.0, 0.0])


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
    made = dk.quantize(
        save(model, tmp_path / "m.onnx"), "int8", tmp_path / "o.onnx", calib=data, max_drop=1.0
    )
    record = made.evidence.calibration
    assert record is not None
    alone = dk.quantize(
        save(layer_norm(), tmp_path / "y.onnx"), "int8", tmp_path / "p.onnx", calib=data
    )
    wanted = alone.evidence.calibration if "y" in kept else None
    assert record.sqnr_db == (wanted.sqnr_db if wanted else {})
    assert record.method in METHODS


def ticking(step_s: float) -> Callable[[], float]:
    """A clock on which each look takes so long."""
    return itertools.count(0.0, step_s).__next__


def asked(data: Path, budget_s: float) -> QuantizeRequest:
    return QuantizeRequest("auto", "tensorrt", calib=data, min_sqnr_db=1.0, budget_s=budget_s)


@pytest.mark.parametrize(("budget_s", "used"), [(27.0, 64), (8.0, 32), (60.0, 128)])
def test_auto_calibrates_within_a_third_of_its_budget(
    outliers: Path, data: Path, budget_s: float, used: int
) -> None:
    """Batches of 32, and one at least."""
    job = prepare(Artefact.open(outliers), asked(data, budget_s), no_progress, ticking(1.0))
    assert job.calibration is not None
    assert job.calibration_record is not None
    assert job.calibration.samples == job.calibration_record.samples == used
    said = f"calibrated on {used} of 128 samples: all of them would take too much of the time"
    assert (said in " ".join(job.notes)) is (used < 128)


@pytest.mark.parametrize("budget_s", [0.5, 3.0])
def test_a_budget_ends_while_reading_or_calibrating(
    outliers: Path, data: Path, budget_s: float
) -> None:
    said: list[str] = []
    with pytest.raises(OutOfTime, match=f"`budget_s` {budget_s:g}: too short to try one candidate"):
        prepare(
            Artefact.open(outliers),
            asked(data, budget_s),
            lambda step, _: said.append(step),
            ticking(1.0),
        )
    assert ("calibrating" in said) is (budget_s > 1)


def test_auto_tries_as_many_calibrators_as_there_is_time_for(
    outliers: Path, data: Path, tmp_path: Path
) -> None:
    job = prepare(Artefact.open(outliers), asked(data, 60.0), no_progress, ticking(0.0))
    slow = replace(job, budget=Budget(0.0, 13.0, ticking(1.0)))
    found = calibration.calibrate_for(slow, "int8", tmp_path)
    assert found.calibration_record is not None
    tried = list(found.calibration_record.sqnr_db)
    assert tried == ["mixed", "mse"]
    best = found.calibration_record.method
    assert found.notes[-1] == f"INT8 by {best}: no time to try percentile, minmax"
    assert best in tried
    late = replace(job, budget=Budget(0.0, 1.0, ticking(1.0)))
    hasty = calibration.calibrate_for(late, "int8", tmp_path)
    assert hasty.notes[-1] == f"INT8 by mixed: no time to try {', '.join(METHODS)}"
    assert hasty.calibration is not None
    assert hasty.calibration.method == "mixed"
    whole = calibration.calibrate_for(job, "int8", tmp_path)
    assert whole.calibration_record is not None
    assert {"mixed", "percentile", "mse"} <= set(whole.calibration_record.sqnr_db)
    assert whole.notes == job.notes


def test_the_search_counts_what_calibrating_took_and_passes_its_notes_on(
    outliers: Path, data: Path, tmp_path: Path
) -> None:
    job = prepare(Artefact.open(outliers), asked(data, 27.0), no_progress, ticking(1.0))
    graph, evidence = write_graph(job, tmp_path / "o.onnx", "o.onnx", no_progress)
    assert evidence.search is not None
    before = 4.0  # looks at the clock, while the data were read and calibrated
    assert evidence.search.steps[0].elapsed_s > before
    assert evidence.search.steps[-1].elapsed_s <= 27.0
    assert any("no time to try" in note for note in evidence.notes)
    assert len(set(evidence.notes)) == len(evidence.notes)
    assert graph.path == tmp_path / "o.onnx"
