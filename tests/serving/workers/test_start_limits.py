"""`serve --workers` where the system gives too little: one line, and the exit code for that."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

from tests.support.serving.faults import LIMIT_S, ROOT, STAND_IN


def test_more_workers_than_there_are_files_for_are_refused(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))

    command = [*STAND_IN, "serve", "m=stand-in", "--http-port", "0", "--no-grpc", "--workers", "30"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=limit,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if " WARNING " not in line]
    assert (done.returncode, done.stdout, errors) == (
        3,
        "",
        [
            "error: --workers 30: a process cannot be started: Too many open files",
            "hint: fewer --workers, or more with ulimit -n, -u",
        ],
    )
