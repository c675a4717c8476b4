"""Export torchvision's detectors and compare the boxes that ONNX Runtime finds with PyTorch's.

    python benchmarks/detectors.py OUT.md [NAME ...]

Needs a torchvision whose own operators load (`nms`, `roi_align`). The weights are random, spread so
that scores and boxes are as decided as trained ones; nothing is downloaded. Each model is exported
with one image as sample, then sees three others: noise, blots and stripes.

A box is found again where the other side has one of the same label with an IoU of 0.5 or more;
the error is max |a-b| / max |a| over the boxes, scores, masks and keypoints of such pairs.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
import torchvision
from torch import nn
from torchvision.models import detection

import deploykit as dk
from deploykit.core.errors import DeploykitError
from deploykit.engines.engine import load
from deploykit.evaluation.accuracy import pair
from deploykit.evaluation.parity import relative

SIDES = {
    "fasterrcnn_resnet50_fpn": 256,
    "fasterrcnn_mobilenet_v3_large_320_fpn": 256,
    "maskrcnn_resnet50_fpn": 256,
    "keypointrcnn_resnet50_fpn": 256,
    "ssd300_vgg16": 300,
    "ssdlite320_mobilenet_v3_large": 320,
    "retinanet_resnet50_fpn": 256,
    "fcos_resnet50_fpn": 256,
}
RESIZING = ("rcnn", "retina", "fcos")  # to 800 pixels, if they are not told otherwise
CLASSES, OFFSETS = ("cls_score", "cls_logits", "classification_head.module_list"), ("bbox", "regr")


def build(name: str) -> nn.Module:
    """The detector with weights whose activations have the spread that training gives them."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"weights": None, "weights_backbone": None}
    if any(each in name for each in RESIZING):
        options |= {"min_size": 256, "max_size": 320}
    module: nn.Module = getattr(detection, name)(**options).eval()
    for each in module.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.running_mean.uniform_(-0.1, 0.1)
            each.running_var.uniform_(0.5, 1.5)
    seen: set[str] = set()

    def spread(layer: str, part: nn.Module, output: torch.Tensor) -> torch.Tensor | None:
        if layer in seen or not output.std() > 0:
            return None  # a head that runs at each level is scaled at the first
        seen.add(layer)
        wanted = 3.0 if any(each in layer for each in CLASSES) else 1.0
        wanted = 0.3 if any(each in layer for each in OFFSETS) else wanted
        factor = wanted / output.std()
        part.weight.mul_(factor)
        if part.bias is not None:
            part.bias.mul_(factor)
        return output * factor

    hooks = [
        part.register_forward_hook(lambda part, _, output, layer=layer: spread(layer, part, output))
        for layer, part in module.named_modules()
        if isinstance(part, (nn.Conv2d, nn.Linear, nn.ConvTranspose2d))
    ]
    with torch.no_grad():
        module(torch.from_numpy(images(SIDES[name])[0]))
        for hook in hooks:
            hook.remove()
        for layer, weights in module.named_parameters():  # else no score reaches the threshold
            if layer.endswith("cls_logits.bias"):
                weights.fill_(-2.0)
    return module


def images(side: int) -> list[np.ndarray]:
    """One for the export, then noise, blots and stripes: float32 [1,3,side,side] from 0 to 1."""
    rng = np.random.default_rng(0)
    noise = [rng.random((1, 3, side, side), np.float32) for _ in range(2)]
    small = torch.from_numpy(rng.random((1, 3, 8, 8), np.float32))
    blots = nn.functional.interpolate(small, size=(side, side), mode="bilinear").numpy()
    stripes = np.sin(np.arange(side, dtype=np.float32) / 5)[None, None, None] / 2 + 0.5
    return [*noise, blots, np.broadcast_to(stripes, (1, 3, side, side)).copy()]


def row(name: str, folder: Path) -> str:
    first, *others = images(SIDES[name])
    np.savez(folder / "images.npz", images=first)
    module, out = build(name), folder / f"{name}.onnx"
    began = time.process_time()
    specs = [f"images:float32[1,3,{SIDES[name]},{SIDES[name]}]"]
    try:
        made = dk.export(module, inputs=specs, out=out, samples=folder / "images.npz")
    except DeploykitError as exc:
        return f"| {name} | refused: {exc.message} | | | |"
    took_s = time.process_time() - began
    matched = total = 0
    counts, worst = [], 0.0
    with load(out, "cpu") as engine:
        for image in others:
            with torch.no_grad():
                (answer,) = module(torch.from_numpy(image))
            want = {f"output_0_{key}": value.numpy() for key, value in answer.items()}
            counts.append(len(answer["boxes"]))
            left, right, found = pair(want, engine({"images": image}))
            matched += sum(each.matched for each in found.values())
            total += sum(each.total for each in found.values())
            for key, values in left.items():
                if values.size:
                    off = np.abs(values.astype(np.float64) - right[key]).max()
                    worst = max(worst, relative(float(off), float(np.abs(values).max())))
    error = max(each.error for each in made.evidence.parity.rows)
    return (
        f"| {name} | exported, error {error:.2g} | {', '.join(map(str, counts))} "
        f"| {matched} of {total}, error {worst:.2g} | {took_s:.0f} |"
    )


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    versions = (
        f"torch {torch.__version__}, torchvision {torchvision.__version__} (its own kernels), "
        f"onnxruntime {ort.__version__}, Python {platform.python_version()}."
    )
    lines = [
        "# torchvision's detectors in ONNX Runtime",
        "",
        versions,
        "`python benchmarks/detectors.py OUT.md`; what the columns mean: in that file.",
        "",
        "| model | export, on its sample | boxes in three images | found again | CPU s |",
        "| --- | --- | --- | --- | --: |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in names or SIDES:
            lines.append(row(name, Path(folder)))
            print(lines[-1], flush=True)
            out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
