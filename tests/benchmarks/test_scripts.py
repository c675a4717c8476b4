"""What a script says of itself leaves no file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.benchmarks.conftest import FOLDER


def test_help_of_the_coverage_simulation_is_no_name_of_a_file(tmp_path: Path) -> None:
    words = [sys.executable, str(FOLDER.parent / "coverage.py"), "--help"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    assert ran.stdout.startswith(b"usage: coverage.py")
    assert list(tmp_path.iterdir()) == []
