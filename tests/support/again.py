"""Run what failed once more, alone: python -m tests.support.again EXIT_CODE, of the run before.

A machine that stands still for a moment can fail a test that waits for other processes. As in
CPython's own CI, such a test gets a second run, and both results stay in the log; one that fails
twice, more than MOST of them or a run that did not reach its end fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 3
_FAILED = 1  # pytest's exit code: all tests ran, and some failed


def again(code: int, cache: Path = Path(".pytest_cache")) -> int:
    """The exit code of the whole; prints what it runs."""
    if code != _FAILED:
        return code
    failed = sorted(json.loads((cache / "v/cache/lastfailed").read_text()))
    if not 0 < len(failed) <= MOST:
        return code
    _say(f"once more, alone, as {len(failed)} failed:", *failed)
    code = subprocess.run([sys.executable, "-m", "pytest", *failed], check=False).returncode
    if not code:
        _say("UNSTABLE: failed among others, passed alone. Find out why:", *failed)
    return code


def _say(*lines: str) -> None:
    sys.stdout.write("\n  ".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(again(int(sys.argv[1])))
