"""The proof that rows are independent takes over what a comparison has run, and no less is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import deploykit as dk
from deploykit.core.errors import BadInput
from deploykit.core.evidence import RowIndependence
from deploykit.engines.batching import JoinedRun, prove_rows, spread_places
from deploykit.engines.engine import Arrays, Engine, load
from deploykit.evaluation.batching import keep_runs
from deploykit.evaluation.feeds import feeds_at_sizes
from deploykit.evaluation.parity import compare_engines
from tests.support.fake_engine import Function
from tests.support.graphs.batch_graphs import BATCHED, DEPENDENT
from tests.support.onnx_zoo import mnist_like, save

ROWS = 32


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick engines get more rounds, which would hide what the first one lacks."""
    monkeypatch.setattr("deploykit.engines.batching._QUICK_S", 0.0)


def proven(engine: Engine, other: Engine | None = None) -> RowIndependence:
    """Compare `engine` as `export` does, then prove its rows."""
    feeds, joined = feeds_at_sizes(engine.inputs), list[JoinedRun]()
    compare_engines(other or engine, engine, feeds, each=keep_runs(engine, feeds, joined))
    return prove_rows(engine, ROWS, joined=joined)


@pytest.mark.parametrize("make", DEPENDENT.values(), ids=DEPENDENT)
def test_rows_that_depend_on_each_other_are_seen_after_a_comparison(
    make: Callable[[], onnx.ModelProto], tmp_path: Path
) -> None:
    with load(save(make(), tmp_path / "m.onnx"), "cpu", threads=1) as engine:
        assert not proven(engine).passed


@pytest.mark.parametrize("name", sorted({*BATCHED} - {"two_ids"}))  # whose ids no comparison finds
def test_independent_rows_are_proven_after_a_comparison(name: str, tmp_path: Path) -> None:
    with load(save(BATCHED[name](), tmp_path / "m.onnx"), "cpu", threads=1) as engine:
        found = proven(engine)
    assert found.passed
    assert {7, ROWS} <= {*found.rows}


def wrong_at(places: slice) -> Callable[[Arrays], dict[str, np.ndarray]]:
    """Twice the inputs; from 16 rows on, those at `places` get the rows before them."""

    def outputs(feeds: Arrays) -> dict[str, np.ndarray]:
        y = feeds["x"] * 2
        if len(y) >= 16:
            y[places] = np.roll(y, 1, axis=0)[places]
        return {"y": y}

    return outputs


@pytest.mark.parametrize(
    "places", [slice(0, 1), slice(8, 16), slice(16, 24), slice(31, 32)], ids=str
)
def test_a_large_batch_that_fails_at_some_of_its_places_is_seen(places: slice) -> None:
    found = proven(Function(wrong_at(places)))
    assert (found.passed, "32 rows" in found.why) == (False, True)


@pytest.mark.parametrize("kind", ["A", "z", "n", "i"])
def test_every_kind_of_neighbour_is_tried_after_a_comparison(kind: str) -> None:
    met: dict[str, Callable[[np.ndarray], bool]] = {
        "A": lambda x: bool(abs(x).max() > 100 and np.isfinite(x).all()),
        "z": lambda x: bool((x == 0).all(axis=1).any()),
        "n": lambda x: bool(np.isnan(x).any()),
        "i": lambda x: bool(np.isinf(x).any()),
    }

    def outputs(feeds: Arrays) -> dict[str, np.ndarray]:
        y = feeds["x"] * 2
        return {"y": y + 1 if met[kind](feeds["x"]) else y}

    assert not proven(Function(outputs)).passed


def test_only_what_a_comparison_lacks_is_run() -> None:
    ran: list[int] = []

    def outputs(feeds: Arrays) -> dict[str, np.ndarray]:
        ran.append(len(feeds["x"]))
        return {"y": feeds["x"] * 2}

    assert proven(Function(outputs), Function(lambda feeds: {"y": feeds["x"] * 2})).passed
    assert ran == [1, 2, 7, ROWS, 1, 4, 4]  # the comparison; a row alone; next to other kinds


def test_a_row_that_runs_only_among_others_depends_on_them() -> None:
    def outputs(feeds: Arrays) -> dict[str, np.ndarray]:
        if len(feeds["x"]) == 1 and feeds["x"][0, 0] != first:
            raise BadInput("not alone")
        return {"y": feeds["x"] * 2}

    engine = Function(outputs)
    first = feeds_at_sizes(engine.inputs)[0]["x"][0, 0]
    found = proven(engine)
    assert (found.passed, "alone: not alone" in found.why) == (False, True)


def test_the_smaller_feeds_of_a_comparison_are_rows_of_the_largest() -> None:
    by_rows = feeds_at_sizes(Function(dict).inputs)
    largest = by_rows[-1]["x"]
    for feeds in by_rows[:-1]:
        assert np.array_equal(feeds["x"], largest[spread_places(ROWS, len(feeds["x"]))])
    assert np.array_equal(by_rows[0]["x"], largest[-1:])
    lengths = feeds_at_sizes(Function(dict, "x:float32[N,T]").inputs)
    assert [feeds["x"].shape for feeds in lengths] == [(1, 5), (2, 12), (7, 1), (ROWS, 33)]


def test_rows_of_a_comparison_at_other_lengths_are_joined_once_more() -> None:
    engine = Function(lambda f: {"y": f["x"] * 2}, "x:float32[N,T]", "y:float32[N,T]")
    assert {7, ROWS} <= {*proven(engine).rows}


def test_a_build_proves_rows_from_its_comparison(tmp_path: Path) -> None:
    model = save(mnist_like(), tmp_path / "model.onnx")
    proof = dk.build(model, "cpu", out=tmp_path / "built.onnx").evidence.batching
    assert proof is not None
    assert proof.passed
    assert {7, ROWS} <= {*proof.rows}
