"""Hostile clients: the server must not keep, or miscount, the bytes of their requests."""

from __future__ import annotations

import contextlib
import gc
import gzip
import random
import socket
import ssl
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deploykit.serving.grpc.call import GrpcCall
from deploykit.serving.http.connection import Exchange, HttpConnection
from deploykit.serving.http.head import HttpLimits
from deploykit.serving.http.infer import InferRoute
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.options import ServeOptions
from deploykit.serving.transport.call import Head
from tests.support.campaign import rounds
from tests.support.fake_engine import FakeEngine
from tests.support.serving.grpc_cases import (
    INFER,
    Answer,
    Echo,
    Frames,
    frames,
    infer_bytes,
    serving,
    unlimited_window,
)
from tests.support.serving.memory import (
    Seen,
    chunked,
    held_bytes,
    raw_infer,
    send_without_end,
)
from tests.support.serving.running import (
    WAIT_S,
    GatedEngine,
    Raw,
    Running,
    request,
    running,
)

LIMIT = 1 << 20
WIDTH = LIMIT // 8  # elements: half of the limit in a request
MESSAGE = infer_bytes(width=WIDTH)
PATH = "/v2/models/m/infer"
STREAM = INFER.replace("ModelInfer", "ModelStreamInfer")
HEALTH = "/grpc.health.v1.Health/"
INVALID_ARGUMENT, UNAVAILABLE = 3, 14
Eventually = Callable[[Callable[[], bool]], None]


def values() -> np.ndarray:
    return np.ones(WIDTH, np.float32)


# -- HTTP


