"""Each setup has one look, its own, in all charts: in colour, in marker, and to any eyes."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from deploykit.core.files import asset
from deploykit.evaluation.latency import CallHistogram
from deploykit.reporting.charts import (
    BOUND,
    NARROW,
    WIDE,
    Bars,
    Chart,
    Frame,
    draw,
    group,
    line,
    marker,
    short,
)
from deploykit.reporting.figures import charts
from deploykit.reporting.report import Report
from tests.support.measure.drawings import SVG, boxes, overlaps

COLUMNS = (
    "fp32 CPU",
    "fp32 CPU, 2 sessions",
    "model.int8.cpu",
    "model.int8.cpu, 2 sessions",
    "model.int8.cpu, own settings",
    "model.fp16",
    "model.bf16",
    "OpenVINO fp32",
    "OpenVINO bf16",
    "OpenVINO int8",
    "PyTorch bf16",
    "fp32, GPU",
    "model, TensorRT",
    "model, TensorRT, overlap",
    "model, TensorRT, CUDA graphs",
    "model, TensorRT, CUDA graphs, overlap",
)
FRAMES = pytest.mark.parametrize("frame", [WIDE, NARROW], ids=["wide", "narrow"])
THEMES = dict(
    zip(("light", "dark"), asset("look.css").split("prefers-color-scheme: dark"), strict=True)
)
# linear RGB as the eyes see it: Machado, Oliveira and Fernandes, 2009, at full severity
EYES = {
    "normal": np.eye(3),
    "protan": np.array(
        [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]
    ),
    "deutan": np.array(
        [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]
    ),
    "tritan": np.array(
        [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]
    ),
}


def wide_report(report: Report, labels: tuple[str, ...], batches: int = 3) -> Report:
    """A report with a point of each label at each batch size, and what the other charts need."""
    first = next(point for point in report.points if point.label == report.baseline)
    sizes = sorted({point.batch for point in report.points})[:batches]
    points = []
    for number, label in enumerate(labels):
        for size in sizes:
            slower = 1 + 0.07 * number
            calls = np.linspace(1, 2, 400) * slower * size / 1e4
            rate = replace(first.throughput_per_s, value=8000 / slower + size)
            points.append(
                replace(
                    first,
                    label=label,
                    batch=size,
                    precision="int8" if number % 2 else "fp32",
                    histogram=CallHistogram.of(calls),
                    compute=first.latency,
                    throughput_per_s=replace(rate, low=rate.value * 0.99, high=rate.value * 1.01),
                )
            )
    places = [
        {"label": label, "batch": 1, "intensity": 3.0, "gflops": 9.0 - 0.1 * number}
        for number, label in enumerate(labels)
    ]
    ceilings = {"gflops": 100.0, "gbytes_per_s": 10.0}
    roofline = {"ceilings": ceilings, "points": places}
    return replace(report, points=tuple(points), baseline=labels[0], roofline=roofline)


def signature(look: int) -> tuple[str, str, str]:
    """Colour, dash and marker, without the places."""
    dash = re.findall(r'stroke-dasharray="([^"]*)"', line([(0, 0), (1, 1)], look))
    return re.findall(r'class="s (\w+)"', group(look))[0], "".join(dash), marker(look, 0, 0)


@pytest.mark.parametrize("count", [9, len(COLUMNS), 40])
def test_every_setup_has_a_look_of_its_own_and_the_same_in_every_chart(
    report: Report, count: int
) -> None:
    labels = tuple(itertools.islice((*COLUMNS, *(f"more {n}" for n in range(40))), count))
    drawn, _ = charts(wide_report(report, labels).to_dict())
    seen: dict[str, set[int]] = {}
    for figure in drawn:
        if isinstance(figure, Chart):
            for series in figure.series:
                seen.setdefault(series.label, set()).add(series.look)
        elif isinstance(figure, Bars):
            for (name, _), look in zip(figure.bars, figure.looks, strict=False):
                seen.setdefault(name, set()).add(look)
    assert len(drawn) >= 7
    assert set(labels) <= seen.keys()  # in the roofline, too, next to its limit
    assert all(len(looks) == 1 for looks in seen.values()), seen
    found = {name: signature(looks.pop()) for name, looks in seen.items()}
    assert len(set(found.values())) == len(found)  # of load levels and the limit, too
    mine = [found[label] for label in labels]
    assert sum(colour == mine[0][0] for colour, _, _ in found.values()) == 1  # the baseline's alone
    if count <= len(COLUMNS):
        assert len({colour for colour, _, _ in mine}) == count
        assert len({shape for _, _, shape in mine}) == count


@FRAMES
def test_each_setup_is_drawn_in_its_colour_and_no_name_covers_another(
    report: Report, frame: Frame
) -> None:
    drawn, _ = charts(wide_report(report, COLUMNS, batches=1).to_dict())
    for figure in drawn:
        svg = draw(figure, frame)
        looks = figure.looks if isinstance(figure, Bars) else [s.look for s in figure.series]
        assert overlaps(svg) == [], figure.title
        groups = {g.get("class") for g in ET.fromstring(svg).iter(f"{SVG}g")}
        assert {f"s {signature(look)[0]}" for look in looks} <= groups


def test_names_that_begin_alike_are_cut_so_that_they_differ() -> None:
    stem = "mobilenet-v3-large-quantized.int8.cpu"
    names = [stem, f"{stem}, 2 sessions", f"{stem}, own settings", f"{stem}, CUDA graphs"]
    assert len({short(name) for name in names}) == 4
    assert all(len(short(name)) == 26 for name in names)
    assert short("fp32 CPU") == "fp32 CPU"


def test_a_limit_has_a_line_and_no_marker_of_a_setup() -> None:
    assert marker(BOUND, 0, 0) == ""
    assert signature(BOUND) == ("bound", "", "")


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("eyes", EYES)
def test_no_two_colours_look_alike_to_any_eyes(theme: str, eyes: str) -> None:
    found = dict(re.findall(r"--(c\d+): #([0-9a-f]{6});", THEMES[theme]))
    assert len(found) == 16
    seen = [oklab(EYES[eyes] @ linear(code)) for code in found.values()]
    least = min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))
    # 0.02 is the least that anybody sees on two fields side by side
    assert least > (0.09 if eyes == "normal" else 0.04)


def linear(code: str) -> np.ndarray:
    parts = np.array([int(code[at : at + 2], 16) for at in (0, 2, 4)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Ottosson's colour space, in which distances are what people see."""
    cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    axes = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    found: np.ndarray = axes @ np.cbrt(cones @ np.clip(rgb, 0, 1))
    return found


@pytest.mark.parametrize("count", [16, 40])
def test_all_names_are_drawn_however_many_setups_there_are(report: Report, count: int) -> None:
    labels = tuple(f"setup {number}" for number in range(count))
    svg = draw(charts(wide_report(report, labels).to_dict())[0][0])
    places = dict(boxes(svg))
    assert set(labels) <= places.keys()
    assert min(top for _, top, _, _ in places.values()) >= 0
    assert overlaps(svg) == []


def test_names_above_a_chart_have_their_markers(report: Report) -> None:
    """All at one place: nothing else tells which name is whose."""
    drawn, _ = charts(wide_report(report, COLUMNS[:3], batches=1).to_dict())
    sweep = next(figure for figure in drawn if figure.name == "sweep-1")
    assert draw(sweep).count("<circle") == 2  # the baseline's, in the plot and at its name
