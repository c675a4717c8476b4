"""Hostile HTTP messages: the answer, and what must hold after each of them."""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import json
import logging
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.serving.memory import held_bytes
from tests.support.serving.running import (
    Raw,
    Reply,
    Running,
    free_axis,
    infer_json,
    request,
    running,
)

INFER = "/v2/models/m/infer"
ROW = infer_json([1, 2, 3, 4], [1, 4])
GOOD = request("POST", INFER, ROW)
LIMIT = 1 << 20
PACKED = gzip.compress(ROW)
CHUNKED = request("POST", INFER, Transfer_Encoding="chunked")
REPEATS = 10
_ROUNDS = 5  # until nothing grows
_LEAKS = re.compile(r"Traceback|\.py\b|/tmp/|/home/|/root/|0x[0-9a-f]{6,}|Thread|object at")
Message = bytes | Callable[[], bytes]


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    with running(max_body_bytes=LIMIT) as server:
        yield server


def send(server: Running, data: bytes) -> Reply:
    with contextlib.closing(Raw(server.port)) as raw:
        with contextlib.suppress(OSError):  # refused before it was read: the answer is there
            raw.send(data)
        return raw.reply(body=not data.startswith(b"HEAD"))


def survives(
    server: Running, data: bytes, wanted: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> str:
    """Returns the error: one line of the log, without anything of our insides."""
    good = send(server, GOOD)
    caplog.clear()
    with caplog.at_level(logging.INFO, "deploykit"):
        reply = send(server, data)
    assert reply.status in wanted, reply
    assert send(server, GOOD).body == good.body
    if reply.status == 200:
        return ""
    assert list(reply.json) == ["error"]
    error: str = reply.json["error"]
    assert not _LEAKS.search(error), error
    (line,) = [each for each in caplog.records if each.name.startswith("deploykit")]
    assert line.getMessage().isprintable()
    assert line.exc_info is None
    return error


def encoded(body: bytes, encoding: str, **headers: str) -> bytes:
    return request("POST", INFER, body, Content_Encoding=encoding, **headers)


def json_size(value: str, body: bytes = ROW) -> bytes:
    return request("POST", INFER, body, Inference_Header_Content_Length=value)


NAMES = [
    *("../etc", "a/../b", "../../etc/passwd", "/etc/passwd", "model/..", "..", "model/"),
    *("%20..", "..%20", "%20", "%09", "%0a", "", "%2e%2e%2fetc", "m%00", "A" * 256, "<img>"),
    *("model.version1", "..my_model", "model..1", "model....1", "m\\x", "a%0aERROR\x1b[2J"),
]
ATTACKS: dict[str, tuple[Message, int | tuple[int, ...]]] = {
    "length and chunks": (
        request("POST", "/v2", Content_Length="6", Transfer_Encoding="chunked") + b"0\r\n\r\nX",
        400,
    ),
    "two lengths": (request("POST", INFER, Content_Length="5\r\nContent-Length: 6"), 400),
    "two hosts": (request("GET", "/v2", Host="localhost\r\nHost: localhost"), 400),
    **{
        f"a length of {length}": (request("POST", INFER, Content_Length=length), (400, 413))
        for length in ("+5", "-1", "1e3", "9" * 23)
    },
    **{
        f"the coding {coding}": (request("POST", INFER, Transfer_Encoding=coding), 400)
        for coding in ("xchunked", "gzip, chunked")
    },
    "chunks in HTTP/1.0": (
        b"POST /v2/repository/index HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    **{
        f"a chunk {chunk!r}": (CHUNKED + chunk + b"0\r\n\r\n", 400)
        for chunk in (b"0x5\r\nabcde\r\n", b"-5\r\nabcde\r\n", b"5\r\nabcdeXX", b"5\nabcde\r\n")
    },
    "a bare LF after the chunks": (CHUNKED + b"0\r\nx: y\n\r\n", 400),
    "a chunk's size of 17 digits": (CHUNKED + b"0" * 16 + b"5\r\nabcde\r\n0\r\n\r\n", 400),
    "a large header": (request("GET", "/v2", long="a" * 70_000), 431),
    "an endless header": (lambda: request("GET", "/v2", long="a" * 20_000_000), 431),
    "large headers": (request("GET", "/v2", **{f"h{i}": "a" * 1000 for i in range(70)}), 431),
    "101 headers": (request("GET", "/v2", **{f"h{i}": "1" for i in range(101)}), 431),
    "a target of 70 kB": (request("GET", "/" + "a" * 70_000), (414, 400)),
    "a target of 9 kB": (request("GET", "/" + "a" * 9000), 414),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "no host": (b"GET /v2/health/live HTTP/1.1\r\n\r\n", 400),
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50), 400),
    "a large chunk": (lambda: CHUNKED + b"ffffff\r\n" + bytes(LIMIT), 413),
    "one byte over": (request("POST", INFER, Content_Length=str(LIMIT + 1)), 413),
    "a million chunks": (lambda: CHUNKED + b"1\r\na\r\n" * 1_000_000, (400, 413)),
    "OPTIONS": (request("OPTIONS", INFER), 405),
    "HEAD": (request("HEAD", "/v2/health/live"), 200),
    **{
        f"{method} {target}": (request(method, target, b"{}"), 501)
        for method, target in (
            ("POST", "/v2/repository/models/m/load"),
            ("POST", "/v2/repository/models/m/unload"),
            ("POST", "/v2/trace/setting"),
            ("POST", "/v2/models/m/trace/setting"),
            ("POST", "/v2/logging"),
            ("POST", "/v2/cudasharedmemory/region/r/register"),
            ("POST", "/v2/systemsharedmemory/region/r/register"),
        )
    },
    **{
        f"a JSON part of {value[:11]!r} bytes": (json_size(value), 400)
        for value in ("99999999999", "-1", "abc", "", "1e3", "+5", "\xb2", "9" * 30, "9999999")
    },
    "a JSON part beyond a compressed body": (
        encoded(PACKED, "gzip", Inference_Header_Content_Length="9999999"),
        400,
    ),
    **{
        f"the version {version!r}": (
            request("POST", f"/v2/models/m/versions/{version}/infer", ROW),
            (404, 400),
        )
        for version in ("2", "-1", "1e3", "../1", "01", "9" * 20, "", "%2f1")
    },
    "a gzip bomb": (lambda: encoded(gzip.compress(bytes(100 << 20), 9), "gzip"), 413),
    "a deflate bomb": (lambda: encoded(zlib.compress(bytes(100 << 20), 9), "deflate"), 413),
    **{
        f"the encoding {name}": (encoded(PACKED, name), 415)
        for name in ("br", "zstd", "gzip, gzip")
    },
    "an encoding of escapes": (encoded(PACKED, "\x7f" * 20), 400),
    **{
        f"the model {name!r:.20} {end}": (request(method, f"/v2/models/{name}{end}"), (404, 400))
        for name in NAMES
        for method, end in (("POST", "/infer"), ("GET", ""), ("GET", "/config"))
    },
}