def test_a_refused_body_is_released_before_the_earlier_answer_is_sent(
    eventually: Eventually,
) -> None:
    engine = GatedEngine(width=WIDTH)
    with running({"m": engine}, max_held_bytes=LIMIT, max_body_bytes=LIMIT) as server:
        engine.warm = True
        raw = server.connect()
        raw.send(raw_infer(values()))
        assert engine.entered.acquire(timeout=WAIT_S)
        first = held_bytes(server)
        raw.send(chunked(bytes(LIMIT // 4)) + b"\r\nno size\r\n")
        eventually(lambda: raw_refused(server))
        assert held_bytes(server) == first
        engine.gate.set()
        assert [raw.reply().status, raw.reply().status] == [200, 400]
        eventually(lambda: held_bytes(server) == 0)


def raw_refused(server: Running) -> bool:
    return any(each.unanswered == 2 for each in server.server._listener.connections)


BODY = values().tobytes()
ENDS: dict[str, tuple[bytes, int | None]] = {  # data and status; None: the client disconnects
    "unknown path": (request("POST", "/v2/nothing", BODY), 404),
    "HEAD": (request("HEAD", "/v2/health/live", BODY), 200),
    "no JSON": (request("POST", PATH, BODY), 400),
    "head in the middle": (request("POST", PATH, BODY) + b"GET /v2 HTTP/1.1\r\nHo", 400),
    "chunk that does not end": (chunked(BODY) + b"xx", 400),
    "chunks above the limit": (chunked(BODY) + b"\r\nfffffff\r\n", 413),
    "chunks, gone": (chunked(BODY), None),
    "gone": (raw_infer(values())[:-1], None),
    "100-continue": (raw_infer(values(), Expect="100-continue")[:-9], None),
    "damaged gzip": (raw_infer(values(), Content_Encoding="gzip"), 400),
    "unknown encoding": (raw_infer(values(), Content_Encoding="br"), 415),
    "followed by invalid HTTP": (raw_infer(values()) + b"\0\r\n\r\n", 200),
    "too slow": (raw_infer(values())[:-1], 408),
}


@pytest.mark.parametrize("name", ENDS)
def test_held_bytes_return_to_zero_after_every_kind_of_request(
    eventually: Eventually, name: str
) -> None:
    data, status = ENDS[name]
    engine = FakeEngine(width=WIDTH)
    with running({"m": engine}, max_held_bytes=LIMIT, max_body_bytes=LIMIT) as server:
        counted = server.server._listener.memory
        raw = Raw(server.port)
        raw.send(data)
        if status is None:
            eventually(lambda: counted.bytes > 0)
        else:
            if name == "too slow":
                eventually(lambda: counted.bytes > len(BODY) - 70_000)
                server.pass_time(HttpLimits().body_s + 1)
            reply = raw.reply(body=name != "HEAD")
            assert reply.status == status
        raw.close()
        eventually(lambda: not server.server._listener.connections)
        eventually(lambda: counted.bytes == 0)


def test_over_tls_the_bytes_of_a_disconnected_client_are_released(
    eventually: Eventually, pem: tuple[Path, Path]
) -> None:
    context = ssl.create_default_context(cafile=str(pem[0]))
    with running({"m": FakeEngine(width=WIDTH)}, tls_cert=pem[0], tls_key=pem[1]) as server:
        plain = socket.create_connection(("127.0.0.1", server.port), WAIT_S)
        client = context.wrap_socket(plain, server_hostname="localhost")
        client.sendall(raw_infer(values())[:-8])
        eventually(lambda: held_bytes(server) > LIMIT // 4)
        client.close()
        eventually(lambda: held_bytes(server) == 0)


def test_strings_count_with_their_size_in_memory(eventually: Eventually) -> None:
    text = b"a" * LIMIT
    packed = gzip.compress(len(text).to_bytes(4, "little") + text)
    data = request(
        "POST",
        PATH,
        packed,
        **{"Inference-Header-Content-Length": "0", "Content-Encoding": "gzip"},
    )
    models = {"m": Echo("string", 1), "wide": FakeEngine(width=WIDTH)}
    with running(models, max_held_bytes=LIMIT, max_body_bytes=2 * LIMIT) as server:
        alone = server.connect()
        alone.send(data)
        assert alone.reply().status == 200
        other = server.connect()
        send_without_end(other, raw_infer(values()).replace(b"/m/", b"/wide/"), 8)
        eventually(lambda: held_bytes(server) > 0)
        alone.send(data)
        assert alone.reply().status == 503
        other.send(BODY[-8:])
        assert other.reply().status == 200
        eventually(lambda: held_bytes(server) == 0)


def test_an_offloaded_body_of_a_cancelled_request_is_released() -> None:
    offloaded: list[tuple[Callable[[], object], Callable[[Callable[[], object]], None]]] = []
    options = ServeOptions()
    repository = ModelRepository({"m": FakeEngine()}, options, deliver=lambda _: None)
    try:
        infer = InferRoute(
            repository,
            repository.find("m"),
            lambda work, then, **_: offloaded.append((work, then)),
        )
        array = np.zeros(LIMIT, np.uint8)
        alive = weakref.ref(array)
        call = Seen(Head(encoding=b"gzip"), array.data)
        del array
        infer(call)
        (work, then), *_ = offloaded
        assert alive() is not None
        assert call.cancel is not None
        call.gone = True
        call.cancel()
        assert alive() is None
        then(work)
        assert call.status == 0
    finally:
        repository.close(drain=False)


def test_aborted_uploads_leave_no_objects_behind(eventually: Eventually) -> None:
    data = [
        raw_infer(values())[:-8],
        chunked(BODY),
        raw_infer(values(), Expect="100-continue")[:99],
    ]
    with running({"m": FakeEngine(width=WIDTH)}, max_held_bytes=LIMIT) as server:
        listener = server.server._listener
        gc.collect()
        before = count(HttpConnection, Exchange)
        gc.disable()
        try:
            for number in range(60):
                with contextlib.closing(Raw(server.port)) as raw, contextlib.suppress(OSError):
                    raw.send(data[number % 3])
            eventually(lambda: not listener.connections and not listener.memory.bytes)
            eventually(lambda: count(HttpConnection, Exchange) <= before)
        finally:
            gc.enable()


def count(*kinds: type) -> int:
    return sum(type(each) in kinds for each in gc.get_objects())


@pytest.mark.parametrize("seed", range(rounds(3, 100)))
def test_random_hostile_http_clients_leave_no_held_bytes(eventually: Eventually, seed: int) -> None:
    chance = random.Random(seed)
    data = [data for data, _ in ENDS.values()]
    models = {"m": FakeEngine(width=WIDTH)}
    with running(models, max_held_bytes=LIMIT, max_body_bytes=LIMIT) as server:
        counted = server.server._listener.memory
        raws: list[Raw] = []
        for _ in range(40):
            if len(raws) < 3 or chance.random() < 0.3:
                raws.append(Raw(server.port))
            raw = chance.choice(raws)
            sent = chance.choice(data)
            with contextlib.suppress(OSError):
                raw.socket.settimeout(0.05)
                raw.send(sent[: chance.randrange(len(sent))] if chance.random() < 0.3 else sent)
            if chance.random() < 0.3:
                raws.remove(raw)
                raw.close()
            assert counted.bytes >= 0
        for raw in raws:
            raw.close()

        def is_served() -> bool:
            with contextlib.closing(Raw(server.port)) as alone:
                alone.send(raw_infer(values()))
                return alone.reply().status == 200

        eventually(is_served)  # not at once: some of the closed connections are yet to be accepted
        eventually(lambda: not server.server._listener.connections)
        eventually(lambda: counted.bytes == 0)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("grpc_port", [None, 0])
def test_a_connection_made_during_shutdown_does_not_break_it(grpc_port: int | None) -> None:
    with running(grpc_port=grpc_port) as served:
        server = served.server
        port = served.port if grpc_port is None else server.grpc_port

        def end() -> None:
            server._begin_drain()
            clients.append(socket.create_connection(("127.0.0.1", port or 0), WAIT_S))

        clients: list[socket.socket] = []
        server._loop.call_soon_threadsafe(end)
        while not clients:
            threading.Event().wait(0.001)
        clients[0].close()
        assert served.stop() == 0


# -- gRPC


def fill(client: Frames, stream: int, size: int) -> None:
    """Send a message without its last byte."""
    client.open(stream)
    data = b"\0" + (size - 4).to_bytes(4, "big") + bytes(size - 5)
    for at in range(0, len(data), 1 << 14):
        client.send(0, 0, stream, data[at : at + (1 << 14)])


def test_health_checks_are_answered_when_the_memory_limit_is_reached(
    eventually: Eventually,
) -> None:
    with serving(max_held_bytes=4000) as server, frames(server.port) as first:
        counted = server.grpc.memory
        fill(first, 1, 4000)
        eventually(lambda: counted.bytes == 4000)
        with frames(server.port) as client:
            assert client.call(1, b"", f"{HEALTH}Check").status == 0
            assert client.call(3, b"", f"{INFER.rpartition('/')[0]}/ServerReady").status == 0
            assert client.call(5, bytes(2000), f"{HEALTH}Check").status == UNAVAILABLE
            assert client.call(7, infer_bytes()).status == UNAVAILABLE
            client.settle()
            assert client.answers[7].reset is None  # it had ended: there is nothing to stop
            assert counted.bytes == 4000


def test_a_health_watch_is_not_an_unanswered_request(eventually: Eventually) -> None:
    engine = GatedEngine()
    with serving({"m": engine}) as server, frames(server.port) as client:
        shared = server.grpc
        client.start(1, b"", f"{HEALTH}Watch")
        client.until(lambda: len(client.answers.get(1, Answer()).data) > 0, 1)
        assert server.see(lambda: (shared.unanswered, shared.memory.bytes)) == (0, 0)
        engine.warm = True
        client.start(3, infer_bytes())
        assert engine.entered.acquire(timeout=WAIT_S)
        server.repository.drain()
        client.until(lambda: len(client.answers[1].data) > 7, 1)  # the watch reports the shutdown
        assert server.see(lambda: shared.unanswered) == 1
        engine.gate.set()
        assert client.answer(3).status == 0
        assert server.see(lambda: shared.unanswered) == 0


def test_parallel_grpc_bodies_on_one_connection_are_answered_or_refused(
    eventually: Eventually,
) -> None:
    models = {"m": FakeEngine(width=WIDTH)}
    with serving(models, max_held_bytes=100, max_body_bytes=LIMIT) as server:
        with unlimited_window(server.port) as client:
            streams = range(1, 17, 2)
            for stream in streams:
                client.open(stream)
            data = b"\0" + len(MESSAGE).to_bytes(4, "big") + MESSAGE
            for at in range(0, len(data), 1 << 14):
                for stream in streams:
                    piece = data[at : at + (1 << 14)]
                    client.send(0, int(at + len(piece) == len(data)), stream, piece)
            found = {client.answer(stream).status for stream in streams}
            assert UNAVAILABLE in found
            assert found <= {0, UNAVAILABLE}
            assert client.call(99, MESSAGE).status == 0
        eventually(lambda: server.grpc.memory.bytes == 0)


@pytest.mark.parametrize("seed", range(rounds(3, 100)))
def test_random_hostile_grpc_clients_leave_no_held_bytes(eventually: Eventually, seed: int) -> None:
    chance = random.Random(seed)
    packed = gzip.compress(infer_bytes(width=WIDTH))
    models = {"m": FakeEngine(width=WIDTH)}
    gc.collect()
    calls = count(GrpcCall)
    with serving(models, max_held_bytes=2 * LIMIT, max_body_bytes=LIMIT) as server:
        shared = server.grpc
        for _ in range(12):
            with contextlib.suppress(OSError), frames(server.port) as client:
                client.socket.settimeout(1)
                for stream in range(1, 2 * chance.randrange(2, 8), 2):
                    path = chance.choice([INFER, STREAM, f"{HEALTH}Watch", "/no/thing"])
                    more = {"grpc-encoding": "gzip"} if chance.random() < 0.4 else {}
                    if chance.random() < 0.2:
                        more["grpc-timeout"] = "1m"
                    client.open(stream, path, **more)
                    data = chance.choice([MESSAGE, packed, b"", b"\xff" * 100_000])
                    end, zipped = chance.random() < 0.6, int(chance.random() < 0.4)
                    if chance.random() < 0.3:
                        data = data[: len(data) // 2]
                        client.send(0, 0, stream, b"\0\0\x0f\0\0" + data[:9000])
                    else:
                        client.message(stream, data, end=end, compressed=zipped)
                    if chance.random() < 0.3:
                        client.send(3, 0, stream, bytes([0, 0, 0, 8]))
                    assert shared.memory.bytes >= 0
                if chance.random() < 0.5:
                    client.settle()
        eventually(lambda: not shared.connections)
        eventually(lambda: server.see(lambda: (shared.unanswered, shared.memory.bytes)) == (0, 0))
        with unlimited_window(server.port) as client:
            assert client.call(1, MESSAGE).status == 0
            bad = client.call(3, b"\xff" * 100)
            assert bad.status == INVALID_ARGUMENT
    eventually(lambda: gc.collect() >= 0 and count(GrpcCall) <= calls)
