"""The report as data: what it says, what it refuses to say, its file, and who is ahead."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from deploykit.benchmarking.columns import best_cpu
from deploykit.core.errors import BadInput, DeploykitError, NotFound
from deploykit.core.evidence import Interval
from deploykit.engines.devices import Conditions
from deploykit.evaluation.statistics import CallHistogram, Latency, ratio
from deploykit.reporting.compare import compare_reports
from deploykit.reporting.machine_load import Outside, Window
from deploykit.reporting.report import PeakMemory, Point, Report, crossover, read, write
from deploykit.reporting.tables import details
from deploykit.reporting.tables import machine as machine_table
from deploykit.reporting.verdict import verdict
from tests.support.measure.simulated import bare_point

NAMES = ("report.html", "report.json", "report.md")
ROOT = Path(__file__).resolve().parents[2]
JETSON = Conditions("Orin", "sysfs", 9, "25W", 306.0, 918.0, 918.0, 9.5, 12.0, 61.0, ())


def find(report: Report, label: str, batch: int) -> Point:
    return next(p for p in report.points if p.label == label and p.batch == batch)


def test_a_report_is_read_back_and_written_again_to_the_same_bytes(
    report: Report, tmp_path: Path
) -> None:
    known = {
        "project": {"commit": "abc", "changed": True},
        "host": "bench-1",
        "clocks": {"governor": "performance", "max_mhz": 3500.0, "turbo": "off"},
        "affinity": "0-1",
        "environment": {"OMP_NUM_THREADS": "2"},
    }
    calls = CallHistogram((3, 5), (40, 1))
    point = replace(report.points[0], histogram=calls, note="[\n1,\n2\n]")
    points = (point, *report.points[1:])
    full = replace(report, provenance=known, points=points, conditions=(JETSON,))
    assert write(full, tmp_path / "a") == tmp_path / "a" / "report.html"
    assert read(tmp_path / "a" / "report.json") == read(tmp_path / "a") == full
    assert '"bins": [3, 5],\n' in (tmp_path / "a" / "report.json").read_text("utf-8")
    write(read(tmp_path / "a"), tmp_path / "b")
    for name in NAMES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == list(NAMES)
    rows = dict(machine_table(full.to_dict()).rows)
    assert (rows["project: commit"], rows["project: changed"]) == ("abc", "True")
    assert "deploykit: commit" not in rows
    assert (rows["clocks: governor"], rows["clocks: max mhz"]) == ("performance", "3500.0")
    assert (rows["host"], rows["affinity"]) == ("bench-1", "0-1")
    assert rows["environment: OMP_NUM_THREADS"] == "2"
    assert (rows["GPU: power mode"], rows["GPU: clock low mhz"]) == ("25W", "306.0")
    assert (rows["GPU: temperature c"], rows["GPU: throttled"]) == ("61.0", "no")


def test_a_report_that_json_cannot_hold_leaves_the_old_files(
    report: Report, tmp_path: Path
) -> None:
    write(report, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in NAMES}
    with pytest.raises(TypeError, match="JSON"):
        write(replace(report, title="new", machine={"load": object()}), tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in NAMES} == before


def test_a_report_keeps_to_the_published_schema(report: Report, tmp_path: Path) -> None:
    schema = json.loads((ROOT / "docs" / "report.schema.json").read_text("utf-8"))
    import jsonschema  # takes a second

    check = jsonschema.Draft202012Validator(schema)
    check.check_schema(schema)
    calls = replace(report.points[0], histogram=CallHistogram.of([1e-3, 2e-3]))
    for each in (report, replace(report, points=(calls,)), Report("nothing", "2026", "")):
        write(each, tmp_path)
        check.validate(json.loads((tmp_path / "report.json").read_text("utf-8")))
    bad = report.to_dict() | {"points": [{**report.points[0].to_dict(), "batch": "8"}]}
    assert not check.is_valid(json.loads(json.dumps(bad)))


def test_a_report_of_version_1_is_read(report: Report, tmp_path: Path) -> None:
    old = json.loads(json.dumps(report.to_dict())) | {"report": 1}
    for point in old["points"]:
        del point["histogram"]
    del old["conditions"], old["wrong"]
    window = {"seconds": 2.0, "load_average": 1.5, "mhz": 3000.0, "celsius": None}
    old["outside"] = {"cpus": 2, "before": {}, "during": window, "after": {}}
    (tmp_path / "report.json").write_text(json.dumps(old))
    load = Outside(2, Window(), Window(seconds=2.0), Window())
    assert read(tmp_path) == replace(report, outside=load)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "not valid JSON"),
        ("[]", "not a deploykit report"),
        ('{"report": 3}', "a report of version 3; this deploykit reads up to 2"),
        ('{"report": 1}', "is not a complete Report"),
        ("[" * 100_000, "not valid JSON"),
    ],
    ids=lambda text: text[:15],
)
def test_a_file_that_is_not_a_report_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(BadInput, match=message):
        read(tmp_path / "report.json")


MISSING = object()
ENDLESS = [1.0] * 100_001


def damage(document: Any, path: str, value: object) -> None:
    """Put another value, or none, at a path of the document."""
    *way, name = path.split(".")
    at = document
    for key in way:
        at = at[int(key) if key.isdigit() else key]
    last = int(name) if isinstance(at, list) else name
    if value is MISSING:
        del at[last]
    else:
        at[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("points.0.latency", MISSING, "is not a complete Point"),
        ("points.0.batch", "8", "'points'[0]: 'batch' must be an integer"),
        ("points.0.batch", 10**400, "'points'[0]: 'batch' must be below 2^63"),
        ("points.0.duration_s", None, "'points'[0]: 'duration_s' must be a finite number"),
        ("points.0.throughput_per_s.value", math.nan, "'value' must be a finite number"),
        ("points.0.round_rates", ENDLESS, "'round_rates' has more than 100,000 items"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_value_is_one_line_that_names_its_key(
    path: str, value: object, message: str, report: Report, tmp_path: Path
) -> None:
    document = json.loads(json.dumps(report.to_dict()))
    damage(document, path, value)
    (tmp_path / "report.json").write_text(json.dumps(document))
    with pytest.raises(BadInput, match=re.escape(message)) as found:
        read(tmp_path)
    assert found.value.message.startswith(str(tmp_path / "report.json"))
    assert "\n" not in found.value.message


DAMAGE: tuple[Any, ...] = (None, "x", -1, 1e308, math.nan, True, [], {}, [1] * 5, "1e5", 10**400)


def places(value: Any, way: tuple[str, ...] = ()) -> Iterator[str]:
    if way:
        yield ".".join(way)
    few = enumerate(value[:2]) if isinstance(value, list) else ()
    for key, each in value.items() if isinstance(value, dict) else few:
        yield from places(each, (*way, str(key)))


def test_whatever_is_damaged_is_refused_or_compared(report: Report, tmp_path: Path) -> None:
    """One damage at each second place of a report, from a seed."""
    random, seen = Random(5), 0
    small = replace(report, points=report.points[:2], serving=report.serving[:1])
    small = replace(small, provenance={"clocks": {"governor": "a"}, "environment": {"A": "b"}})
    text = json.dumps(small.to_dict())
    for path in list(places(json.loads(text)))[::2]:
        document = json.loads(text)
        damage(document, path, random.choice(DAMAGE))
        (tmp_path / "report.json").write_text(json.dumps(document))
        with contextlib.suppress(DeploykitError):
            compare_reports(tmp_path, tmp_path)
            seen += 1
    assert seen > 30


def test_places_without_a_report_are_refused(report: Report, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read(tmp_path)
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(BadInput, match="out: cannot be used as a folder"):
        write(report, tmp_path / "out")
    served = report.serving[0]
    endless = replace(served, latency=replace(served.latency, max_ms=math.inf))
    for each in (Report("nothing", "2026", ""), replace(report, serving=(endless,), points=())):
        write(each, tmp_path)
        assert read(tmp_path) == each
    assert "| ∞ |" in (tmp_path / "report.md").read_text("utf-8")


@pytest.mark.parametrize("change", [{"batch": 16}, {"scenario": "server"}, {"rounds": 3}], ids=str)
def test_a_ratio_is_paired_by_round_of_equal_measurements(
    change: dict[str, Any], report: Report
) -> None:
    a, b = find(report, "int8 CPU", 32), find(report, "fp32 CPU (baseline)", 32)
    alone = replace(report, points=())
    assert alone.speedup(a, b) == ratio(a.round_rates, b.round_rates)
    with pytest.raises(BadInput, match=f"cannot be compared: {next(iter(change))}"):
        alone.speedup(a, replace(b, **change))
    points = tuple(p for p in report.points if p.label == report.baseline or p.batch >= 8)
    assert {item.batch for item in replace(report, points=points).speedups} == {8, 16, 32, 64}
    assert replace(report, points=points, baseline="no such setup").speedups == ()


def test_a_report_of_a_jetson_without_its_power_mode_is_marked(report: Report) -> None:
    board, unknown, changed = {"l4t": "36.4.3"}, {"power_mode": None}, {"power_mode": "15W, 25W"}
    on_jetson = replace(JETSON, **unknown, source="nvml+sysfs")
    for machine, conditions, says in (
        (board, (), "THE POWER MODE IS NOT KNOWN"),
        ({}, (on_jetson,), "THE POWER MODE IS NOT KNOWN"),
        (board, (replace(JETSON, **changed),), "THE POWER MODE CHANGED during the run"),
        (board | {"power_mode": "25W"}, (), ""),
        (unknown, (replace(on_jetson, source="nvml"),), ""),
    ):
        known = replace(report, machine={**report.machine, **machine}, conditions=conditions)
        text = " ".join(verdict(known))
        assert ("THE POWER MODE" in text) == bool(says)
        assert says in text


def table(report: Report, title: str) -> list[dict[str, str]]:
    for found in details(report.to_dict()):
        if found.title == title:
            return [dict(zip(found.columns, row, strict=True)) for row in found.rows]
    return []


def test_memory_and_compute_alone_have_tables(report: Report) -> None:
    assert table(report, "Memory") == table(report, "Compute alone") == []
    half = Interval(0.1, 0.09, 0.11)
    compute = Latency(400, half, half, None, 0.2, {"p99_ms": 368})
    points = (replace(report.points[0], compute=compute), *report.points[1:])
    memory = (PeakMemory(report.baseline, 64, 123_000_000),)
    known = replace(report, memory=memory, points=points)
    (row,) = table(known, "Memory")
    assert (row["label"], row["peak MB"], row["batch"]) == (report.baseline, "123", "64")
    (row,) = table(known, "Compute alone")
    assert row["compute p50 ms"] == "0.100 [0.0900, 0.110]"
    assert row["compute p99 ms"] == "–"
    assert row["end to end p50 ms"].startswith("0.210")


def points(**rates: tuple[float, float]) -> list[Point]:
    """Points by batch ("b8") with the ends of the interval that both figures of them get."""
    found = []
    for batch, ends in rates.items():
        both = Interval(sum(ends) / 2, *ends)
        latency = Latency(100, both, None, None, ends[1])
        found.append(bare_point("A", int(batch[1:]), latency=latency, throughput_per_s=both))
    return found


CPU = points(b1=(90, 110), b2=(90, 110), b4=(90, 110), b8=(90, 110))


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (points(b1=(50, 60), b2=(120, 130), b4=(150, 160), b8=(200, 210)), 2),
        (points(b1=(120, 130), b2=(100, 130), b4=(150, 160), b8=(200, 210)), 4),
        (points(b1=(120, 130), b2=(120, 130), b4=(150, 160), b8=(100, 210)), None),
        (points(b2=(120, 130), b4=(150, 160), b16=(1, 2)), 2),
    ],
    ids=["from 2", "intervals touch at 2", "not at the end", "common batches"],
)
def test_crossover_is_the_first_batch_from_which_a_stays_ahead(
    gpu: list[Point], expected: int | None
) -> None:
    assert crossover(gpu, CPU) == crossover(gpu[::-1], CPU) == expected
    slow_then_fast = points(b1=(120, 130), b2=(80, 95), b4=(50, 60), b8=(40, 50))
    assert crossover(slow_then_fast, CPU, by="p50") == 4
    assert crossover(CPU, slow_then_fast, by="p50") is None
    unknown = [replace(p, latency=Latency(3, None, None, None, 1.0)) for p in CPU]
    assert crossover(unknown, CPU, by="p50") is None
    assert crossover(points(b3=(1, 2)), CPU) is None  # no batch was measured on both


@pytest.mark.parametrize(
    ("rate", "in_one", "in_ten"), [(101.9, None, None), (102.5, None, 1), (103, 1, 1)]
)
def test_ahead_is_more_than_processes_differ_where_only_one_timed_both(
    rate: float, in_one: int | None, in_ten: int | None
) -> None:
    pair = [points(b1=(value - 0.1, value + 0.1)) for value in (rate, 100)]
    assert crossover(*pair) == in_one
    ten = [[replace(point, processes=10) for point in side] for side in pair]
    assert crossover(*ten) == in_ten


def test_the_best_of_the_cpu_is_right_on_the_cpu_and_in_the_closed_loop(report: Report) -> None:
    found = [replace(each, settings=f"of {each.label}") for each in report.points]
    fastest = best_cpu(found, set())
    assert [each.batch for each in fastest] == [1, 2, 4, 8, 16, 32, 64]
    assert (fastest[0].label, fastest[0].settings) == ("int8 CPU", "of int8 CPU")
    runtimes = "ONNX Runtime fp32, ONNX Runtime fp16, ONNX Runtime int8"
    assert fastest[0].why == f"the fastest of 4 columns on the CPU ({runtimes})"
    assert best_cpu(found, {"int8 CPU"})[0].label == "fp32 CPU, 2 × 1"
    for elsewhere in ({"device": "cuda:0"}, {"scenario": "offline"}):
        assert best_cpu([replace(each, **elsewhere) for each in found], set()) == ()
