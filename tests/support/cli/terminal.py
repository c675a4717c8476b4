"""Run the command line on a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

DEPLOYKIT = [sys.executable, "-m", "deploykit"]


def on_terminal(words: list[object], until: str | None = None, **variables: str) -> tuple[int, str]:
    """Run a command on a terminal of 100 columns; Ctrl-C once it has printed `until`."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"} | variables
    process = subprocess.Popen(
        [*DEPLOYKIT, *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    seen = b""
    try:
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # the terminal's other side is closed: the process has ended
                break
            seen += chunk
            if until is not None and until in seen.decode(errors="replace"):
                process.send_signal(signal.SIGINT)
                until = None
            if not chunk:
                break
        code = process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return code, seen.decode()
