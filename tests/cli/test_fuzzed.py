"""Changed models and mistyped values: never exit 70, never a traceback. The fuzzers are scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.campaign import CAMPAIGN, rounds

ROOT = Path(__file__).resolve().parents[2]
MODELS = [("fuzz_models", str(seed), str(rounds(30, 2000))) for seed in range(rounds(1, 8))]


@pytest.mark.parametrize("words", [*MODELS, ("fuzz_commands", *["--all"] * CAMPAIGN)])
def test_nothing_that_a_user_passes_is_called_a_bug(tmp_path: Path, words: tuple[str, ...]) -> None:
    program, *more = words
    if program == "fuzz_commands":
        pytest.importorskip("torch")
    command = [sys.executable, "-W", "ignore", "-m", f"scripts.{program}", tmp_path, *more]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = ran.stdout.splitlines()
    assert [line for line in lines if line.startswith("BUG")] == []
    assert lines[-1:] == ["DONE"], f"{lines[-1:]}: exit {ran.returncode}: {ran.stderr[-500:]}"
