"""Your own detector: circles, squares and triangles, found by a network of 160,000 weights.

    deploykit train examples/find_shapes.py -o shapes.pt --save-splits shapes
    deploykit export shapes.pt --arch examples/find_shapes.py --task detect
    deploykit serve shapes.onnx

It answers as YOLO does, so that `--task detect` adds NMS. Labels are boxes, [samples,M,5]: class,
x1, y1, x2, y2 in pixels, class -1 in unused rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

from deploykit.core.files import load_py
from deploykit.core.recipe import Recipe, Split, Splits
from deploykit.core.task import IMAGENET
from deploykit.core.tensors import parse_spec

metric = load_py(Path(__file__).with_name("average_precision.py"))

CLASSES = ("circle", "square", "triangle")
SIDE, STRIDE, MOST = 64, 8, 4
CELLS = (SIDE // STRIDE) ** 2
MAX_IOU, LEAST_SCORE = 0.7, 0.01  # of two boxes that both stay; of a box that is looked at


class Detector(nn.Module):
    """[N,3,64,64] -> [N,4+classes,64]: centre, size and probabilities of each cell's box."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 16, 2), (16, 32, 2), (32, 64, 2), (64, 96, 1), (96, 96, 1)]
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, s, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b, s in sizes
        ]
        self.body = nn.Sequential(*layers)
        self.head = nn.Conv2d(96, 4 + len(CLASSES), 1)
        nn.init.constant_(self.head.bias[4:], -4.0)  # most cells are background
        self.register_buffer("centres", centres(), persistent=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        raw = self.head(self.body(image)).flatten(2)
        sides = STRIDE * raw[:, :4].clamp(-4, 3).exp()  # left, top, right, bottom
        low, high = self.centres - sides[:, :2], self.centres + sides[:, 2:]
        return torch.cat(((low + high) / 2, high - low, raw[:, 4:].sigmoid()), 1)


def build() -> nn.Module:
    return Detector()


def centres() -> torch.Tensor:
    """Of the cells, in pixels: [2,64], x and y."""
    at = torch.arange(SIDE // STRIDE) * STRIDE + STRIDE / 2
    return torch.stack(torch.meshgrid(at, at, indexing="xy")).flatten(1)


def loss(found: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Focal loss of the classes, and 1 - GIoU of the cells near a shape's centre."""
    boxes, classes = labels[..., 1:], labels[..., 0].long()
    at = centres().to(labels.device)
    low, high = boxes[..., :2, None], boxes[..., 2:, None]  # [N,M,2,1]
    inside = ((at > low) & (at < high)).all(2)
    near = ((at - (low + high) / 2).abs() < 1.25 * STRIDE).all(2)
    areas = (high - low).prod(2).expand(-1, -1, CELLS)
    areas = areas.masked_fill(~(inside & near & (classes >= 0).unsqueeze(-1)), torch.inf)
    least, owner = areas.min(1)  # a cell is of the smallest shape around it
    ours = least < torch.inf
    wanted = torch.zeros_like(found[:, 4:]).transpose(1, 2)
    kinds = classes.gather(1, owner)[ours]
    wanted[ours] = nn.functional.one_hot(kinds, len(CLASSES)).to(wanted.dtype)
    scores = found[:, 4:].transpose(1, 2).clamp(1e-6, 1 - 1e-6)
    right = torch.where(wanted > 0, scores, 1 - scores)
    count = ours.sum().clamp(min=1)
    focal = (-((1 - right) ** 2) * right.log()).sum() / count
    centre, half = found[:, :2].transpose(1, 2)[ours], found[:, 2:4].transpose(1, 2)[ours] / 2
    target = boxes.gather(1, owner.unsqueeze(-1).expand(-1, -1, 4))[ours]
    return focal + (1 - giou(torch.cat((centre - half, centre + half), -1), target)).sum() / count


def giou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    def area(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return (high - low).clamp(min=0).prod(-1)

    shared = area(torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:]))
    around = area(torch.minimum(a[:, :2], b[:, :2]), torch.maximum(a[:, 2:], b[:, 2:]))
    union = area(a[:, :2], a[:, 2:]) + area(b[:, :2], b[:, 2:]) - shared
    return shared / union - (around - union) / around


def nms(found: np.ndarray) -> Any:
    """The boxes of one image's [4+classes,64]."""
    classes, scores = found[4:].argmax(0), found[4:].max(0)
    corners = np.concatenate((found[:2] - found[2:4] / 2, found[:2] + found[2:4] / 2)).T
    left, kept = np.argsort(-scores, kind="stable")[: int((scores > LEAST_SCORE).sum())], []
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        same = classes[left] == classes[best]
        left = left[~same | (metric.iou(corners[best : best + 1], corners[left])[0] <= MAX_IOU)]
    return metric.FoundBoxes(corners[kept].clip(0, SIDE), scores[kept], classes[kept])


def score(outputs: dict[str, np.ndarray], labels: np.ndarray) -> np.ndarray:
    images = [nms(each) for each in outputs["found"]]
    names = metric.FoundBoxes._fields
    return np.concatenate(
        [
            metric.map_of_each({name: getattr(image, name)[None] for name in names}, own[None])
            for image, own in zip(images, labels, strict=True)
        ]
    )


def draw(
    rng: np.random.Generator, width: int = SIDE, height: int = SIDE
) -> tuple[np.ndarray, np.ndarray]:
    """An image of one to four shapes that hardly overlap, and its labels (4, 5)."""
    noise = rng.normal(rng.uniform(60, 200), 12, (height, width, 3)).clip(0, 255).astype(np.uint8)
    image, labels = Image.fromarray(noise), np.full((MOST, 5), -1, np.float32)
    pen, unit = ImageDraw.Draw(image), min(width, height)
    for row in range(rng.integers(1, MOST + 1)):
        size = rng.uniform(0.2, 0.45) * unit
        x, y = rng.uniform(0, width - size), rng.uniform(0, height - size)
        box = np.round([x, y, x + size, y + size])
        if metric.iou(box[None], labels[:, 1:]).max() > 0.1:
            continue
        kind, colour = rng.integers(len(CLASSES)), tuple(rng.integers(0, 256, 3).tolist())
        x1, y1, x2, y2 = box - [0, 0, 1, 1]  # Pillow draws the last pixel, too
        if kind == 0:
            pen.ellipse((x1, y1, x2, y2), fill=colour)
        elif kind == 1:
            pen.rectangle((x1, y1, x2, y2), fill=colour)
        else:
            pen.polygon([((x1 + x2) / 2, y1), (x1, y2), (x2, y2)], fill=colour)
        labels[row] = (kind, *box)
    return np.asarray(image), labels


def splits(train: int, calibration: int, test: int) -> Splits:
    drawn = [draw(np.random.default_rng(seed)) for seed in range(train + calibration + test)]
    images, labels = (np.stack(each) for each in zip(*drawn, strict=True))

    def split(first: int, last: int) -> Split:
        return Split({"image": images[first:last]}, labels[first:last])

    return Splits(
        split(0, train),
        split(train, train + calibration),
        split(train + calibration, len(images)),
        source="drawn shapes",
        classes=CLASSES,
    )


def data(_path: Path | None) -> Splits:
    return splits(2000, 100, 400)


RECIPE = Recipe(
    build=build,
    data=data,
    inputs=(parse_spec(f"image:uint8[N,{SIDE},{SIDE},3]"),),
    outputs=(parse_spec(f"found:float32[N,{4 + len(CLASSES)},{CELLS}]"),),
    loss=loss,
    metric=score,
    metric_name="mean average precision, by image",
    epochs=10,
    batch_size=32,
    learning_rate=2e-3,
    preprocess=IMAGENET,
)
