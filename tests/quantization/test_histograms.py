from __future__ import annotations

import numpy as np
import pytest

from deploykit.quantization.formats import TensorHistogram


def histogram(*batches: np.ndarray) -> TensorHistogram:
    counts = TensorHistogram()
    for batch in batches:
        counts.add(np.asarray(batch, np.float32))
    return counts


def normal(count: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(count) * scale).astype(np.float32)


def test_every_value_is_counted_while_the_limit_grows() -> None:
    batches = [normal(1000), normal(100_000, 3.0), normal(500, 40.0), np.zeros((3, 7))]
    counts = histogram(*batches)
    assert counts.counts.sum() == sum(batch.size for batch in batches)
    assert counts.limit >= max(np.abs(batch).max() for batch in batches)


def test_the_order_of_batches_moves_the_ends_by_a_bin_at_most() -> None:
    small, large = normal(200_000), normal(200_000, 10.0)
    for share in (99.0, 99.9):
        one, other = (histogram(*b).percentile(share) for b in ((small, large), (large, small)))
        bin_width = 2 * np.abs(large).max() / 4096
        np.testing.assert_allclose(one, other, atol=2 * bin_width)


@pytest.mark.parametrize("share", [90.0, 99.0, 99.9])
def test_the_percentile_is_numpys(share: float) -> None:
    values = normal(100_000)
    tail = (100 - share) / 2
    wanted = np.percentile(values, [tail, 100 - tail])
    # a bin is 0.001 wide, but the outermost values lie further apart
    np.testing.assert_allclose(histogram(values).percentile(share), wanted, atol=0.01)


def test_a_few_values_are_all_kept() -> None:
    values = normal(100)
    low, high = histogram(values).percentile()
    assert low <= values.min()
    assert high >= values.max()


def test_infinities_and_nan_are_left_out() -> None:
    counts = histogram(np.array([1.0, np.inf, -np.inf, np.nan, -2.0]))
    assert counts.counts.sum() == 2
    assert counts.limit == 2.0


def test_the_ends_of_what_was_added_hold_infinities_and_nan() -> None:
    ends = [
        TensorHistogram().add(np.array(v, np.float32)) for v in ([3, -2], [-np.inf, np.inf, 1], [])
    ]
    assert ends == [(-2.0, 3.0), (-np.inf, np.inf), (0.0, 0.0)]
    counts = TensorHistogram(np.ones(2))
    assert counts.add(np.array([[1, np.nan], [2, -3]], np.float32)) == (-3, 2)
    assert (counts.has_nan, counts.channel_peaks.tolist()) == (True, [2, 3])


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [1e-38, -1e-40]], ids=str)
def test_a_dead_tensor_has_no_range(values: list[float]) -> None:
    counts = histogram(np.array(values, np.float32))
    assert counts.percentile() == (0.0, 0.0)


def test_growing_keeps_what_was_counted_in_its_place() -> None:
    values = normal(100_000)
    wanted = np.percentile(values, [0.5, 99.5])
    bin_width = 2 * 16 * np.abs(values).max() / 4096
    got = histogram(values, np.array([10 * np.abs(values).max()])).percentile(99)
    np.testing.assert_allclose(got, wanted, atol=2 * bin_width)


def error(values: np.ndarray, peak: float, weights: np.ndarray | float = 1.0) -> float:
    """What INT8 with this peak does to the values, squared and weighted."""
    step = peak / 127
    stored = np.clip(np.rint(values / step), -127, 127) * step
    return float(np.sum(weights * (values - stored) ** 2))


@pytest.mark.parametrize("tail", [1.0, 5.0, 30.0])
def test_the_least_error_is_that_of_real_rounding(tail: float) -> None:
    values = np.append(normal(100_000), normal(20, tail)).astype(np.float32)
    found = histogram(values).least_error()
    peaks = np.geomspace(np.abs(values).max() / 50, np.abs(values).max(), 200)
    assert error(values, found) <= 1.03 * min(error(values, peak) for peak in peaks)


def test_an_error_in_a_channel_counts_by_its_importance() -> None:
    values = normal(200_000).reshape(-1, 20)
    values[:, 7] *= 50.0
    importance = np.ones(20)
    importance[7] = 1 / 2500
    counts = TensorHistogram(importance)
    counts.add(values[:6000].reshape(10, 600, 20))
    counts.add(values[6000:])
    found = counts.least_error()
    assert error(values, found, importance) < 0.5 * error(values, np.abs(values).max(), importance)
    assert found < histogram(values).least_error() / 2
    np.testing.assert_array_equal(counts.channel_peaks, np.abs(values).max(axis=0))


def test_zeros_alone_have_no_error() -> None:
    assert histogram(np.zeros(1000)).least_error() == 0.0


def test_importance_is_kept_while_the_limit_grows() -> None:
    importance = np.array([1.0, 0.25])
    counts = TensorHistogram(importance)
    for scale in (1.0, 40.0, 3000.0):
        counts.add(normal(1000, scale).reshape(-1, 2))
    assert counts.weighted.sum() == pytest.approx(3 * 500 * importance.sum())
