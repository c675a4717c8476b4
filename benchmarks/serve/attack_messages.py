"""Attacks by messages of gRPC that are slow, large or strange to decode."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from attack_client import (
    DATA,
    END,
    END_HEADERS,
    HEADERS,
    INFER,
    STREAM,
    Attack,
    Client,
    block,
    packed,
    prefixed,
    swarm,
)

from deploykit.engines.oip.protobuf import MESSAGES

Late = Callable[[], bool]


def message(
    model: str = "m",
    datatype: str = "FP32",
    shape: Sequence[int] = (1, 4),
    raw: bytes | None = None,
    **contents: Any,
) -> bytes:
    """A ModelInferRequest with one input."""
    request = MESSAGES["ModelInferRequest"](model_name=model)
    item = request.inputs.add(name="x", datatype=datatype, shape=shape)
    for name, values in contents.items():
        getattr(item.contents, name).extend(values)
    if raw is not None:
        request.raw_input_contents.append(raw)
    data: bytes = request.SerializeToString()
    return data


def field(number: int, content: bytes) -> bytes:
    """A field of protobuf with its length."""
    out, size = bytes([number << 3 | 2]), len(content)
    while size > 127:
        out += bytes([size & 127 | 128])
        size >>= 7
    return out + bytes([size]) + content


def large(
    make: Callable[[], bytes],
    clients: int = 8,
    *,
    compressed: int = 0,
    path: str = INFER,
    **headers: str,
) -> Attack:
    """The same message in call after call."""

    async def attack(port: int, seconds: float) -> None:
        data = prefixed(make(), compressed)

        async def one(client: Client, late: Late) -> None:
            for number in itertools.count(1, 2):
                if late():
                    return
                before = client.answered
                await client.send(packed(HEADERS, END_HEADERS, number, block(path, **headers)))
                if not await client.message(number, data):
                    return
                while client.answered == before and not (late() or client.ended):
                    await client.wait(0.1)

        await swarm(port, seconds, clients, one)

    return attack


def flood(make: Callable[[], bytes], clients: int, calls: int, **headers: str) -> Attack:
    """Many calls at once on each connection, each with the same DATA, which fit in a frame."""

    async def attack(port: int, seconds: float) -> None:
        data, path = make(), headers.pop("path", STREAM)
        start = block(path, **headers)

        async def one(client: Client, late: Late) -> None:
            number = 1
            while not late():
                before = client.answered
                whole = b"".join(
                    packed(HEADERS, END_HEADERS, n, start) + packed(DATA, END, n, data)
                    for n in range(number, number + 2 * calls, 2)
                )
                if not await client.send(whole):
                    return
                number += 2 * calls
                while client.answered < before + calls and not (late() or client.ended):
                    await client.wait(0.1)

        await swarm(port, seconds, clients, one)

    return attack


LISTED: dict[str, Attack] = {
    "fp32_contents of 15 MB": large(
        lambda: message(shape=[1, 3_900_000], fp32_contents=[1.5] * 3_900_000)
    ),
    "fp64_contents of 15 MB": large(
        lambda: message("f64", "FP64", [1, 1_900_000], fp64_contents=[1.5] * 1_900_000)
    ),
    "int64_contents of 15 MB": large(
        lambda: message("i64", "INT64", [1, 3_900_000], int64_contents=[1 << 25] * 3_900_000)
    ),
    "bool_contents of 4 MB": large(
        lambda: message("flag", "BOOL", [1, 4_000_000], bool_contents=[True] * 4_000_000)
    ),
    "260,000 strings in bytes_contents": large(
        lambda: message("text", "BYTES", [1, 260_000], bytes_contents=[b"abcd"] * 260_000)
    ),
    "15 strings of 1 MB in bytes_contents": large(
        lambda: message("text", "BYTES", [1, 15], bytes_contents=[bytes(1 << 20)] * 15)
    ),
}
OWN: dict[str, Attack] = {
    "900,000 strings in raw contents": large(
        lambda: message("text", "BYTES", [1, 900_000], b"\2\0\0\0ab" * 900_000)
    ),
    "200,000 strings in raw contents, 32 clients": large(
        lambda: message("text", "BYTES", [1, 200_000], b"\2\0\0\0ab" * 200_000), 32
    ),
    "a model's name of 60 MB": large(lambda: field(1, "\U0001f600".encode() * 15_000_000), 4),
    "60 MB of an unknown field": large(lambda: field(15, bytes(60 << 20)), 4),
    "an id of 30 MB": large(lambda: message(raw=bytes(16)) + field(3, b"i" * (30 << 20)), 4),
    "calls with 60 kB of damaged gzip": large(
        lambda: gzip.compress(bytes(9))[:10] + bytes(66_000), 64, compressed=1, grpc_encoding="gzip"
    ),
    "small messages in 200 parts of gzip": flood(
        lambda: prefixed(gzip.compress(b"") * 200, 1) * 3, 16, 64, grpc_encoding="gzip"
    ),
    "500 small messages of gzip in each of 64 streams": flood(
        lambda: prefixed(zlib.compress(bytes(60_000)), 1) * 150, 16, 64, grpc_encoding="deflate"
    ),
    "typed contents of 31 kB": flood(
        lambda: prefixed(message(shape=[1, 3_900], fp32_contents=[1.5] * 3_900)), 16, 16, path=INFER
    ),
    "parameters with 900 keys": flood(
        lambda: prefixed(
            field(1, b"m") + b"".join(field(4, field(1, b"k%d" % n)) for n in range(900))
        ),
        16,
        64,
    ),
    "shapes of 64 axes of 2^62": flood(
        lambda: prefixed(message(shape=[1 << 62] * 64, raw=b"")) * 20, 16, 64
    ),
    "900 inputs of 1 byte each": flood(
        lambda: prefixed(field(1, b"m") + field(5, field(1, b"y")) * 900), 16, 64
    ),
}
ATTACKS = {**LISTED, **OWN}
