"""What `build` refuses before it looks for a GPU: options that are wrong on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import deploykit as dk
from deploykit.core.errors import DeploykitError
from tests.support.onnx_zoo import mnist_like, save


@pytest.mark.parametrize(
    ("profile", "option", "message"),
    [
        ("l4", {"workspace": "4X"}, "'4X' is not a size"),
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
