"""The limit on the bytes of all requests that a server holds at once."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deploykit.serving.transport.call import MemoryBudget
from tests.support.serving.grpc_cases import INFER, Answer, frames, infer_bytes, serving
from tests.support.serving.memory import held_bytes, raw_infer, send_without_end
from tests.support.serving.running import WAIT_S, GatedEngine, Raw, request, running

LIMIT = 1 << 20
WIDTH = LIMIT // 8  # elements: half of the limit in a request
Eventually = Callable[[Callable[[], bool]], None]


def test_a_request_alone_in_the_server_may_exceed_the_limit() -> None:
    budget = MemoryBudget(100, 64)
    assert budget.add(150, 150)
    assert not budget.add(1, 1)
    budget.bytes -= 151
    assert budget.add(100, 50)
    assert not budget.add(1, 51)


def test_the_default_limit_is_a_quarter_of_memory_but_at_least_one_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deploykit.serving.transport.call.memory_bytes", lambda: 4000)
    assert MemoryBudget(None, 64).limit == 1000
    assert MemoryBudget(None, 2000).limit == 2000
    assert MemoryBudget(300, 2000).limit == 300


@pytest.fixture
def engine() -> GatedEngine:
    return GatedEngine(width=WIDTH)


def test_bodies_on_all_connections_share_one_limit(
    engine: GatedEngine, eventually: Eventually
) -> None:
    values = np.ones(WIDTH, np.float32)
    with running({"m": engine}, max_held_bytes=LIMIT) as server:
        raws = [server.connect() for _ in range(3)]
        for count, raw in enumerate(raws[:2], 1):
            send_without_end(raw, raw_infer(values), 8)
            eventually(lambda count=count: held_bytes(server) >= count * (LIMIT // 2 - 70_000))
        send_without_end(raws[2], raw_infer(values), 8)
        refused = raws[2].reply()
        assert refused.status == 503
        assert refused.headers["retry-after"] == "1"
        assert f"holds {LIMIT} bytes" in refused.json["error"]
        for raw in raws[:2]:
            reply = raw.ask(values.tobytes()[-8:])
            assert reply.status == 200
        eventually(lambda: held_bytes(server) == 0)
        again = server.connect()
        answered = again.ask(raw_infer(values))
        assert answered.status == 200


def test_a_request_counts_until_it_is_answered(engine: GatedEngine, eventually: Eventually) -> None:
    values = np.ones(WIDTH, np.float32)
    with running({"m": engine}, max_held_bytes=LIMIT) as server:
        engine.warm = True
        raw = server.connect()
        raw.send(raw_infer(values))
        assert engine.entered.acquire(timeout=WAIT_S)
        assert held_bytes(server) >= values.nbytes - 70_000
        engine.gate.set()
        assert raw.reply() is not None
        eventually(lambda: held_bytes(server) == 0)


@pytest.mark.parametrize("how", ["length", "chunks"])
def test_the_bytes_of_a_disconnected_client_are_released(
    engine: GatedEngine, eventually: Eventually, how: str
) -> None:
    values = np.ones(WIDTH, np.float32)
    with running({"m": engine}, max_held_bytes=LIMIT) as server:
        raw = Raw(server.port)
        if how == "length":
            send_without_end(raw, raw_infer(values), 8)
        else:
            head = request("POST", "/v2/models/m/infer")
            head = head.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
            head = head.replace(b"Content-Length: 0\r\n", b"")
            raw.send(head + b"80000\r\n" + values.tobytes()[:-8])
        eventually(lambda: held_bytes(server) >= values.nbytes - 70_000)
        raw.close()
        eventually(lambda: held_bytes(server) == 0)


def test_a_compressed_body_counts_with_its_decompressed_size(
    engine: GatedEngine, eventually: Eventually
) -> None:
    values = np.zeros(WIDTH, np.float32)
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
        send_without_end(first, raw_infer(values), 8)
        eventually(lambda: held_bytes(server) > 0)
        raw = server.connect()
        refused = raw.ask(data)
        assert refused.status == 503
        first.send(values.tobytes()[-8:])
        assert first.reply() is not None
        eventually(lambda: held_bytes(server) == 0)


def test_held_bytes_and_their_limit_are_in_the_metrics() -> None:
    with running(max_held_bytes=LIMIT) as server:
        text = server.ask("GET", "/metrics").body.decode()
        assert "deploykit_held_bytes 0.0\n" in text
        assert "deploykit_held_limit_bytes 1.048576e+06\n" in text


def test_grpc_messages_on_all_connections_share_one_limit(eventually: Eventually) -> None:
    size = LIMIT // 2
    message = b"\0" + (size + 8).to_bytes(4, "big") + bytes(size - 5)  # 8 are still to come
    with serving(max_held_bytes=LIMIT) as server:
        budget = server.grpc.memory
        with frames(server.port) as first:
            for stream in (1, 3):
                first.open(stream)
                for at in range(0, len(message), 1 << 14):
                    first.send(0, 0, stream, message[at : at + (1 << 14)])
            eventually(lambda: budget.bytes == LIMIT)
            with frames(server.port) as second:
                refused = second.call(1, infer_bytes())
                assert refused.status == 14
                assert f"holds {LIMIT} bytes" in refused.headers["grpc-message"]
        eventually(lambda: budget.bytes == 0)
        with frames(server.port) as again:
            assert again.call(1, infer_bytes()).status == 0
            eventually(lambda: budget.bytes == 0)


def messages(data: bytes) -> int:
    """How many gRPC messages there are in the data of a stream."""
    found = 0
    while len(data) >= 5:
        data = data[5 + int.from_bytes(data[1:5], "big") :]
        found += 1
    return found


def test_each_message_of_a_grpc_stream_counts_until_its_answer(eventually: Eventually) -> None:
    stream = INFER.replace("ModelInfer", "ModelStreamInfer")
    with serving() as server, frames(server.port) as client:
        budget = server.grpc.memory
        client.open(1, stream)
        for value in range(3):
            client.message(1, infer_bytes(value=value), end=False)
        answer = client.until(lambda: messages(client.answers.get(1, Answer()).data) == 3, 1)
        eventually(lambda: budget.bytes == 0)
        assert not answer.ended


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_large_grpc_message_of_a_cancelled_call_is_released(
    eventually: Eventually, method: str
) -> None:
    from deploykit.engines.oip.protobuf import MESSAGES

    message = MESSAGES["ModelInferRequest"](model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=[1, WIDTH])
    message.inputs[0].contents.fp32_contents.extend([1.0] * WIDTH)
    waiting: list[Any] = []
    with serving() as server, frames(server.port) as client:
        server.grpc.inference.routes["m"].offload = lambda work, then, **_: waiting.append(
            (work, then)
        )
        client.start(
            1,
            message.SerializeToString(),
            INFER.replace("ModelInfer", method),
            end=method == "ModelInfer",
        )
        eventually(lambda: len(waiting) == 1)
        ((work, then),) = waiting
        inference = work.__self__
        assert len(inference._source[0]) > WIDTH * 4
        client.cancel(1)  # RST_STREAM: CANCEL
        eventually(lambda: inference._source is None)
        server.see(lambda: then(work))
        assert client.call(3, infer_bytes(value=2)).status == 0
