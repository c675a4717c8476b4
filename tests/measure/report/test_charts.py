"""Charts: axes, labels that do not cover each other, and nothing drawn without data."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from deploykit.core.assets import FOLDER
from deploykit.measure.report.figures import Chart, Mark, Series, charts
from deploykit.measure.report.formatting import MISSING, count, number, points, spread
from deploykit.measure.report.report import Report
from deploykit.measure.report.tables import summary
from tests.support.node import evaluate, needs_node

CHARTS = FOLDER / "charts.js"
WIDTH, HEIGHT = 760, 400
SVG = "{http://www.w3.org/2000/svg}"
FONT, MEAN_WIDTH = 12, 0.6  # as charts.js takes them

pytestmark = needs_node


def draw(one: Chart, frame: str = "FIGURE") -> str:
    drawn: str = evaluate(CHARTS, f"m.draw(v.chart, m.{frame})", chart=asdict(one))
    return drawn


def make_axis(values: list[float], **options: object) -> dict[str, Any]:
    found: dict[str, Any] = evaluate(CHARTS, "m.axis(v.values, v.o)", values=values, o=options)
    return found


def text_box(x: float, y: float, text: str, anchor: str) -> tuple[float, float, float, float]:
    width = MEAN_WIDTH * FONT * len(text)
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
    return left, y - FONT, left + width, y + 0.25 * FONT


def chart(*series: Series, **changes: object) -> Chart:
    values: dict[str, object] = {
        "name": "c",
        "title": "Title",
        "finding": "Finding",
        "x_label": "x (ms)",
        "y_label": "y (ms)",
        "series": series,
    }
    return Chart(**{**values, **changes})  # type: ignore[arg-type]


def line(label: str, ys: list[float], look: int = 0) -> Series:
    return Series(label, tuple(Mark(i + 1.0, y, y * 0.9, y * 1.1) for i, y in enumerate(ys)), look)


def boxes(svg: str) -> list[tuple[str, tuple[float, float, float, float]]]:
    return [
        (
            text.text or "",
            text_box(
                float(text.attrib["x"]),
                float(text.attrib["y"]),
                text.text or "",
                text.get("text-anchor", "start"),
            ),
        )
        for text in ET.fromstring(svg).iter(f"{SVG}text")
    ]


def overlaps(svg: str) -> list[tuple[str, str]]:
    return [
        (a, b)
        for (a, (l1, t1, r1, b1)), (b, (l2, t2, r2, b2)) in itertools.combinations(boxes(svg), 2)
        if l1 < r2 and r1 > l2 and t1 < b2 and b1 > t2
    ]


CROWDED = {
    "same ends": [line(f"setup {i}", [1.0, 2.0, 3.0 + i * 0.001], i) for i in range(5)],
    "ends at the bottom": [line(f"setup {i}", [9.0, 5.0, 0.001 * (i + 1)], i) for i in range(5)],
    "long names": [line("n" * 80, [1.0, 5e6], 0), line("m" * 80, [1.0, 5e6], 1)],
    "single marks": [Series(f"single {i}", (Mark(1 + i * 1e-3, 98, 97, 99),), i) for i in range(5)],
    "seven decades": [line("wide", [10.0**i for i in range(7)])],
    "one mark": [Series("alone", (Mark(3.0, 5.0),))],
    "all zero": [line("zero", [0.0, 0.0])],
}


@pytest.mark.parametrize("name", CROWDED)
def test_no_label_covers_another_or_leaves_the_chart(name: str) -> None:
    svg = draw(chart(*CROWDED[name]))
    assert overlaps(svg) == []
    for text, (left, top, right, bottom) in boxes(svg):
        assert left >= 0, text
        assert right <= WIDTH, text
        assert top >= 0, text
        assert bottom <= HEIGHT, text


def test_ticks_that_would_cover_each_other_are_left_out() -> None:
    many = tuple((float(batch), str(batch)) for batch in range(1, 129))
    svg = draw(chart(line("a", [1.0, 2.0, 3.0]), x_ticks=many, x_log=True))
    assert overlaps(svg) == []
    labels = [text for text, _ in boxes(svg)]
    assert {"1", "2", "4"} < set(labels)
    assert len(labels) < len(many)


def test_no_text_covers_another_in_a_real_report(report: Report) -> None:
    drawn, missing = charts(report.to_dict())
    assert [c.title for c in drawn] == [
        "Latency against throughput",
        "Throughput against batch size",
        "Accuracy against latency",
        "Latency over HTTP, by percentile",
    ]
    assert missing == []
    for one in drawn:
        assert overlaps(draw(one)) == [], one.title


def test_every_line_is_named_and_differs_in_dash_and_marker_not_only_in_colour() -> None:
    svg = draw(chart(*(line(f"setup {i}", [1.0, 2.0 + i], i) for i in range(5))))
    labels = [text for text, _ in boxes(svg)]
    assert [f"setup {i}" for i in range(5) if f"setup {i}" in labels] == [
        f"setup {i}" for i in range(5)
    ]
    root = ET.fromstring(svg)
    lines = [p for p in root.iter(f"{SVG}path") if p.get("class") == "line"]
    assert len({p.get("stroke-dasharray") for p in lines}) == 5


def test_a_chart_without_marks_is_no_frame() -> None:
    assert draw(chart()) == ""
    assert draw(chart(Series("empty", ()))) == ""


def test_figures_without_data_are_left_out_with_a_sentence() -> None:
    drawn, missing = charts(Report("t", "2026", "c").to_dict())
    assert drawn == []
    assert len(missing) == 3
    assert all(sentence.endswith(".") for sentence in missing)


def test_a_wide_range_is_logarithmic_and_says_so() -> None:
    assert "y (ms), log scale" in draw(chart(line("a", [1.0, 100.0])))
    assert "log scale" not in draw(chart(line("a", [1.0, 10.0])))


def test_a_linear_axis_starts_at_zero_where_asked_and_covers_the_intervals() -> None:
    axis = make_axis([7.0, 11.3], zero=True)
    assert (axis["low"], axis["high"]) == (0.0, 12.5)
    assert [text for _, text in axis["ticks"]] == ["0.0", "2.5", "5.0", "7.5", "10.0", "12.5"]


@pytest.mark.parametrize(
    "values",
    [[0.13, 0.26], [97.1, 99.4], [1.0, 1.0], [0.0, 0.0], [-2.0, 3.0], [1e-6, 3e-6]],
    ids=str,
)
def test_the_label_of_a_tick_is_its_value(values: list[float]) -> None:
    axis = make_axis(values)
    assert len(axis["ticks"]) >= 3
    for value, text in axis["ticks"]:
        assert float(text.replace("−", "-")) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("values", [[0.2, 18.0], [3.0, 5.0], [1.0, 1e7], [7.0, 7.0]], ids=str)
def test_a_logarithmic_axis_holds_its_values_and_has_round_ticks(values: list[float]) -> None:
    axis = make_axis(values, log=True)
    assert axis["low"] < min(values) <= max(values) < axis["high"]
    for value, _ in axis["ticks"]:
        assert axis["low"] <= value <= axis["high"]
        assert 10 ** (math.log10(value) % 1) == pytest.approx(
            min((1, 2, 3, 5, 10), key=lambda m: abs(m - 10 ** (math.log10(value) % 1)))
        )


def test_equal_steps_are_equal_on_a_linear_and_equal_factors_on_a_log_axis() -> None:
    half = "m.axis([0, 10]).at(5, 0, 100)"
    assert evaluate(CHARTS, half) == pytest.approx(50)
    thirds = "[1, 10, 100, 1000].map((x) => m.axis([1, 1000], {log: true}).at(x, 0, 90))"
    at = evaluate(CHARTS, thirds)
    steps = [b - a for a, b in itertools.pairwise(at)]
    assert steps == pytest.approx([steps[0]] * 3)


def test_a_panel_breaks_its_line_where_there_is_no_value_and_names_its_series() -> None:
    marks = [{"x": x, "y": y} for x, y in enumerate([1, 2, None, 4, 5])]
    both = [{"label": name, "look": i + 1, "marks": marks} for i, name in enumerate(["p99", "p50"])]
    given = {"title": "Latency", "alt": "Latency, now 5 ms", "series": both, "zero": True}
    svg = evaluate(CHARTS, "m.draw(v.chart, m.PANEL)", chart=given)
    root = ET.fromstring(svg)
    assert root.get("aria-label") == "Latency, now 5 ms"
    lines = [p for p in root.iter(f"{SVG}path") if p.get("class") == "line"]
    assert len(lines) == 2 * 2 + 2  # two runs of each, and a sample of each in the legend
    assert {"p99", "p50"} < {text for text, _ in boxes(svg)}
    assert overlaps(svg) == []


def test_bars_carry_their_share_and_leave_out_labels_that_would_overlap() -> None:
    bars = [{"label": str(10 * i), "value": i} for i in range(1, 41)]
    svg = evaluate(CHARTS, "m.drawBars(v.chart)", chart={"bars": bars, "alt": "Bars"})
    assert overlaps(svg) == []
    few = evaluate(CHARTS, "m.drawBars(v.chart)", chart={"bars": bars[:2], "alt": "Bars"})
    assert [text for text, _ in boxes(few)] == ["33 %", "10", "67 %", "20"]
    assert evaluate(CHARTS, "m.drawBars({bars: [], alt: ''})") == ""


def test_a_whisker_spans_its_interval() -> None:
    svg = draw(chart(Series("a", (Mark(1, 50, 20, 80), Mark(2, 60, 60, 60)))))
    whiskers = [p for p in ET.fromstring(svg).iter(f"{SVG}path") if p.get("class") == "whisker"]
    ticks = dict(boxes(svg))
    assert len(whiskers) == 1  # an interval without width has none
    start, end = (
        float(part) for part in whiskers[0].attrib["d"].split("M")[1].split(" ")[1].split("V")
    )
    assert start == pytest.approx(ticks["80"][3] - 7, abs=0.2)  # a tick's text ends 7 px below it
    assert end == pytest.approx(ticks["20"][3] - 7, abs=0.2)


def test_names_in_a_chart_are_escaped() -> None:
    svg = draw(chart(line("<script>alert(1)</script>", [1, 2]), title="a<b", finding="<&>"))
    assert "<script" not in svg
    assert ET.fromstring(svg).get("aria-label") == "a<b"


def test_the_crossover_is_marked_where_the_fastest_setup_overtakes(report: Report) -> None:
    document = report.to_dict()
    for found in document["crossovers"]:
        if found["by"] == "throughput":
            found["batch"] = 4 if found["label"] == "int8 CPU" else None
    sweep = charts(document)[0][1]
    assert sweep.flag == (4.0, "int8 CPU ahead from batch 4")
    assert "fp16 CPU is not ahead of fp32 CPU (baseline) up to batch 64" in sweep.finding
    assert "int8 CPU ahead from batch 4" in draw(sweep)


def test_the_baseline_looks_the_same_wherever_it_stands(report: Report) -> None:
    document = report.to_dict()
    document["points"].reverse()
    for one in charts(document)[0][:3]:
        assert {s.look for s in one.series if s.label == report.baseline} == {0}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12345, "12 300"),
        (1.234, "1.23"),
        (9.996, "10.0"),
        (999.6, "1 000"),
        (0.0456, "0.0456"),
        (-3.2, "−3.20"),
        (1e-7, "0.000000100"),
        (math.inf, MISSING),
        (math.nan, MISSING),
    ],
)
def test_a_figure_has_three_significant_digits(value: float, text: str) -> None:
    assert number(value).replace("\u202f", " ") == text


def test_counts_are_exact() -> None:
    assert count(12345).replace("\u202f", " ") == "12 345"


def test_intervals_are_written_with_their_value() -> None:
    parts = {"value": 1.84, "low": 1.79, "high": 1.9}
    assert spread(parts) == "1.84 [1.79, 1.90]"
    assert spread(None) == MISSING
    drop = {"value": 0.002, "low": -0.003, "high": 0.007}
    assert points(drop, 540).replace("\u202f", " ") == "0.2 pp (−0.3 to 0.7)"


def test_a_wide_character_counts_as_wider_than_a_latin_one() -> None:
    assert evaluate(CHARTS, "m.textWidth('度') > m.textWidth('d')")


def test_the_page_writes_numbers_as_the_report_does() -> None:
    values = [0, 12345, 1.234, 9.996, 999.6, 0.0456, -3.2, 1e-7, 0.5, 100, 1e6, 42, 7.25e8]
    assert evaluate(CHARTS, "v.x.map((x) => m.number(x))", x=values) == list(map(number, values))
    assert evaluate(CHARTS, "m.number(null)") == MISSING
    whole = [0, 7, 999, 1000, 12345, -12]
    assert evaluate(CHARTS, "v.x.map((x) => m.count(x))", x=whole) == list(map(count, whole))


def test_too_few_calls_for_a_percentile_are_reported_not_hidden(report: Report) -> None:
    few = report.to_dict()
    for point in few["points"]:
        point["latency"]["p99_ms"] = None
        point["samples"] = 40
    cells = [cell for row in summary(few).rows for cell in row]
    assert "too few: 40" in cells
