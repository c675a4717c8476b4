"""Pipelines and forks: what a stage forks holds no worker, and a worker is forked from no stage."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.installed import needs
from tests.support.serving.faults import REAL, Process, until
from tests.support.serving.reloading import model
from tests.support.serving.worker_processes import ask, connections, is_running, kill, workers

needs("onnxruntime")

STEPS = """
import os
import time

import numpy as np

add = {"model": "m.onnx", "x": "rows"}
open(f"read.{os.getpid()}", "w").close()


def rows(values: list[float]) -> np.ndarray:
    forked = os.fork()
    if not forked:
        os.closerange(0, 3)  # which the test reads to their end
        time.sleep(3600)
    open(f"forked.{forked}", "w").close()
    return np.array(values, np.float32).reshape(1, 4)


def answer(add: np.ndarray) -> list[float]:
    return add.reshape(-1).tolist()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    steps, path = tmp_path / "steps.py", model(tmp_path / "m.onnx", 1.0)
    steps.write_text(STEPS)
    options = ("--workers", "2", "--pipeline", str(steps))
    with Process(tmp_path, *options, command=REAL, engine=f"m={path}") as found:
        yield found
    for each in forked(found):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def forked(server: Process) -> list[int]:
    return [int(each.suffix[1:]) for each in server.log.parent.glob("forked.*")]


def predict(server: Process) -> set[int]:
    """The statuses of new connections, of which each worker has some."""
    with connections(server) as clients:
        asked = ("POST", "/v2/models/steps/predict", b"[1, 2, 3, 4]")
        return {ask(client, *asked)[0] for client in clients}


def test_a_killed_worker_is_replaced_though_what_it_forked_still_runs(server: Process) -> None:
    """It was not: what it had forked held its sockets, and clients got no answer for ever."""
    assert predict(server) == {200}
    kill(server, workers(server)[0])
    until(lambda: server.gauge("deploykit_workers") == 2)
    assert predict(server) == {200}
    assert all(map(is_running, forked(server)))


def test_a_server_ends_at_once_and_what_it_forked_with_it(server: Process) -> None:
    """Its parent waited a minute for workers that had ended, and what they had forked stayed."""
    assert predict(server) == {200}
    server.popen.terminate()
    assert server.wait() == 0
    assert not any("is killed" in line for line in server.log_lines())
    until(lambda: not any(map(is_running, forked(server))))


def test_no_process_that_is_forked_has_read_a_pipeline(server: Process) -> None:
    """A file that ran PyTorch had each worker wait for ever for threads that no fork has."""
    readers = {int(each.suffix[1:]) for each in server.log.parent.glob("read.*")}
    assert server.popen.pid not in readers > set(workers(server))
