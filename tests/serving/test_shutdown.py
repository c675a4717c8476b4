"""Signals and shutdown, in a separate process because signals go to the main thread."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from deploykit.core.errors import BadInput
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from tests.support.campaign import rounds
from tests.support.fake_engine import FakeEngine
from tests.support.serving.faults import ROOT, Process, quiet_port
from tests.support.serving.grpc_cases import frames, infer_bytes
from tests.support.serving.running import WAIT_S, GatedEngine, Raw, infer_json, request, running

INFER = request("POST", "/v2/models/m/infer", infer_json([1, 2, 3, 4], [1, 4]))
Eventually = Callable[[Callable[[], bool]], None]
READY, LIVE = request("GET", "/v2/health/ready"), request("GET", "/v2/health/live")


class Served:
    def __init__(self, release: Path, echo_s: float) -> None:
        self.release = release
        script = Path(__file__).resolve().parents[1] / "support" / "serving" / "serve_slowly.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(release), str(echo_s)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, data: bytes) -> Raw:
        raw = Raw(self.port)
        raw.send(data)
        return raw


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    served = Served(tmp_path / "release", getattr(request, "param", 600.0))
    yield served
    served.process.kill()
    served.process.wait(WAIT_S)
    assert served.process.stdout is not None
    served.process.stdout.close()


def is_refused(served: Served) -> bool:
    """Whether the port is closed."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", served.port)) != 0


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)]
)
def test_after_a_signal_open_connections_are_answered_once_more_and_new_ones_refused(
    served: Served, number: signal.Signals, code: int, eventually: Eventually
) -> None:
    """A proxy sends a refused request to another server, but no request that was answered 503."""
    kept = [served.ask(LIVE) for _ in range(4)]
    assert [raw.reply().status for raw in kept] == [200] * 4
    accepted = [served.ask(INFER) for _ in range(3)]
    assert served.line() == "busy"
    depth = 'deploykit_requests_in_flight{model="m",version="1"} 3.0\n'
    eventually(lambda: depth in metrics(served))

    served.process.send_signal(number)
    eventually(lambda: is_refused(served))
    for raw, data, status in zip(kept, (READY, LIVE), (503, 200), strict=False):
        reply = raw.ask(data)
        assert (reply.status, reply.headers["connection"]) == (status, "close")
    kept[2].send(INFER)
    assert served.process.poll() is None

    served.release.touch()
    assert [raw.reply().status for raw in (*accepted, kept[2])] == [200] * 4
    assert kept[3].ended()
    assert served.process.wait(WAIT_S) == code
    last = "dropped 0" if code == 0 else ""
    assert [served.line() for _ in range(4)] == ["busy", "busy", "busy", last]
    for raw in (*kept, *accepted):
        raw.close()


def test_in_the_time_to_drain_all_requests_are_answered_but_readiness(
    eventually: Eventually,
) -> None:
    with running(drain_s=2.0, grpc_port=0) as server, frames(server.server.grpc_port or 0) as grpc:
        assert grpc.call(1, infer_bytes()).status == 0
        kept = server.connect()
        kept.ask(LIVE)
        server.server.stop()
        eventually(lambda: server.ask("GET", "/v2/health/ready").status == 503)
        for raw in (kept, server.connect()):
            reply = raw.ask(INFER)
            assert (reply.status, reply.headers["connection"]) == (200, "close")
        grpc.until(lambda: grpc.goaway == 0)  # NO_ERROR
        assert grpc.call(3, infer_bytes()).status == 0  # the client may not know yet
        grpc.send(6, 1, 0, b"retiring")  # it answers the PING
        assert grpc.closed()
        with frames(server.server.grpc_port or 0) as other:
            other.settle()
            assert other.goaway is None  # else a client that asks only now never could
            assert other.call(1, infer_bytes()).status == 0
            other.until(lambda: other.goaway == 0)
            assert server.stop() == 0


def test_a_client_that_connects_before_the_ports_close_is_answered() -> None:
    with running(drain_s=0.3) as server:
        port, seen = server.port, Counter[int]()

        def ask() -> None:
            # reset: it came after the last `accept` and before the port was closed
            with contextlib.suppress(ConnectionRefusedError, ConnectionResetError):
                while True:
                    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
                        client.sendall(INFER)
                        seen[int(client.recv(1 << 16).split(b" ", 2)[1])] += 1

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for each in threads:
            each.start()
        server.server.stop()
        for each in threads:
            each.join()
        assert seen.keys() == {200}


@pytest.mark.parametrize(
    ("number", "served"),
    [(signal.SIGINT, 600.0), (signal.SIGTERM, 0.05)],
    ids=["Ctrl-C", "SIGTERM"],
    indirect=["served"],
)
def test_a_second_signal_ends_the_process_at_once(
    served: Served, eventually: Eventually, number: signal.Signals
) -> None:
    accepted = served.ask(INFER)
    assert served.line() == "busy"
    served.process.send_signal(signal.SIGTERM)
    eventually(lambda: is_refused(served))
    time.sleep(0.1)
    served.process.send_signal(number)
    assert served.process.wait(WAIT_S) == 130
    accepted.close()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_signals_sent_twice_within_the_echo_count_once(
    served: Served, eventually: Eventually, second: signal.Signals
) -> None:
    """`timeout` sends SIGTERM to its child and to the child's process group; systemd sends both."""
    accepted = served.ask(INFER)
    assert served.line() == "busy"
    for number in (signal.SIGTERM, second):
        served.process.send_signal(number)
        eventually(lambda: is_refused(served))
    served.release.touch()
    reply = accepted.reply()
    assert reply.status == 200
    accepted.close()
    assert served.process.wait(WAIT_S) == 0


