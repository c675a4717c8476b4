"""A classifier that answers with names goes through each verb, or is refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from deploykit.core.errors import GateFailed
from deploykit.engines.engine import load
from deploykit.evaluation.batching import prove_batch
from deploykit.evaluation.compare import compare
from deploykit.evaluation.predict import predict
from tests.support.string_labels import samples, write_classifier


@pytest.fixture(name="model")
def model_fixture(tmp_path: Path) -> Path:
    return write_classifier(tmp_path / "m.onnx")


def test_its_rows_are_proven_independent(model: Path) -> None:
    with load(model, "cpu") as engine:
        assert prove_batch(engine, model, None).passed


def test_it_equals_itself(model: Path) -> None:
    assert compare(model, model).parity.passed


def test_another_one_differs_in_its_strings(model: Path, tmp_path: Path) -> None:
    found = compare(model, write_classifier(tmp_path / "other.onnx", scale=-1.0))
    with pytest.raises(GateFailed, match=r"output 'label' .* strings differ") as caught:
        found.raise_if_over()
    assert "LinearClassifier" in str(caught.value.hint)


def test_predictions_of_strings_are_written_and_scored(model: Path, tmp_path: Path) -> None:
    X = samples(9)
    with load(model, "cpu") as engine:
        want = engine({"X": X})
    labels = want["label"].astype(str)
    labels[0] = "another"
    np.savez(tmp_path / "x.npz", X=X, labels=labels)
    found = predict(model, tmp_path / "x.npz", tmp_path / "y.npz", batch=4)
    got = np.load(tmp_path / "y.npz")  # without pickles
    assert got["label"].tolist() == want["label"].tolist()
    np.testing.assert_array_equal(got["probabilities"], want["probabilities"])
    assert found.accuracy is not None
    assert found.accuracy.value == 8 / 9


def test_strings_are_inputs_from_an_npz(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (string[N,2] x) => (string[N,2] y) { y = Identity(x) }""")
    onnx.save(model, tmp_path / "m.onnx")
    words = np.array([["a", "bcd"], ["", "ü"], ["ef", "g"]])
    np.savez(tmp_path / "x.npz", x=words)
    predict(tmp_path / "m.onnx", tmp_path / "x.npz", tmp_path / "y.npz", batch=2)
    assert np.load(tmp_path / "y.npz")["y"].tolist() == words.tolist()
    data = {"data": tmp_path / "x.npz"}
    assert compare(tmp_path / "m.onnx", tmp_path / "m.onnx", **data).parity.passed
