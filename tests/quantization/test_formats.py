from __future__ import annotations

import numpy as np
import pytest

from deploykit.quantization.formats import bfloat16_bytes, fp8_bytes, int4_bytes, int8_steps

ONE = np.float32(1)


def sweep(count: int = 100_000) -> np.ndarray:
    """Values of either sign from the smallest E4M3 subnormal's tenth to its largest number."""
    random = np.random.default_rng(0)
    values = np.exp2(random.uniform(-13, np.log2(448), count)) * random.choice([-1, 1], count)
    ties = np.arange(0, 449) / 1024  # halves between subnormals, and their like
    return np.concatenate([values, ties, -ties, ties * 1024]).astype(np.float32)


def test_every_e4m3_number_is_rounded_to_nearest_even() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert fp8_bytes(sweep(), ONE) == sweep().astype(ml_dtypes.float8_e4m3fn).tobytes()


def test_fp8_numbers_come_back_as_they_were() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    every = np.arange(256, dtype=np.uint8)
    every = every[(every & 0x7F) != 0x7F]  # NaN
    values = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert fp8_bytes(values, ONE) == every.tobytes()


def test_bfloat16_keeps_nan_and_infinity() -> None:
    values = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    bits = np.frombuffer(bfloat16_bytes(values), np.uint16)
    assert bits.tolist() == [0x7FC0, 0x7F80, 0xFF80, 0x8000]


def test_an_odd_number_of_int4_fills_the_last_byte_with_zero() -> None:
    assert int4_bytes(np.array([1, -1, 7])) == bytes([0xF1, 0x07])


def test_int8_steps_of_a_large_array_are_those_of_its_parts() -> None:
    values = np.random.default_rng(0).standard_normal((3000, 1000)).astype(np.float32)
    scale = np.abs(values).max(axis=0) / np.float32(127)
    wanted = np.clip(np.rint(values / scale), -127, 127).astype(np.int8)
    np.testing.assert_array_equal(int8_steps(values, scale, 1), wanted)
