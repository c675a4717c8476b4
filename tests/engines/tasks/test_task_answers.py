"""A task's outputs become labels, boxes, masks and embeddings, as JSON values."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.task import Task, TaskOutputs
from deploykit.engines.tasks.engine import answer
from tests.support.installed import needs

needs("PIL")

from deploykit.engines.tasks.images import PlacedImage, read_image  # noqa: E402
from tests.support.runtimes.pictures import encoded, image_input, noise  # noqa: E402

LABELS = ("cat", "dog", "fox")
OUTPUTS = TaskOutputs("scores", "boxes", "classes", "mask", "embedding")


def task(kind: str, **more: Any) -> Task:
    image = more.pop("image", image_input())
    return Task(kind, OUTPUTS, image=image, **{"labels": LABELS, **more})


def placed(height: int, width: int, rule: Any) -> PlacedImage:
    return read_image(encoded(noise(height, width)), rule)


SMALL = placed(4, 6, image_input())


def only(*given: Any, **more: Any) -> dict[str, Any]:
    """The one answer, which is JSON."""
    (found,) = answer(*given, **more)
    return json.loads(json.dumps(found, allow_nan=False))


def test_the_labels_come_with_the_highest_score_first() -> None:
    scores = np.array([[0.25, 0.5, 0.125]], np.float32)
    assert only(task("classify", top_k=2), {"scores": scores}, [SMALL]) == {
        "label": "dog",
        "score": 0.5,
        "top": [
            {"label": "dog", "index": 1, "score": 0.5},
            {"label": "cat", "index": 0, "score": 0.25},
        ],
    }


def test_labels_without_names_are_their_indices_and_more_than_there_are_is_all() -> None:
    found = only(
        task("classify", labels=(), top_k=9), {"scores": np.array([[0.25, 0.75]])}, [SMALL]
    )
    assert [each["label"] for each in found["top"]] == ["1", "0"]


def test_each_row_has_its_answer() -> None:
    found = answer(task("classify"), {"scores": np.eye(3)[[2, 0]]}, [SMALL, SMALL])
    assert [each["label"] for each in found] == ["fox", "cat"]


def test_boxes_have_names_scores_and_places_in_the_original() -> None:
    """Of 40x100 pixels, letterboxed into 50x50: half the size, 15 rows of padding above."""
    image = placed(40, 100, image_input(50, 50, resize="letterbox"))
    outputs = {
        "scores": np.array([[0.3, 0.9, 0.2, 0.0]], np.float32),
        "boxes": np.array(
            [[[0, 15, 50, 35], [10, 25, 20, 33], [0, 0, 1, 1], [0, 0, 0, 0]]], np.float32
        ),
        "classes": np.array([[2, 1, 0, 0]]),
    }
    found = only(task("detect"), outputs, [image])
    assert (found["width"], found["height"]) == (100, 40)
    assert [(each["label"], each["index"], each["box"]) for each in found["boxes"]] == [
        ("dog", 1, [20, 20, 40, 36]),
        ("fox", 2, [0, 0, 100, 40]),
    ]
    assert [each["score"] for each in found["boxes"]] == pytest.approx([0.9, 0.3])


def test_rows_without_a_score_are_no_boxes_even_at_threshold_0() -> None:
    outputs = {
        "scores": np.array([[0.0, 0.1]]),
        "boxes": np.zeros((1, 2, 4)),
        "classes": np.zeros((1, 2), int),
    }
    found = only(task("detect", threshold=0.0), outputs, [SMALL])
    assert [each["score"] for each in found["boxes"]] == [0.1]


def test_without_boxes_the_list_is_empty() -> None:
    outputs = {
        "scores": np.zeros((1, 0)),
        "boxes": np.zeros((1, 0, 4)),
        "classes": np.zeros((1, 0)),
    }
    assert only(task("detect"), outputs, [SMALL]) == {"boxes": [], "width": 6, "height": 4}


def unpacked(rle: dict[str, Any]) -> np.ndarray:
    """COCO's run lengths as a mask, written from its documentation: columns first, zeros first."""
    flat = np.repeat(np.arange(len(rle["counts"])) % 2, rle["counts"])
    return flat.reshape(rle["size"][::-1]).T.astype(bool)


