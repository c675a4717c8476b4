"""The example detector: trained on drawn shapes, served, and as good over HTTP as in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.campaign import only_in_a_campaign
from tests.support.installed import needs

pytest.importorskip("torch")
needs("onnxscript", "onnxruntime", "PIL")

import deploykit as dk  # noqa: E402
from deploykit.core.files import load_py  # noqa: E402
from scripts import served_detector  # noqa: E402

pytestmark = pytest.mark.torch

EXAMPLE = served_detector.EXAMPLE
METRIC = f"{EXAMPLE.with_name('average_precision.py')}:map_of_each"
SMALL = f"""
from dataclasses import replace
from pathlib import Path
from deploykit.core.files import load_py

shapes = load_py({str(EXAMPLE)!r})
RECIPE = replace(shapes.RECIPE, data=lambda _: shapes.splits(300, 20, 20), epochs=6)
"""


def exported(recipe: Path, folder: Path) -> dk.Made:
    dk.train(str(recipe), folder / "shapes.pt", save_splits=folder / "data")
    made = dk.export(folder / "shapes.pt", task="detect", arch=str(recipe), threshold=0.01)
    assert made.manifest.task is not None
    assert made.manifest.task.labels == load_py(EXAMPLE).CLASSES
    return made


def test_over_http_a_detector_finds_what_it_finds_in_pytorch(tmp_path: Path) -> None:
    recipe = tmp_path / "small.py"
    recipe.write_text(SMALL)
    served, direct = served_detector.compared(exported(recipe, tmp_path).path, 24)
    assert direct > 0.02
    assert served == pytest.approx(direct, abs=0.005)


@only_in_a_campaign
@pytest.mark.slow
def test_a_trained_detector_and_its_lower_precisions_over_http(tmp_path: Path) -> None:
    made = exported(EXAMPLE, tmp_path)
    served, direct = served_detector.compared(made.path, 600)
    assert direct > 0.45
    assert served == pytest.approx(direct, abs=0.005)
    files, labels = served_detector.photos(600)
    score = load_py(EXAMPLE).metric.mean_average_precision
    for to in ("fp16", "int8"):
        given: dict[str, Any] = {"metric": METRIC, "max_drop": 0.03, "runtime": "onnxruntime"}
        data = {"calib": tmp_path / "data/calibration.npz", "data": tmp_path / "data/test.npz"}
        low = dk.quantize(made.path, to, out=tmp_path / f"{to}.onnx", **given, **data)
        found = score(served_detector.over_http(low.path, files), labels)
        assert found.coco > direct - 0.03
