"""Score the example detector as it is served, and in PyTorch, on the same drawn images.

    python -m scripts.served_detector CHECKPOINT.pt

Next to the checkpoint is the .onnx file that `export` wrote.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import deploykit as dk
from deploykit.core.files import load_py

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/find_shapes.py"
SIZES = [(64, 64), (128, 96), (60, 100)]  # the last two are resized and filled up
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def photos(count: int) -> tuple[list[bytes], np.ndarray]:
    """Drawn images as PNG and JPEG files, and their labels in pixels of the image."""
    from PIL import Image

    shapes, files, labels = load_py(EXAMPLE), [], []
    for seed in range(count):
        width, height = SIZES[seed % len(SIZES)]
        pixels, own = shapes.draw(np.random.default_rng(100_000 + seed), width, height)
        file = io.BytesIO()
        form = ("PNG", {}) if seed % 2 else ("JPEG", {"quality": 95})
        Image.fromarray(pixels).save(file, form[0], **form[1])
        files.append(file.getvalue())
        labels.append(own)
    return files, np.stack(labels)


def in_pytorch(checkpoint: Path, files: list[bytes]) -> list[Any]:
    """The boxes that the module finds, with Pillow and numpy alone around it."""
    from PIL import Image

    shapes = load_py(EXAMPLE)
    module = shapes.build()
    module.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    module.eval()
    found = []
    for file in files:
        image = Image.open(io.BytesIO(file)).convert("RGB")
        scale = shapes.SIDE / max(image.size)
        small = image.resize((round(image.width * scale), round(image.height * scale)), 2)
        left, top = ((shapes.SIDE - side) // 2 for side in small.size)
        canvas = np.full((shapes.SIDE, shapes.SIDE, 3), 114, np.uint8)
        canvas[top : top + small.height, left : left + small.width] = np.asarray(small)
        values = ((canvas / 255 - MEAN) / STD).transpose(2, 0, 1)[None]
        with torch.inference_mode():
            raw = module(torch.from_numpy(values).float())[0].numpy()
        boxes = shapes.nms(raw)
        moved = (boxes.boxes - np.array([left, top] * 2)) / scale
        found.append(boxes._replace(boxes=moved.clip(0, [*image.size] * 2)))
    return found


def over_http(model: Path, files: list[bytes]) -> list[Any]:
    kind = load_py(EXAMPLE).metric.FoundBoxes
    served = dk.serve({"shapes": model}, http_port=0, grpc_port=None)
    with served as server, dk.client(server.url) as client:
        answers = client.predict(files)
    names = ("box", "score", "index")
    rows = [[[each[name] for each in answer["boxes"]] for name in names] for answer in answers]
    return [kind(np.reshape(box, (-1, 4)), np.array(s), np.array(c)) for box, s, c in rows]


def compared(model: Path, count: int) -> tuple[float, float]:
    """COCO's mean average precision over HTTP and in PyTorch, on the same files."""
    files, labels = photos(count)
    score = load_py(EXAMPLE).metric.mean_average_precision
    served = score(over_http(model, files), labels).coco
    return served, score(in_pytorch(model.with_suffix(".pt"), files), labels).coco


if __name__ == "__main__":
    print(compared(Path(sys.argv[1]).with_suffix(".onnx"), 600))