MASK = np.array([[0, 0, 1], [2, 1, 1]])


def test_a_mask_is_run_lengths_for_each_label_in_pixels_of_the_original() -> None:
    """A mask of 2x3, stretched over 4x6 pixels."""
    found = only(task("segment"), {"mask": MASK[None]}, [SMALL])
    assert (found["width"], found["height"]) == (6, 4)
    large = np.kron(MASK, np.ones((2, 2), int))
    assert [(each["label"], each["pixels"]) for each in found["segments"]] == [
        ("cat", 8),
        ("dog", 12),
        ("fox", 4),
    ]
    for each in found["segments"]:
        np.testing.assert_array_equal(unpacked(each["rle"]), large == each["index"])


def test_counts_end_with_the_last_pixels_and_begin_with_zeros() -> None:
    found = only(task("segment"), {"mask": np.zeros((1, 2, 3), int)}, [SMALL])
    assert [each["rle"] for each in found["segments"]] == [{"size": [4, 6], "counts": [0, 24]}]


def test_what_was_cut_off_belongs_to_no_label() -> None:
    """Of 4x10 pixels the model saw the middle 4x4."""
    image = placed(4, 10, image_input(4, 4, resize="shortest-edge", resize_to=4))
    found = only(task("segment"), {"mask": np.zeros((1, 4, 4), int)}, [image])
    (each,) = found["segments"]
    expected = np.zeros((4, 10), bool)
    expected[:, 3:7] = True
    np.testing.assert_array_equal(unpacked(each["rle"]), expected)


def test_what_was_filled_up_is_not_answered() -> None:
    image = placed(2, 4, image_input(4, 4, resize="letterbox"))
    mask = np.array([[[2] * 4, [0, 0, 1, 1], [0, 0, 1, 1], [2] * 4]])
    found = only(task("segment"), {"mask": mask}, [image])
    assert [(each["label"], each["pixels"]) for each in found["segments"]] == [
        ("cat", 4),
        ("dog", 4),
    ]


def test_a_mask_as_png_holds_the_labels_indices() -> None:
    from PIL import Image

    image = placed(4, 10, image_input(4, 4, resize="shortest-edge", resize_to=4))
    found = only(task("segment"), {"mask": np.full((1, 4, 4), 2)}, [image], mask="png")
    with Image.open(io.BytesIO(base64.b64decode(found["png"]))) as opened:
        pixels = np.asarray(opened)
    expected = np.full((4, 10), 255)
    expected[:, 3:7] = 2
    np.testing.assert_array_equal(pixels, expected)


def test_a_png_has_no_place_for_more_labels_than_255() -> None:
    with pytest.raises(BadInput, match="255 labels at most"):
        only(task("segment"), {"mask": np.full((1, 4, 6), 255)}, [SMALL], mask="png")


def test_an_embedding_is_a_list_of_numbers() -> None:
    found = answer(task("embed"), {"embedding": np.array([[0.5, -0.5], [1, 0]])}, [SMALL, SMALL])
    assert found == [{"embedding": [0.5, -0.5]}, {"embedding": [1.0, 0.0]}]


@pytest.mark.parametrize("kind", ["classify", "detect", "embed"])
def test_nan_is_refused(kind: str) -> None:
    outputs = {
        "scores": np.array([[np.nan, 1]]),
        "boxes": np.zeros((1, 2, 4)),
        "classes": np.zeros((1, 2)),
        "embedding": np.array([[np.inf, 0]]),
    }
    with pytest.raises(BadInput, match="holds NaN or infinity"):
        answer(task(kind), outputs, [SMALL])
