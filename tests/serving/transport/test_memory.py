"""The limit on the bytes of requests and answers that a server holds, with hostile clients too."""

from __future__ import annotations

import contextlib
import gc
import gzip
import io
import random
import ssl
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploykit.core.tensors import TensorSpec, parse_spec
from deploykit.engines.engine import Arrays
from deploykit.engines.oip import MESSAGES
from deploykit.serving.batching.batcher import Splitter
from deploykit.serving.batching.queue import Pending
from deploykit.serving.http.routes import InferRoute
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip import messages
from deploykit.serving.oip import request as requests
from deploykit.serving.options import ServeOptions
from deploykit.serving.transport.connection import Head, Limits, MemoryBudget
from deploykit.serving.web.page import FILES
from tests.support.campaign import rounds
from tests.support.fake_engine import FakeEngine
from tests.support.serving.grpc_cases import (
    INFER,
    STREAM,
    Answer,
    Echo,
    frames,
    infer_bytes,
    serving,
    unlimited_window,
)
from tests.support.serving.loops import KEY
from tests.support.serving.memory import (
    Seen,
    chunked,
    held_bytes,
    in_binary,
    raw_infer,
    send_without_end,
)
from tests.support.serving.running import (
    WAIT_S,
    GatedEngine,
    Raw,
    Running,
    infer_json,
    request,
    running,
)

LIMIT = 1 << 20
WIDTH = LIMIT // 8  # elements: half of the limit in a request
Eventually = Callable[[Callable[[], bool]], None]


def test_the_limit_is_a_quarter_of_memory_but_at_least_one_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deploykit.serving.transport.connection.memory_bytes", lambda: 4000)
    limits = [MemoryBudget(*of).limit for of in ((None, 64), (None, 2000), (300, 2000))]
    assert limits == [1000, 2000, 300]
    limits = [MemoryBudget(*of, 4).limit for of in ((None, 64), (None, 2000), (300, 2000))]
    assert limits == [250, 2000, 75]


