"""What scripts leave behind: no file by asking for help, nothing when they are killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from scripts.gpu.guard import marked

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_help_of_the_coverage_simulation_is_no_name_of_a_file(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPTS / "coverage.py"), "--help"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    assert ran.stdout.startswith(b"usage: coverage.py")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_capacity_test_leaves_neither_server_nor_folder(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPTS / "plan_capacity.py"), "--only", "own thread"]
    run = subprocess.Popen(
        words, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL
    )
    end = time.monotonic() + 60
    try:
        while not list(tmp_path.glob("*/*.json")):  # the server's times
            assert run.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        (folder,) = tmp_path.iterdir()
        assert marked(str(folder))
    finally:
        run.kill()
        run.wait()
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not marked(str(folder))
    assert not folder.exists()