@pytest.mark.parametrize(("message", "status"), ATTACKS.values(), ids=ATTACKS)
def test_malformed_and_forbidden_requests_are_refused(
    small: Running,
    caplog: pytest.LogCaptureFixture,
    message: Message,
    status: int | tuple[int, ...],
) -> None:
    data = message if isinstance(message, bytes) else message()
    survives(small, data, (status,) if isinstance(status, int) else status, caplog)


def test_no_attack_leaves_files_threads_or_memory_behind(small: Running) -> None:
    messages = [data for data, _ in ATTACKS.values() if isinstance(data, bytes)]
    grown: list[tuple[int, int]] = []  # threads and bytes
    # a leak grows again; what allocators keep does not, nor do the few threads that read bodies
    while not grown or grown[-1][0] > 0 or grown[-1][1] >= 4 << 20:
        assert len(grown) < _ROUNDS, grown
        before = _settled(small)
        for data in messages * REPEATS:
            send(small, data)
        after = _settled(small, before)
        assert after["files"] <= before["files"]
        assert after["held_bytes"] == 0  # as the server counts them
        grown.append(
            (after["threads"] - before["threads"], after["rss_bytes"] - before["rss_bytes"])
        )


def _resources(server: Running) -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "files": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": threading.active_count(),
        "held_bytes": held_bytes(server),
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def _settled(server: Running, before: dict[str, int] | None = None) -> dict[str, int]:
    """What is held once the server has seen that its clients left; `before`: as much as then."""
    pause = threading.Event()
    for _ in range(6000):
        after = _resources(server)
        if after["files"] <= (before or after)["files"] and not after["held_bytes"]:
            break
        pause.wait(0.01)
    ctypes.CDLL(None).malloc_trim(0)
    return {**after, "rss_bytes": _resources(server)["rss_bytes"]}


def test_unknown_model_names_add_no_metrics(small: Running) -> None:
    raw = small.connect()
    before = small.ask("GET", "/metrics").body.count(b"\ndeploykit_")
    for start in range(0, 500, 10):
        raw.send(b"".join(request("POST", f"/v2/models/x{start + i}/infer") for i in range(10)))
        assert [raw.reply().status for _ in range(10)] == [404] * 10
    metrics = small.ask("GET", "/metrics").body.decode()
    assert set(re.findall(r'model="([^"]*)"', metrics)) == {"m"}
    assert metrics.count("\ndeploykit_") - before <= 1  # the status 404


def test_json_that_decodes_above_the_body_limit_gets_413() -> None:
    """200,000 zeros are below the limit as JSON and above it as FP32."""
    with running({"m": free_axis()}, max_body_bytes=500_000) as server:
        item = {"name": "x", "datatype": "FP32", "shape": [1, 200_000]}
        body = json.dumps({"inputs": [{**item, "data": [0] * 200_000}]}, separators=(",", ":"))
        reply = server.ask("POST", INFER, body.encode())
        assert reply.status == 413
        assert "`max_body_bytes`" in reply.json["error"]
