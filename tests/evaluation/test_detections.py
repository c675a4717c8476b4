"""Boxes are compared with their counterparts, whatever their order and number."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from deploykit.core.evidence import Parity
from deploykit.engines.data.samples import Samples
from deploykit.evaluation.accuracy import pair, same_answers
from deploykit.evaluation.evaluation import evaluate
from deploykit.evaluation.parity import compare_engines
from tests.support.fake_engine import Function

Outputs = Mapping[str, np.ndarray]
IMAGE = {"x": np.zeros((1, 3, 8, 8), np.float32)}


def found(count: int, seed: int = 0, stem: str = "") -> dict[str, np.ndarray]:
    """As torchvision's detectors answer: boxes far from each other, best first."""
    rng = np.random.default_rng(seed)
    corner = 100 * np.arange(count, dtype=np.float32)[:, None] + rng.random((count, 2), np.float32)
    sides = 20 + 40 * rng.random((count, 2), np.float32)
    return {
        f"{stem}boxes": np.concatenate((corner, corner + sides), 1),
        f"{stem}labels": rng.integers(1, 9, count),
        f"{stem}scores": np.sort(rng.random(count, np.float32))[::-1].copy(),
    }


def rows(outputs: Outputs, which: object) -> dict[str, np.ndarray]:
    return {name: array[which] for name, array in outputs.items()}  # type: ignore[index]


def head(outputs: Outputs) -> np.ndarray:
    """The same in one tensor [1,M,6]."""
    parts = (outputs["boxes"], outputs["scores"][:, None], outputs["labels"][:, None])
    return np.concatenate(parts, 1)[None].astype(np.float32)


def engine(outputs: Outputs) -> Function:
    specs = {2: "[M,4]", 1: "[M]", 3: "[N,M,6]"}
    texts = [f"{name}:{a.dtype}{specs[a.ndim]}" for name, a in outputs.items()]
    return Function(lambda _: dict(outputs), "x:float32[1,3,8,8]", *texts)


def compared(left: Outputs, right: Outputs) -> Parity:
    return compare_engines(engine(left), engine(right), [IMAGE])


def test_boxes_are_compared_with_their_counterparts() -> None:
    left = found(5, stem="output_0_")
    right = rows(left, [2, 0, 1, 4, 3])
    parity = compared(left, right)
    assert parity.passed
    (row,) = [row for row in parity.rows if row.answers]
    assert (row.output, row.answers) == ("output_0_boxes", "boxes")
    assert (row.agreement, row.mean_iou) == (1.0, 1.0)
    right["output_0_boxes"] = right["output_0_boxes"] + np.float32(0.5)
    (row,) = [row for row in compared(left, right).rows if row.answers]
    assert row.max_abs == pytest.approx(0.5, abs=1e-3)
    assert row.mean_iou == pytest.approx(0.96, abs=0.02)
    assert row.agreement == 1.0


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_a_box_that_one_does_not_find_is_an_error_of_its_share(turned: bool, single: bool) -> None:
    """Before, other numbers of boxes could not be compared at all."""
    pair = [found(10), rows(found(10), slice(9))][:: -1 if turned else 1]
    outputs = [{"output0": head(each)} for each in pair] if single else pair
    row = compared(*outputs).worst
    assert row.error == pytest.approx(0.1)
    assert (row.agreement, row.answers, row.problem) == (pytest.approx(0.9), "boxes", "")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_boxes_that_are_broken_on_one_side_are_not_found(value: float) -> None:
    left, right = found(4), found(4)
    right["boxes"][:] = value
    row = compared(left, right).worst
    assert (row.output, row.error, row.agreement, row.problem) == ("boxes", 1.0, 0.0, "")
    assert not compared(right, left).passed


def test_another_label_or_too_little_in_common_is_no_counterpart() -> None:
    left = found(4)
    right = {name: array.copy() for name, array in left.items()}
    right["labels"][0] += 1
    right["boxes"][1] += right["boxes"][1, 2:].max() / 2
    assert same_answers(left, right, IMAGE, 1).tolist() == [[2, 6]]


def test_masks_and_keypoints_go_with_their_boxes_and_padding_is_no_box() -> None:
    left = {**found(3), "masks": np.arange(12, dtype=np.float32).reshape(3, 1, 2, 2)}
    mine, theirs, _ = pair(left, rows(left, [2, 1, 0]))
    np.testing.assert_array_equal(mine["masks"], theirs["masks"])
    filled = {
        name: np.concatenate((a, np.zeros((5, *a.shape[1:]), a.dtype)))[None]
        for name, a in found(3).items()
    }
    (matches,) = pair(filled, filled)[2].values()
    assert (matches.matched, matches.total) == (3, 3)


@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_boxes_without_an_area_and_no_boxes_are_compared(count: int) -> None:
    left = found(count)
    left["boxes"][:, 2:] = left["boxes"][:, :2]
    assert compared(left, left).passed
    assert compared(left, found(0)).passed is (count == 0)
    assert compared(found(0), left).passed is (count == 0)


@pytest.mark.parametrize(
    "outputs",
    [
        {"boxes": np.zeros((2, 9, 4), np.float32), "scores": np.zeros((2, 9, 3), np.float32)},
        {**found(3), "boxes": -found(3)["boxes"]},  # no corners
        {**found(3), "boxes": np.full((3, 4), np.nan, np.float32)},
        {"output0": np.ones((1, 5, 6), np.float32)},  # no area
        {"output0": np.random.default_rng(0).standard_normal((1, 5, 6)).astype(np.float32)},
        {"output0": np.zeros((1, 5, 6), np.float32)},
        found(5000),
    ],
    ids=["raw head", "negative", "NaN", "ones", "noise", "zeros", "too many"],
)
def test_what_is_not_certainly_a_detector_is_compared_as_it_is(outputs: Outputs) -> None:
    assert pair(outputs, outputs)[2] == {}


def test_without_labels_a_detector_must_find_nine_of_ten_boxes() -> None:
    left = found(20)
    samples = Samples({"x": np.zeros((3, 3, 8, 8), np.float32)}, None, "here")
    verdicts = [
        evaluate(engine(left), engine(rows(left, slice(kept))), samples=samples)
        for kept in (20, 18, 17)
    ]
    assert [each.passed for each in verdicts] == [True, True, False]
    assert "both found 85 % of the boxes, below 90%" in verdicts[2].why
    assert verdicts[1].agreement.value == pytest.approx(0.9)
    assert verdicts[1].sqnr_db == np.inf
