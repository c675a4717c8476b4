"""Small requests do not wait for large ones, and time limits hold whatever the worker does."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import Expired, Overloaded
from deploykit.serving.models import worker as worker_module
from deploykit.serving.models.worker import WorkerProcess
from tests.support.fake_engine import FakeEngine
from tests.support.serving.memory import held_bytes
from tests.support.serving.running import Raw, Running, infer_json, request, running

WIDTH = 300_000  # as JSON above 1 MiB, which another process reads
LARGE, SMALL = "/v2/models/large/infer", "/v2/models/m/infer"
ROW = infer_json([1, 2, 3, 4], [1, 4])
BIG = infer_json([0.123456] * WIDTH, [1, WIDTH])
BIG_GZIP = gzip.compress(BIG, 1)
Eventually = Callable[[Callable[[], bool]], None]


@contextmanager
def stopped_worker(**options: Any) -> Iterator[tuple[Running, int]]:
    """A server whose worker process runs no more until SIGCONT."""
    with running({"m": FakeEngine(), "large": FakeEngine(width=WIDTH)}, **options) as server:
        while server.ask("POST", LARGE, BIG).status == 504:
            pass  # it takes longer to start than the time limit
        process = server.server._worker._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        try:
            yield server, process.pid
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)


def in_work(server: Running, count: int, **headers: str) -> list[Raw]:
    """Clients whose large requests wait for the worker."""
    raws = [server.connect() for _ in range(count)]
    body = BIG_GZIP if headers else BIG
    for raw in raws:
        raw.send(request("POST", LARGE, body, **headers))
    return raws


@pytest.mark.parametrize("headers", [{}, {"Content_Encoding": "gzip"}], ids=["plain", "gzip"])
def test_small_requests_are_answered_while_large_ones_wait(headers: dict[str, str]) -> None:
    with stopped_worker() as (server, pid):
        raws = in_work(server, 6, **headers)
        for accept in ("gzip, deflate, br", "identity", "*", "gzip;q=0"):
            assert server.ask("POST", SMALL, ROW, Accept_Encoding=accept).status == 200
        packed = gzip.compress(infer_json([1] * 40_000, [10_000, 4]))
        small = {"Content_Encoding": "gzip", "Accept_Encoding": "gzip"}
        assert server.ask("POST", SMALL, gzip.compress(ROW), **small).status == 200
        assert server.ask("POST", SMALL, packed, **small).status == 400  # more rows than allowed
        assert server.ask("GET", "/metrics").status == 200
        os.kill(pid, signal.SIGCONT)
        assert [reply.status for reply in (raw.reply() for raw in raws)] == [200] * 6


def test_a_stopped_worker_costs_its_requests_their_time_limit_and_is_replaced(
    eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stopped_worker(timeout_ms=500) as (server, pid):
        monkeypatch.setattr(worker_module, "HUNG_S", 1.0)
        raws = in_work(server, 4)
        replies = [raw.reply() for raw in raws]
        assert [reply.status for reply in replies] == [504] * 4
        assert "time limit" in replies[0].json["error"]
        eventually(lambda: held_bytes(server) == 0)
        eventually(lambda: server.server._worker._process is None)
        monkeypatch.undo()
        reply = server.ask("POST", LARGE, BIG)
        while reply.status == 504:
            reply = server.ask("POST", LARGE, BIG)
        assert reply.status == 200
        assert server.server._worker._process.pid != pid  # type: ignore[union-attr]


def test_an_answer_that_a_stopped_worker_should_write_expires() -> None:
    with stopped_worker(timeout_ms=500) as (server, _):
        values = np.ones(WIDTH, np.float32)
        head = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, WIDTH],
                            "parameters": {"binary_data_size": values.nbytes}}]}  # fmt: skip
        start = json.dumps(head).encode()
        length = {"Inference-Header-Content-Length": str(len(start))}
        reply = server.ask("POST", LARGE, start + values.tobytes(), **length)
        assert reply.status == 504


def test_the_clients_own_time_limit_includes_the_decoding() -> None:
    with running({"large": FakeEngine(width=WIDTH)}) as server:
        body = infer_json([0.5] * WIDTH, [1, WIDTH], parameters={"timeout": 1})
        assert server.ask("POST", LARGE, body).status == 504


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
def test_a_worker_that_cannot_start_is_a_503(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with running({"large": FakeEngine(width=WIDTH)}) as server:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            reply = server.ask("POST", LARGE, BIG)
            assert reply.status == 503
            assert reply.headers["retry-after"] == "1"
        assert server.ask("POST", LARGE, BIG).status == 200


def test_a_thread_that_cannot_start_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with running({"m": FakeEngine(), "large": FakeEngine(width=WIDTH)}) as server:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        packed = gzip.compress(ROW)
        assert server.ask("POST", LARGE, BIG).status == 503
        assert server.ask("POST", SMALL, packed, Content_Encoding="gzip").status == 503
        assert server.ask("GET", "/metrics").status == 503
        assert server.ask("POST", SMALL, ROW).status == 200
        monkeypatch.undo()


def test_a_worker_that_never_reads_does_not_hold_its_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with WorkerProcess() as worker:
        assert worker.run(60, len, b"abc") == 3
        process = worker._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(worker_module, "HUNG_S", 0.0)
            with pytest.raises(Expired, match="time limit"):
                worker.run(0.2, len, bytes(10 << 20))  # more than the pipe takes
        assert process.poll() is not None
        assert worker.run(60, len, b"abc") == 3


def test_a_worker_in_use_does_not_hold_others_beyond_their_limit() -> None:
    with WorkerProcess() as worker:
        worker._lock.acquire()
        with pytest.raises(Expired):
            worker.run(0.01, len, b"")
        worker._lock.release()
        worker.close()
        with pytest.raises(Overloaded):
            worker.run(1, len, b"")
