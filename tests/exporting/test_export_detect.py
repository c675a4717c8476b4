"""`export --task detect`: decoded boxes and NMS in the graph, equal to torchvision's own NMS."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch")
needs("onnxscript")

import deploykit as dk  # noqa: E402
from deploykit.core.task import LETTERBOX, TaskOutputs  # noqa: E402

pytestmark = pytest.mark.torch

CLASSES, ANCHORS, SIDE = 3, 8 * 8 * 2, 32


class Yolo(torch.nn.Module):  # type: ignore[misc, name-defined] # torch may be absent
    """As YOLO answers: [N,4+classes,anchors], centres, sizes and probabilities."""

    spread, nc = 1.0, CLASSES

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 2 * (4 + CLASSES), 4, stride=4)
        grid = torch.arange(8, dtype=torch.float32) * 4 + 2
        centres = torch.stack(torch.meshgrid(grid, grid, indexing="xy")).flatten(1)
        self.register_buffer("centres", centres.repeat(1, 2))

    def forward(self, image: Any) -> Any:
        rows = image.shape[0]
        raw = self.conv(image).reshape(rows, 4 + CLASSES, ANCHORS)
        centres = self.centres + 3 * self.spread * raw[:, :2].tanh()
        sizes = 10 + 6 * self.spread * raw[:, 2:4].tanh()
        return torch.cat((centres, sizes, (4 * self.spread * raw[:, 4:]).sigmoid()), 1)


class WithMaps(Yolo):
    """As a YOLOv5 in eval mode answers: [N,anchors,5+classes], and the maps that it decoded.

    The scores of classes are to be multiplied by that of an object.
    """

    def forward(self, image: Any) -> Any:
        found = super().forward(image).transpose(1, 2)
        found = torch.cat((found[..., :4], found[..., 4:5], found[..., 4:]), -1)
        return found, [found.reshape(-1, 2, 8, 8, 5 + CLASSES).logit(1e-6)]


def corners_of(found: Any) -> Any:
    half = found[..., 2:4] / 2
    return torch.cat((found[..., :2] - half, found[..., :2] + half), -1)


class Pair(Yolo):
    def forward(self, image: Any) -> Any:
        found = super().forward(image).transpose(1, 2)
        return {"boxes": corners_of(found), "scores": found[..., 4:]}


class Own(Yolo):
    """As torchvision's detectors answer, with their own NMS: one image's rows, best first."""

    threshold = 0.5

    def forward(self, image: Any) -> Any:
        found = super().forward(image)[0].transpose(0, 1)
        scores, labels = found[:, 4:].max(1)
        scores, order = (scores * (scores > self.threshold)).topk(40)
        corners = corners_of(found[order]) * (scores > 0).unsqueeze(1)
        masks = corners.sum(1)
        return [{"boxes": corners, "labels": labels[order], "scores": scores, "masks": masks}]


class Head(Yolo):
    """The end of a YOLO of Ultralytics without NMS: [N,boxes,6], corners, score and class."""

    end2end, nc = True, 2

    def forward(self, image: Any) -> Any:
        found = super().forward(image).transpose(1, 2)[:, :40]
        scores, classes = found[..., 4:].max(-1, keepdim=True)
        return torch.cat((corners_of(found), scores, classes.float()), -1)


class MaskHead(Head):
    """One that finds masks too: 8 coefficients in each row, and the prototypes."""

    nc = 5

    def forward(self, image: Any) -> Any:
        rows = super().forward(image)
        return torch.cat((rows, rows[..., :4].tanh(), rows[..., :4].sin()), -1), self.conv(image)


class Ultralytics(torch.nn.Module):  # type: ignore[misc, name-defined] # torch may be absent
    __module__ = "ultralytics.nn.tasks"

    def __init__(self, head: type[Any] = Head) -> None:
        super().__init__()
        self.model = torch.nn.ModuleList([head()])
        self.names = [f"class {number}" for number in range(head.nc)]

    def forward(self, image: Any) -> Any:
        return self.model[0](image)


def built(kind: Any, *given: Any, **changed: Any) -> Any:
    torch.manual_seed(0)
    model = kind(*given).eval()
    for name, value in changed.items():
        setattr(model, name, value)
    return model


def images(rows: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (rows, SIDE, SIDE, 3), dtype=np.uint8)


def answers_of(model: Any, rows: int) -> Any:
    with torch.inference_mode():
        return model(torch.from_numpy(images(rows)).permute(0, 3, 1, 2) / 255)


def exported(model: Any, folder: Path, batch: str = "N", **given: Any) -> Any:
    values = folder / "values.toml"
    values.write_text("mean = [0, 0, 0]\nstd = [1, 1, 1]\n")
    own = isinstance(model, Ultralytics)
    usual = {} if own else {"preprocess": str(values), "labels": ["circle", "square", "star"]}
    spec = [f"image:float32[{batch},3,{SIDE},{SIDE}]"]
    usual |= {"out": folder / "d.onnx", "inputs": spec, "task": "detect"}
    return dk.export(model, **{**usual, **given})


def answered(made: Any, rows: int) -> dict[str, np.ndarray]:
    with dk.load(made.path, "cpu") as engine:
        return engine({"image": images(rows)})


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    low, high = np.maximum(a[:2], b[:2]), np.minimum(a[2:], b[2:])
    shared = float(np.prod(np.clip(high - low, 0, None)))
    return shared / float(np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - shared)


def expected(found: Any, iou: float, most: int) -> list[tuple[np.ndarray, float, int]]:
    """NMS as it is defined, box by box, of one image's corners [A,4] and scores [A,C]."""
    corners, scores = (each.numpy().astype(np.float64) for each in found)
    best, kept = scores.argmax(1), []
    for at in np.argsort(-scores.max(1), kind="stable"):
        same = [other for other in kept if best[other] == best[at]]
        if all(overlap(corners[at], corners[other]) <= iou for other in same):
            kept.append(at)
    return [(corners[at].clip(0, SIDE), scores[at].max(), int(best[at])) for at in kept[:most]]


