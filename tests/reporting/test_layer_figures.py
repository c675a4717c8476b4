"""The layers of a call in the report: what takes most, and whether they add up to the call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deploykit.reporting.charts import draw
from deploykit.reporting.figures import charts, layer_note, layer_rows, layers_chart
from deploykit.reporting.html import report_page
from deploykit.reporting.points import LayerTime, LayerTimes
from deploykit.reporting.report import Report, read, write
from tests.support.measure.drawings import elements

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


def plain(text: str) -> str:
    return text.replace("\u202f", " ")


def test_each_layer_has_its_share() -> None:
    rows = [tuple(map(plain, row)) for row in layer_rows(TIMES.to_dict(), 2)]
    assert rows[0][1:] == ("Conv", "2.60", "66.7 %")
    assert rows[1] == ("pool", "MaxPool", "1.00", "25.6 %")
    assert rows[2] == ("5 001 others", "–", "0.300", "7.69 %")
    assert sum(float(row[2]) for row in rows) == pytest.approx(TIMES.sum_ms)
    whole = replace(TIMES, count=3, sum_ms=3.8).to_dict()
    assert len(layer_rows(whole)) == 3


@pytest.mark.parametrize(
    ("sum_ms", "says"),
    [(3.9, ""), (4.19, ""), (3.79, "NOT within 5 %"), (4.21, "NOT within 5 %")],
)
def test_layers_that_do_not_add_up_to_the_call_are_marked(sum_ms: float, says: str) -> None:
    note = plain(layer_note(replace(TIMES, sum_ms=sum_ms).to_dict()))
    assert f"add up to {100 * sum_ms / 4:.3g} % of a call of 4.00 ms without the profiler" in note
    assert "with which one takes 4.40 ms" in note
    assert "0.0800 µs more for each layer" in note  # 0.4 ms for 5,003
    assert ("NOT" in note) == bool(says)
    assert says in note


def test_the_bars_are_as_long_as_the_layers_take(report: Report) -> None:
    document = replace(report, layers=(TIMES,)).to_dict()
    (bars,) = layers_chart(document)
    assert bars in charts(document)[0]
    drawn = draw(bars)
    widths = [float(rect.attrib["width"].rstrip("%")) for rect in elements(drawn).iter("rect")]
    assert widths == pytest.approx([100, 100 / 2.6, 20 / 2.6], abs=0.01)
    assert "pool · MaxPool <span>1.00</span>" in drawn


def test_the_page_escapes_names_and_shows_every_row(report: Report) -> None:
    page = report_page(replace(report, layers=(TIMES,)).to_dict())
    assert "Where the time goes, by layer: int8 CPU" in page
    assert "<script>alert" not in page
    assert "add up to 97.5" in page


def test_layers_are_read_back_and_a_report_without_them_has_no_chart(
    report: Report, tmp_path: Path
) -> None:
    given = replace(report, layers=(TIMES,))
    write(given, tmp_path)
    assert read(tmp_path) == given
    assert layers_chart(report.to_dict()) == []
    nothing = replace(TIMES, layers=(), count=0, sum_ms=0.0)
    assert layers_chart(replace(report, layers=(nothing,)).to_dict()) == []
