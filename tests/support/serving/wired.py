"""An HTTP/2 connection of the server without a socket: bytes in, bytes out, one thread."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from deploykit.serving.grpc.call import GrpcCall, Method, parse_head
from deploykit.serving.http2 import Http2Connection, Http2Limits, Http2Port
from deploykit.serving.transport.connection import MemoryBudget
from tests.support.serving.grpc_cases import LIVE


class Wire(asyncio.Transport):
    """Keeps what is written until `take`."""

    def __init__(self) -> None:
        super().__init__()
        self.out = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        self.out += data

    def take(self) -> bytes:
        found, self.out = bytes(self.out), bytearray()
        return found

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


def _echo(call: GrpcCall, data: bytes, at: int) -> None:
    call.reply([data[at:]])


def _echo_twice(call: GrpcCall, data: bytes, at: int) -> None:
    call.send_message([data[at:]])
    call.unreplied += 1
    call.send_message([data[at:]])


METHODS = {
    "/echo": Method(_echo),
    "/stream": Method(_echo_twice, lambda call: call.complete()),
}


def block(*more: tuple[bytes, bytes], without: bytes = b"", path: str = LIVE) -> bytes:
    """The headers of a call as HPACK literals; `more` come last, and replace none."""
    pairs = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
    pairs = [pair for pair in pairs if pair[0] != without] + list(more)
    return b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in pairs
    )


class Wired:
    """One connection to methods that echo. `close` it."""

    def __init__(self, limits: Http2Limits | None = None, max_bytes: int = 1 << 20) -> None:
        self.loop = asyncio.new_event_loop()
        limits = limits or Http2Limits()
        parse = partial(parse_head, METHODS, lambda _: True, limits.headers)
        self.now_s = 0.0
        self.memory = MemoryBudget(1 << 30, max_bytes)
        self.shared = Http2Port(
            parse, GrpcCall, limits, max_bytes, self.memory, lambda work, then: then(work)
        )
        self.shared.turns.clock_s = lambda: self.now_s
        self.shared.now_s = 0.0
        self.wire = Wire()
        self.connection = Http2Connection(self.shared)
        self.turn(self.connection.connection_made, self.wire)

    def turn(self, function: Any, *arguments: Any) -> int:
        """Call it on the loop, and run what it started; returns how many turns that took."""

        async def call() -> int:
            function(*arguments)
            turns = 1
            await asyncio.sleep(0)
            while (
                self.shared.turns.waiting or self.connection._writes or self.connection._will_push
            ):
                await asyncio.sleep(0)
                turns += 1
            return turns

        return self.loop.run_until_complete(call())

    def feed(self, data: bytes) -> int:
        return self.turn(self.connection.data_received, data)

    def tick(self, later_s: float = 0.1) -> None:
        self.now_s += later_s
        self.turn(self.shared.tick, self.now_s)

    def close(self) -> None:
        self.turn(self.connection.connection_lost, None)
        self.loop.close()
