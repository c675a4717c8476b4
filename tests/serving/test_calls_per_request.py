"""How many functions a request passes through: no layer is added to the hot path unnoticed."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit
from deploykit.serving.batching import batcher as batching
from deploykit.serving.http.connection import HttpConnection
from deploykit.serving.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    Http2Connection,
    frame,
)
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from deploykit.serving.transport import connection as shared
from tests.support.fake_engine import FakeEngine
from tests.support.serving.grpc_cases import INFER, infer_bytes
from tests.support.serving.running import binary_request
from tests.support.serving.wired import Wire, block

PACKAGE = str(Path(deploykit.__file__).parent)
CLIENTS = 32  # they form one batch, whose calls they share
HTTP_CALLS, GRPC_CALLS = 64, 107  # of Python and C functions per request


@pytest.fixture
def server(
    monkeypatch: pytest.MonkeyPatch, eventually: Callable[[Callable[[], object]], object]
) -> Iterator[Server]:
    """It runs batches on this thread and does not wait for the next request."""
    for module, name, value in (  # the profiler, and a busy machine, make requests slow
        (shared, "TURN_S", 60),
        (shared, "_SHORT_S", 60),
        (batching, "GATHER_US", 60_000_000),
        (batching, "SLOW_US", 60_000_000),
    ):
        monkeypatch.setattr(module, name, value)
    found = Server({"m": FakeEngine()}, ServeOptions(http_port=0, grpc_port=0))
    batcher = found.repository.models["m"].batcher
    batcher.inline_max_rows, batcher._spin_us = CLIENTS, 0
    eventually(lambda: batcher._idle)  # else the engine's thread runs what it finds first
    yield found
    found.repository.close(drain=False)
    found._offload.close()
    found._release()


def run(server: Server, act: Callable[[], None]) -> None:
    async def answer() -> None:
        act()
        for _ in range(4):  # the loop runs the batch and writes the replies
            await asyncio.sleep(0)

    server._loop.run_until_complete(answer())


def count_calls(server: Server, send_all: Callable[[], None]) -> Counter[str]:
    """Calls per request of our functions, and of C functions by ours, once the caches are full."""
    counts: Counter[str] = Counter()

    def see(frame: Any, event: str, argument: Any) -> None:
        place = frame.f_code
        if place.co_filename.startswith(PACKAGE) and event in ("call", "c_call"):
            inside = f"{place.co_filename.removeprefix(PACKAGE)}:{place.co_name}"
            counts[inside if event == "call" else f"{argument.__name__} in {inside}"] += 1

    run(server, send_all)
    sys.setprofile(see)
    try:
        run(server, send_all)
    finally:
        sys.setprofile(None)
    return Counter({name: count / CLIENTS for name, count in counts.items()})


def test_an_http_request_passes_through_few_functions(server: Server) -> None:
    wires = [Wire() for _ in range(CLIENTS)]
    connections = [HttpConnection(server._listener) for _ in wires]
    for connection, wire in zip(connections, wires, strict=True):
        connection.connection_made(wire)
    request = binary_request(np.ones((1, 4), np.float32))

    def send_all() -> None:
        for connection in connections:
            connection.get_buffer(-1)[: len(request)] = request
            connection.buffer_updated(len(request))

    calls = count_calls(server, send_all)
    assert all(wire.out.count(b"HTTP/1.1 200 OK") == 2 for wire in wires)
    assert sum(calls.values()) <= HTTP_CALLS, calls


def test_a_grpc_call_passes_through_few_functions(server: Server) -> None:
    assert server._grpc is not None
    wires = [Wire() for _ in range(CLIENTS)]
    connections = [Http2Connection(server._grpc) for _ in wires]
    message = infer_bytes()
    prefixed = b"\0" + len(message).to_bytes(4, "big") + message
    headers = block(path=INFER, without=b"te")
    numbers = iter((1, 3))

    def connect() -> None:
        for connection, wire in zip(connections, wires, strict=True):
            connection.connection_made(wire)
            connection.data_received(PREFACE + frame(SETTINGS, 0, 0))

    def send_all() -> None:
        number = next(numbers)
        data = frame(HEADERS, END_HEADERS, number, headers)
        data += frame(DATA, END_STREAM, number, prefixed)
        for connection in connections:
            connection.data_received(data)

    run(server, connect)
    calls = count_calls(server, send_all)
    assert all(wire.out.count(b"\x0bgrpc-status\x010") == 2 for wire in wires)
    assert sum(calls.values()) <= GRPC_CALLS, calls
