"""What `build` refuses before it looks for a GPU: options that are wrong on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import deploykit as dk
from deploykit.core.errors import DeploykitError
from tests.support.onnx_zoo import make, mnist_like, save


@pytest.mark.parametrize(
    ("profile", "option", "message"),
    [
        ("l4", {"device": -1}, "must be the number of a GPU, got -1"),
        ("l4", {"plugins": (Path("nope.so"),)}, "no such plugin library"),
        ("l4", {"batch": "8,1,2"}, "batch"),
        ("jetson-orin-nano-8gb", {"dla": 0}, "has no DLA"),
    ],
)
def test_wrong_options_are_named_before_the_missing_gpu(
    tmp_path: Path, profile: str, option: dict[str, Any], message: str
) -> None:
    source = save(mnist_like(), tmp_path / "m.onnx")
    with pytest.raises(DeploykitError, match=message):
        dk.build(source, profile, shapes=dk.Shapes(**option))


def test_a_model_without_inputs_is_built_and_takes_no_images(tmp_path: Path) -> None:
    """It computes one answer, from its weights alone."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    weights = {"w": np.arange(8, dtype=np.float32).reshape(2, 4) - 3}
    model = make([helper.make_node("Relu", ["w"], ["y"])], {}, {"y": (2, 4)}, weights)
    made = dk.build(save(model, tmp_path / "m.onnx"), "cpu", out=tmp_path / "b.onnx")
    assert made.parity is not None
    assert made.parity.passed
    images = tmp_path / "images"
    images.mkdir()
    (images / "a.png").write_bytes(b"")
    with pytest.raises(dk.BadInput, match="its inputs are: none"):
        dk.predict(made.path, images, out=tmp_path / "p.npz")
