"""Charts: axes, labels that do not cover each other, and nothing drawn without data."""

from __future__ import annotations

import itertools
import math
from xml.etree import ElementTree as ET

import pytest

from deploykit.evaluation.formatting import MISSING, count, number, points, spread
from deploykit.reporting.charts import (
    NARROW,
    WIDE,
    Bars,
    Chart,
    Frame,
    Mark,
    Series,
    draw,
    make_axis,
    text_width,
    wrapped,
)
from deploykit.reporting.figures import charts
from deploykit.reporting.report import Report
from deploykit.reporting.tables import summary
from tests.support.measure.drawings import SVG, boxes, overlaps

FRAMES = pytest.mark.parametrize("frame", [WIDE, NARROW], ids=["wide", "narrow"])


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


CROWDED = {
    "same ends": [line(f"setup {i}", [1.0, 2.0, 3.0 + i * 0.001], i) for i in range(5)],
    "ends at the bottom": [line(f"setup {i}", [9.0, 5.0, 0.001 * (i + 1)], i) for i in range(5)],
    "ends at the top": [
        Series(f"setup {i}", (Mark(1, 1), Mark(2, 4 - i * 1e-4)), i) for i in range(6)
    ],
    "long names": [line("n" * 80, [1.0, 5e6], 0), line("m" * 80, [1.0, 5e6], 1)],
    "single marks": [Series(f"single {i}", (Mark(1 + i * 1e-3, 98, 97, 99),), i) for i in range(5)],
    "seven decades": [line("wide", [10.0**i for i in range(7)])],
    "one mark": [Series("alone", (Mark(3.0, 5.0),))],
    "all zero": [line("zero", [0.0, 0.0])],
}


@pytest.mark.parametrize("name", CROWDED)
@FRAMES
def test_no_label_covers_another_or_leaves_the_chart(name: str, frame: Frame) -> None:
    svg = draw(chart(*CROWDED[name]), frame)
    assert overlaps(svg) == []
    _, _, width, height = map(float, ET.fromstring(svg).attrib["viewBox"].split())
    for text, (left, top, right, bottom) in boxes(svg):
        assert left >= 0, text
        assert right <= width, text
        assert top >= 0, text
        assert bottom <= height, text


def test_ticks_that_would_cover_each_other_are_left_out() -> None:
    many = tuple((float(batch), str(batch)) for batch in range(1, 129))
    svg = draw(chart(line("a", [1.0, 2.0, 3.0]), x_ticks=many, x_log=True))
    assert overlaps(svg) == []
    labels = [text for text, _ in boxes(svg)]
    assert {"1", "2", "4"} < set(labels)
    assert len(labels) < len(many)


@FRAMES
def test_no_text_covers_another_in_a_real_report(report: Report, frame: Frame) -> None:
    drawn, missing = charts(report.to_dict())
    assert [c.title for c in drawn] == [
        "Latency against throughput",
        "Throughput against batch size",
        "Accuracy against latency",
        "Latency of requests, by percentile",
    ]
    assert [sentence.split(" is not drawn")[0] for sentence in missing] == [
        "The latency of calls by percentile",
        "Where the time of a call goes",
        "The roofline",
        "Clocks, power and temperature are not drawn: no GPU was watched.",
    ]
    for one in drawn:
        assert overlaps(draw(one, frame)) == [], one.title


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
    assert len(missing) == 7
    assert all(sentence.endswith(".") for sentence in missing)


def test_a_wide_range_is_logarithmic_and_says_so() -> None:
    assert "y (ms), log scale" in draw(chart(line("a", [1.0, 100.0])))
    assert "log scale" not in draw(chart(line("a", [1.0, 10.0])))


def test_a_linear_axis_starts_at_zero_where_asked_and_covers_the_intervals() -> None:
    axis = make_axis([7.0, 11.3], zero=True)
    assert (axis.low, axis.high) == (0.0, 12.5)
    assert [text for _, text in axis.ticks] == ["0.0", "2.5", "5.0", "7.5", "10.0", "12.5"]


@pytest.mark.parametrize(
    "values",
    [[0.13, 0.26], [97.1, 99.4], [1.0, 1.0], [0.0, 0.0], [-2.0, 3.0], [1e-6, 3e-6]],
    ids=str,
)
def test_the_label_of_a_tick_is_its_value(values: list[float]) -> None:
    axis = make_axis(values)
    assert len(axis.ticks) >= 3
    for value, text in axis.ticks:
        assert float(text.replace("−", "-")) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("values", [[0.2, 18.0], [3.0, 5.0], [1.0, 1e7], [7.0, 7.0]], ids=str)