def test_sighup_stays_ignored_under_nohup(tmp_path: Path) -> None:
    ignored: Callable[[], object] = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    with Process(tmp_path, before=ignored) as server:
        masks = Path(f"/proc/{server.popen.pid}/status").read_text()
        assert int(masks.split("SigIgn:")[1].split()[0], 16) & 1 << signal.SIGHUP - 1


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_second_sigterm_at_any_moment_of_the_end_does_not_change_the_exit_code(
    tmp_path: Path, workers: str
) -> None:
    """Python and uvloop put the default handlers back before the process ends."""
    for _ in range(rounds(2, 40)):
        env = {"FAULT_ECHO_S": "600"}
        with Process(tmp_path, "--workers", workers, env=env) as server:
            server.popen.send_signal(signal.SIGTERM)
            while server.popen.poll() is None:
                server.popen.send_signal(signal.SIGTERM)
            assert server.popen.returncode == 0


def test_sigterms_while_the_models_are_closed_do_not_change_the_exit_code() -> None:
    """What closes takes longer than a SIGTERM counts as one with the next."""
    code = """
import os, signal
from types import SimpleNamespace
from deploykit.serving import server
from deploykit.serving.workers import signals
from deploykit.serving.models.repository import ModelRepository
from tests.support.fake_engine import FakeEngine
now_s = 100.0
def stop(*_): os.kill(os.getpid(), signal.SIGTERM)
def later(seconds):
    global now_s
    now_s += seconds; stop()
def close(self, **options):
    later(1.1); closed(self, **options)
clock = SimpleNamespace(monotonic=lambda: now_s, monotonic_ns=lambda: int(1e9 * now_s))
server.time = signals.time = clock
closed, ModelRepository.close = ModelRepository.close, close
assert server.run(server.Server({"m": FakeEngine()}, server.ServeOptions(http_port=0)), stop) == 0
for _ in range(5):
    later(0.3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=WAIT_S, check=False)
    assert done.returncode == 0


def test_a_sigterm_after_the_echo_reaches_the_handler_of_the_program() -> None:
    code = """
import signal, os
from types import SimpleNamespace
from deploykit.serving import server
from deploykit.serving.workers import signals
from tests.support.fake_engine import FakeEngine
got, now_s = [], 100.0
def stop(*_): os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
clock = SimpleNamespace(monotonic=lambda: now_s, monotonic_ns=lambda: int(1e9 * now_s))
server.time = signals.time = clock
options = server.ServeOptions(http_port=0)
server.run(server.Server({"m": FakeEngine()}, options), stop)
now_s += 0.9; stop()
assert got == [], got
now_s += 1.1; stop()
assert got == [1], got
stop()
assert got == [1, 1], got
signal.signal(signal.SIGTERM, signal.SIG_DFL)
server.run(server.Server({"m": FakeEngine()}, options), stop)
now_s += 1.1; stop()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=WAIT_S, check=False)
    assert done.returncode == -signal.SIGTERM


def metrics(served: Served) -> str:
    raw = served.ask(request("GET", "/metrics"))
    reply = raw.reply()
    raw.close()
    return reply.body.decode()


def test_shutdown_waits_for_pipelined_requests() -> None:
    engine = GatedEngine()
    with running({"m": engine}, max_batch=1) as server:
        engine.warm = True
        raw = server.connect()
        raw.send(INFER * 3)
        assert engine.entered.acquire(timeout=WAIT_S)
        server.server.stop()
        engine.gate.set()
        replies = [raw.reply() for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 200]
        assert raw.ended()
        assert server.stop() == 0


def test_a_port_in_use_is_named() -> None:
    with running() as server, pytest.raises(BadInput) as caught:
        Server({"m": FakeEngine()}, ServeOptions(http_port=server.port))
    assert f"`http_port` {server.port}: already in use" in caught.value.message
    assert "0 picks a free one" in (caught.value.hint or "")


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "x" * 300, "unix:"])
def test_a_host_that_cannot_be_bound_is_named(host: str) -> None:
    with pytest.raises(BadInput, match=f"`host` {host}"):
        Server({"m": FakeEngine()}, ServeOptions(host=host, http_port=0))


def test_a_server_listens_at_a_path_over_http_and_grpc(tmp_path: Path) -> None:
    triton = pytest.importorskip("tritonclient.grpc")
    path = tmp_path / "dk.sock"
    with socket.socket(socket.AF_UNIX) as killed:  # a server that left its file
        killed.bind(str(path))
    with running(host=f"unix:{path}", grpc_port=0) as server:
        assert (server.server.host, server.server.port) == (f"unix:{path}", 0)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(INFER.replace(b"localhost", b"models"))
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        with triton.InferenceServerClient(f"unix:{path}.grpc") as client:
            assert client.is_model_ready("m")
        with pytest.raises(BadInput, match="already in use"):
            Server({"m": FakeEngine()}, ServeOptions(host=f"unix:{path}", http_port=0))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BadInput, match="No such file"):
        Server({"m": FakeEngine()}, ServeOptions(host=f"unix:{tmp_path}/no/dk.sock"))


def test_a_server_that_cannot_start_releases_its_port() -> None:
    port = quiet_port()
    with pytest.raises(BadInput, match="cannot be the name"):
        Server({"a/b": FakeEngine()}, ServeOptions(http_port=port))
    socket.create_server(("127.0.0.1", port)).close()