def test_bodies_on_all_connections_share_one_limit(eventually: Eventually) -> None:
    values = np.ones(WIDTH, np.float32)
    with running({"m": FakeEngine(width=WIDTH)}, max_held_bytes=LIMIT) as server:
        raws = [server.connect() for _ in range(3)]
        for count, raw in enumerate(raws[:2], 1):
            send_without_end(raw, raw_infer(values), 8)
            eventually(lambda count=count: held_bytes(server) >= count * (LIMIT // 2 - 70_000))
        send_without_end(raws[2], raw_infer(values), 8)
        refused = raws[2].reply()
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert f"holds {LIMIT} bytes" in refused.json["error"]
        assert [raw.ask(values.tobytes()[-8:]).status for raw in raws[:2]] == [200, 200]
        eventually(lambda: held_bytes(server) == 0)
        assert server.connect().ask(raw_infer(values)).status == 200
        text = server.ask("GET", "/metrics").body.decode()
        assert "deploykit_held_limit_bytes 1.048576e+06\n" in text


# -- Answers count until their client has taken them


ANSWER = 8 << 20  # bytes; more than the buffers of two sockets take
ANSWERS = 3 * ANSWER
SLACK = 160 << 10  # what one connection may hold uncounted or above the limit
PATH = "/v2/models/m/infer"
PAGE = max(FILES, key=lambda path: len(FILES[path][1]))


class Wide(GatedEngine):
    """Answers 4 bytes with `ANSWER` bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.set()
        self.inputs = (TensorSpec("x", "float32", ("N", 1)),)
        self.outputs = (TensorSpec("y", "float32", ("N", ANSWER // 4)),)

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        return {"y": np.repeat(super().__call__(feeds)["y"], ANSWER // 4, axis=1)}


ASKED = request("POST", PATH, infer_json([1], [1, 1], parameters={"binary_data_output": True}))


def buffered(server: Running) -> int:
    """The bytes that connections keep: replies that are not sent, requests not processed."""
    return sum(
        each.transport.get_write_buffer_size() + len(each.kept)
        for each in list(server.server._listener.connections)
    )


@pytest.mark.parametrize("together", [1, 4])
def test_answers_that_nobody_reads_stay_within_the_budget(
    eventually: Eventually, together: int
) -> None:
    with running({"m": Wide()}, max_held_bytes=ANSWERS, max_batch=1) as server:
        raws = [server.connect() for _ in range(16 // together)]
        for raw in raws:
            raw.send(ASKED * together)
        idle = server.server.repository.find("m")
        eventually(lambda: held_bytes(server) > ANSWERS - ANSWER and not idle.unanswered)
        assert buffered(server) <= ANSWERS + len(raws) * SLACK
        assert held_bytes(server) <= ANSWERS + len(raws) * SLACK
        other = server.connect()
        refused = other.ask(ASKED)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert server.ask("GET", "/v2/health/ready").status == 200
        for raw in raws:
            raw.close()
        eventually(lambda: held_bytes(server) == 0)
        assert server.connect().ask(ASKED).status == 200
        eventually(lambda: held_bytes(server) == 0)


def test_no_engine_runs_for_an_answer_that_does_not_fit(eventually: Eventually) -> None:
    engine = Wide()
    with running({"m": engine}, max_held_bytes=ANSWER // 16, max_batch=1) as server:
        alone = server.connect()
        alone.send(ASKED)  # it may exceed the budget
        eventually(lambda: held_bytes(server) > ANSWER // 16)
        ran = len(engine.batches)
        other = server.connect()
        other.send(ASKED * 4)
        assert [reply.status for reply in (other.reply(), other.reply())] == [503, 503]
        assert len(engine.batches) == ran
        alone.close()


def test_clients_that_pipeline_and_do_not_read_cost_little(
    eventually: Eventually, pem: tuple[Path, Path]
) -> None:
    """Before any token: the page's files are public."""
    asked = request("GET", PAGE)
    context = ssl.create_default_context(cafile=str(pem[0]))
    with running(token="0123456789abcdef", tls_cert=pem[0], tls_key=pem[1]) as server:
        raws = [server.connect() for _ in range(3)]
        for raw in raws:
            raw.socket = context.wrap_socket(raw.socket, server_hostname="localhost")
            raw.socket.settimeout(0.5)
            with pytest.raises(TimeoutError):
                raw.send(asked * ((48 << 20) // len(asked)))
        found: list[int] = []
        server.server._loop.call_soon_threadsafe(lambda: found.append(buffered(server)))
        eventually(lambda: bool(found))
        assert found[0] <= len(raws) * (SLACK + (700 << 10))
        assert held_bytes(server) >= found[0] - len(raws) * SLACK
        for raw in raws:
            raw.close()
            raw.socket.close()
        eventually(lambda: held_bytes(server) == 0 and not server.server._listener.connections)


# -- Hostile clients: the server must not keep, or miscount, the bytes of their requests


HEALTH = "/grpc.health.v1.Health/"
UNAVAILABLE = 14


def values() -> np.ndarray:
    return np.ones(WIDTH, np.float32)


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
                server.pass_time(Limits().stall_s + 1)
            reply = raw.reply(body=name != "HEAD")
            assert reply.status == status
        raw.close()
        eventually(lambda: not server.server._listener.connections)
        eventually(lambda: counted.bytes == 0)


@pytest.mark.parametrize("seed", range(rounds(2, 100)))
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
            raw, sent = chance.choice(raws), chance.choice(data)
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
        eventually(lambda: not server.server._listener.connections and counted.bytes == 0)


@pytest.mark.parametrize("seed", range(rounds(2, 100)))
def test_random_hostile_grpc_clients_leave_no_held_bytes(eventually: Eventually, seed: int) -> None:
    chance = random.Random(seed)
    message = infer_bytes(width=WIDTH)
    models = {"m": FakeEngine(width=WIDTH)}
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
                    data = chance.choice([message, gzip.compress(message), b"", b"\xff" * 100_000])
                    end, zipped = chance.random() < 0.6, int(chance.random() < 0.4)
                    if chance.random() < 0.3:  # a message that is cut, or a stream that is reset
                        client.send(0, 0, stream, b"\0\0\x0f\0\0" + data[: len(data) // 2][:9000])
                    else:
                        client.message(stream, data, end=end, compressed=zipped)
                    if chance.random() < 0.3:
                        client.send(3, 0, stream, bytes([0, 0, 0, 8]))
                    assert shared.memory.bytes >= 0
        eventually(lambda: not shared.connections)
        eventually(lambda: server.see(lambda: (shared.unanswered, shared.memory.bytes)) == (0, 0))
        with unlimited_window(server.port) as client:
            assert client.call(1, message).status == 0


@pytest.mark.parametrize(("model", "status"), [("text", 503), ("wide", 503), ("half", 200)])
def test_compressed_bodies_and_strings_count_with_their_size_in_memory(
    eventually: Eventually, model: str, status: int
) -> None:
    size = {"text": LIMIT // 2, "wide": WIDTH * 4, "half": WIDTH // 4}[model]
    if model == "text":
        body, json_bytes = in_binary(size.to_bytes(4, "little") + bytes(size), [1, 1], "BYTES")
    else:
        body, json_bytes = in_binary(bytes(size), [1, size // 4])
    headers = {"Inference-Header-Content-Length": json_bytes, "Content-Encoding": "gzip"}
    data = request("POST", PATH.replace("/m/", f"/{model}/"), gzip.compress(body), **headers)
    widths = {"m": WIDTH, "wide": WIDTH, "half": WIDTH // 16}
    models = {name: FakeEngine(width=width) for name, width in widths.items()}
    with running({**models, "text": Echo("string", 1)}, max_held_bytes=LIMIT // 4 * 3) as server:
        other, raw = server.connect(), server.connect()
        send_without_end(other, raw_infer(values()), 8)
        eventually(lambda: held_bytes(server) > LIMIT // 4)
        assert raw.ask(data).status == status
        assert other.ask(BODY[-8:]).status == 200
        eventually(lambda: held_bytes(server) == 0)
        assert raw.ask(data).status == 200  # it is alone


def test_health_checks_are_answered_when_the_memory_limit_is_reached(
    eventually: Eventually,
) -> None:
    """Messages on all connections share it; those of a stream count until their answers."""
    with serving(max_held_bytes=4000) as server:
        counted = server.grpc.memory
        with frames(server.port) as first, frames(server.port) as client:
            for stream in (1, 3):
                first.open(stream)
                first.send(0, 0, stream, b"\0" + (1996).to_bytes(4, "big") + bytes(1995))
            eventually(lambda: counted.bytes == 4000)
            assert client.call(1, b"", f"{HEALTH}Check").status == 0
            assert client.call(3, b"", f"{INFER.rpartition('/')[0]}/ServerReady").status == 0
            assert client.call(5, bytes(2000), f"{HEALTH}Check").status == UNAVAILABLE
            refused = client.call(7, infer_bytes())
            assert refused.status == UNAVAILABLE
            assert "holds 4000 bytes" in refused.headers["grpc-message"]
            client.settle()
            assert refused.reset is None  # it had ended: there is nothing to stop
            assert counted.bytes == 4000
        eventually(lambda: counted.bytes == 0)
        with frames(server.port) as again:
            again.start(1, infer_bytes(), STREAM, end=False)
            again.until(lambda: bool(again.answers.get(1, Answer()).data))
            eventually(lambda: counted.bytes == 0)


# -- What a request held is freed with its answer, not at the next garbage collection


LONG = 100_000
HTTP = "/v2/models/{}/infer"
GOOD = infer_json([0.5] * LONG, [1, LONG])
LARGEST = 4 << 20  # of a body, expanded too
BOMB = bytes(LARGEST + 1)
FEW_BYTES = 64 << 10
TIMES = 3


class Failing(FakeEngine):
    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if feeds["x"].max() > 4:  # not in the warm-up
            return {"y": feeds["x"].astype(np.float64)}
        if feeds["x"].max() > 2:
            raise RuntimeError("broken")
        return super().__call__(feeds)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if a garbage collection finds something that holds many bytes, of what began here."""
    gc.collect()
    gc.disable()
    gc.freeze()  # the server of a test before may be gone only now
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        leaves = {id(leaf): leaf for leaf in gc.get_referents(*gc.garbage)}
        large = [leaf for leaf in leaves.values() if bytes_of(leaf) > FEW_BYTES]
        assert [(type(leaf).__name__, bytes_of(leaf)) for leaf in large] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def bytes_of(leaf: object) -> int:
    if isinstance(leaf, (np.ndarray, memoryview)):
        return leaf.nbytes
    return sys.getsizeof(leaf) if isinstance(leaf, (bytes, bytearray, io.BytesIO)) else 0


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    models = {"large": FakeEngine(width=LONG), "fails": Failing(width=LONG)}
    with running(models, max_body_bytes=LARGEST) as server:
        assert server.ask("POST", HTTP.format("large"), GOOD).status == 200  # starts its threads
        yield server


PACKED = gzip.compress(GOOD, 1)
OVER_HTTP: dict[str, tuple[str, bytes, str, int]] = {
    "a good one in gzip": ("large", PACKED, "gzip", 200),
    "gzip above the limit": ("large", gzip.compress(BOMB, 1), "gzip", 413),
    "no JSON when expanded": ("large", gzip.compress(BOMB[: LARGEST // 2], 1), "gzip", 400),
    "a wrong shape": ("large", GOOD.replace(b"[1, ", b"[2, "), "identity", 400),
    "half of it, then nothing": ("large", GOOD, "identity", 0),
    "an unknown model": ("nothing", GOOD, "identity", 404),
    "an engine that fails": ("fails", GOOD.replace(b"0.5", b"3.5"), "identity", 500),
    "an engine that answers wrongly": ("fails", GOOD.replace(b"0.5", b"5.5"), "identity", 500),
}


@pytest.mark.parametrize(("name", "body", "encoding", "status"), OVER_HTTP.values(), ids=OVER_HTTP)
def test_an_http_request_leaves_no_garbage(
    server: Running, name: str, body: bytes, encoding: str, status: int
) -> None:
    data = request("POST", HTTP.format(name), body, Content_Encoding=encoding)
    with nothing_left():
        for _ in range(TIMES):
            raw = server.connect()
            raw.send(data if status else data[: len(data) // 2])
            assert not status or raw.status() == status
            raw.close()
        assert server.ask("GET", "/v2/health/live").status == 200  # the loop is done with them


ROWS = infer_bytes(value=3, width=LONG)
OVER_GRPC: dict[str, tuple[bytes, str, int]] = {
    "above the limit": (zlib.compress(BOMB, 1), "deflate", 8),
    "no deflate": (ROWS, "deflate", 3),
    "no message when expanded": (zlib.compress(BOMB[: LARGEST // 2], 1), "deflate", 3),
    "a wrong shape": (infer_bytes(value=3, width=LONG + 1), "identity", 3),
    "an engine that fails": (ROWS, "identity", 13),
    "an engine that answers wrongly": (infer_bytes(value=5, width=LONG), "identity", 13),
}


@pytest.mark.parametrize("path", [INFER, STREAM])
@pytest.mark.parametrize(("message", "encoding", "status"), OVER_GRPC.values(), ids=OVER_GRPC)
def test_a_grpc_message_leaves_no_garbage(
    path: str, message: bytes, encoding: str, status: int
) -> None:
    with (
        serving({"m": Failing(width=LONG)}, max_body_bytes=LARGEST) as server,
        frames(server.port) as client,
        nothing_left(),
    ):
        for stream in range(1, 2 * TIMES, 2):
            client.start(
                stream,
                message,
                path,
                compressed=int(encoding != "identity"),
                grpc_encoding=encoding,
            )
            assert client.answer(stream).status in ((status,) if path == INFER else (status, 0))
        client.settle()


ALL_WINDOW = b"\0\4" + (1 << 30).to_bytes(4, "big")


def test_a_large_answer_keeps_only_its_own_rows_of_a_batch() -> None:
    """Else one slow reader keeps the memory of all 32 answers, and 1/32 of it is counted."""
    whole = np.ones((3, LONG), np.float32)
    rows = {count: {"x": np.zeros((count, 1), np.float32)} for count in (1, 2)}
    batch = [Pending(feeds, count, KEY, print, 0, 0, 0) for count, feeds in rows.items()]
    Splitter((parse_spec("y:float32[N,W]"),), joined=True)(batch, {"y": whole})
    for pending, count in zip(batch, rows, strict=True):
        found = pending.outputs["y"]
        assert found.shape == (count, LONG)
        assert found.flags.owndata
        assert not np.shares_memory(found, whole)


@pytest.mark.parametrize("waits", ["body", "outputs"])
def test_the_bytes_of_a_disconnected_client_are_released_before_they_are_processed(
    eventually: Eventually, caplog: pytest.LogCaptureFixture, waits: str
) -> None:
    """They are no longer counted, and may wait for those of others for seconds."""
    offloaded: list[Any] = []
    width = 70_000  # as JSON below what is decoded on another thread
    repository = ModelRepository({"m": FakeEngine(width=width)}, ServeOptions())
    model = repository.find("m")
    try:
        infer = InferRoute(repository, model, lambda *job, **_: offloaded.append(job))
        if waits == "body":
            array = np.zeros(1 << 20, np.uint8)
            alive = weakref.ref(array)
            call = Seen(Head(encoding=b"gzip"), array.data)
            del array
        else:
            call = Seen(Head(), infer_json([0] * width, [1, width]))
        infer(call)
        eventually(lambda: len(offloaded) == 1)
        ((work, then),) = offloaded
        if waits == "outputs":
            alive = weakref.ref(work.__self__.pending.outputs["y"])
        assert alive() is not None
        call.gone = True
        assert call.cancel is not None
        call.cancel()
        eventually(lambda: alive() is None)
        then(work)
        assert call.status == 0
    finally:
        repository.close(drain=False)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def strings(element: bytes, count: int) -> bytes:
    message = MESSAGES["ModelInferRequest"](model_name="m")
    message.inputs.add(name="x", datatype="BYTES", shape=[1, count])
    message.raw_input_contents.append(element * count)
    data: bytes = message.SerializeToString()
    return data


def classified(width: int) -> bytes:
    message = MESSAGES["ModelInferRequest"].FromString(infer_bytes(width=width))
    wanted = message.outputs.add(name="y")
    wanted.parameters["classification"].int64_param = 3
    data: bytes = message.SerializeToString()
    return data


LETTERS = (200_000).to_bytes(4, "little") + b"a" * 200_000
SLOW = {  # the function that takes long, the server's model, the message; part of the answer
    "classes": ("classify", FakeEngine(width=LONG), classified(LONG), b"3.000000:0"),
    "few classes": ("classify", FakeEngine(width=100), classified(100), b"3.000000:0"),
    "short strings": (
        "to_bytes",
        Echo("string", "T"),
        strings(b"\1\0\0\0a", 40_000),
        b"\1\0\0\0a" * 99,
    ),
    "long strings": ("to_bytes", Echo("string", "T"), strings(LETTERS, 3), LETTERS),
}


@pytest.mark.parametrize("name", SLOW)
def test_what_takes_long_to_encode_is_encoded_on_another_thread(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Twelve clients that asked for 5 of 2 million values stopped the loop for 1.2 s."""
    function, engine, message, part = SLOW[name]
    threads: list[int] = []
    module = requests if function == "classify" else messages
    real = getattr(module, function)

    def seen(*args: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return real(*args, **options)

    monkeypatch.setattr(module, function, seen)
    with serving({"m": engine}) as server, unlimited_window(server.port) as client:
        answer = client.call(1, message)
        assert answer.status == 0
        assert part in answer.data
        assert threads
        assert (server.see(threading.get_ident) in threads) is (name == "few classes")


def test_a_stream_that_has_failed_takes_no_more_answers(
    eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    """Its slots are gone when the engine returns, and there is an answer that was not read."""
    steps = threading.Semaphore(0)
    engine = GatedEngine(width=LONG)
    engine.gate = SimpleNamespace(wait=lambda limit_s: steps.acquire(timeout=limit_s))  # type: ignore[assignment]
    with (
        serving({"m": engine}, max_batch=1) as server,
        frames(server.port, settings=b"\0\4\0\0\0\0") as client,
    ):
        engine.warm = True
        client.start(1, classified(LONG), STREAM, end=False)
        client.message(1, classified(LONG), end=False)
        model = server.repository.models["m"]
        eventually(lambda: server.see(lambda: model.unanswered) == 2)
        assert engine.entered.acquire(timeout=WAIT_S)
        steps.release()
        assert engine.entered.acquire(timeout=WAIT_S)
        (link,) = server.see(lambda: list(server.grpc.connections))
        eventually(lambda: link.answer_bytes > 0)
        (call,) = server.see(lambda: list(link.streams.values()))
        server.see(lambda: call.fail("DEADLINE_EXCEEDED", "in a test"))
        assert server.see(lambda: call.trailers is not None)
        steps.release()
        eventually(lambda: not server.see(lambda: model.unanswered))
        client.settle()
        client.send(4, 0, 0, ALL_WINDOW)
        assert client.answer(1).status == 4
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
