"""report.json as a file: its schema, earlier versions, and what is refused."""

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

from deploykit.core.errors import BadInput, DeploykitError, NotFound
from deploykit.evaluation.latency import CallHistogram
from deploykit.reporting.compare import compare_reports
from deploykit.reporting.machine_load import Outside, Window
from deploykit.reporting.report import Report, read, write

ROOT = Path(__file__).resolve().parents[2]


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


def test_a_list_of_numbers_takes_one_line(report: Report, tmp_path: Path) -> None:
    point = replace(report.points[0], histogram=CallHistogram((3, 5), (40, 1)), note="[\n1,\n2\n]")
    write(replace(report, points=(point,)), tmp_path)
    text = (tmp_path / "report.json").read_text("utf-8")
    assert '"bins": [3, 5],\n' in text
    assert json.loads(text)["points"][0]["note"] == point.note
    assert read(tmp_path).points == (point,)


def damaged(values: dict[str, Any], path: str) -> str:
    *way, last = path.split(".")
    at: Any = values
    for key in way:
        at = at[int(key)] if key.isdigit() else at[key]
    del at[last]
    return json.dumps(values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "not valid JSON"),
        ("[]", "not a deploykit report"),
        ('{"report": 3}', "a report of version 3; this deploykit reads up to 2"),
        ('{"report": true}', "not a deploykit report"),
        ('{"report": 0}', "not a deploykit report"),
        ('{"report": 1}', "is not a complete Report"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_file_that_is_not_a_report_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(BadInput, match=message):
        read(tmp_path / "report.json")


@pytest.mark.parametrize(
    "path",
    ["points.0.latency", "points.0.batch", "serving.0.ok", "accuracy.0.drop", "gates.0.name"],
)
def test_a_report_with_a_part_missing_is_refused(path: str, report: Report, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(damaged(json.loads(json.dumps(report.to_dict())), path))
    with pytest.raises(BadInput, match=r"report\.json: .*is not a complete "):
        read(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("points.0.batch", "8", "'points'[0]: 'batch' must be an integer"),
        ("points.0.batch", 10**400, "'points'[0]: 'batch' must be below 2^63"),
        ("points.0.duration_s", None, "'points'[0]: 'duration_s' must be a finite number"),
        ("points.0.throughput_per_s.value", math.nan, "'value' must be a finite number"),
        ("points.0.round_rates", [1.0] * 100_001, "'round_rates' has more than 100,000 items"),
        ("accuracy.0.value.low", math.inf, "'accuracy'[0]: 'value': 'low' must be a finite number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_value_is_one_line_that_names_its_key(
    path: str, value: object, message: str, report: Report, tmp_path: Path
) -> None:
    document = json.loads(json.dumps(report.to_dict()))
    *way, last = path.split(".")
    at: Any = document
    for key in way:
        at = at[int(key)] if key.isdigit() else at[key]
    at[last] = value
    (tmp_path / "report.json").write_text(json.dumps(document))
    with pytest.raises(BadInput, match=re.escape(message)) as found:
        read(tmp_path)
    assert "\n" not in found.value.message


DAMAGE: tuple[Any, ...] = (None, "x", -1, 1e308, math.nan, True, [], {}, [1] * 5, "1e5", 10**400)


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if way:
        yield way
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:2] if isinstance(value, list) else ())
    )
    for key, each in items:
        yield from places(each, (*way, key))


def test_whatever_is_damaged_is_refused_or_compared(report: Report, tmp_path: Path) -> None:
    """One damage at each place of a report, from a seed."""
    random, seen = Random(5), 0
    small = replace(report, points=report.points[:2], serving=report.serving[:1])
    small = replace(small, provenance={"clocks": {"governor": "a"}, "environment": {"A": "b"}})
    text = json.dumps(small.to_dict())
    for *way, last in list(places(json.loads(text)))[::2]:
        document = json.loads(text)
        at: Any = document
        for key in way:
            at = at[key]
        at[last] = random.choice(DAMAGE)
        (tmp_path / "report.json").write_text(json.dumps(document))
        with contextlib.suppress(DeploykitError):
            compare_reports(tmp_path, tmp_path)
            seen += 1
    assert seen > 30


def test_a_report_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read(tmp_path)
