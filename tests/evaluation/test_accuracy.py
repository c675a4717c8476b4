"""Top-1 accuracy: right and wrong rows, and what it cannot score."""

from __future__ import annotations

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.tensors import TensorSpec
from deploykit.engines.data.samples import Samples
from deploykit.evaluation.accuracy import top1, top1_scores
from tests.support.fake_engine import FakeEngine

VALUES = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]], np.float32)


def test_a_row_scores_1_where_the_largest_value_is_the_label() -> None:
    np.testing.assert_array_equal(top1(VALUES, np.array([1, 1, 1]), "d"), [1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    "labels",
    [
        np.array([1.0, 1.0, 1.0], np.float32),
        np.array([True, True, True]),
        np.array([[1], [1], [1]]),
        np.array(["1", "1", "1"]),
        np.array([b"1", b"1", b"1"]),
        np.eye(2)[[1, 1, 1]],
        np.eye(2, dtype=np.uint8)[[1, 1, 1]],
        np.eye(2, dtype=bool)[[1, 1, 1]],
    ],
    ids=lambda labels: f"{labels.dtype}{list(labels.shape)}",
)
def test_class_numbers_of_any_type_and_one_hot_rows_are_labels(labels: np.ndarray) -> None:
    np.testing.assert_array_equal(top1(VALUES, labels, "d"), [1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        (np.array([1, 0, 1]), np.array([1, 1, 1])),
        (np.array([[1], [0], [1]]), np.array([1.0, 1.0, 1.0])),
        (np.array([1, 0, 1]), np.eye(2)[[1, 1, 1]]),
        (np.array(["b", "a", "b"], object), np.array(["b", "b", "b"])),
        (np.array(["1", "0", "1"], object), np.array([1, 1, 1])),
    ],
    ids=["integers", "a column", "one-hot", "names", "numbers as names"],
)
def test_an_output_of_labels_is_compared_with_them(values: np.ndarray, labels: np.ndarray) -> None:
    np.testing.assert_array_equal(top1(values, labels, "d"), [1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("values", "labels", "message"),
    [
        (VALUES, np.array([1.5, 0.0, 1.0]), r"labels are float64\[3\]"),
        (VALUES, np.array([1.0, np.nan, 1.0]), "labels are float64"),
        (VALUES, np.array([[1, 1], [0, 1], [1, 0]]), r"labels are int64\[3, 2\]"),
        (VALUES, np.array([[0.3, 0.7], [1, 0], [0, 1]]), "labels are float64"),
        (VALUES, np.array([[0, 0, 1]] * 3), r"labels are int64\[3, 3\]"),
        (VALUES, np.array(["cat", "dog", "cat"]), "labels are names, such as 'cat'"),
        (VALUES, np.array([b"cat", b"dog", b"cat"]), "labels are names"),
        (VALUES, np.array(["1", "0", "2"]), "2 classes"),
        (VALUES[:2], np.array([1, 0, 1]), "samples, classes"),
        (VALUES[:, :1], np.array([0, 0, 0]), "samples, classes"),
        (VALUES, np.array([1, 0, 2]), "2 classes"),
        (VALUES, np.array([1, 0, -1]), "2 classes"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    values: np.ndarray, labels: np.ndarray, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        top1(values, labels, "data.npz")


def test_an_engine_is_scored_over_all_batches_in_order() -> None:
    rows = np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0]]
    samples = Samples({"x": rows}, np.array([0, 1, 2, 0, 0]), "d")
    engine = FakeEngine(width=4)
    np.testing.assert_array_equal(top1_scores(engine, samples, batch_size=2), [1, 1, 1, 0, 1])
    assert engine.batches == [2, 2, 1]


def test_samples_without_labels_are_refused() -> None:
    samples = Samples({"x": np.zeros((1, 4), np.float32)}, None, "data.npz")
    with pytest.raises(BadInput, match=r"data\.npz: no array 'labels'"):
        top1_scores(FakeEngine(width=4), samples)


def test_a_model_of_a_fixed_batch_is_scored_at_its_size() -> None:
    rows = np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0]]
    engine = FakeEngine(width=4)
    engine.inputs = (TensorSpec("x", "float32", (2, 4)),)
    samples = Samples({"x": rows}, np.array([0, 1, 2, 0, 0]), "d")
    np.testing.assert_array_equal(top1_scores(engine, samples), [1, 1, 1, 0])
