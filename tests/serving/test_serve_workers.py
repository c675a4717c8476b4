"""`dk.serve(workers=...)`: a server of a user's program that has several processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import deploykit as dk
from deploykit.serving import running_server
from deploykit.serving.options import ServeOptions
from tests.support.installed import needs
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.large_model import write_model
from tests.support.serving.faults import LIMIT_S, ROOT, until
from tests.support.serving.worker_processes import is_running

needs("onnxruntime")

PROGRAM = """
import sys

import deploykit as dk

with dk.serve(sys.argv[1], workers=2, grpc_port=None) as server:
    print(server.url, flush=True)
    server.wait()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(linear(), tmp_path / "linear.onnx")


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for each in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for child in map(int, each.read_text().split()):
                found |= {child, *descendants(child)}
    return found


def test_several_processes_answer_until_the_server_is_closed(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = descendants(os.getpid())
    with dk.serve({"m": model}, workers=2) as server:
        started = descendants(os.getpid()) - before
        assert len(started) == 3  # the workers and their parent
        assert server.models == ("m",)
        assert server.grpc_url is not None
        with urllib.request.urlopen(f"{server.url}/status", timeout=LIMIT_S) as reply:
            assert json.loads(reply.read())["workers"]["serving"] == 2
    assert not any(map(is_running, started))
    assert "closed" in repr(server)
    assert server.close() == 0
    assert capfd.readouterr().err == ""  # as this process, they log warnings alone


@pytest.mark.parametrize("options", [{"buckets": {"Q": (16,)}}, {"http_port": 0}], ids=str)
def test_errors_are_those_of_one_process(model: Path, options: dict[str, Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        if "http_port" in options:
            options = {"http_port": taken.getsockname()[1]}
        errors = []
        for workers in (1, 2):
            with pytest.raises(dk.BadInput) as caught:
                dk.serve(model, workers=workers, **options)
            errors.append((caught.value.message, caught.value.hint))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_all_processes_end_with_the_program_and_leave_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C reaches all processes of a terminal; kill -9 the program alone."""
    path = write_model(tmp_path / "large.onnx")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path)], env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.stdout is not None
    assert program.stdout.readline().startswith("http://")
    assert list(tmp_path.glob("deploykit-weights-*"))
    started = descendants(program.pid)
    assert len(started) == 3
    (os.killpg if number == signal.SIGINT else os.kill)(program.pid, number)
    _, errors = program.communicate(timeout=LIMIT_S)
    if number == signal.SIGINT:  # Python's own message, of the program alone
        lines = [line for line in errors.splitlines() if line[:1] != " "]
        assert [line for line in lines if "workers share" not in line] == [  # on one core
            "Traceback (most recent call last):",
            "KeyboardInterrupt",
        ]
    until(lambda: not any(map(is_running, started)))
    assert [each.name for each in tmp_path.iterdir()] == ["large.onnx"]
    assert program.returncode == -number


def test_ctrl_c_while_it_is_waited_for_does_not_end_the_wait_of_close() -> None:
    """Python before 3.12 takes a thread whose `join` was interrupted for ended."""
    code = """
        import signal, threading
        from deploykit.serving.running_server import RunningServer
        from deploykit.serving.options import ServeOptions

        def run(on_start, stop):
            on_start(None, "localhost", 1, None, ["m"])
            stop.recv(1)  # until it is to stop
            threading.Event().wait(0.5)
            print("ended", flush=True)
            return 0

        server = RunningServer(run, ServeOptions())
        interrupt = (threading.main_thread().ident, signal.SIGINT)
        try:
            threading.Timer(0.3, signal.pthread_kill, interrupt).start()
            server.wait()
        except KeyboardInterrupt:
            server.close()
            print("closed")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.splitlines() == ["ended", "closed"], done.stderr


def test_a_server_that_is_ended_before_it_is_ready_says_so() -> None:
    with pytest.raises(dk.DeploykitError, match="stopped before it was ready"):
        dk.RunningServer(lambda *_: 0, ServeOptions())


def test_ctrl_c_while_it_starts_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002
            raise KeyboardInterrupt

    stand_in = SimpleNamespace(Event=Interrupted, Thread=threading.Thread)
    monkeypatch.setattr(running_server, "threading", stand_in)
    ended = threading.Event()

    def run(_on_start: object, stop: socket.socket) -> int:
        assert stop.recv(1) == b""
        ended.set()
        return 0

    with pytest.raises(KeyboardInterrupt):
        dk.RunningServer(run, ServeOptions())
    assert ended.wait(LIMIT_S)