@pytest.mark.parametrize("kind", [Yolo, Pair, WithMaps])
def test_the_graph_keeps_the_boxes_that_nms_keeps(kind: type[Any], tmp_path: Path) -> None:
    iou = 0.0 if kind is Yolo else 0.45
    made = exported(built(kind), tmp_path, iou=iou, boxes=60, threshold=0.4)
    assert [str(spec) for spec in made.manifest.outputs] == [
        "boxes:float32[N,60,4]",
        "scores:float32[N,60]",
        "classes:int64[N,60]",
    ]
    task = made.manifest.task
    assert task.outputs == TaskOutputs(boxes="boxes", scores="scores", classes="classes")
    assert (task.threshold, task.image.resize, len(task.labels)) == (0.4, LETTERBOX, 3)
    raw = answers_of(built(Pair), 4)
    scores = raw["scores"] * (raw["scores"][..., :1] if kind is WithMaps else 1)
    answers = answered(made, 4)
    for row in range(4):
        wanted = expected((raw["boxes"][row], scores[row]), iou, 60)
        used, found = len(wanted), {name: values[row] for name, values in answers.items()}
        np.testing.assert_allclose(found["scores"][:used], [each[1] for each in wanted], atol=1e-6)
        np.testing.assert_allclose(found["boxes"][:used], [each[0] for each in wanted], atol=1e-4)
        assert found["classes"][:used].tolist() == [each[2] for each in wanted]
        assert not any(values[used:].any() for values in found.values())
    assert kind is not Yolo or used < 60
    if kind is Yolo:
        half = dk.quantize(made.path, "fp16", out=tmp_path / "h.onnx")
        low = answered(half, 4)["scores"]
        np.testing.assert_allclose(answers["scores"][:, :10], low[:, :10], atol=5e-3)  # of 11 bits
        assert half.manifest.task == task


@pytest.mark.parametrize("head", [Head, MaskHead])
def test_a_model_without_nms_is_sorted_and_cut_off_at_the_image(
    head: type[Any], tmp_path: Path
) -> None:
    """Columns are corners, a score, a class, and mask coefficients: no scores of classes."""
    model = built(Ultralytics, head)
    made = exported(model, tmp_path)
    assert made.manifest.task.labels == tuple(model.names)
    assert ("left out: the outputs output_1" in made.notes) is (head is MaskHead)
    found, rows = answered(made, 2), answers_of(model, 2)
    rows = rows[0] if head is MaskHead else rows
    best = rows[..., 4].sort(1, descending=True).values[:, : found["scores"].shape[1]]
    np.testing.assert_allclose(found["scores"], best, atol=1e-6)
    assert found["boxes"].min() >= 0
    assert found["boxes"].max() <= SIDE


def test_boxes_that_the_librarys_nms_cannot_check_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ultralytics.utils.nms", ModuleType("nms"))
    made = exported(built(Ultralytics, Yolo), tmp_path)
    (note,) = (note for note in made.notes if "NMS" in note)
    assert "not compared with Ultralytics' own NMS, which failed: " in note


@pytest.mark.parametrize("task", ["segment", "embed", "classify", "detect"])
def test_what_a_detector_is_not_exported_for_is_refused(task: str, tmp_path: Path) -> None:
    """Prototypes of masks are no scores; boxes in shares of the image are all in one corner."""
    head = type("RTDETRDecoder", (Head,), {}) if task == "detect" else Head
    reason = "its head RTDETRDecoder fits none" if task == "detect" else "the model finds boxes"
    with pytest.raises(dk.BadInput, match=reason):
        exported(built(Ultralytics, head), tmp_path, task=task)


def test_a_detector_with_its_own_nms_answers_rows_of_one_number(tmp_path: Path) -> None:
    made = exported(built(Own), tmp_path, batch="1", boxes=60)
    assert [spec.shape[1] for spec in made.manifest.outputs] == [60] * 3
    assert "left out: the outputs output_0_masks" in made.notes
    (own,), answers = answers_of(built(Own), 1), answered(made, 1)
    np.testing.assert_allclose(answers["boxes"][0, :40], own["boxes"], atol=1e-4)
    np.testing.assert_allclose(answers["scores"][0, :40], own["scores"], atol=1e-6)
    assert not answers["boxes"][0, 40:].any()
    assert not answers["scores"][0, 40:].any()


@pytest.mark.parametrize(
    ("weight", "hint"),
    [(1.0, "`samples`: a folder of images"), (math.nan, "infinity is in 1 of its 3 weights")],
)
def test_a_comparison_without_a_box_proves_nothing(
    weight: float, hint: str, tmp_path: Path
) -> None:
    """A trained detector finds nothing in noise, and one whose training went wrong nowhere."""
    unused = torch.nn.Parameter(torch.tensor(weight))
    with pytest.raises(dk.GateFailed, match="finds no box that PyTorch finds") as caught:
        exported(built(Own, threshold=2.0, unused=unused), tmp_path, batch="1")
    assert hint in str(caught.value.hint)
    assert not (tmp_path / "d.onnx").exists()


def test_where_equal_scores_decide_the_choice_is_proven_apart(tmp_path: Path) -> None:
    made = exported(built(Yolo, spread=1e-7), tmp_path, iou=0.3, boxes=20)  # all scores equal
    outputs = {row.output for row in made.parity.rows}
    assert made.parity.passed
    assert outputs in (
        {"boxes", "scores", "classes"},
        {"boxes", "scores", "classes", "corners", "by_class"},
    )
