"""The example detector: trained on drawn shapes, served, and as good over HTTP as in PyTorch."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.campaign import only_in_a_campaign
from tests.support.installed import needs

torch = pytest.importorskip("torch")
needs("onnxscript", "onnxruntime", "PIL")

import deploykit as dk  # noqa: E402
from deploykit.core.files import load_py  # noqa: E402

pytestmark = pytest.mark.torch

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/find_shapes.py"
METRIC = f"{EXAMPLE.with_name('average_precision.py')}:map_of_each"
SMALL = f"""
from dataclasses import replace
from pathlib import Path
from deploykit.core.files import load_py

shapes = load_py({str(EXAMPLE)!r})
RECIPE = replace(shapes.RECIPE, data=lambda _: shapes.splits(300, 20, 20), epochs=6)
"""
SIZES = [(64, 64), (128, 96), (60, 100)]  # the last two are resized and filled up
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def exported(recipe: Path, folder: Path) -> dk.Made:
    dk.train(str(recipe), folder / "shapes.pt", save_splits=folder / "data")
    made = dk.export(folder / "shapes.pt", task="detect", arch=str(recipe), threshold=0.01)
    assert made.manifest.task is not None
    assert made.manifest.task.labels == load_py(EXAMPLE).CLASSES
    return made


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


def compared(made: dk.Made, count: int) -> float:
    """COCO's mean average precision in PyTorch; over HTTP it is the same, on the same files."""
    files, labels = photos(count)
    score = load_py(EXAMPLE).metric.mean_average_precision
    direct: float = score(in_pytorch(made.path.with_suffix(".pt"), files), labels).coco
    assert score(over_http(made.path, files), labels).coco == pytest.approx(direct, abs=0.005)
    return direct


def test_over_http_a_detector_finds_what_it_finds_in_pytorch(tmp_path: Path) -> None:
    recipe = tmp_path / "small.py"
    recipe.write_text(SMALL)
    assert compared(exported(recipe, tmp_path), 24) > 0.02


@only_in_a_campaign
@pytest.mark.slow
def test_a_trained_detector_and_its_lower_precisions_over_http(tmp_path: Path) -> None:
    made = exported(EXAMPLE, tmp_path)
    direct = compared(made, 600)
    assert direct > 0.45
    files, labels = photos(600)
    for to in ("fp16", "int8"):
        given: dict[str, Any] = {"metric": METRIC, "max_drop": 0.03, "runtime": "onnxruntime"}
        data = {"calib": tmp_path / "data/calibration.npz", "data": tmp_path / "data/test.npz"}
        low = dk.quantize(made.path, to, out=tmp_path / f"{to}.onnx", **given, **data)
        found = load_py(EXAMPLE).metric.mean_average_precision(over_http(low.path, files), labels)
        assert found.coco > direct - 0.03
