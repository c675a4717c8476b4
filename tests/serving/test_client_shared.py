"""One `dk.client` in several threads and processes, against a real server."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from tests.support.installed import needs
from tests.support.serving.faults import until
from tests.support.serving.running import WAIT_S, Running, running

needs("PIL")

from deploykit.evaluation.verify import open_proven  # noqa: E402
from tests.support.runtimes.pictures import encoded  # noqa: E402
from tests.support.serving.task_models import write_task_model  # noqa: E402

THREADS = 6
IMAGES = {
    label: encoded(np.full((32, 48, 3), level, np.uint8))
    for label, level in {"dark": 0, "light": 255}.items()
}
FORK = """
import os, sys
import deploykit as dk

url, *files = sys.argv[1:]
with dk.client(url) as client:
    client.predict(files[0])
    child = os.fork()
    file, label = (files[1], "light") if child else (files[0], "dark")
    wrong = sum(client.predict(file)["label"] != label for _ in range(100))
if child == 0:
    os._exit(wrong)
print(wrong, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


class Gated:
    """An engine that waits in each call until the gate is open."""

    steady = False  # else the server may call it on its event loop, which then accepts nothing

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __call__(self, feeds: Any) -> Any:
        assert self.gate.wait(WAIT_S)
        return self.engine(feeds)


@pytest.fixture
def engine(tmp_path: Path) -> Gated:
    return Gated(open_proven(write_task_model(tmp_path, "classify"), threads=1)[0])


@pytest.fixture
def served(engine: Gated) -> Iterator[Running]:
    with running({"m": engine}) as server:
        yield server
        engine.gate.set()


def url(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}"


def connections(server: Running) -> int:
    return len(server.server._listener.connections)


def answer(client: dk.ModelClient, label: str) -> str:
    found: str = client.predict(IMAGES[label])["label"]
    return found


@pytest.mark.parametrize("threads", [2, THREADS])
def test_each_thread_gets_its_own_answers(served: Running, threads: int) -> None:
    labels = list(IMAGES) * 100
    with dk.client(url(served)) as client, ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(lambda label: answer(client, label), labels)) == labels


@pytest.mark.skipif(sys.platform == "win32", reason="it cannot fork")
def test_a_forked_process_and_its_parent_get_their_own_answers(
    served: Running, tmp_path: Path
) -> None:
    files = [tmp_path / f"{label}.png" for label in IMAGES]
    for file in files:
        file.write_bytes(IMAGES[file.stem])
    command = [sys.executable, "-c", FORK, url(served), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.stdout, done.stderr) == ("0 0\n", "")


def test_a_closed_client_leaves_no_connection_of_any_thread(served: Running, engine: Gated) -> None:
    labels = list(IMAGES) * (THREADS // 2)
    with dk.client(url(served)) as client, ThreadPoolExecutor(THREADS) as pool:
        assert answer(client, "dark") == "dark"
        engine.gate.clear()
        answers = pool.map(lambda label: answer(client, label), labels)
        until(lambda: connections(served) == THREADS)
        engine.gate.set()
        assert list(answers) == labels
        assert connections(served) == THREADS
        client.close()
        until(lambda: not connections(served))


def test_a_connection_that_is_in_use_when_its_client_is_closed_is_closed_after_its_answer(
    served: Running, engine: Gated
) -> None:
    client = dk.client(url(served))
    with ThreadPoolExecutor(THREADS) as pool:
        assert answer(client, "dark") == "dark"
        engine.gate.clear()
        waiting = [pool.submit(answer, client, label) for label in IMAGES]
        until(lambda: connections(served) == len(waiting))
        client.close()
        engine.gate.set()
        assert [each.result() for each in waiting] == list(IMAGES)
        until(lambda: not connections(served))


def test_threads_that_end_leave_their_connection_to_the_next(served: Running) -> None:
    with dk.client(url(served)) as client:
        for label in list(IMAGES) * 3:
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(answer, client, label).result() == label
        assert connections(served) == 1
