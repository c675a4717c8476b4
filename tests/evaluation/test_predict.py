"""`predict` uses the labels that it is given, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput, MissingExtra
from deploykit.core.extras import installed
from deploykit.evaluation.predict import Predicted, predict

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

INPUTS = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)


def run(model: Path, folder: Path, labels: np.ndarray) -> Predicted:
    np.savez(folder / "data.npz", x=INPUTS, labels=labels)
    return predict(model, folder / "data.npz", folder / "out.npz", device="cpu")


def test_the_same_labels_in_another_form_give_the_same_accuracy(
    affine_onnx: Path, tmp_path: Path
) -> None:
    numbers = np.arange(30) % 4
    expected = run(affine_onnx, tmp_path, numbers)
    assert expected.accuracy is not None
    for labels in (np.eye(4)[numbers], numbers.astype(str), numbers[:, None]):
        assert run(affine_onnx, tmp_path, labels).accuracy == expected.accuracy


def test_arrays_that_are_neither_inputs_nor_labels_are_named(
    affine_onnx: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "data.npz", x=INPUTS, label=np.arange(30) % 4, y=INPUTS)
    found = predict(affine_onnx, tmp_path / "data.npz", tmp_path / "out.npz", device="cpu")
    assert (found.accuracy, found.samples) == (None, 30)
    assert "without 'label', 'y'" in found.note
    assert "named 'labels'" in found.note


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        (np.array(["cat", "dog", "owl"] * 10), "labels are names, such as 'cat'"),
        (np.linspace(0, 1, 30), "labels are float64[30]"),
        (np.zeros((30, 7), np.int64), "labels are int64[30, 7]"),
        (np.full(30, 9), "labels run from 9 to 9"),
    ],
)
def test_labels_that_are_not_classes_leave_the_predictions_and_a_note(
    affine_onnx: Path, tmp_path: Path, labels: np.ndarray, why: str
) -> None:
    found = run(affine_onnx, tmp_path, labels)
    assert (found.accuracy, found.samples) == (None, 30)
    assert why in found.note
    assert (tmp_path / "out.npz").exists()


def test_a_cluster_without_ray_names_the_extra(affine_onnx: Path, tmp_path: Path) -> None:
    if installed("ray"):
        pytest.skip("Ray is installed")
    np.savez(tmp_path / "data.npz", x=INPUTS)
    with pytest.raises(MissingExtra, match="ray is not installed") as caught:
        predict(affine_onnx, tmp_path / "data.npz", tmp_path / "out.npz", on="ray")
    assert "[ray]" in (caught.value.hint or "")


def test_another_cluster_is_refused(affine_onnx: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="`on` 'slurm': is neither local nor ray"):
        predict(affine_onnx, tmp_path / "data.npz", tmp_path / "out.npz", on="slurm")
