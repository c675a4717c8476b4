"""The proof that rows are independent sees a row that its neighbours, or its place, change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.engines.batching import prove_rows, spread_places
from deploykit.engines.engine import Arrays
from deploykit.evaluation.feeds import feeds_at_sizes
from tests.support.fake_engine import Function

ROWS = 32


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick engines get more rounds, which would hide what the first one lacks."""
    monkeypatch.setattr("deploykit.engines.batching._QUICK_S", 0.0)


@pytest.mark.parametrize(
    "places", [slice(0, 1), slice(8, 16), slice(16, 24), slice(31, 32)], ids=str
)
def test_a_large_batch_that_fails_at_some_of_its_places_is_seen(places: slice) -> None:
    def outputs(feeds: Arrays) -> dict[str, np.ndarray]:
        y = feeds["x"] * 2
        if len(y) >= 16:
            y[places] = np.roll(y, 1, axis=0)[places]
        return {"y": y}

    found = prove_rows(Function(outputs), ROWS)
    assert (found.passed, "32 rows" in found.why) == (False, True)


NEIGHBOURS: dict[str, Callable[[np.ndarray], bool]] = {
    "large": lambda x: bool(abs(x).max() > 100 and np.isfinite(x).all()),
    "zeros": lambda x: bool((x == 0).all(axis=1).any()),
    "NaN": lambda x: bool(np.isnan(x).any()),
    "infinity": lambda x: bool(np.isinf(x).any()),
}


@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_every_kind_of_neighbour_is_tried(kind: str) -> None:
    def outputs(feeds: Arrays) -> dict[str, np.ndarray]:
        return {"y": feeds["x"] * 2 + NEIGHBOURS[kind](feeds["x"])}

    assert not prove_rows(Function(outputs), ROWS).passed


def test_a_row_that_runs_only_among_others_depends_on_them() -> None:
    def outputs(feeds: Arrays) -> dict[str, np.ndarray]:
        if len(feeds["x"]) == 1 and feeds["x"][0, 0] != rows[0, 0]:
            raise BadInput("not alone")
        return {"y": feeds["x"] * 2}

    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    found = prove_rows(Function(outputs), ROWS, samples={"x": rows})
    assert (found.passed, "alone: not alone" in found.why) == (False, True)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_batch_that_ran_already_stands_for_the_largest(mixed: bool) -> None:
    rows: list[int] = []

    def outputs(feeds: Arrays) -> dict[str, np.ndarray]:
        rows.append(len(feeds["x"]))
        return {"y": feeds["x"] * 2}

    x = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    y = x * 2 + mixed * np.roll(x, 1, axis=0)
    found = prove_rows(Function(outputs), ROWS, joined=({"x": x}, {"y": y}))
    assert (found.passed, max(rows), found.rows) == (not mixed, 4, (4, 20))
    assert ("seen with 20 rows" in found.why) == mixed


def test_samples_decide_where_random_rows_all_give_the_same() -> None:
    x = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    engine = Function(lambda feeds: {"y": np.maximum(feeds["x"] - 100, 0)})
    found = prove_rows(engine, ROWS, samples={"x": x + 200}, joined=({"x": x}, {"y": x * 0}))
    assert (found.passed, found.rows) == (True, (2, 3, 4, 20, 32))


def test_the_smaller_feeds_of_a_comparison_are_rows_of_the_largest() -> None:
    by_rows = feeds_at_sizes(Function(dict).inputs)
    largest = by_rows[-1]["x"]
    for feeds in by_rows[:-1]:
        assert np.array_equal(feeds["x"], largest[spread_places(ROWS, len(feeds["x"]))])
    assert np.array_equal(by_rows[0]["x"], largest[-1:])
    lengths = feeds_at_sizes(Function(dict, "x:float32[N,T]").inputs)
    assert [feeds["x"].shape for feeds in lengths] == [(1, 5), (2, 12), (7, 1), (ROWS, 33)]
