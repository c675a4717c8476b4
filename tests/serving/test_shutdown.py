"""Signals, the end of a server, and where it listens."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from tests.support.campaign import rounds
from tests.support.fake_engine import FakeEngine
from tests.support.serving.faults import (
    BROKEN,
    REFUSED,
    ROOT,
    Clients,
    Process,
    quiet_port,
    until,
)
from tests.support.serving.grpc_cases import frames, infer_bytes
from tests.support.serving.running import WAIT_S, GatedEngine, Raw, infer_json, request, running

triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")

INFER = request("POST", "/v2/models/m/infer", infer_json([1, 2, 3, 4], [1, 4]))
READY, LIVE = request("GET", "/v2/health/ready"), request("GET", "/v2/health/live")
PATIENT = {"FAULT_LINGER_S": "1", "FAULT_SOON_S": "60"}  # this machine may stand still for long


@contextmanager
def held(folder: Path, **env: str) -> Iterator[Process]:
    """A server whose engine is called one row at a time, and on hold."""
    default = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # whatever started the tests
    env = {**PATIENT, "FAULT_ECHO_S": "600", **env}
    with Process(folder, "--max-batch", "1", env=env, before=default) as server:
        server.hold()
        yield server


def asked(server: Process, data: bytes) -> Raw:
    raw = Raw(server.port)
    raw.send(data)
    return raw


def is_refused(server: Process) -> bool:
    """Whether the port is closed."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", server.port)) != 0


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)]
)
def test_after_a_signal_open_connections_are_answered_once_more_and_new_ones_refused(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """A proxy sends a refused request to another server, but no request that was answered 503."""
    with held(tmp_path) as server:
        kept = [asked(server, LIVE) for _ in range(4)]
        assert [raw.reply().status for raw in kept] == [200] * 4
        accepted = [asked(server, INFER) for _ in range(3)]
        until(lambda: server.gauge("deploykit_requests_in_flight") == 3)
        server.popen.send_signal(number)
        until(lambda: is_refused(server))
        for raw, data, status in zip(kept, (READY, LIVE), (503, 200), strict=False):
            reply = raw.ask(data)
            assert (reply.status, reply.headers["connection"]) == (status, "close")
        kept[2].send(INFER)
        assert server.popen.poll() is None
        server.release()
        assert [raw.reply().status for raw in (*accepted, kept[2])] == [200] * 4
        assert kept[3].ended()
        assert server.wait() == code
        for raw in (*kept, *accepted):
            raw.close()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_signals_sent_twice_within_the_echo_count_once(
    tmp_path: Path, second: signal.Signals
) -> None:
    """`timeout` sends SIGTERM to its child and to the child's process group; systemd sends both."""
    with held(tmp_path) as server, closing(asked(server, INFER)) as accepted:
        until(server.in_engine)
        for number in (signal.SIGTERM, second):
            server.popen.send_signal(number)
            until(lambda: is_refused(server))
        server.release()
        assert accepted.reply().status == 200
        assert server.wait() == 0


def ask_grpc(address: str, statuses: list[str]) -> None:
    """Ask again and again until a request is refused, or the connection ends."""
    tensor = triton.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.full((1, 4), 100, np.float32))
    with triton.InferenceServerClient(address) as client:
        try:
            while True:
                assert client.infer("m", [tensor]).as_numpy("y").tolist() == [[201.0] * 4]
                statuses.append("OK")
        except triton.InferenceServerException as exc:
            statuses.append(exc.status())


@pytest.mark.parametrize("seed", range(rounds(2, 50)))
def test_sigterm_under_load_loses_no_accepted_request(tmp_path: Path, seed: int) -> None:
    """Each row that the engine ran was received, over HTTP and gRPC, and none stayed unanswered."""
    env, options = {"FAULT_LATENCY_S": "0.005"}, ("--max-batch", "8", "--grpc-port", "0")
    statuses: list[str] = []
    with Process(tmp_path, *options, env=env) as server, ThreadPoolExecutor(2) as pool:
        others = [pool.submit(ask_grpc, server.grpc, statuses) for _ in range(2)]
        with Clients(server.port, 5) as clients:
            until(lambda: len(clients.outcomes) > 20 and len(statuses) > 2)
            time.sleep(random.Random(seed).random() * 0.2)
            server.popen.terminate()
            assert server.wait() == 0
            counts = clients.stop()
        for each in others:
            each.result()
    assert counts.keys() <= {200, 503, BROKEN, REFUSED}
    assert set(statuses) == {"OK", "StatusCode.UNAVAILABLE"}
    assert counts[200] + statuses.count("OK") == int((tmp_path / "ran").read_text())


def test_in_the_time_to_drain_all_requests_are_answered_but_readiness() -> None:
    with running(drain_s=2.0, grpc_port=0) as server, frames(server.server.grpc_port or 0) as grpc:
        assert grpc.call(1, infer_bytes()).status == 0
        kept = server.connect()
        kept.ask(LIVE)
        server.server.stop()
        until(lambda: server.ask("GET", "/v2/health/ready").status == 503)
        for raw in (kept, server.connect()):
            reply = raw.ask(INFER)
            assert (reply.status, reply.headers["connection"]) == (200, "close")
        grpc.until(lambda: grpc.goaway == 0)  # NO_ERROR
        assert grpc.call(3, infer_bytes()).status == 0  # the client may not know yet
        with frames(server.server.grpc_port or 0) as other:
            other.settle()
            assert other.goaway is None  # else a client that asks only now never could
            assert other.call(1, infer_bytes()).status == 0
            other.until(lambda: other.goaway == 0)
            assert server.stop() == 0
        assert grpc.closed()


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
    for _ in range(rounds(1, 40)):
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


def test_an_address_that_cannot_be_bound_is_named() -> None:
    port, engine = quiet_port(), FakeEngine()
    with pytest.raises(BadInput, match="no served model has an input"):
        Server({"m": engine}, ServeOptions(http_port=port, buckets=["Q=16"]))  # releases its port
    with running(grpc_port=0, http_port=port) as server:
        taken = {"http_port": port, "grpc_port": server.server.grpc_port}
        hosts = ("192.0.2.1", "no such host", "x" * 300, "unix:")
        rows = [({name: at}, f"`{name}` {at}: already in use") for name, at in taken.items()]
        rows += [({"host": host, "http_port": 0}, f"`host` {host}") for host in hosts]
        # a name of two addresses: the other one is not taken in its place
        rows += [({"host": "", "http_port": port}, f"`http_port` {port}: already in use")]
        for options, words in rows:
            with pytest.raises(BadInput, match=words) as caught:
                Server({"m": engine}, ServeOptions(**options))
            assert "in use" not in words or "0 picks a free one" in caught.value.hint


def test_a_server_listens_at_a_path_over_http_and_grpc(tmp_path: Path) -> None:
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
