"""Clients that write HTTP/2 frames by hand, many at once, and count what the server says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from hpack import Decoder, HPACKError

Attack = Callable[[int, float], Awaitable[None]]  # port and seconds; prints what was answered

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
END, END_HEADERS, PADDED = 1, 4, 8
MOST = (1 << 31) - 1
SERVICE = "/inference.GRPCInferenceService/"
INFER, STREAM, LIVE = (SERVICE + name for name in ("ModelInfer", "ModelStreamInfer", "ServerLive"))
OPEN_WINDOWS = struct.pack(">HI", 4, MOST)
NO_WINDOWS = struct.pack(">HI", 4, 0)


def packed(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return struct.pack(">BHBBI", size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """An HPACK literal that enters no table; both below 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def block(path: str = INFER, **more: str) -> bytes:
    """The header block of a call."""
    pairs = {":method": "POST", ":scheme": "http", ":path": path, "te": "trailers"}
    pairs["content-type"] = "application/grpc"
    pairs.update({name.replace("_", "-"): value for name, value in more.items()})
    return b"".join(literal(name.encode(), value.encode()) for name, value in pairs.items())


def prefixed(data: bytes, compressed: int = 0) -> bytes:
    """A gRPC message."""
    return bytes([compressed]) + len(data).to_bytes(4, "big") + data


def window(stream: int, more: int) -> bytes:
    return packed(WINDOW_UPDATE, 0, stream, more.to_bytes(4, "big"))


def reset(stream: int) -> bytes:
    return packed(RST_STREAM, 0, stream, (8).to_bytes(4, "big"))


class Client:
    """One connection. `said`: what the server answered, shared by the clients of an attack."""

    def __init__(self, said: Counter[str]) -> None:
        self.said = said
        self.ended = False
        self.answered = 0  # calls
        self.changed = asyncio.Event()
        self.windows: Counter[int] = Counter({0: 65535})
        self.paused = False  # reads nothing
        self._decoder = Decoder()

    async def open(self, port: int, settings: bytes = OPEN_WINDOWS, buffer: int = 0) -> Client:
        """Connect and send the preface. `buffer`: bytes that the socket receives at most."""
        sock = socket.socket()
        sock.setblocking(False)
        if buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        self.reader, self.writer = await asyncio.open_connection(sock=sock)
        self.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + packed(SETTINGS, 0, 0, settings))
        if settings == OPEN_WINDOWS:
            self.writer.write(window(0, MOST - 65535))
        self._reading = asyncio.create_task(self._read())
        return self

    async def send(self, data: bytes) -> bool:
        """Whether the connection still stands."""
        if self.ended:
            return False
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError:
            self.ended = True
        return not self.ended

    async def message(self, stream: int, data: bytes, *, end: bool = True) -> bool:
        """DATA as fast as the server's windows allow."""
        at, size = 0, len(data)
        self.windows[stream] += 1 << 20
        while at < size:
            free = min(16384, self.windows[0], self.windows[stream], size - at)
            if free <= 0:
                self.changed.clear()
                if self.ended:
                    return False
                await self.changed.wait()
                continue
            self.windows[0] -= free
            self.windows[stream] -= free
            flags = END if end and at + free == size else 0
            if not await self.send(packed(DATA, flags, stream, data[at : at + free])):
                return False
            at += free
        return True

    async def wait(self, limit_s: float) -> None:
        """Until the server has said something."""
        self.changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.changed.wait(), limit_s)

    def abort(self) -> None:
        """Reset the connection."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
        self._reading.cancel()

    async def close(self) -> None:
        self._reading.cancel()
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def _read(self) -> None:
        try:
            while True:
                while self.paused:
                    await asyncio.sleep(0.05)
                high, low, kind, _, stream = struct.unpack(
                    ">BHBBI", await self.reader.readexactly(9)
                )
                payload = await self.reader.readexactly(high << 16 | low)
                self._count(kind, stream, payload)
        except (OSError, asyncio.IncompleteReadError):
            if not self.ended:
                self.said["closed"] += 1
        finally:
            self.ended = True
            self.changed.set()

    def _count(self, kind: int, stream: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE:
            self.windows[stream] += int.from_bytes(payload, "big")
            self.changed.set()
        elif kind == HEADERS:
            with contextlib.suppress(HPACKError):
                headers = dict(self._decoder.decode(payload))
                if "grpc-status" in headers:
                    self.said[f"status {headers['grpc-status']}"] += 1
                    self.answered += 1
                    self.changed.set()
        elif kind == RST_STREAM:
            code = int.from_bytes(payload, "big")
            if code:
                self.said[f"RST_STREAM {code}"] += 1
        elif kind == GOAWAY:
            self.said[f"GOAWAY {int.from_bytes(payload[4:8], 'big')}"] += 1
            self.ended = True
            self.changed.set()


async def swarm(
    port: int,
    seconds: float,
    clients: int,
    one: Callable[[Client, Callable[[], bool]], Awaitable[Any]],
    *,
    settings: bytes = OPEN_WINDOWS,
    buffer: int = 0,
    again: bool = True,
) -> None:
    """`one(client, late)` on so many connections at once, `again` after it has ended; prints."""
    said: Counter[str] = Counter()
    end_s = time.monotonic() + seconds

    def late() -> bool:
        return time.monotonic() > end_s

    async def run() -> None:
        while True:
            client = Client(said)
            try:
                await client.open(port, settings, buffer)
                await one(client, late)
                if client.ended:
                    client.abort()
                else:
                    await client.close()
            except OSError:
                said["refused"] += 1
                await asyncio.sleep(0.05)
            if late() or not again:
                return

    tasks = [asyncio.create_task(run()) for _ in range(clients)]
    _, left = await asyncio.wait(tasks, timeout=seconds + 3)
    for task in left:
        task.cancel()
    found = ", ".join(f"{count} {name}" for name, count in sorted(said.items()))
    print(f"{found or 'none'}{f', {len(left)} clients unfinished' if left else ''}")
