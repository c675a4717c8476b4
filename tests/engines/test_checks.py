"""Warnings of calibration data, and samples that two sets share."""

from __future__ import annotations

import numpy as np
import pytest

from deploykit.core.tensors import parse_spec
from deploykit.engines.data.samples import Samples, check_calibration, overlap

NCHW = (parse_spec("x:float32[N,3,4,4]"),)
NHWC = (parse_spec("x:uint8[N,4,4,3]"),)


def samples_of(array: np.ndarray, **others: np.ndarray) -> Samples:
    return Samples({"x": array, **others}, None, "calib")


def good(count: int = 100) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, 3, 4, 4)).astype(np.float32)


def pixels(count: int = 100) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 4, 4, 3), np.uint8)


def test_good_data_give_no_warning() -> None:
    assert check_calibration(samples_of(good()), NCHW) == ()
    assert check_calibration(samples_of(pixels()), NHWC) == ()


def test_few_samples_are_reported() -> None:
    (warning,) = check_calibration(samples_of(good(99)), NCHW)
    assert warning.startswith("calib: only 99 samples")


@pytest.mark.parametrize(("repeated", "warned"), [(10, False), (11, True)])
def test_many_repeated_samples_are_counted(repeated: int, warned: bool) -> None:
    array = good()
    array[:repeated] = array[-1]
    found = check_calibration(samples_of(array), NCHW)
    expected = ("calib: 11 of 100 samples are duplicates",) if warned else ()
    assert found == expected


def test_samples_repeat_only_where_all_their_inputs_do() -> None:
    array = np.repeat(good(1), 100, axis=0)
    samples = samples_of(array, mask=np.arange(100))
    specs = (*NCHW, parse_spec("mask:int64[N]"))
    assert not any("duplicates" in text for text in check_calibration(samples, specs))


@pytest.mark.parametrize(("factor", "warned"), [(1.0, False), (255.0, True)])
def test_pixels_that_do_not_look_normalised_are_reported(factor: float, warned: bool) -> None:
    array = np.float32(factor) * np.random.default_rng(0).random((100, 3, 4, 4), np.float32)
    found = check_calibration(samples_of(array), NCHW)
    assert any("look unnormalised" in text for text in found) is warned


def test_large_values_that_are_not_pixels_are_not_reported() -> None:
    array = np.random.default_rng(0).standard_normal((100, 8)).astype(np.float32) * 1000
    assert check_calibration(samples_of(array), (parse_spec("x:float32[N,8]"),)) == ()


def test_a_channel_that_never_changes_is_named() -> None:
    array, bytes_ = good(), pixels()
    array[:, 2] = 0.5
    bytes_[..., 0] = 0
    (warning,) = check_calibration(samples_of(array), NCHW)
    assert warning == "calib: channel 2 of 'x' is 0.5 everywhere"
    (warning,) = check_calibration(samples_of(bytes_), NHWC)
    assert warning == "calib: channel 0 of 'x' is 0 everywhere"


def test_images_that_are_all_black_are_reported() -> None:
    found = check_calibration(samples_of(pixels() * 0), NHWC)
    assert any("99 of 100 samples are duplicates" in text for text in found)
    assert sum("is 0 everywhere" in text for text in found) == 3


def test_nan_is_not_reported_as_calibration_refuses_it() -> None:
    array = good()
    array[3] = np.nan
    check_calibration(samples_of(array), NCHW)


def test_overlap_counts_test_samples_that_were_also_calibrated_on() -> None:
    array = good(20)
    a, b = samples_of(array[:12]), samples_of(array[9:])
    assert overlap(a, b) == 3
    assert overlap(a, samples_of(array[12:])) == 0
    assert overlap(samples_of(array[::-1]), samples_of(np.asfortranarray(array))) == 20
    assert overlap(a, samples_of(np.repeat(array[:1], 4, axis=0))) == 4


def test_overlap_looks_at_all_inputs_of_a_sample() -> None:
    array = good(5)
    a = samples_of(array, ids=np.arange(5))
    assert overlap(a, samples_of(array, ids=np.arange(5))) == 5
    assert overlap(a, samples_of(array, ids=np.array([0, 1, 9, 9, 9]))) == 2
    assert overlap(a, samples_of(array + 1, ids=np.arange(5))) == 0
