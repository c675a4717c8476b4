from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import deploykit as dk
from deploykit.benchmarking.scenarios import run_scenarios
from deploykit.benchmarking.timing import Setup, Timing, sweep
from deploykit.core.evidence import Interval
from deploykit.engines.data.samples import random_feeds
from tests.support.fake_engine import FakeEngine

pytestmark = pytest.mark.usefixtures("onnxruntime_alone")

ALL = ["offline", "single-stream", "multi-stream", "server"]


def feeds(n: int) -> Any:
    return random_feeds(FakeEngine().inputs, {"N": n})


def setup(label: str, **more: Any) -> Setup:
    return Setup(label, FakeEngine, **{"file": "a.onnx", "precision": "fp32", "threads": 1, **more})


def chosen(
    name: str, rates: dict[str, float], *setups: Setup, batches: tuple[int, ...] = (1, 8)
) -> list[tuple[str, int]]:
    """The label and samples of a query of each result, where the sweep found these `rates`."""
    timed = sweep(setups, batches, Timing(0.0, 0.002, 2), feeds)
    points = [
        replace(each, throughput_per_s=Interval(*[rates[each.label] * each.batch] * 3))
        for each in timed
    ]
    slo_ms = 1e6 if name == "server" else None
    found = run_scenarios([name], setups, points, 0.02, slo_ms, feeds)
    return [(each.label, each.batch) for each in found]


def test_each_scenario_runs_in_the_settings_that_were_fastest_for_it() -> None:
    one, two = setup("one"), setup("two", sessions=2)
    apart, eight = setup("apart", sessions=2, processes=True), setup("eight", batches=(8,))
    rates = {"one": 1.0, "two": 2.0, "apart": 3.0, "eight": 1.5}
    assert chosen("single-stream", rates, one, two) == [("one", 1)]
    assert chosen("multi-stream", rates, one, two, eight) == [("eight", 8)]
    assert chosen("offline", rates, one, two) == [("two", 8)]
    assert chosen("server", rates, one, two, apart) == [("two", 1)]
    assert chosen("offline", {**rates, "one": 9.0}, one, two) == [("one", 8)]


def test_each_file_has_a_result() -> None:
    a, b = setup("a"), setup("b", file="b.onnx")
    rates = {"a": 1.0, "b": 2.0}
    assert chosen("single-stream", rates, a, b) == [("a", 1), ("b", 1)]
    assert chosen("multi-stream", rates, a, batches=(4,)) == [("a", 8)]


def test_an_engine_that_takes_no_such_query_has_no_value() -> None:
    small = Setup("small", lambda: FakeEngine(max_batch=4), file="a.onnx")
    points = sweep([small], (1, 4), Timing(0.0, 0.04, 2), feeds)
    (found,) = run_scenarios(["multi-stream"], [small], points, 0.02, None, feeds)
    assert (found.value, found.why) == (None, "it takes no query of 8 samples")


def timed(path: Path, **options: Any) -> dk.Report:
    short = {"batches": (1, 8), "seconds": 0.05, "device": "cpu"}
    return dk.bench([path], out=path.parent / "report", **{**short, **options})


def test_a_bench_with_scenarios_reports_them(affine_onnx: Path) -> None:
    report = timed(affine_onnx, scenarios=ALL, slo_ms=10_000.0)
    found = {each.scenario: each for each in report.scenarios}
    assert list(found) == ALL
    assert {name: each.metric for name, each in found.items()} == {
        "offline": "samples/s",
        "single-stream": "p90 ms",
        "multi-stream": "p99 ms",
        "server": "queries/s",
    }
    assert found["offline"].value
    assert found["single-stream"].value or found["single-stream"].needs == 64
    assert found["multi-stream"].batch == 8
    assert found["server"].slo_ms == 10_000.0
    sentences = [sentence.partition(":")[0] for sentence in report.verdict]
    assert "Server (p99 within 10 000 ms)" in [each.replace("\u202f", " ") for each in sentences]
    page = (affine_onnx.parent / "report" / "report.md").read_text("utf-8")
    assert "| single-stream | fp32 CPU | 1 session of" in page
    assert {point.scenario for point in report.points} == {"closed-loop"}


@pytest.mark.parametrize(
    ("scenarios", "slo_ms", "problem"),
    [
        (["offfline"], None, "`scenario` offfline: no such scenario"),
        ([""], None, "`scenario` : no such scenario"),
        (["server"], None, "`scenario` server needs `slo_ms`"),
        (["server"], 0.0, "`slo_ms` must be a number above 0"),
        (["server"], math.nan, "`slo_ms` must be a number above 0"),
    ],
)
def test_scenarios_that_make_no_sense_are_refused_before_anything_is_timed(
    affine_onnx: Path, scenarios: list[str], slo_ms: float | None, problem: str
) -> None:
    with pytest.raises(dk.BadInput, match=problem):
        timed(affine_onnx, scenarios=scenarios, slo_ms=slo_ms)
    assert not (affine_onnx.parent / "report").exists()