def test_a_logarithmic_axis_holds_its_values_and_has_round_ticks(values: list[float]) -> None:
    axis = make_axis(values, log=True)
    assert axis.low < min(values) <= max(values) < axis.high
    for value, _ in axis.ticks:
        assert axis.low <= value <= axis.high
        assert 10 ** (math.log10(value) % 1) == pytest.approx(
            min((1, 2, 3, 5, 10), key=lambda m: abs(m - 10 ** (math.log10(value) % 1)))
        )


def test_equal_steps_are_equal_on_a_linear_and_equal_factors_on_a_log_axis() -> None:
    assert make_axis([0, 10]).at(5, 0, 100) == pytest.approx(50)
    axis = make_axis([1, 1000], log=True)
    steps = [b - a for a, b in itertools.pairwise(axis.at(10.0**i, 0, 90) for i in range(4))]
    assert steps == pytest.approx([steps[0]] * 3)


def test_a_bound_is_a_line_at_its_value_with_its_name() -> None:
    svg = draw(chart(line("a", [1.0, 2.0]), limit=(4.0, "4 ms at p99")))
    flag = next(p for p in ET.fromstring(svg).iter(f"{SVG}path") if p.get("class") == "flag")
    y = float(flag.attrib["d"].split(" ")[1].split("H")[0])
    places = dict(boxes(svg))
    assert y == pytest.approx(places["4"][3] - 7, abs=0.2)  # a tick's text ends 7 px below it
    assert "4 ms at p99" in places


@FRAMES
def test_the_parts_of_a_bar_are_as_long_as_they_take_and_named(frame: Frame) -> None:
    bars = (("TensorRT", (2.0, 6.0)), ("a<b" * 30, (0.0, 2.0)), ("nothing", (0.0, 0.0)))
    given = Bars("w", "Where", "Finding", "time (ms)", ("copies", "compute"), bars)
    svg = draw(given, frame)
    assert overlaps(svg) == []
    widths = [float(r.attrib["width"]) for r in ET.fromstring(svg).iter(f"{SVG}rect")]
    assert len(widths) == 3  # a part that takes no time is not there
    assert widths[1] + 1.5 == pytest.approx(3 * (widths[0] + 1.5), rel=0.02)
    assert widths[2] == pytest.approx(widths[0], abs=0.11)
    texts = [text for text, _ in boxes(svg)]
    assert {"copies 2.00", "compute 6.00", "8.00", "TensorRT", "0"} <= set(texts)
    assert draw(Bars("w", "Where", "Finding", "ms", (), ()), frame) == ""


def test_text_is_cut_into_lines_between_words() -> None:
    assert wrapped("one two three", text_width("one two")) == ["one two", "three"]
    assert wrapped("one", 1.0) == ["one"]
    assert wrapped("", 10.0) == [""]
    assert text_width("度") > text_width("d")


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
    assert isinstance(sweep, Chart)
    assert sweep.flag == (4.0, "int8 CPU ahead from batch 4")
    others = "fp32 CPU, 2 × 1; fp16 CPU"
    assert f"Not ahead of fp32 CPU (baseline) up to batch 64: {others}." in sweep.finding
    assert "int8 CPU ahead from batch 4" in draw(sweep)


def test_the_baseline_looks_the_same_wherever_it_stands(report: Report) -> None:
    document = report.to_dict()
    document["points"].reverse()
    for one in charts(document)[0][:3]:
        assert isinstance(one, Chart)
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
    assert spread({**parts, "high": None}) == "1.84 [1.79, ∞]"
    assert spread(None) == MISSING
    drop = {"value": 0.002, "low": -0.003, "high": 0.007}
    assert points(drop, 540).replace("\u202f", " ") == "0.2 pp (−0.3 to 0.7)"


def test_too_few_calls_for_a_percentile_are_reported_not_hidden(report: Report) -> None:
    few = report.to_dict()
    for point in few["points"]:
        point["latency"]["p99_ms"] = None
        point["samples"] = 40
    cells = [cell for row in summary(few).rows for cell in row]
    assert "too few: 40" in cells
