"""`deploykit bench --compare A B`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploykit.reporting import report as reports
from tests.support.cli.command import Run
from tests.support.measure.simulated import simulated


def test_the_command_takes_folders_and_exits_by_the_bound(run: Run, tmp_path: Path) -> None:
    a, b = (str(tmp_path / name) for name in "ab")
    reports.write(simulated(1), Path(a))
    reports.write(simulated(2, 1.2), Path(b))
    shown = run("bench", "--compare", a, b)
    assert shown.code == 0
    assert f"{b} (B) against {a} (A): 9 slower" in shown.out
    assert "The intervals of all 9 ratios hold together" in shown.out
    failed = run("bench", "--compare", a, b, "--fail-on-regression", "5%", "--json")
    assert failed.code == 1
    assert len(json.loads(failed.out)["regressions"]) == 9
    assert f"error: {b} is slower than {a} by more than 5.00 %: model, batch 1" in failed.err
    assert run("bench", "--compare", b, a, "--fail-on-regression", "5%").code == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["bench"], "which ENGINE?"),
        (["bench", "--fail-on-regression", "5%"], "--fail-on-regression needs --compare"),
        (["bench", "model.onnx", "--compare", "a", "b"], "it takes no ENGINE"),
        (
            ["bench", "--compare", "a", "b", "--quick", "--batches", "1", "-o", "c"],
            "--compare measures nothing: it takes no --batches and no --out and no --quick",
        ),
        (["bench", "--compare", "a", "b", "--fail-on-regression", "0.05"], "a percentage"),
        (["bench", "--compare", "a", "b", "--fail-on-regression", "nan%"], "0 or more"),
        (["bench", "--compare", "a", "b", "--fail-on-regression", "-1%"], "0 or more"),
        (["bench", "--compare", "missing.json", "b"], "missing.json: no such file"),
    ],
)
def test_wrong_options_are_one_line(run: Run, words: list[str], error: str) -> None:
    shown = run(*words)
    assert shown.code == 2
    assert shown.err.startswith("error:")
    assert error in shown.err
