"""Charts: axes, looks and legends; labels that do not cover each other; nothing without data."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from deploykit.core.files import LOOK
from deploykit.evaluation.formatting import MISSING, count, number, points, spread
from deploykit.evaluation.latency import CallHistogram
from deploykit.reporting.charts import (
    BOUND,
    Bars,
    Chart,
    Mark,
    Series,
    draw,
    group,
    line,
    make_axis,
    marker,
)
from deploykit.reporting.figures import charts
from deploykit.reporting.report import Report
from deploykit.reporting.tables import summary
from tests.support.measure.drawings import elements, names, overlaps

COLUMNS = (
    *("fp32 CPU", "fp32 CPU, 2 sessions", "model.int8.cpu", "model.int8.cpu, own settings"),
    *("model.fp16", "model.bf16", "OpenVINO fp32", "OpenVINO bf16", "OpenVINO int8"),
    *("PyTorch bf16", "fp32, GPU", "model, TensorRT", "model, TensorRT, CUDA graphs, overlap"),
)


def chart(*series: Series, **changes: object) -> Chart:
    texts = ("c", "Title", "Finding", "x (ms)", "y (ms)")
    return replace(Chart(*texts, series), **changes)  # type: ignore[arg-type]


def rising(label: str, ys: list[float], look: int = 0) -> Series:
    marks = tuple(Mark(i + 1.0, y, y * 0.9, y * 1.1, str(i)) for i, y in enumerate(ys))
    return Series(label, marks, look)


@pytest.mark.parametrize(
    "series",
    [
        [rising(f"setup {i}", [1.0, 2.0, 3.0 + i * 0.001], i) for i in range(5)],
        [rising("n" * 80, [1.0, 5e6]), rising("m" * 80, [1.0, 5e6], 1)],
        [Series(f"single {i}", (Mark(1 + i * 1e-3, 98, 97, 99),), i) for i in range(5)],
        [rising("wide", [10.0**i for i in range(7)])],
        [Series("alone", (Mark(3.0, 5.0),))],
        [rising("zero", [0.0, 0.0])],
    ],
    ids=["same ends", "long names", "single marks", "seven decades", "one mark", "all zero"],
)
def test_every_line_is_named_and_no_label_covers_another(series: list[Series]) -> None:
    drawn = draw(chart(*series))
    assert overlaps(drawn) == []
    assert names(drawn) == [one.label for one in series]


def test_ticks_that_would_cover_each_other_are_left_out_at_equal_steps() -> None:
    many = tuple((float(batch), str(batch)) for batch in range(1, 129))
    drawn = draw(chart(rising("a", [1.0, 2.0, 3.0]), x_ticks=many, x_log=False))
    assert overlaps(drawn) == []
    shown = [int(t.text or "") for t in elements(drawn).iter("text") if t.get("dy") == "20"]
    steps = {b - a for a, b in itertools.pairwise(shown[:-1])}
    assert len(steps) == 1
    assert 4 < len(shown) < 20


def test_a_chart_without_marks_is_no_frame() -> None:
    assert draw(chart()) == draw(chart(Series("empty", ()))) == ""
    assert draw(Bars("w", "Where", "Finding", "ms", ())) == ""


def test_figures_without_data_are_left_out_with_a_sentence(report: Report) -> None:
    drawn, missing = charts(Report("t", "2026", "c").to_dict())
    assert (drawn, len(missing)) == ([], 6)
    assert all(sentence.endswith(".") for sentence in missing)
    drawn, missing = charts(report.to_dict())
    assert [figure.title for figure in drawn] == [
        "Latency against throughput",
        "Throughput against batch size",
        "Accuracy against latency",
        "Latency of requests, by percentile",
    ]
    assert len(missing) == 3
    assert [overlaps(draw(figure)) for figure in drawn] == [[]] * 4


def test_a_wide_range_is_logarithmic_and_says_so() -> None:
    assert "y (ms), log scale" in draw(chart(rising("a", [1.0, 100.0])))
    assert "log scale" not in draw(chart(rising("a", [1.0, 10.0])))


def test_a_linear_axis_starts_at_zero_where_asked_and_covers_the_intervals() -> None:
    axis = make_axis([7.0, 11.3], zero=True)
    assert (axis.low, axis.high) == (0.0, 12.5)
    assert [text for _, text in axis.ticks] == ["0", "2.5", "5", "7.5", "10", "12.5"]


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
        mantissa = 10 ** (math.log10(value) % 1)
        assert min(abs(mantissa - each) for each in (1, 2, 3, 5, 10)) < 1e-9


def test_equal_steps_are_equal_on_a_linear_and_equal_factors_on_a_log_axis() -> None:
    assert make_axis([0, 10]).at(5) == pytest.approx(50)
    axis = make_axis([1, 1000], log=True)
    steps = [b - a for a, b in itertools.pairwise(axis.at(10.0**i) for i in range(4))]
    assert steps == pytest.approx([steps[0]] * 3)


def test_a_bound_and_where_something_begins_are_lines_with_their_names() -> None:
    bounds = {"limit": (4.0, "4 ms at p99"), "flag": (1.5, "a begins")}
    drawn = draw(chart(rising("a", [1.0, 2.0]), **bounds))
    first, second = re.findall(r'<path class="flag" d="(M[^"]*(?:H100|V100))"', drawn)
    assert first == "M0 0H100"  # of 0 to 4
    assert second == "M50 0V100"
    assert names(drawn) == ["a", "4 ms at p99", "a begins"]


def test_a_bar_is_as_long_as_its_figure() -> None:
    bars = (("Conv", 8.0), ("a<b" * 30, 2.0), ("nothing", 0.0))
    drawn = draw(Bars("w", "Where", "Finding", "time (ms)", bars))
    plots = [svg for svg in elements(drawn).iter("svg") if svg.get("class") == "bar"]
    widths = [[rect.get("width") for rect in svg.iter("rect")] for svg in plots]
    assert widths == [["100%"], ["25%"], []]
    assert "Conv <span>8.00</span>" in drawn


def test_a_whisker_spans_its_interval() -> None:
    drawn = draw(chart(Series("a", (Mark(1, 50, 20, 80), Mark(2, 60, 60, 60)))))
    assert re.findall(r'class="whisker" d="([^"]*)"', drawn) == ["M0 75V0"]  # of 0 to 80


def test_names_in_a_chart_are_escaped() -> None:
    drawn = draw(chart(rising("<script>alert(1)</script>", [1, 2]), title="a<b", x_label="<&>"))
    assert "<script" not in drawn
    assert 'aria-label="a&lt;b"' in drawn
    assert "&lt;&amp;&gt;" in drawn


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


def wide_report(report: Report, labels: tuple[str, ...], batches: int = 3) -> Report:
    """A report with a point of each label at each batch size, and what the other charts need."""
    first = next(point for point in report.points if point.label == report.baseline)
    points = []
    for place, label in enumerate(labels):
        for size in sorted({point.batch for point in report.points})[:batches]:
            slower = 1 + 0.07 * place
            calls = np.linspace(1, 2, 400) * slower * size / 1e4
            rate = replace(first.throughput_per_s, value=8000 / slower + size)
            points.append(
                replace(
                    first,
                    label=label,
                    batch=size,
                    precision="int8" if place % 2 else "fp32",
                    histogram=CallHistogram.of(calls),
                    compute=first.latency,
                    throughput_per_s=replace(rate, low=rate.value * 0.99, high=rate.value * 1.01),
                )
            )
    places = [
        {"label": label, "batch": 1, "intensity": 3.0, "gflops": 9.0 - 0.1 * place}
        for place, label in enumerate(labels)
    ]
    ceilings = {"gflops": 100.0, "gbytes_per_s": 10.0}
    roofline = {"ceilings": ceilings, "points": places}
    return replace(report, points=tuple(points[::-1]), baseline=labels[0], roofline=roofline)


def signature(look: int) -> tuple[str, str, str]:
    """Colour, dash and marker."""
    dash = re.findall(r'stroke-dasharray="([^"]*)"', line([(0, 0), (1, 1)], look))
    return re.findall(r'class="s (\w+)"', group(look, "x"))[0], "".join(dash), marker(look)


@pytest.mark.parametrize("many", [9, len(COLUMNS), 40])
def test_every_setup_has_a_look_of_its_own_and_the_same_in_every_chart(
    report: Report, many: int
) -> None:
    labels = tuple(itertools.islice((*COLUMNS, *(f"more {n}" for n in range(40))), many))
    drawn, _ = charts(wide_report(report, labels).to_dict())
    seen: dict[str, set[int]] = {}
    for figure in drawn:
        assert isinstance(figure, Chart)
        pairs = [(series.label, series.look) for series in figure.series]
        for name, look in pairs:
            seen.setdefault(name, set()).add(look)
        page = draw(figure)
        assert overlaps(page) == [], figure.title
        for _, look in pairs:
            assert f'class="s {signature(look)[0]}"' in page
    assert len(drawn) >= 6
    assert set(labels) <= seen.keys()  # in the roofline, too, next to its limit
    assert all(len(looks) == 1 for looks in seen.values()), seen
    assert seen[labels[0]] == {0}  # the baseline's, wherever it stands
    found = {name: signature(looks.pop()) for name, looks in seen.items()}
    assert len(set(found.values())) == len(found)  # of load levels and the limit, too
    mine = [found[label] for label in labels]
    assert sum(colour == mine[0][0] for colour, _, _ in found.values()) == 1  # the baseline's alone
    if many <= len(COLUMNS):
        assert len({colour for colour, _, _ in mine}) == many
        assert len({shape for _, _, shape in mine}) == many


def test_a_limit_has_a_line_and_no_marker_of_a_setup() -> None:
    assert signature(BOUND) == ("bound", "", "")


THEMES = dict(
    zip(("light", "dark"), LOOK.read_text().split("prefers-color-scheme: dark"), strict=True)
)
# linear RGB as the eyes see it: Machado, Oliveira and Fernandes, 2009, at full severity
EYES = {
    "normal": np.eye(3),
    "protan": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deutan": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritan": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
# Ottosson's colour space Oklab, in which distances are what people see
CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
OKLAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("eyes", EYES)
def test_no_two_colours_look_alike_to_any_eyes(theme: str, eyes: str) -> None:
    codes = dict(re.findall(r"--(c\d+): #([0-9a-f]{6});", THEMES[theme])).values()
    assert len(codes) == 16
    rgb = np.array([[int(code[at : at + 2], 16) for at in (0, 2, 4)] for code in codes]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.transpose(EYES[eyes]), 0, 1)
    lab = np.cbrt(seen @ np.transpose(CONES)) @ np.transpose(OKLAB)
    least = min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(lab, 2))
    # 0.02 is the least that anybody sees on two fields side by side
    assert least > (0.09 if eyes == "normal" else 0.04)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(0), "0"),
        (number(12345), "12 300"),
        (number(1.234), "1.23"),
        (number(9.996), "10.0"),
        (number(999.6), "1 000"),
        (number(0.0456), "0.0456"),
        (number(-3.2), "−3.20"),
        (number(1e-7), "0.000000100"),
        (number(math.inf), MISSING),
        (number(math.nan), MISSING),
        (count(12345), "12 345"),
        (spread({"value": 1.84, "low": 1.79, "high": 1.9}), "1.84 [1.79, 1.90]"),
        (spread({"value": 1.84, "low": 1.79, "high": None}), "1.84 [1.79, ∞]"),
        (spread(None), MISSING),
        (points({"value": 0.002, "low": -0.003, "high": 0.007}, 540), "0.2 pp (−0.3 to 0.7)"),
    ],
)
def test_a_figure_has_three_significant_digits_and_a_count_all(text: str, expected: str) -> None:
    assert text.replace("\u202f", " ") == expected


def test_too_few_calls_for_a_percentile_are_reported_not_hidden(report: Report) -> None:
    few = report.to_dict()
    for point in few["points"]:
        point["latency"]["p99_ms"] = None
        point["samples"] = 40
    assert "too few: 40" in [cell for row in summary(few).rows for cell in row]
