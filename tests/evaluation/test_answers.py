"""Which axis of an output holds classes, by the shapes of the inputs of the same call."""

from __future__ import annotations

import numpy as np
import pytest

from deploykit.engines.answers import class_axis
from deploykit.evaluation.accuracy import same_answers
from deploykit.evaluation.parity import compare_engines
from tests.support.fake_engine import Function


@pytest.mark.parametrize(
    ("name", "output", "inputs", "axis"),
    [
        ("logits", (2, 10), [(2, 3, 8, 8)], 1),
        ("score", (2, 1), [(2, 3, 8, 8)], None),
        ("y", (2,), [(2, 4)], None),
        ("logits", (2, 7, 30), [(2, 7), (2, 7)], 2),  # tokens
        ("logits", (2, 7, 30), [(2, 7, 80)], 2),  # frames of speech
        ("boxes", (2, 3234, 4), [(2, 3, 320, 320)], None),
        ("scores", (2, 3234, 91), [(2, 3, 320, 320)], None),
        ("output0", (2, 84, 8400), [(2, 3, 640, 640)], None),
        ("output0", (2, 3, 4), [(2, 3, 640, 640)], None),  # three boxes, not three channels
        ("boxes", (2, 4), [(2, 3, 8, 8)], None),
        ("mask", (2, 5, 8, 8), [(2, 3, 8, 8)], 1),
        ("mask", (2, 1, 8, 8), [(2, 3, 8, 8)], None),
        ("mask", (2, 8, 8, 5), [(2, 8, 8, 3)], 3),
        ("mask", (2, 5, 4, 4), [(2, 3, 8, 8)], None),  # features, or classes of another size
        ("mask", (2, 5, 8, 8), [(2, 3)], None),
        ("text_embeds", (2, 512), [(2, 7)], None),
        ("pooler_output", (2, 128), [(2, 7)], None),
        ("last_hidden_state", (2, 7, 128), [(2, 7)], None),
        ("keypoints", (2, 34), [(2, 3, 8, 8)], None),
        ("y", (2, 2, 2, 2, 2), [(2, 2, 2, 2, 2)], None),
    ],
)
def test_the_classes_stand_where_an_input_has_the_same_places(
    name: str, output: tuple[int, ...], inputs: list[tuple[int, ...]], axis: int | None
) -> None:
    feeds = {f"x{n}": np.zeros(shape, np.float32) for n, shape in enumerate(inputs)}
    assert class_axis(name, np.zeros(output, np.float32), feeds) == axis
    assert class_axis(name, np.zeros(output, np.int64), feeds) is None


def test_rows_of_length_one_are_embeddings_unless_none_is_negative() -> None:
    rows = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert class_axis("output", rows, {}) == 1
    assert class_axis("output", units, {}) is None
    assert class_axis("output", np.eye(5, dtype=np.float32), {}) == 1  # certain probabilities


def test_the_answers_of_a_segmentation_are_its_pixels() -> None:
    """Over the last axis, as it was, all 16 would be the same."""
    feeds = {"image": np.zeros((1, 3, 4, 4), np.float32)}
    left = np.zeros((1, 2, 4, 4), np.float32)
    left[0, 0] = 1.0
    right = left.copy()
    right[0, :, 0, 0] = right[0, ::-1, 0, 0].copy()
    found = same_answers({"y": left}, {"y": right}, feeds, 1)
    assert found is not None
    assert found.tolist() == [[15, 16]]


def test_a_segmentation_has_the_mean_iou_of_the_classes_that_either_shows() -> None:
    left = np.zeros((1, 3, 4, 4), np.float32)
    left[0, 0] = 1.0
    left[0, 1, :, 0] = 2.0  # 4 pixels of class 1, 12 of class 0; none of class 2
    right = left.copy()
    right[0, 1, 0, 1] = 2.0
    engines = [
        Function(lambda _, y=y: {"y": y}, "image:float32[N,3,4,4]", "y:float32[N,3,4,4]")
        for y in (left, right)
    ]
    feeds = {"image": np.zeros((1, 3, 4, 4), np.float32)}
    row = compare_engines(*engines, [feeds, feeds]).worst
    assert (row.answers, row.agreement) == ("pixels", 15 / 16)
    assert row.mean_iou == pytest.approx((4 / 5 + 11 / 12) / 2)
