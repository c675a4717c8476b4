"""report.json as a file: its schema, earlier versions, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deploykit.core.errors import BadInput, NotFound
from deploykit.measure.histogram import CallHistogram
from deploykit.measure.report.report import Report, read, write

ROOT = Path(__file__).resolve().parents[3]


def test_a_report_keeps_to_the_published_schema(report: Report, tmp_path: Path) -> None:
    schema = json.loads((ROOT / "docs" / "report.schema.json").read_text("utf-8"))
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
    (tmp_path / "report.json").write_text(json.dumps(old))
    assert read(tmp_path) == report


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


def test_a_report_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read(tmp_path)
