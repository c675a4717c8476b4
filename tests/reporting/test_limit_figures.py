"""Charts of percentiles, of where the time goes, of the roofline and of the GPU's state."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.evidence import Interval
from deploykit.engines.devices import Conditions
from deploykit.evaluation.latency import CallHistogram, Latency
from deploykit.reporting.charts import Chart, draw
from deploykit.reporting.figures import (
    calls_chart,
    charts,
    gpu_charts,
    roofline,
    served_chart,
)
from deploykit.reporting.report import PeakMemory, Report, read, write
from deploykit.reporting.tables import details, summary
from deploykit.reporting.verdict import verdict
from tests.support.measure.drawings import overlaps

TRACE: dict[str, tuple[float | None, ...]] = {
    "clock_mhz": (1980.0, None, 1600.0),
    "power_w": (300.0, 690.0, 700.0),
    "temperature_c": (None, None, None),
}
GPU = Conditions("H200", "nvml", 3, None, 1600.0, 1980.0, 1980.0, 560.0, 700.0, None, (), TRACE)
ROOF: dict[str, Any] = {
    "ceilings": {"gflops": 1000.0, "gbytes_per_s": 100.0},
    "points": [
        {"label": "int8 CPU", "batch": 1, "intensity": 2.0, "gflops": 150.0},
        {"label": "int8 CPU", "batch": 64, "intensity": 40.0, "gflops": 900.0},
        {"label": "fp16 CPU", "batch": 1, "intensity": 2.0, "gflops": 20.0},
    ],
}


def with_calls(report: Report) -> Report:
    calls_s = np.concatenate([np.full(990, 1e-3), np.full(10, 4e-3)])
    histogram = CallHistogram.of(calls_s)
    return replace(report, points=tuple(replace(p, histogram=histogram) for p in report.points))


def test_the_distribution_shows_each_setup_to_its_slowest_call(report: Report) -> None:
    found = calls_chart(with_calls(report).to_dict())
    assert found is not None
    labels = dict.fromkeys(point.label for point in report.points)
    assert [one.label for one in found.series] == list(labels)
    marks = {round(mark.x): mark.y for mark in found.series[0].marks}
    assert marks[2] == pytest.approx(1.0, rel=0.005)
    assert marks[100] == pytest.approx(1.0, rel=0.005)  # 990 of 1000 calls are no slower
    assert marks[200] == pytest.approx(4.0, rel=0.005)
    assert max(marks) == 1000
    assert "took 3.99 times its median" in found.finding  # within a bin of 4
    assert calls_chart(report.to_dict()) is None


def test_a_setup_of_larger_batches_alone_is_in_no_figure_of_the_smallest(report: Report) -> None:
    few = tuple(p for p in with_calls(report).points if p.label != "int8 CPU" or p.batch > 1)
    document = replace(report, points=few).to_dict()
    found = calls_chart(document)
    assert found is not None
    assert "int8 CPU" not in [one.label for one in found.series]
    accuracy = next(one for one in charts(document)[0] if one.name == "accuracy")
    assert isinstance(accuracy, Chart)
    assert "int8 CPU" not in [one.label for one in accuracy.series]
    row = next(row for row in summary(document).rows if row[0] == "int8 CPU")
    assert row[3:5] == ("–", "–")
    assert "batch 64" in row[5]


def test_one_call_is_no_distribution(report: Report) -> None:
    single = replace(report.points[0], histogram=CallHistogram.of([1e-3]))
    assert calls_chart(replace(report, points=(single,)).to_dict()) is None


def test_the_roofline_says_what_bounds_each_setup(report: Report) -> None:
    document = report.to_dict() | {"roofline": ROOF}
    found = roofline(document)
    assert found is not None
    roof = found.series[0]
    assert [(mark.x, mark.y) for mark in roof.marks] == [(1, 100), (10, 1000), (80, 1000)]
    assert [row[4:] for row in found.rows] == [
        ("memory", "75.0\u202f%"),
        ("arithmetic", "90.0\u202f%"),
        ("memory", "10.0\u202f%"),
    ]
    assert "int8 CPU at batch 64 comes closest to the limit of its arithmetic" in found.finding
    assert "log scale" in draw(found)
    assert overlaps(draw(found)) == []


IDLE = {"label": "int8 CPU", "batch": 1, "intensity": 0.0, "gflops": 0.0}  # no arithmetic at all


@pytest.mark.parametrize(
    "broken",
    [None, {}, {"points": []}, {"points": ROOF["points"]}, ROOF | {"points": [IDLE]}],
    ids=["none", "empty", "no points", "no ceilings", "no arithmetic"],
)
def test_without_ceilings_or_points_there_is_no_roofline(report: Report, broken: Any) -> None:
    assert roofline(report.to_dict() | {"roofline": broken}) is None
    if broken and "ceilings" in broken:
        mark = IDLE | {"batch": 64}
        assert verdict(replace(report, roofline=broken | {"points": [mark]}))


def test_the_state_of_a_gpu_is_drawn_where_it_was_recorded(report: Report) -> None:
    found = gpu_charts(replace(report, conditions=(GPU,)).to_dict())
    assert [chart.title for chart in found] == ["GPU clock over the run", "GPU power over the run"]
    assert [(mark.x, mark.y) for mark in found[0].series[0].marks] == [(0, 1980), (100, 1600)]
    assert found[0].finding.replace("\u202f", " ") == "H200: 1 600 to 1 980 MHz; not throttled."
    hot = replace(GPU, throttled=("sw_thermal",))
    found = gpu_charts(replace(report, conditions=(hot, GPU)).to_dict())
    assert "THROTTLED (sw_thermal)" in found[0].finding
    assert [one.label for one in found[0].series] == ["H200 1", "H200 2"]
    assert gpu_charts(replace(report, conditions=(replace(GPU, trace={}),)).to_dict()) == []


def test_the_wanted_time_is_a_line_over_the_load_levels(report: Report) -> None:
    document = report.to_dict()
    for result in document["serving"]:
        result["slo_ms"] = 15.0
    found = served_chart(document)
    assert isinstance(found, Chart)
    assert found.limit == (15.0, "wanted: 15.0\u202fms")
    document["serving"][0]["slo_ms"] = 20.0
    found = served_chart(document)
    assert isinstance(found, Chart)
    assert found.limit is None


def test_a_report_of_a_server_that_lost_requests_is_written(report: Report, tmp_path: Path) -> None:
    served = report.serving[0]
    assert served.latency is not None
    endless = replace(served, latency=replace(served.latency, max_ms=float("inf")))
    write(replace(report, serving=(endless,), points=()), tmp_path)
    assert "| ∞ |" in (tmp_path / "report.md").read_text("utf-8")
    assert read(tmp_path).serving == (endless,)


def test_an_answer_that_never_came_is_no_mark(report: Report) -> None:
    document = report.to_dict()
    document["serving"][0]["latency"]["max_ms"] = None
    found = served_chart(document)
    assert found is not None
    assert "max" not in [mark.text for mark in found.series[0].marks]


def test_all_charts_of_a_full_report_have_no_text_over_another(report: Report) -> None:
    document = replace(with_calls(report), conditions=(GPU,)).to_dict() | {"roofline": ROOF}
    drawn, missing = charts(document)
    assert len(drawn) == 8
    assert missing == []
    for figure in drawn:
        assert overlaps(draw(figure)) == [], figure.title


def table(report: Report, title: str) -> list[dict[str, str]]:
    for found in details(report.to_dict()):
        if found.title == title:
            return [dict(zip(found.columns, row, strict=True)) for row in found.rows]
    return []


def test_the_memory_of_a_process_is_in_a_table(report: Report) -> None:
    assert table(report, "Memory") == []
    known = replace(report, memory=(PeakMemory(report.baseline, 64, 123_000_000),))
    (row,) = table(known, "Memory")
    assert (row["setup"], row["peak memory (MB)"], row["batch"]) == (report.baseline, "123", "64")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_wanted_time_is_a_number_above_0(value: float, report: Report) -> None:
    with pytest.raises(BadInput, match="`slo_ms` must be a number above 0"):
        replace(report, slo_ms=value)


def test_compute_alone_stands_next_to_the_whole_call(report: Report) -> None:
    assert table(report, "Compute alone") == []
    half = Interval(0.1, 0.09, 0.11)
    compute = Latency(400, half, half, None, 0.2, {"p99_ms": 368})
    first = replace(report.points[0], compute=compute)
    (row,) = table(replace(report, points=(first, *report.points[1:])), "Compute alone")
    assert row["compute p50 (ms)"] == "0.100 [0.0900, 0.110]"
    assert row["compute p99 (ms)"] == "–"
    assert row["end to end p50 (ms)"].startswith("0.210")
