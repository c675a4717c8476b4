"""Answers count in the memory budget until their client has taken them; reading stops meanwhile."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Arrays
from deploykit.serving.http.connection import Exchange, HttpConnection
from deploykit.serving.web.page import FILES
from tests.support.fake_engine import FakeEngine
from tests.support.serving.memory import held_bytes
from tests.support.serving.running import WAIT_S, GatedEngine, Running, request, running

ANSWER = 8 << 20  # bytes; more than the buffers of two sockets take
LIMIT = 3 * ANSWER
SLACK = 160 << 10  # what one connection may hold uncounted or above the limit
INFER = "/v2/models/m/infer"
Eventually = Callable[[Callable[[], bool]], None]


class Wide(GatedEngine):
    """Answers 4 bytes with `ANSWER` bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.set()
        self.inputs = (TensorSpec("x", "float32", ("N", 1)),)
        self.outputs = (TensorSpec("y", "float32", ("N", ANSWER // 4)),)

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return {"y": np.repeat(super().__call__(feeds)["y"], ANSWER // 4, axis=1)}


def ask(**headers: str) -> bytes:
    item = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}
    body = {"inputs": [item], "parameters": {"binary_data_output": True}}
    return request("POST", INFER, json.dumps(body).encode(), **headers)


def buffered(server: Running) -> int:
    """The bytes that connections keep: replies that are not sent, requests not processed."""
    return sum(
        each._transport.get_write_buffer_size() + len(each._kept)
        for each in list(server.server._listener.connections)
    )


@pytest.mark.parametrize("encoding", ["identity", "gzip;q=0, deflate;q=0"])
@pytest.mark.parametrize("together", [1, 4])
def test_answers_that_nobody_reads_stay_within_the_budget(
    eventually: Eventually, together: int, encoding: str
) -> None:
    engine = Wide()
    with running({"m": engine}, max_held_bytes=LIMIT, max_batch=1) as server:
        raws = [server.connect() for _ in range(16 // together)]
        for raw in raws:
            raw.send(ask(Accept_Encoding=encoding) * together)
        idle = server.server.repository
        eventually(lambda: held_bytes(server) > LIMIT - ANSWER and not idle.unanswered)
        assert buffered(server) <= LIMIT + len(raws) * SLACK
        assert held_bytes(server) <= LIMIT + len(raws) * SLACK
        other = server.connect()
        refused = other.ask(ask())
        assert refused.status == 503
        assert refused.headers["retry-after"] == "1"
        assert server.ask("GET", "/v2/health/ready").status == 200
        for raw in raws:
            raw.close()
        eventually(lambda: held_bytes(server) == 0)
        assert server.ask("POST", INFER, ask().partition(b"\r\n\r\n")[2]).status == 200
        eventually(lambda: held_bytes(server) == 0)


def test_no_engine_runs_for_an_answer_that_does_not_fit(eventually: Eventually) -> None:
    engine = Wide()
    with running({"m": engine}, max_held_bytes=ANSWER // 2, max_batch=1) as server:
        alone = server.connect()
        alone.send(ask())  # it may exceed the budget
        eventually(lambda: held_bytes(server) >= ANSWER)
        ran = len(engine.batches)
        other = server.connect()
        other.send(ask() * 4)
        assert [reply.status for reply in (other.reply(), other.reply())] == [503, 503]
        assert len(engine.batches) == ran
        alone.close()


def test_an_answer_counts_whole_until_its_last_byte_is_taken(eventually: Eventually) -> None:
    with running({"m": Wide()}, max_held_bytes=LIMIT) as server:
        raw = server.connect(receive_buffer=64 << 10)
        eventually(lambda: len(server.server._listener.connections) == 1)
        (connection,) = server.server._listener.connections
        sender = connection._transport.get_extra_info("socket")
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        raw.send(ask())
        eventually(lambda: buffered(server) > 0)
        before = buffered(server)
        raw._stream.read(ANSWER // 2)
        eventually(lambda: buffered(server) < before)
        assert buffered(server) > 0
        assert held_bytes(server) >= ANSWER
        raw._stream.read(ANSWER // 2)
        eventually(lambda: held_bytes(server) == 0)


def test_small_answers_count_that_wait_for_an_earlier_one(eventually: Eventually) -> None:
    engine = GatedEngine()
    with running({"m": engine}, max_held_bytes=10_000) as server:
        engine.warm = True
        raw = server.connect()
        first = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1] * 4}]}
        body = json.dumps(first).encode()
        raw.send(request("POST", INFER, body) + request("GET", "/openapi.json") * 2)
        assert engine.entered.acquire(timeout=WAIT_S)
        eventually(lambda: held_bytes(server) > 5000)
        engine.gate.set()
        replies = [raw.reply() for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 503]
        eventually(lambda: held_bytes(server) == 0)


@pytest.mark.parametrize("tls", [False, True])
def test_a_client_that_pipelines_and_does_not_read_costs_little(
    eventually: Eventually, tls: bool, pem: tuple[Path, Path]
) -> None:
    """Before any token: the page's files are public."""
    options = {"tls_cert": pem[0], "tls_key": pem[1]} if tls else {}
    page = max(FILES, key=lambda path: len(FILES[path][1]))
    asked = request("GET", page)
    with running({"m": FakeEngine()}, token="0123456789abcdef", **options) as server:
        raws = [server.connect() for _ in range(3)]
        for raw in raws:
            raw.socket.settimeout(0.5)
            if tls:
                context = ssl.create_default_context(cafile=str(pem[0]))
                raw.socket.settimeout(WAIT_S)
                raw.socket = context.wrap_socket(raw.socket, server_hostname="localhost")
                raw.socket.settimeout(0.5)
            with pytest.raises(TimeoutError):
                raw.send(asked * ((48 << 20) // len(asked)))
        sizes = server.server._loop.call_soon_threadsafe
        found: list[int] = []
        sizes(lambda: found.append(buffered(server)))
        eventually(lambda: bool(found))
        assert found[0] <= len(raws) * (SLACK + (700 << 10 if tls else 0))
        assert held_bytes(server) >= found[0] - len(raws) * SLACK
        for raw in raws:
            raw.close()
            raw.socket.close()
        eventually(lambda: held_bytes(server) == 0 and not server.server._listener.connections)


def test_a_client_that_pipelines_gets_few_requests_per_turn_of_the_loop() -> None:
    """However cheap a request is to send; what it asks for may take a millisecond."""
    with running({"m": FakeEngine()}) as server:
        turns: list[int] = []
        listener = server.server._listener
        handle, read = listener.handle, HttpConnection._read

        def counted(exchange: Exchange) -> None:
            turns[-1] += 1
            handle(exchange)

        def begun(connection: HttpConnection, end: int) -> None:
            turns.append(0)
            read(connection, end)

        listener.handle = counted
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HttpConnection, "_read", begun)
            raw = server.connect()
            raw.send(request("HEAD", "/openapi.json") * 500)
            for _ in range(500):
                reply = raw.reply(body=False)
                assert reply.status == 200
        assert sum(turns) == 500
        assert max(turns) <= 16


def test_requests_that_waited_for_a_reader_are_answered_in_order(eventually: Eventually) -> None:
    page = max(FILES, key=lambda path: len(FILES[path][1]))
    pair = request("GET", page) + request("GET", "/v2/health/live")
    with running({"m": FakeEngine()}) as server:
        raw = server.connect()
        sender = threading.Thread(target=raw.send, args=(pair * 3000,), daemon=True)
        sender.start()
        eventually(lambda: held_bytes(server) > 0)
        for _ in range(3000):
            first, second = raw.reply(), raw.reply()
            assert first.body == FILES[page][1]
            assert second.json == {"live": True}
        sender.join(WAIT_S)
        eventually(lambda: held_bytes(server) == 0)


@pytest.mark.parametrize("binary", [True, False])
def test_tensors_in_shared_memory_count_like_received_ones(
    eventually: Eventually, binary: bool
) -> None:
    rows = 1 << 18  # 4 MiB
    engine = GatedEngine()
    key = Path(f"/dev/shm/test-held-{uuid4().hex}")
    key.write_bytes(bytes(rows * 16))
    region = {"shared_memory_region": "r", "shared_memory_byte_size": rows * 16}
    item = {"name": "x", "datatype": "FP32", "shape": [rows, 4], "parameters": region}
    body: dict[str, object] = {"inputs": [item]}
    if not binary:
        body["padding"] = "x" * (300 << 10)  # decoded on another thread
    ask = request("POST", INFER, json.dumps(body).encode())
    options = {"shared_memory": True, "max_batch": rows, "max_held_bytes": 10 << 20}
    try:
        with running({"m": engine}, **options) as server:
            spec = json.dumps({"key": f"/{key.name}", "byte_size": rows * 16}).encode()
            path = "/v2/systemsharedmemory/region/r/register"
            assert server.ask("POST", path, spec).status == 200
            engine.warm = True
            raws = [server.connect() for _ in range(4)]
            for count, raw in enumerate(raws[:2], 1):
                raw.send(ask)
                eventually(lambda count=count: held_bytes(server) >= count * rows * 16)
            for raw in raws[2:]:
                refused = raw.ask(ask)
                assert refused.status == 503
            assert held_bytes(server) < 10 << 20
            for raw in raws:
                raw.close()
            engine.gate.set()
            eventually(lambda: held_bytes(server) == 0)
    finally:
        key.unlink()
