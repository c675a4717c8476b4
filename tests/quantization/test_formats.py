from __future__ import annotations

import numpy as np

from deploykit.quantization.formats import fp8_numbers, int8_steps

ONE = np.float32(1)


def sweep(count: int = 20_000) -> np.ndarray:
    """Values of either sign from the smallest E4M3 subnormal's tenth to its largest number."""
    random = np.random.default_rng(0)
    values = np.exp2(random.uniform(-13, np.log2(448), count)) * random.choice([-1, 1], count)
    ties = np.arange(0, 449) / 1024  # halves between subnormals, and their like
    return np.concatenate([values, ties, -ties, ties * 1024]).astype(np.float32)


def e4m3() -> np.ndarray:
    """The magnitudes by their bytes: 4 bits of exponent with bias 7, 3 of mantissa; no infinity."""
    exponent, mantissa = np.divmod(np.arange(0x7F), 8)
    return np.where(exponent, np.exp2(exponent - 7.0) * (1 + mantissa / 8), mantissa * 2.0**-9)


def test_every_number_is_rounded_to_the_nearest_e4m3_number_and_ties_to_even() -> None:
    values = sweep()
    away = np.abs(np.abs(values)[:, None] - e4m3())
    odd = np.arange(0x7F) % 2
    wanted = np.lexsort((np.broadcast_to(odd, away.shape), away))[:, 0]
    assert np.array_equal(fp8_numbers(values, ONE).view(np.uint8) & 0x7F, wanted)


def test_fp8_numbers_come_back_as_they_were() -> None:
    values = np.concatenate([e4m3(), -e4m3()]).astype(np.float32)
    found = fp8_numbers(values, ONE)
    assert np.array_equal(found.astype(np.float32), values)
    assert np.array_equal(found.view(np.uint8) >> 7, np.repeat([0, 1], 0x7F))


def test_what_is_above_the_largest_e4m3_number_becomes_that() -> None:
    found = fp8_numbers(np.array([1e6, -449.0], np.float32), ONE)
    assert found.astype(np.float32).tolist() == [448, -448]


def test_int8_steps_of_a_large_array_are_those_of_its_parts() -> None:
    values = np.random.default_rng(0).standard_normal((3000, 1000)).astype(np.float32)
    scale = np.abs(values).max(axis=0) / np.float32(127)
    wanted = np.clip(np.rint(values / scale), -127, 127).astype(np.int8)
    np.testing.assert_array_equal(int8_steps(values, scale, 1), wanted)
