"""`serve --workers` where the system gives too little: one line, and the exit code for that.

A server that has started goes on, and tries again.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.serving.faults import LIMIT_S, ROOT, STAND_IN, Process, request, until
from tests.support.serving.worker_processes import ask, connections, kill, workers


def test_more_workers_than_there_are_files_for_are_refused(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))

    command = [
        *STAND_IN,
        "serve",
        "m=stand-in",
        "--http-port",
        "0",
        "--grpc-port=none",
        "--workers",
        "30",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=limit,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert (done.returncode, done.stdout, errors) == (
        3,
        "",
        [
            "error: --workers 30: a process cannot be started: Too many open files",
            "hint: fewer --workers, or more with ulimit -n, -u",
        ],
    )


def files(pid: int) -> set[int]:
    return {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}


def lowest_free(pid: int) -> int:
    return min(set(range(1000)) - files(pid))


def limit_files(pid: int, soft: int) -> None:
    resource.prlimit(
        pid, resource.RLIMIT_NOFILE, (soft, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1])
    )


def logged(server: Process, text: str) -> int:
    return sum(text in line for line in server.log_lines())


def test_a_worker_that_cannot_be_replaced_is_tried_again_until_it_can(tmp_path: Path) -> None:
    """First no process can be started for it, then it cannot open its model."""
    env = {"FAULT_OPENS": "2", "FAULT_DELAY_S": "0.01"}
    with Process(tmp_path, "--workers", "2", env=env) as server:
        parent, victim = server.popen.pid, workers(server)[0]
        soft, _ = resource.prlimit(parent, resource.RLIMIT_NOFILE)
        limit_files(parent, lowest_free(parent))
        kill(server, victim)
        until(lambda: logged(server, "cannot be started: Too many open files") > 2)
        assert server.infer(1.0) == (200, [3.0])
        limit_files(parent, soft)
        until(lambda: logged(server, "cannot be opened once more") > 1)
        assert server.infer(2.0) == (200, [5.0])
        for each in tmp_path.glob("opened.*"):
            each.unlink()
        until(lambda: server.gauge("deploykit_workers") == 2)
        server.popen.terminate()
        assert server.wait() == 0


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_connection_to_the_engines_that_no_file_is_left_for_is_made_once_there_is(
    tmp_path: Path, left: int
) -> None:
    """The parent sends two files, and mapping one takes a third; none may stay open for ever."""

    options = ("--workers", "shared:2")
    with Process(tmp_path, *options, env={"FAULT_CONNECT_S": "0.05"}) as server:
        engines, victim, _ = workers(server)
        before, (soft, _) = len(files(engines)), resource.prlimit(engines, resource.RLIMIT_NOFILE)
        os.kill(server.popen.pid, signal.SIGSTOP)  # which would start another one meanwhile
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(files(engines)) < before)
        limit_files(engines, lowest_free(engines) + left)
        os.kill(server.popen.pid, signal.SIGCONT)
        until(lambda: logged(server, "cannot be connected") > 5)
        assert len(files(engines)) < before
        assert server.status("/v2/health/ready") in (200, 503)
        limit_files(engines, soft)
        until(lambda: server.gauge("deploykit_workers") == 2)
        with connections(server) as clients:

            def answers() -> set[int]:
                asked = ("POST", "/v2/models/m/infer", request(1.0))
                return {ask(client, *asked)[0] for client in clients}

            until(lambda: answers() == {200})
        until(lambda: len(files(engines)) == before)  # one that was asked for twice is closed
