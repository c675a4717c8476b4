"""Charts: axes, looks and labels that cover no other; what each says; nothing without data."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from deploykit.core.evidence import Interval
from deploykit.engines.devices import Conditions
from deploykit.evaluation.formatting import MISSING, count, number, percent, spread
from deploykit.evaluation.statistics import CallHistogram
from deploykit.reporting.charts import (
    BOUND,
    Chart,
    Mark,
    Series,
    calls_chart,
    charts,
    draw,
    group,
    line,
    make_axis,
    marker,
    roofline,
    served_chart,
)
from deploykit.reporting.report import LayerTime, LayerTimes, Report, read, write
from deploykit.reporting.tables import details, layers_table, summary
from deploykit.reporting.verdict import verdict
from tests.support.measure.simulated import plain

PHONE, PAGE, HEIGHT = 254, 900, 320  # pixels of a plot
FONT, MEAN_WIDTH = 12, 0.6  # as the style sheet draws them
Box = tuple[float, float, float, float]


def elements(drawn: str) -> ET.Element:
    return ET.fromstring(f"<div>{drawn}</div>")


def boxes(drawn: str, width: int) -> list[tuple[str, Box]]:
    """The texts of a drawing whose plot is so wide: left, top, right, bottom in pixels."""
    found = []
    for text in elements(drawn).iter("text"):
        x, y = (float(text.attrib[name].rstrip("%")) / 100 for name in "xy")
        at_x = x * width + float(text.attrib["dx"])
        at_y = y * HEIGHT + float(text.attrib["dy"])
        name = text.text or ""
        size = MEAN_WIDTH * FONT * len(name.replace("\u202f", ""))
        left = at_x - {"start": 0.0, "middle": size / 2, "end": size}[text.attrib["text-anchor"]]
        found.append((name, (left, at_y - FONT, left + size, at_y + 0.25 * FONT)))
    return found


def overlaps(drawn: str) -> list[tuple[str, str]]:
    """The texts that cover each other on a phone or on a wide page."""
    return [
        (a, b)
        for width in (PHONE, PAGE)
        for (a, (l1, t1, r1, b1)), (b, (l2, t2, r2, b2)) in itertools.combinations(
            boxes(drawn, width), 2
        )
        if l1 < r2 and r1 > l2 and t1 < b2 and b1 > t2
    ]


def names(drawn: str) -> list[str]:
    return re.findall(r"</svg>([^<]+)</li>", drawn)


def chart(*series: Series, **changes: object) -> Chart:
    texts = ("Title", "Caption", "x (ms)", "y (ms)")
    return replace(Chart(*texts, series), **changes)  # type: ignore[arg-type]


def rising(label: str, ys: list[float], look: int = 0) -> Series:
    marks = tuple(Mark(i + 1.0, y, y * 0.9, y * 1.1, str(i)) for i, y in enumerate(ys))
    return Series(label, marks, look)


def test_every_line_is_named_and_no_label_covers_another() -> None:
    for series in (
        [rising(f"setup {i}", [1.0, 2.0, 3.0 + i * 0.001], i) for i in range(5)],
        [rising("n" * 80, [1.0, 5e6]), rising("m" * 80, [1.0, 5e6], 1)],
        [rising("wide", [10.0**i for i in range(7)])],
        [Series("alone", (Mark(3.0, 5.0),)), rising("zero", [0.0, 0.0])],
    ):
        drawn = draw(chart(*series))
        assert overlaps(drawn) == []
        assert names(drawn) == [one.label for one in series]


def test_figures_without_data_are_left_out(report: Report) -> None:
    assert draw(chart()) == draw(chart(Series("empty", ()))) == ""
    assert charts(Report("t", "2026", "c").to_dict()) == ([], [])
    drawn, notes = charts(report.to_dict())
    assert [figure.title for figure in drawn] == [
        "Latency against throughput",
        "Throughput against batch size",
        "Accuracy against latency",
        "Latency of requests, by percentile",
    ]
    mark, latency = drawn[0].series[0].marks[0], report.points[0].latency
    assert latency.p50_ms is not None
    assert latency.p99_ms is not None
    assert (mark.low, mark.high) == (latency.p50_ms.value, latency.p99_ms.value)
    assert notes == []


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[0.13, 0.26], [1.0, 1.0], [1e-6, 3e-6], [1.0, 1e7]], ids=str)
def test_an_axis_holds_its_values_and_has_round_ticks(values: list[float], log: bool) -> None:
    axis = make_axis(values, log=log)
    assert axis.low <= min(values) <= max(values) <= axis.high
    for value, text in axis.ticks:
        assert float(plain(text).replace("−", "-").replace(" ", "")) == pytest.approx(value)
        mantissa = 10 ** (math.log10(value) % 1) if value > 0 else 1.0
        assert not log or min(abs(mantissa - each) for each in (1, 2, 3, 5, 10)) < 1e-9
    middle = math.sqrt(axis.low * axis.high) if log else (axis.low + axis.high) / 2
    assert axis.at(middle) == pytest.approx(50)
    from_zero = make_axis([7.0, 11.3], zero=True)
    assert [text for _, text in from_zero.ticks] == ["0", "2.5", "5", "7.5", "10", "12.5"]
    assert float(make_axis([-2.0, 3.0]).ticks[0][1].replace("−", "-")) <= -2


def test_a_chart_draws_bounds_whiskers_and_its_scale_and_escapes_names() -> None:
    drawn = draw(chart(rising("a", [1.0, 2.0]), limit=(4.0, "4 ms at p99")))
    assert re.findall(r'<path class="flag" d="(M[^"]*H100)"', drawn) == ["M0 0H100"]  # of 0 to 4
    assert names(drawn) == ["a", "4 ms at p99"]
    assert "log scale" not in drawn
    assert "y (ms), log scale" in draw(chart(rising("a", [1.0, 100.0])))
    drawn = draw(chart(Series("a", (Mark(1, 50, 20, 80), Mark(2, 60, 60, 60)))))
    assert re.findall(r'class="whisker" d="([^"]*)"', drawn) == ["M0 75L0 0"]  # of 0 to 80
    drawn = draw(chart(rising("<script>alert(1)</script>", [1, 2]), title="a<b", x_label="<&>"))
    assert "<script" not in drawn
    assert 'aria-label="a&lt;b"' in drawn
    assert "&lt;&amp;&gt;" in drawn


def test_the_crossover_is_marked_where_a_setup_overtakes(report: Report) -> None:
    document = report.to_dict()
    for found in document["crossovers"]:
        if found["by"] == "throughput":
            found["batch"] = 4 if found["label"] == "int8 CPU" else None
    sweep = charts(document)[0][1]
    labelled = [(one.label, mark.x) for one in sweep.series for mark in one.marks if mark.text]
    assert labelled == [("int8 CPU", 4.0)]
    assert "ahead from here" in draw(sweep)


def wide_report(report: Report, labels: tuple[str, ...]) -> Report:
    """A report with points of each label at three batch sizes, and what the other charts need."""
    first = next(point for point in report.points if point.label == report.baseline)
    points, places = [], []
    for place, label in enumerate(labels):
        slower = 1 + 0.07 * place
        places.append({"label": label, "batch": 1, "intensity": 3.0, "gflops": 9 - 0.1 * place})
        for size in (1, 2, 4):
            rate = 8000 / slower + size
            new = {"label": label, "batch": size, "precision": "int8" if place % 2 else "fp32"}
            calls = CallHistogram.of(np.linspace(1, 2, 400) * slower * size / 1e4)
            measured = {"throughput_per_s": Interval(rate, rate * 0.99, rate * 1.01)}
            points.append(replace(first, **new, **measured, histogram=calls, compute=first.latency))
    roofline = {"ceilings": ROOF["ceilings"], "points": places}
    return replace(report, points=tuple(points[::-1]), baseline=labels[0], roofline=roofline)


def signature(look: int) -> tuple[str, str, str]:
    dash = re.findall(r'stroke-dasharray="([^"]*)"', line([(0, 0), (1, 1)], look))
    return re.findall(r'class="s (\w+)"', group(look, "x"))[0], "".join(dash), marker(look)


@pytest.mark.parametrize("many", [9, 13, 40])
def test_every_setup_has_a_look_of_its_own_and_the_same_in_every_chart(
    report: Report, many: int
) -> None:
    labels = tuple(f"setup {n}, its own settings" for n in range(many))
    drawn, _ = charts(wide_report(report, labels).to_dict())
    seen: dict[str, set[int]] = {}
    for figure in drawn:
        page = draw(figure)
        assert overlaps(page) == [], figure.title
        for series in figure.series:
            seen.setdefault(series.label, set()).add(series.look)
            assert f'class="s {signature(series.look)[0]}"' in page
    assert len(drawn) == 6
    assert set(labels) <= seen.keys()  # in the roofline, too, next to its limit
    assert all(len(looks) == 1 for looks in seen.values()), seen
    assert seen[labels[0]] == {0}  # the baseline's, wherever it stands
    found = {name: signature(looks.pop()) for name, looks in seen.items()}
    assert len(set(found.values())) == len(found)  # of load levels and the limit, too
    mine = [found[label] for label in labels]
    assert sum(colour == mine[0][0] for colour, _, _ in found.values()) == 1  # the baseline's alone
    if many <= 13:
        assert len({colour for colour, _, _ in mine}) == many
        assert len({shape for _, _, shape in mine}) == many
    assert signature(BOUND) == ("bound", "", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(12345), "12 300"),
        (number(1.234), "1.23"),
        (number(999.6), "1 000"),
        (number(-3.2), "−3.20"),
        (number(1e-7), "0.000000100"),
        (number(math.nan), MISSING),
        (count(12345), "12 345"),
        (spread({"value": 1.84, "low": 1.79, "high": None}), "1.84 [1.79, ∞]"),
        (spread(None), MISSING),
        (percent({"value": 0.002, "low": -0.003, "high": 0.007}, 540, "pp"), "0.2 pp [−0.3, 0.7]"),
    ],
)
def test_a_figure_has_three_significant_digits_and_a_count_all(text: str, expected: str) -> None:
    assert text.replace("\u202f", " ") == expected


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
    assert calls_chart(report.to_dict()) is None


def test_a_setup_of_larger_batches_alone_is_in_no_figure_of_the_smallest(report: Report) -> None:
    few = tuple(p for p in with_calls(report).points if p.label != "int8 CPU" or p.batch > 1)
    document = replace(report, points=few).to_dict()
    accuracy = next(one for one in charts(document)[0] if one.title.startswith("Accuracy"))
    for found in (calls_chart(document), accuracy):
        assert found is not None
        assert "int8 CPU" not in [one.label for one in found.series]
    row = next(row for row in summary(document).rows if row[0] == "int8 CPU")
    assert row[3:5] == ("–", "–")
    assert "batch 64" in row[5]
    single = replace(report.points[0], histogram=CallHistogram.of([1e-3]))
    assert calls_chart(replace(report, points=(single,)).to_dict()) is None


def test_the_roofline_says_what_bounds_each_setup(report: Report) -> None:
    document = report.to_dict() | {"roofline": ROOF}
    found = roofline(document)
    assert found is not None
    roof = found.series[0]
    assert [(mark.x, mark.y) for mark in roof.marks] == [(1, 100), (10, 1000), (80, 1000)]
    (table,) = (each for each in details(document) if each.title == "Roofline")
    assert table.columns == ("label", "batch", "intensity", "gflops")
    assert [row[3] for row in table.rows] == [number(each["gflops"]) for each in ROOF["points"]]
    assert "log scale" in draw(found)
    assert overlaps(draw(found)) == []


IDLE = {"label": "int8 CPU", "batch": 1, "intensity": 0.0, "gflops": 0.0}  # no arithmetic at all


@pytest.mark.parametrize(
    "broken",
    [None, {"points": []}, {"points": ROOF["points"]}, ROOF | {"points": [IDLE]}],
    ids=["none", "no points", "no ceilings", "no arithmetic"],
)
def test_without_ceilings_or_points_there_is_no_roofline(report: Report, broken: Any) -> None:
    assert roofline(report.to_dict() | {"roofline": broken}) is None
    if broken and "ceilings" in broken:
        mark = IDLE | {"batch": 64}
        assert verdict(replace(report, roofline=broken | {"points": [mark]}))


def test_the_state_of_a_gpu_is_drawn_where_it_was_recorded(report: Report) -> None:
    def traced(*conditions: Conditions) -> list[Chart]:
        drawn, _ = charts(replace(report, conditions=conditions).to_dict())
        return [each for each in drawn if "over the run" in each.title]

    clock, power = traced(GPU)
    assert (clock.title, power.title) == ("GPU clock over the run", "GPU power over the run")
    assert [(mark.x, mark.y) for mark in clock.series[0].marks] == [(0, 1980), (100, 1600)]
    assert clock.caption == "Not throttled."
    hot, _ = traced(replace(GPU, throttled=("sw_thermal",)), replace(GPU, name="other"))
    assert "THROTTLED (sw_thermal)" in hot.caption
    assert [one.label for one in hot.series] == ["H200", "other"]
    assert traced(replace(GPU, trace={})) == []


def test_the_load_levels_show_the_wanted_time_and_no_answer_that_never_came(
    report: Report,
) -> None:
    document = report.to_dict()
    for result in document["serving"]:
        result["slo_ms"] = 15.0
    document["serving"][0]["latency"]["max_ms"] = None
    found = served_chart(document)
    assert isinstance(found, Chart)
    assert found.limit == (15.0, "wanted: 15.0\u202fms")
    assert "max" not in [mark.text for mark in found.series[0].marks]
    document["serving"][0]["slo_ms"] = 20.0
    assert served_chart(document).limit is None


def test_all_charts_of_a_full_report_have_no_text_over_another(report: Report) -> None:
    document = replace(with_calls(report), conditions=(GPU,), layers=(TIMES,)).to_dict()
    document |= {"roofline": ROOF, "gpu_roofline": ROOF}
    drawn, notes = charts(document)
    assert (len(drawn), notes) == (10, [])
    for figure in drawn:
        assert overlaps(draw(figure)) == [], figure.title


TIMES = LayerTimes(
    label="int8 CPU",
    batch=8,
    runtime="onnxruntime 1.32.0",
    calls=40,
    call_ms=4.0,
    profiled_ms=4.4,
    sum_ms=3.9,
    count=5003,
    layers=(
        LayerTime("conv1<script>alert(1)</script>", "Conv", 2.6, 45.0, "int8"),
        LayerTime("pool", "MaxPool", 1.0),
        LayerTime("fc" * 90, "Gemm", 0.2, 10.0, "fp32"),
    ),
    ceilings={"int8": 180.0, "fp32": 100.0},
)


@pytest.mark.parametrize(("sum_ms", "adds_up"), [(3.9, True), (3.79, False), (4.21, False)])
def test_each_layer_has_its_share_and_those_that_do_not_add_up_are_marked(
    sum_ms: float, adds_up: bool
) -> None:
    table = layers_table(replace(TIMES, sum_ms=sum_ms).to_dict(), 2)
    rows = [tuple(map(plain, row)) for row in table.rows]
    assert rows[0][1:] == ("Conv", "2.60", f"{260 / sum_ms:.3g} %")
    assert rows[1][:3] == ("pool", "MaxPool", "1.00")
    assert rows[2][:3] == ("5 001 others", "–", plain(number(sum_ms - 3.6)))
    assert len(layers_table(replace(TIMES, count=3).to_dict()).rows) == 3
    note = plain(table.note)
    assert f"add up to {100 * sum_ms / 4:.3g} % of a call of 4.00 ms without the profiler" in note
    assert ("NOT within 5 %" in note) != adds_up


def test_the_page_shows_the_layers(report: Report, tmp_path: Path) -> None:
    nothing = replace(TIMES, label="none", layers=(), count=0, sum_ms=0.0)
    given = replace(report, layers=(TIMES, nothing))
    page = write(given, tmp_path).read_text("utf-8")
    assert read(tmp_path) == given
    assert "Time by layer: int8 CPU" in page
    assert "Time by layer: int8 CPU" in (tmp_path / "report.md").read_text("utf-8")
    assert '<th scope="row">pool</th><td>MaxPool</td><td class="n">1.00</td>' in page
    assert "<script>alert" not in page
    assert "add up to 97.5" in page
    assert "Time by layer: none" not in page
    drawn, _ = charts(given.to_dict())
    assert [mark.y for mark in drawn[-1].series[0].marks] == pytest.approx([2.6, 3.6, 3.8])
    assert "by layer: int8 CPU" in drawn[-1].title
    assert "layers" not in charts(report.to_dict())[0][-1].x_label
