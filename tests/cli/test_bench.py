"""`deploykit bench` and `compare` of two reports: what they print, and their exit codes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from deploykit.cli import output, tables
from deploykit.core.evidence import Interval
from deploykit.reporting import report as reports
from tests.support.cli.command import Run
from tests.support.measure.simulated import simulated


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    """The folders of two reports; the second is 20 % slower."""
    for name, report in (("a", simulated(1)), ("b", simulated(2, 1.2))):
        reports.write(report, tmp_path / name)
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_compare_takes_folders_and_files_and_exits_by_the_bound(
    run: Run, two: tuple[str, str]
) -> None:
    a, b = two
    shown = run("compare", f"{a}/report.json", b)
    assert shown.code == 0
    assert f"{b} (B) against {a}/report.json (A): 9 slower" in shown.out
    assert "The intervals of all 9 ratios hold together" in shown.out
    failed = run("compare", a, b, "--fail-on-regression", "5%", "--json")
    assert failed.code == 1
    assert len(json.loads(failed.out)["regressions"]) == 9
    assert f"error: {b} is slower than {a} by more than 5.00 %: model, batch 1" in failed.err
    assert run("compare", b, a, "--fail-on-regression", "5%").code == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("bench", "ENGINE"),
        ("compare A B --fail-on-regression 0.05", "a percentage"),
        ("compare A B --fail-on-regression nan%", "0 or more"),
        ("compare A B --fail-on-regression -1%", "0 or more"),
        ("compare A B --max-error 1", "--max-error has no effect on two reports"),
        ("compare A B --device cuda", "--device has no effect on two reports"),
        ("compare A", "a: is a report; which report is compared with it?"),
        ("compare A model.onnx", "model.onnx: no such file"),
        ("compare missing.json B", "missing.json: no such file"),
        ("compare model.onnx --fail-on-regression 5%", "--fail-on-regression is for two reports"),
        *(
            (f"bench model.onnx --axis {text}", "hint: --axis T=128,H=224")
            for text in ("T", "T=", "=3", "T=x", "T=-1", "T=1,T=2", "T=1,", "T=١")
        ),
    ],
)
def test_wrong_options_are_refused(run: Run, two: tuple[str, str], words: str, error: str) -> None:
    names = dict(zip("AB", two, strict=True))
    shown = run(*(names.get(word, word) for word in words.split()))
    assert shown.code == 2
    assert error in shown.err


def test_a_slow_engine_has_a_rate_and_six_conclusions_follow_the_headline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    many = replace(simulated(1), verdict=tuple(f"Sentence {number}." for number in range(12)))
    rate = Interval(0.0123, 0.012, 0.0125)
    slow = replace(many, points=tuple(replace(p, throughput_per_s=rate) for p in many.points))
    output.show_parts(tables.report(slow, tmp_path))
    shown = capsys.readouterr().out
    assert shown.count("  0.0123") == len(slow.points)
    assert re.findall(r"Sentence (\d+)", shown) == [*"0123456"]
    assert "more conclusions are in the report" in shown


def test_a_token_of_another_server_may_be_short(run: Run, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\r\nmore\n")
    ran = run("load", f"unix:{tmp_path}/none.sock", "--token-file", tmp_path / "token")
    assert "no server answers there" in ran.err  # it is taken
    (tmp_path / "token").write_text("\n")
    ran = run("load", f"unix:{tmp_path}/none.sock", "--token-file", tmp_path / "token")
    assert (ran.code, "`token`" in ran.err or "--token" in ran.err) == (2, True)
