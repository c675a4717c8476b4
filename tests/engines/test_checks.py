"""Warnings of calibration data, and samples that two sets share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from deploykit.core.tensors import parse_spec
from deploykit.engines.data.samples import Samples, check_calibration, overlap

RNG = np.random.default_rng(0)
GOOD = RNG.standard_normal((100, 3, 4, 4)).astype(np.float32)
PIXELS = RNG.integers(0, 256, (100, 4, 4, 3), np.uint8)


def samples_of(array: np.ndarray, **others: np.ndarray) -> Samples:
    return Samples({"x": array, **others}, None, "calib")


def repeated(count: int) -> np.ndarray:
    return np.concatenate([GOOD[-1:]] * count + [GOOD[count:]])


def constant(array: np.ndarray, at: object, value: float) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array


LAST = np.s_[:, 2]
FIRST = np.s_[..., 0]


@pytest.mark.parametrize(
    ("array", "warnings"),
    [
        (GOOD, []),
        (PIXELS, []),
        (GOOD[:99], ["calib: only 99 samples"]),
        (repeated(10), []),
        (repeated(11), ["calib: 11 of 100 samples are duplicates"]),
        (RNG.random((100, 3, 4, 4), np.float32), []),
        (255 * RNG.random((100, 3, 4, 4), np.float32), ["look unnormalised"]),
        (1000 * RNG.standard_normal((100, 8)).astype(np.float32), []),  # these are no pixels
        (constant(GOOD, LAST, 0.5), ["calib: channel 2 of 'x' is 0.5 everywhere"]),
        (constant(PIXELS, FIRST, 0), ["calib: channel 0 of 'x' is 0 everywhere"]),
        (PIXELS * 0, ["99 of 100 samples are duplicates", *["is 0 everywhere"] * 3]),
        (constant(GOOD, 3, np.nan), []),  # a calibration refuses it
    ],
)
def test_what_is_odd_in_calibration_data_is_reported(
    array: np.ndarray, warnings: Sequence[str]
) -> None:
    shape = ",".join(map(str, ("N", *array.shape[1:])))
    found = check_calibration(samples_of(array), (parse_spec(f"x:{array.dtype}[{shape}]"),))
    assert len(found) == len(warnings)
    assert all(words in text for words, text in zip(warnings, found, strict=True)), found


def test_samples_repeat_only_where_all_their_inputs_do() -> None:
    samples = samples_of(np.repeat(GOOD[:1], 100, axis=0), mask=np.arange(100))
    specs = (parse_spec("x:float32[N,3,4,4]"), parse_spec("mask:int64[N]"))
    assert not any("duplicates" in text for text in check_calibration(samples, specs))


def test_overlap_counts_test_samples_that_were_also_calibrated_on() -> None:
    array = GOOD[:20]
    a, b = samples_of(array[:12]), samples_of(array[9:])
    assert overlap(a, b) == 3
    assert overlap(a, samples_of(array[12:])) == 0
    assert overlap(samples_of(array[::-1]), samples_of(np.asfortranarray(array))) == 20
    assert overlap(a, samples_of(np.repeat(array[:1], 4, axis=0))) == 4
    numbered = samples_of(array[:5], ids=np.arange(5))  # all inputs of a sample count
    assert overlap(numbered, samples_of(array[:5], ids=np.array([0, 1, 9, 9, 9]))) == 2
    assert overlap(numbered, samples_of(array[:5] + 1, ids=np.arange(5))) == 0
