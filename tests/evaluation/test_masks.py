"""Parity of masks: a share of pixels may differ where scores are equal, and no more than that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploykit.core.tensors import parse_spec
from deploykit.evaluation.parity import compare_engines

INPUTS = (parse_spec("image:uint8[N,100,200,3]"),)
OUTPUTS = (parse_spec("mask:int32[N,100,200]"),)
FEEDS = {"image": np.zeros((1, 100, 200, 3), np.uint8)}


def engine(mask: np.ndarray) -> Any:
    class Answers(SimpleNamespace):
        def __call__(self, _feeds: Any) -> dict[str, np.ndarray]:
            return {"mask": mask}

    return Answers(inputs=INPUTS, outputs=OUTPUTS)


@pytest.mark.parametrize(("pixels", "passed"), [(0, True), (2, True), (3, False), (20000, False)])
def test_one_pixel_in_ten_thousand_may_differ(pixels: int, passed: bool) -> None:
    left = np.tile(np.arange(4, dtype=np.int32), 5000).reshape(1, 100, 200)
    right = left.copy()
    right.reshape(-1)[:pixels] = 7
    (row,) = (parity := compare_engines(engine(left), engine(right), [FEEDS], max_error=1e-4)).rows
    assert parity.passed is passed
    assert row.error == pixels / 20000
