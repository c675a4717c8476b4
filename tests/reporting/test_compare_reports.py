"""Two reports of `bench` are compared by what is certain, and refused where they are not alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.cli.tables import report_comparison
from deploykit.core.errors import BadInput, GateFailed
from deploykit.core.evidence import Interval
from deploykit.evaluation.statistics import Latency
from deploykit.reporting import report as reports
from deploykit.reporting.compare import ratio_of
from deploykit.reporting.report import Report
from tests.support.measure.simulated import BATCHES, MACHINE, PROVENANCE, simulated

Compare = Callable[..., dk.ReportComparison]
A, B = simulated(1), simulated(2)


@pytest.fixture(name="compare")
def compare_fixture(tmp_path: Path) -> Callable[..., dk.ReportComparison]:
    def compare(a: Report, b: Report, **options: Any) -> dk.ReportComparison:
        for name, report in (("a", a), ("b", b)):
            (tmp_path / f"{name}.json").write_text(json.dumps(report.to_dict()))
        return dk.compare_reports(tmp_path / "a.json", tmp_path / "b.json", **options)

    return compare


def findings(result: dk.ReportComparison) -> set[str]:
    return {each.finding for row in result.rows for each in row.figures}


def test_the_same_again_differs_in_1_of_20_and_5_percent_are_found_in_18(compare: Compare) -> None:
    same, slow = (
        [findings(compare(simulated(n), simulated(n + 1, slower))) for n in range(0, 40, 2)]
        for slower in (1.0, 1.0526)
    )
    assert sum(bool(each & {"faster", "slower"}) for each in same) <= 1
    assert sum("slower" in each for each in slow) >= 18
    assert not any("faster" in each for each in slow)


def test_a_difference_under_2_percent_is_practically_equal(compare: Compare) -> None:
    def exact(report: Report, factor: float) -> Report:
        rate = Interval(1000 * factor, 999.9 * factor, 1000.1 * factor)
        point = replace(report.points[0], throughput_per_s=rate, processes=10)
        return replace(report, points=(point,))

    for factor, expected in (
        (1.0, "practically equal"),
        (1.015, "practically equal"),
        (0.985, "practically equal"),
        (0.9, "slower"),
        (1.1, "faster"),
    ):
        (row,) = compare(exact(A, 1.0), exact(A, factor)).rows
        figure = row.figures[0]
        assert (figure.figure, figure.a, figure.b) == ("throughput", 1000.0, 1000.0 * factor)
        assert figure.ratio.value == pytest.approx(factor)
        assert figure.finding == expected


def test_the_interval_is_that_of_welch() -> None:
    """Two means of 5 with a standard error of 1 %, and one test: t with 8 degrees of freedom."""
    half = 2.7764451051977987 * 0.01
    side = Interval(1.0, float(np.exp(-half)), float(np.exp(half)))
    found = ratio_of(side, side, (5, 5), tests=1)
    assert np.log(found.high) == pytest.approx(2.3060041350333704 * 0.01 * np.sqrt(2))
    assert found.low == pytest.approx(1 / found.high)
    many = ratio_of(side, side, (5, 5), tests=10)
    assert np.log(many.high) == pytest.approx(3.832518685 * 0.01 * np.sqrt(2))  # 99.75 %
    wide, one = Interval(1.0, 0.0, 2.0), Interval(1.0, 0.99, 1.01)
    assert ratio_of(wide, one, (5, 5), tests=1) == Interval(1.0, 0.0, float("inf"))


def test_a_regression_is_certain_or_none(compare: Compare) -> None:
    slow = simulated(2, 1.2)
    result = compare(A, slow, fail_on_regression=0.05)
    assert (result.passed, len(result.regressions)) == (False, len(BATCHES) * 3)
    with pytest.raises(GateFailed, match=r"slower than .* by more than 5\.00 %: model, batch 1"):
        result.raise_if_slower()
    compare(A, slow, fail_on_regression=0.3).raise_if_slower()
    compare(A, B, fail_on_regression=0.0).raise_if_slower()
    compare(A, slow).raise_if_slower()


def with_machine(**changes: Any) -> Report:
    return replace(B, machine=MACHINE | changes)


def with_provenance(**changes: Any) -> Report:
    return replace(B, provenance=PROVENANCE | changes)


def with_points(**changes: Any) -> Report:
    return replace(B, points=tuple(replace(point, **changes) for point in B.points))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (with_machine(cpu="Another CPU"), "cpu: An Example CPU against Another CPU"),
        (with_machine(gpus=[{"name": "L4", "driver": "580"}]), "gpus: none against name L4"),
        (
            with_machine(packages={"deploykit": "0.1.0", "numpy": "2.4.0"}),
            "version of numpy: 2.3.0 against 2.4.0",
        ),
        (replace(B, quick=True), "length of the timing: full against quick"),
        (with_points(threads=1), "threads of model, batch 1: 2 against 1"),
        (
            with_points(shapes={"x": (1, 128)}),
            "sizes of the inputs of model, batch 1: x 1 64 against x 1 128",
        ),
        (with_points(marks=("busy",)), "not valid for a comparison: model, batch 1: busy"),
        (
            with_provenance(inputs={"from": "the data given", "sha256": "decaf"}),
            "inputs: from golden samples, sha256 c0ffee against from the data given, sha256 decaf",
        ),
        (replace(B, throttled=("power cap",)), "not valid for a comparison: the GPU: power cap"),
        (replace(with_points(marks=("a",)), invalid=("stop",)), "not valid for a comparison: stop"),
        (replace(B, wrong=("model",)), "batch 1: its outputs failed their gate"),
        (replace(B, points=()), "no engine was timed"),
        (with_points(label="another"), "have no row in common"),
        (replace(B, points=B.points[:1] * 2), "the row model, batch 1 is there twice"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_compared_is_refused_by_name(
    compare: Compare, other: Report, named: str
) -> None:
    with pytest.raises(BadInput) as caught:
        compare(A, other)
    assert named in caught.value.message


def test_every_difference_is_in_the_message_and_many_alike_are_counted(compare: Compare) -> None:
    other = replace(with_machine(cpu="Another", usable_cores=1), quick=True)
    points = [replace(p, label=f"{p.label} {i}") for i in range(3) for p in A.points]
    sized = [replace(p, shapes={"x": (p.batch, 9)}) for p in points]
    with pytest.raises(BadInput) as caught:
        compare(replace(A, points=tuple(points)), replace(other, points=tuple(sized)))
    message = caught.value.message
    for words in ("cpu:", "usable cores:", "length of the timing:"):
        assert words in message
    assert message.count("sizes of the inputs of") == 3
    assert f"and {len(points) - 3} more such" in message


def test_what_a_report_does_not_say_is_named(compare: Compare) -> None:
    for other, names in (
        (B, set()),
        (with_machine(packages=MACHINE["packages"] | {"onnx": "1.20.0", "torch": "3"}), set()),
        (replace(B, machine={}), {"memory", "cpu"}),
        (with_machine(packages={}), {"version of deploykit"}),
        (with_points(shapes={}), {"sizes of the inputs"}),
        (replace(B, provenance={}), {"clock governor", "CPUs that it may use"}),
        (with_machine(power_mode="25W"), {"power mode"}),
    ):
        found = set(compare(A, other).not_known)
        assert names <= found
        assert bool(found) == bool(names)


def test_rows_of_one_report_alone_are_named(compare: Compare) -> None:
    more = replace(B.points[0], label="more")
    result = compare(A, replace(B, points=(*B.points[1:], more)))
    assert (result.only_a, result.only_b) == (("model, batch 1",), ("more, batch 1",))
    assert [row.batch for row in result.rows] == [2, 4]


def test_figures_without_an_interval_are_named_and_not_compared(compare: Compare) -> None:
    few = [replace(p, latency=replace(p.latency, p99_ms=None)) for p in B.points]
    result = compare(A, replace(B, points=tuple(few)))
    assert {each.figure for row in result.rows for each in row.figures} == {"throughput", "p50"}
    assert any("p99 not compared" in n and "batch 1 and 2 more" in n for n in result.notes)
    zero, nothing = Interval(0.0, 0.0, 0.0), Latency(1, None, None, None, 1.0)
    still = with_points(throughput_per_s=zero, latency=nothing)
    result = compare(still, still)
    assert [row.figures for row in result.rows] == [()] * len(BATCHES)
    assert report_comparison(result)


def test_a_baseline_that_moved_is_named(compare: Compare) -> None:
    moved = "the machine was not in the same state"
    assert any(moved in each for each in compare(A, simulated(2, 1.2)).notes)
    assert not any(moved in each for each in compare(A, B).notes)
    rebuilt = replace(simulated(2, 1.2), artefacts=({"file": "model.onnx", "sha256": "b" * 64},))
    assert not any(moved in each for each in compare(A, rebuilt).notes)


def test_a_report_that_is_compared_with_itself_is_named(compare: Compare) -> None:
    assert any("the same run" in each for each in compare(A, A).notes)
    assert not any("the same run" in each for each in compare(A, B).notes)


def test_the_processes_are_the_unit_where_there_are_several(compare: Compare) -> None:
    """Nothing is assumed then, and the degrees of freedom are those of the processes."""
    widths, assumed = {}, {}
    for count in (5, 1, 2):
        sides = [[replace(p, processes=count) for p in each.points] for each in (A, B)]
        found = compare(*(replace(A, points=tuple(points)) for points in sides))
        ratio = found.rows[0].figures[0].ratio
        widths[count] = np.log(ratio.high / ratio.low)
        assumed[count] = any("is assumed" in note for note in found.notes)
    assert list(widths.values()) == sorted(widths.values())
    assert assumed == {5: False, 1: True, 2: False}


def test_what_bench_writes_can_be_compared(affine_onnx: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    short: dict[str, Any] = {"batches": [1], "seconds": 0.05}
    dk.bench([affine_onnx], **short, out=tmp_path / "a")
    dk.bench([affine_onnx], **short, out=tmp_path / "b", against=[tmp_path / "a"])
    for name in "ab":  # whatever else this machine does meanwhile
        report = reports.read(tmp_path / name)
        points = tuple(replace(point, marks=()) for point in report.points)
        reports.write(replace(report, invalid=(), points=points), tmp_path / name)
    result = dk.compare_reports(tmp_path / "a", tmp_path / "b")
    assert result.rows
    assert "inputs" not in result.not_known
    assert result.only_a == result.only_b == ()
