"""What the calibration computed of the model is not computed again to evaluate INT8."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import deploykit as dk
from deploykit.engines.data.samples import Samples
from deploykit.engines.engine import KnownOutputs
from deploykit.engines.onnxruntime.engine import OnnxRuntimeEngine
from deploykit.graph.graph import Graph
from deploykit.quantization.calibrate import calibrate
from tests.support.fake_engine import FakeEngine
from tests.support.onnx_zoo import make, mnist_like, save

SAMPLES = 48  # more than one batch
IMAGES = np.random.default_rng(0).random((SAMPLES, 1, 28, 28), dtype=np.float32)
ROWS = np.random.default_rng(1).standard_normal((SAMPLES, 4), dtype=np.float32)


def of_rows(last: onnx.NodeProto, batch: str | int = "N") -> onnx.ModelProto:
    weight = np.random.default_rng(2).standard_normal((4, 4)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), last]
    return make(nodes, {"x": (batch, 4)}, {"y": (batch, 4)}, {"w": weight})


def every_output(model: onnx.ModelProto, folder: Path, **given: Any) -> dict[str, np.ndarray]:
    graph = Graph.open(save(model, folder / "m.onnx"))
    samples = Samples({"x": ROWS}, None, "rows")
    return dict(calibrate(graph, samples, every_output=True, **given).every_output)


RELU = helper.make_node("Relu", ["h"], ["y"])
OVER_ROWS = helper.make_node("Softmax", ["h"], ["y"], axis=0)


@pytest.mark.parametrize("batch", ["N", 16, 1])
def test_a_calibration_knows_the_outputs_for_all_samples(tmp_path: Path, batch: str | int) -> None:
    model = of_rows(RELU, batch)
    found = every_output(model, tmp_path, batch_size=20)["y"]
    with dk.load(tmp_path / "m.onnx", "cpu") as engine:
        size = batch if isinstance(batch, int) else SAMPLES
        parts = [engine({"x": ROWS[at : at + size]})["y"] for at in range(0, SAMPLES, size)]
    np.testing.assert_allclose(found, np.concatenate(parts), rtol=1e-5, atol=1e-6)


def test_outputs_that_depend_on_the_batch_are_not_taken_over(tmp_path: Path) -> None:
    assert every_output(of_rows(OVER_ROWS), tmp_path) == {}


def test_nor_are_those_of_one_batch_that_no_other_confirms(tmp_path: Path) -> None:
    assert every_output(of_rows(RELU), tmp_path, batch_size=SAMPLES) == {}
    assert every_output(of_rows(RELU), tmp_path, batch_size=1) == {}


def test_nor_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploykit.quantization.calibrate._EVERY_BYTES", ROWS.nbytes - 1)
    assert every_output(of_rows(RELU), tmp_path) == {}


def test_the_places_to_choose_on_get_the_same_outputs_either_way(tmp_path: Path) -> None:
    graph = Graph.open(save(of_rows(RELU), tmp_path / "m.onnx"))
    samples, places = Samples({"x": ROWS}, None, "rows"), [np.array([40, 3]), np.array([7, 20])]
    kept = [calibrate(graph, samples, places=places, every_output=e).outputs for e in (True, False)]
    for (rows, outputs), (again, wanted) in zip(*kept, strict=True):
        assert np.array_equal(rows, again)
        np.testing.assert_allclose(outputs[0], wanted[0], rtol=1e-5, atol=1e-6)


def test_the_float32_model_runs_once_on_each_calibration_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = save(mnist_like(), tmp_path / "model.onnx")
    np.savez(tmp_path / "calib.npz", image=IMAGES)
    rows = Counter[str]()
    run = OnnxRuntimeEngine.__call__

    def counted(self: OnnxRuntimeEngine, feeds: Any) -> dict[str, np.ndarray]:
        rows[self.path.name] += len(feeds["image"])
        return run(self, feeds)

    monkeypatch.setattr(OnnxRuntimeEngine, "__call__", counted)
    out, given = tmp_path / "out.onnx", {"calib": tmp_path / "calib.npz"}
    made = dk.quantize(model, "int8", out, **given)
    assert (rows["model.onnx"], rows["out.onnx"]) == (4, SAMPLES + 4)  # golden samples: 4
    monkeypatch.setattr("deploykit.quantization.calibrate._EVERY_BYTES", 0)
    again = dk.quantize(model, "int8", out, **given)
    assert rows["model.onnx"] == 4 + SAMPLES + 4
    both = [each.evaluation for each in (made, again)]
    assert both[0] is not None
    assert both[1] is not None
    assert both[0].sqnr_db == pytest.approx(both[1].sqnr_db, abs=1e-3)
    assert both[0].agreement == both[1].agreement
    assert made.evidence.calibration.method == again.evidence.calibration.method


def test_inputs_whose_outputs_are_not_known_are_run() -> None:
    engine = FakeEngine()
    known = KnownOutputs(engine, {"x": ROWS[:6]}, {"y": ROWS[:6]})
    assert np.array_equal(known({"x": ROWS[:4]})["y"], ROWS[:4])
    other = known({"x": ROWS[:4]})["y"]  # not the next ones
    assert np.array_equal(other, ROWS[:4] * 2 + 1)
    assert np.array_equal(known({"x": ROWS[4:6]})["y"], ROWS[4:6])
    known({"x": ROWS[6:8]})
    assert engine.batches == [4, 2]
