"""The bytes of requests that a server holds over all its connections, and their limit."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deploykit.serving.transport.memory import MemoryBudget
from tests.support.serving.grpc_cases import INFER, Answer, frames, infer_bytes, serving
from tests.support.serving.memory import held, part, raw_infer
from tests.support.serving.running import WAIT_S, GatedEngine, Raw, request, running

LIMIT = 1 << 20
WIDE = LIMIT // 8  # numbers: half of the limit in a request
Eventually = Callable[[Callable[[], bool]], None]


def test_a_lone_request_may_hold_more_than_the_limit() -> None:
    bytes_held = MemoryBudget(100, 64)
    assert bytes_held.add(150, 150)
    assert not bytes_held.add(1, 1)
    bytes_held.bytes -= 151
    assert bytes_held.add(100, 50)
    assert not bytes_held.add(1, 51)


def test_limit_is_a_share_of_the_memory_but_one_largest_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deploykit.serving.transport.memory.memory_bytes", lambda: 4000)
    assert MemoryBudget(None, 64).limit == 1000
    assert MemoryBudget(None, 2000).limit == 2000
    assert MemoryBudget(300, 2000).limit == 300


@pytest.fixture
def engine() -> GatedEngine:
    return GatedEngine(width=WIDE)


def test_bodies_on_many_connections_together_have_a_limit(
    engine: GatedEngine, eventually: Eventually
) -> None:
    values = np.ones(WIDE, np.float32)
    with running({"m": engine}, max_held_bytes=LIMIT) as server:
        raws = [server.connect() for _ in range(3)]
        for count, raw in enumerate(raws[:2], 1):
            part(raw, raw_infer(values), 8)
            eventually(lambda count=count: held(server) >= count * (LIMIT // 2 - 70_000))
        part(raws[2], raw_infer(values), 8)
        refused = raws[2].reply()
        assert refused is not None
        assert refused.status == 503
        assert refused.headers["retry-after"] == "1"
        assert f"holds {LIMIT} bytes" in refused.json["error"]
        for raw in raws[:2]:
            raw.send(values.tobytes()[-8:])
            reply = raw.reply()
            assert reply is not None
            assert reply.status == 200
        eventually(lambda: held(server) == 0)
        again = server.connect()
        again.send(raw_infer(values))
        answered = again.reply()
        assert answered is not None
        assert answered.status == 200


def test_a_request_is_held_until_it_is_answered(
    engine: GatedEngine, eventually: Eventually
) -> None:
    values = np.ones(WIDE, np.float32)
    with running({"m": engine}, max_held_bytes=LIMIT) as server:
        engine.warm = True
        raw = server.connect()
        raw.send(raw_infer(values))
        assert engine.entered.acquire(timeout=WAIT_S)
        assert held(server) >= values.nbytes - 70_000
        engine.gate.set()
        assert raw.reply() is not None
        eventually(lambda: held(server) == 0)


@pytest.mark.parametrize("how", ["length", "chunks"])
def test_a_client_that_goes_holds_nothing(
    engine: GatedEngine, eventually: Eventually, how: str
) -> None:
    values = np.ones(WIDE, np.float32)
    with running({"m": engine}, max_held_bytes=LIMIT) as server:
        raw = Raw(server.port)
        if how == "length":
            part(raw, raw_infer(values), 8)
        else:
            head = request("POST", "/v2/models/m/infer")
            head = head.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
            head = head.replace(b"Content-Length: 0\r\n", b"")
            raw.send(head + b"80000\r\n" + values.tobytes()[:-8])
        eventually(lambda: held(server) >= values.nbytes - 70_000)
        raw.close()
        eventually(lambda: held(server) == 0)


def test_what_unpacks_to_more_is_counted_as_what_it_is(
    engine: GatedEngine, eventually: Eventually
) -> None:
    values = np.zeros(WIDE, np.float32)
    packed = gzip.compress(values.tobytes())
    assert len(packed) < 5000
    data = request(
        "POST",
        "/v2/models/m/infer",
        packed,
        **{"Inference-Header-Content-Length": "0", "Content-Encoding": "gzip"},
    )
    with running({"m": engine}, max_held_bytes=LIMIT // 4 * 3) as server:
        first = server.connect()
        part(first, raw_infer(values), 8)
        eventually(lambda: held(server) > 0)
        raw = server.connect()
        raw.send(data)
        refused = raw.reply()
        assert refused is not None
        assert refused.status == 503
        first.send(values.tobytes()[-8:])
        assert first.reply() is not None
        eventually(lambda: held(server) == 0)


def test_both_are_shown_to_prometheus() -> None:
    with running(max_held_bytes=LIMIT) as server:
        text = server.ask("GET", "/metrics").body.decode()
        assert "deploykit_held_bytes 0.0\n" in text
        assert "deploykit_held_limit_bytes 1.048576e+06\n" in text


def test_grpc_messages_on_many_connections_together_have_a_limit(eventually: Eventually) -> None:
    size = LIMIT // 2
    message = b"\0" + (size + 8).to_bytes(4, "big") + bytes(size - 5)  # 8 are still to come
    with serving(max_held_bytes=LIMIT) as server:
        held = server.server._shared.memory
        with frames(server.port) as first:
            for stream in (1, 3):
                first.open(stream)
                for at in range(0, len(message), 1 << 14):
                    first.send(0, 0, stream, message[at : at + (1 << 14)])
            eventually(lambda: held.bytes == LIMIT)
            with frames(server.port) as second:
                refused = second.call(1, infer_bytes())
                assert refused.status == 14
                assert f"holds {LIMIT} bytes" in refused.headers["grpc-message"]
        eventually(lambda: held.bytes == 0)
        with frames(server.port) as again:
            assert again.call(1, infer_bytes()).status == 0
            eventually(lambda: held.bytes == 0)


def messages(data: bytes) -> int:
    """How many gRPC messages there are in the data of a stream."""
    found = 0
    while len(data) >= 5:
        data = data[5 + int.from_bytes(data[1:5], "big") :]
        found += 1
    return found


def test_each_message_of_a_grpc_stream_is_held_until_its_answer(eventually: Eventually) -> None:
    stream = INFER.replace("ModelInfer", "ModelStreamInfer")
    with serving() as server, frames(server.port) as client:
        held = server.server._shared.memory
        client.open(1, stream)
        for value in range(3):
            client.message(1, infer_bytes(value=value), end=False)
        answer = client.until(lambda: messages(client.answers.get(1, Answer()).data) == 3, 1)
        eventually(lambda: held.bytes == 0)
        assert not answer.ended


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_large_grpc_message_that_waits_to_be_read_goes_with_its_client(
    eventually: Eventually, method: str
) -> None:
    from deploykit.serving.oip.protobuf import MESSAGES

    asked = MESSAGES["ModelInferRequest"](model_name="m")
    asked.inputs.add(name="x", datatype="FP32", shape=[1, WIDE])
    asked.inputs[0].contents.fp32_contents.extend([1.0] * WIDE)
    waiting: list[Any] = []
    with serving() as server, frames(server.port) as client:
        server.server._calls.inference.routes["m"].offload = lambda work, then: waiting.append(
            (work, then)
        )
        client.open(1, INFER.replace("ModelInfer", method))
        client.message(1, asked.SerializeToString(), end=method == "ModelInfer")
        eventually(lambda: len(waiting) == 1)
        ((work, then),) = waiting
        inference = work.__self__
        assert len(inference._source[0]) > WIDE * 4
        client.send(3, 0, 1, (8).to_bytes(4, "big"))  # RST_STREAM: CANCEL
        eventually(lambda: inference._source is None)
        server.see(lambda: then(work))
        assert client.call(3, infer_bytes(value=2)).status == 0
