"""gRPC messages that are slow or large to decode: bounded before they are parsed, off the loop."""

from __future__ import annotations

import gzip
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.engines.oip import MESSAGES
from deploykit.serving.oip import messages
from tests.support.fake_engine import FakeEngine
from tests.support.serving.grpc_cases import (
    INFER,
    STREAM,
    Echo,
    Frames,
    Serving,
    first_value,
    frames,
    infer_bytes,
    serving,
)

INVALID, TOO_LARGE, UNAVAILABLE = 3, 8, 14


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    models = {"m": FakeEngine(), "s": Echo("string", "W"), "wide": FakeEngine(width=200_000)}
    with serving(models) as running:
        yield running
        memory = running.grpc.memory
        with frames(running.port) as after:
            assert first_value(after.call(1, infer_bytes(value=20))) == 41
            after.settle()
        assert running.see(lambda: memory.bytes) == 0


@pytest.fixture
def client(served: Serving) -> Iterator[Frames]:
    with frames(served.port) as client:
        yield client


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that parse messages of inference."""
    found: list[str] = []
    parse = messages.parse

    def see(name: str, data: bytes) -> Any:
        found.append(threading.current_thread().name)
        return parse(name, data)

    monkeypatch.setattr(messages, "parse", see)
    return found


def held(server: Any) -> list[tuple[Any, Any]]:
    """What is to run elsewhere from now on, work and what follows it, and does not run."""
    waiting: list[tuple[Any, Any]] = []
    server.offload = lambda work, then, **_: waiting.append((work, then))
    return waiting


def noted(server: Any) -> list[Any]:
    """The work that runs elsewhere from now on."""
    seen, offload = [], server.offload

    def run(work: Any, then: Any, **more: Any) -> None:
        seen.append(work)
        offload(work, then, **more)

    server.offload = run
    return seen


def field(number: int, content: bytes) -> bytes:
    """A field of protobuf with its length."""
    out, size = bytes([number << 3 | 2]), len(content)
    while size > 127:
        out += bytes([size & 127 | 128])
        size >>= 7
    return out + bytes([size]) + content


def contents(number: int, data: bytes, shape: bytes = b"\1\4") -> bytes:
    """A request with one input, whose contents are `data` in the field of that number."""
    inside = data if number == 0 else field(number, data)
    tensor = field(1, b"x") + field(2, b"FP32") + field(3, shape) + field(5, inside)
    return field(1, b"m") + field(5, tensor)


HOSTILE = {
    "tiny fields at the top": (b"\x0a\0" * 500_000, "more than 1024 fields"),
    "empty inputs": (field(1, b"m") + b"\x2a\0" * 900, "900 inputs, the model has 1"),
    "empty strings": (contents(0, b"\x42\0" * 400_000), "more than 262144 fields"),
    "a long shape": (contents(6, bytes(16), b"\1" * 100_000), "100000 axes"),
    "many packed numbers": (contents(1, b"\1" * 5_000_000), "more than 262144 elements"),
    "much that is not raw": (contents(6, bytes(17 << 20)), "without raw_input_contents"),
    **{
        f"a broken field {data!r}": (data, "not a valid ModelInferRequest")
        for data in (b"\x0a", b"\x0a\x80", b"\x09\0", b"\x0d\0", b"\x0c", b"\xff" * 1000)
    },
    "a long name": (field(1, b"x" * 70_000), "name or version has 70000 bytes"),
    "a name that is not UTF-8": (field(1, b"\xff") + field(4, bytes(70_000)), "not a valid"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_message_is_refused_before_it_is_parsed(
    client: Frames, threads: list[str], name: str
) -> None:
    data, said = HOSTILE[name]
    refused = client.call(1, data)
    assert refused.status in (INVALID, TOO_LARGE)
    assert said in refused.headers["grpc-message"]
    assert all("deploykit" in thread for thread in threads) or len(data) < 32 << 10


def test_splitting_a_message_keeps_what_protobuf_reads() -> None:
    """Against protobuf itself, for fields in every order and cut at every place."""
    rng = np.random.default_rng(7)
    request = MESSAGES["ModelInferRequest"].FromString(infer_bytes(id="a", value=3))
    request.raw_input_contents.append(b"second")
    pieces = [
        field(1, b"m"),
        field(3, b"a"),
        field(5, request.inputs[0].SerializeToString()),
        *(field(7, each) for each in request.raw_input_contents),
        b"\x78\5" + b"\x7d" + bytes(4),  # unknown fields
    ]
    for _ in range(300):
        data = b"xy" + b"".join(pieces[i] for i in rng.permutation(len(pieces)))
        data = data[: rng.integers(2, len(data) + 1)]
        try:
            split = messages.split_request(data, 2)
        except BadInput:
            with pytest.raises(BadInput):
                messages.parse("ModelInferRequest", data[2:])
            continue
        whole = messages.parse("ModelInferRequest", data[2:])
        assert [data[2 + at : 2 + at + n] for at, n in split.spans] == whole.raw_input_contents
        del whole.raw_input_contents[:]
        assert messages.parse("ModelInferRequest", split.head) == whole
        assert (split.model, split.version) == (whole.model_name, whole.model_version)
        assert messages.split_request(data, 2) == split  # remembered


def test_large_contents_and_large_strings_are_decoded_off_the_loop(
    client: Frames, threads: list[str], served: Serving
) -> None:
    request = MESSAGES["ModelInferRequest"](model_name="wide")
    item = request.inputs.add(name="x", datatype="FP32", shape=[1, 200_000])
    item.contents.fp32_contents.extend([4.0] * 200_000)
    client.open_windows()
    assert first_value(client.call(1, request.SerializeToString())) == 9
    assert [name for name in threads if "deploykit" not in name] == []
    offloaded = noted(served.grpc.routes["s"])
    strings = MESSAGES["ModelInferRequest"](model_name="s")
    strings.inputs.add(name="x", datatype="BYTES", shape=[1, 10_000])
    strings.raw_input_contents.append(bytes(40_000))
    assert client.call(3, strings.SerializeToString()).status == 0
    assert len(offloaded) == 2  # decoded, and encoded


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_messages_that_expand_are_decompressed_off_the_loop_in_order(path: str) -> None:
    plain = infer_bytes(value=3, width=200_000)
    bomb, small = gzip.compress(plain), gzip.compress(infer_bytes(value=5, width=200_000)[:50])
    with serving({"m": FakeEngine(width=200_000)}) as server, frames(server.port) as client:
        shared = server.grpc
        asked = noted(shared)
        client.open_windows()
        client.start(1, bomb, path, compressed=1, end=path == INFER, grpc_encoding="gzip")
        if path == STREAM:
            client.message(1, small, compressed=1, end=False)
            client.message(1, bomb, compressed=1)
        answer = client.answer(1)
        assert answer.status == 0
        assert len(asked) == (1 if path == INFER else 3)
        if path == STREAM:
            assert answer.data.count(b"not a valid") == 1
            assert answer.data.index(b"not a valid") in range(700_000, 900_000)
        client.settle()
        assert server.see(lambda: shared.memory.bytes) < 1 << 20


def test_expanded_messages_share_the_memory_limit_and_are_forgotten_with_their_call() -> None:
    limit, bomb = 4 << 20, zlib.compress(bytes(3 << 20), 9)
    with (
        serving(max_held_bytes=limit, max_body_bytes=limit) as server,
        frames(server.port) as client,
    ):
        shared = server.grpc
        waiting = held(shared)
        for stream in range(1, 20, 2):
            client.start(stream, bomb, STREAM, compressed=1, end=False, grpc_encoding="deflate")
        client.settle()
        assert len(waiting) == 10
        assert server.see(lambda: shared.unanswered) == 10  # a shutdown waits for them
        first, *others = list(waiting)
        client.cancel(1)
        client.settle()
        server.see(lambda: first[1](first[0]))
        assert server.see(lambda: (shared.unanswered, shared.memory.bytes < 1 << 20)) == (9, True)
        most = 0
        for work, then in others:
            server.see(lambda work=work, then=then: then(work))
            most = max(most, server.see(lambda: shared.memory.bytes))
        assert 0 < most <= limit


def test_shared_memory_that_requests_refer_to_is_counted(shared: str) -> None:
    width = 1 << 18
    Path("/dev/shm", shared[1:]).write_bytes(bytes(4 * width))
    options = {"shared_memory": True, "max_held_bytes": 6 * width}
    with (
        serving({"m": FakeEngine(width=width)}, **options) as server,
        frames(server.port) as client,
    ):
        memory = server.repository.memory
        assert memory is not None
        memory.register("r", shared, 0, 4 * width)
        request = MESSAGES["ModelInferRequest"](model_name="m")
        item = request.inputs.add(name="x", datatype="FP32", shape=[1, width])
        item.parameters["shared_memory_region"].string_param = "r"
        item.parameters["shared_memory_byte_size"].int64_param = 4 * width
        waiting = held(server.grpc.routes["m"])
        for stream in (1, 3, 5):
            client.start(stream, request.SerializeToString())
        client.settle()
        assert len(waiting) == 3

        def decode() -> None:
            for work, then in waiting:
                result = work()
                then(lambda result=result: result)

        server.see(decode)
        assert [client.answer(stream).status for stream in (3, 5)] == [UNAVAILABLE] * 2
