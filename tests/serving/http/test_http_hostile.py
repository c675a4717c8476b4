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
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.serving.memory import held_bytes
from tests.support.serving.running import (
    Raw,
    Reply,
    Running,
    binary_request,
    free_axis,
    infer_json,
    request,
    running,
)

INFER = "/v2/models/m/infer"
GOOD = request("POST", INFER, infer_json([1, 2, 3, 4], [1, 4]))
REPEATS = 100
CPU_LIMIT_S = 10.0  # of one message, and generous: 0.1 is much
SLACK_BYTES = 32 << 20  # growth of the memory over the repeats, if a body is read; 1 MiB if not
_ROUNDS = 5  # until nothing grows
_LEAKS = re.compile(r"Traceback|\.py\b|/tmp/|/home/|/root/|0x[0-9a-f]{6,}|Thread|object at")


class Lines(logging.Handler):
    """What the server writes to its log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage() + (record.exc_text or ""))

    def __enter__(self) -> Lines:
        logger = logging.getLogger("deploykit")
        self._level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        logging.getLogger("deploykit").removeHandler(self)
        logging.getLogger("deploykit").setLevel(self._level)


def survives(
    server: Running,
    data: bytes,
    status: int | tuple[int, ...],
    *,
    says: str = "",
    repeats: int = REPEATS,
    slack_bytes: int = SLACK_BYTES,
) -> Reply:
    """Send `data` again and again, each time on a connection of its own; returns the first reply.

    With `says`, a text that the error must hold.
    """
    wanted = (status,) if isinstance(status, int) else status
    good = _good(server)
    with Lines() as log:
        first = _one(server, data)
    # 1: the status, and one sentence
    assert first.status in wanted, first
    if first.status != 200:
        assert list(first.json) == ["error"]
        text = first.json["error"]
        assert isinstance(text, str)
        assert says in text, text
        # 2: nothing of our insides
        assert not _LEAKS.search(text), text
        # 7: one line, printable
        assert len(log.lines) == 1, log.lines
        assert log.lines[0].isprintable()
    # 3: alive, and the same answer, bit for bit
    assert server.ask("GET", "/v2/health/live").status == 200
    assert _good(server) == good
    # 5: nothing grows; 6 is the CPU time of each
    grown: list[tuple[int, int]] = []  # threads and bytes
    # a leak grows again; what allocators keep does not, nor do the few threads that read bodies
    while not grown or grown[-1][0] > 0 or grown[-1][1] >= slack_bytes:
        assert len(grown) < _ROUNDS, grown
        before = _settled(server)
        for _ in range(repeats):
            assert _one(server, data).status in wanted
        assert _good(server) == good
        after = _settled(server, before)
        assert after["files"] <= before["files"]
        assert after["held_bytes"] == 0  # as the server counts them
        grown.append(
            (after["threads"] - before["threads"], after["rss_bytes"] - before["rss_bytes"])
        )
    return first


def _one(server: Running, data: bytes) -> Reply:
    raw = Raw(server.port)
    begin_s = time.process_time()
    with contextlib.suppress(OSError):  # refused before it was read: the answer is there
        raw.send(data)
    reply = raw.reply(body=not data.startswith(b"HEAD"))
    assert reply is not None, "no answer"
    assert time.process_time() - begin_s < CPU_LIMIT_S
    raw.close()
    return reply


def _good(server: Running) -> bytes:
    raw = Raw(server.port)
    reply = raw.ask(GOOD)
    raw.close()
    assert reply.status == 200
    return reply.body


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


LIMIT = 1 << 20
CHUNKED = request("POST", INFER, Transfer_Encoding="chunked")


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    with running(max_body_bytes=LIMIT) as server:
        yield server


WIRE = {
    "T5 length and chunks": (
        request("POST", "/v2", Content_Length="6", Transfer_Encoding="chunked") + b"0\r\n\r\nX",
        400,
    ),
    "T6 two lengths": (request("POST", INFER, Content_Length="5\r\nContent-Length: 6"), 400),
    "T6 +5": (request("POST", INFER, Content_Length="+5"), 400),
    "T6 -1": (request("POST", INFER, Content_Length="-1"), 400),
    "T6 1e3": (request("POST", INFER, Content_Length="1e3"), 400),
    "T6 23 digits": (request("POST", INFER, Content_Length="9" * 23), (400, 413)),
    "T7 xchunked": (request("POST", INFER, Transfer_Encoding="xchunked"), 400),
    "T7 gzip, chunked": (request("POST", INFER, Transfer_Encoding="gzip, chunked"), 400),
    "T7 chunked in HTTP/1.0": (
        b"POST /v2/repository/index HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "T8 0x5": (CHUNKED + b"0x5\r\nabcde\r\n0\r\n\r\n", 400),
    "T8 -5": (CHUNKED + b"-5\r\nabcde\r\n0\r\n\r\n", 400),
    "T8 no end": (CHUNKED + b"5\r\nabcdeXX0\r\n\r\n", 400),
    "T8 a bare LF": (CHUNKED + b"5\nabcde\r\n0\r\n\r\n", 400),
    "T8 17 digits": (CHUNKED + b"0" * 16 + b"5\r\nabcde\r\n0\r\n\r\n", 400),
    "T10 70 kB": (request("GET", "/v2", long="a" * 70_000), 431),
    "T10 20 MB": (request("GET", "/v2", long="a" * 20_000_000), 431),
    "T11 70 kB": (request("GET", "/" + "a" * 70_000), (414, 400)),
    "T11 9 kB": (request("GET", "/" + "a" * 9000), 414),
    "T10 headers of 70 kB": (
        request("GET", "/v2", **{f"h{i}": "a" * 1000 for i in range(70)}),
        431,
    ),
    "T10 101 headers": (request("GET", "/v2", **{f"h{i}": "1" for i in range(101)}), 431),
    "T12 HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "T12 no host": (b"GET /v2/health/live HTTP/1.1\r\n\r\n", 400),
    "T12 a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50), 400),
    "T13 a large chunk": (CHUNKED + b"ffffff\r\n" + bytes(LIMIT), 413),
    "T13 one byte over": (request("POST", INFER, Content_Length=str(LIMIT + 1)), 413),
    "T13 chunked, over": (CHUNKED + b"%x\r\n" % (LIMIT + 1), 413),
    "T15 OPTIONS": (request("OPTIONS", INFER), 405),
    "T15 HEAD": (request("HEAD", "/v2/health/live"), 200),
    "W1": (request("GET", "/v2", Host="evil.example"), 403),
    "W1 a host that looks local": (request("GET", "/v2", Host="127.0.0.1.evil.example"), 403),
    "W2 null": (request("DELETE", INFER, Origin="null"), 403),
    "W2 POST": (request("POST", INFER, Origin="https://evil.example"), 403),
    "W2 PUT": (request("PUT", INFER, Origin="https://evil.example"), 403),
    "W2 DELETE": (request("DELETE", INFER, Origin="https://evil.example"), 403),
    "W5 load": (request("POST", "/v2/repository/models/m/load", b"{}"), 501),
    "W5 unload": (request("POST", "/v2/repository/models/m/unload", b"{}"), 501),
    "W5 trace": (request("POST", "/v2/trace/setting", b"{}"), 501),
    "W5 trace of a model": (request("POST", "/v2/models/m/trace/setting", b"{}"), 501),
    "W5 logging": (request("POST", "/v2/logging", b"{}"), 501),
    "W5 CUDA": (request("POST", "/v2/cudasharedmemory/region/r/register", b"{}"), 501),
    "shared memory": (
        request("POST", "/v2/systemsharedmemory/region/r/register", b'{"key": "/etc/passwd"}'),
        501,
    ),
}


WIRE |= {  # B1 to B3
    f"a header length of {value[:9]}": (
        request("POST", INFER, infer_json([1] * 4, [1, 4]), Inference_Header_Content_Length=value),
        400,
    )
    for value in ("99999999999", "-1", "abc", "", "1e3", "+5", "\xb2", "9" * 30, "9999999")
}
WIRE["a header length beyond a compressed body"] = (
    request(
        "POST", INFER, gzip.compress(infer_json([1] * 4, [1, 4])),
        Content_Encoding="gzip", Inference_Header_Content_Length="9999999",
    ),
    400,
)  # fmt: skip
WIRE["a million chunks of one byte"] = (CHUNKED + b"1\r\na\r\n" * 1_000_000, (400, 413))
WIRE |= {  # N4
    f"the version {version}": (
        request("POST", f"/v2/models/m/versions/{version}/infer", infer_json([1] * 4, [1, 4])),
        (404, 400),
    )
    for version in ("2", "-1", "1e3", "../1", "01", "9" * 20, "", "%2f1")
}


@pytest.mark.parametrize(("data", "status"), WIRE.values(), ids=WIRE)
def test_malformed_and_forbidden_requests_are_refused(
    small: Running, data: bytes, status: int | tuple[int, ...]
) -> None:
    big = len(data) > 1 << 20
    survives(small, data, status, repeats=5 if big else 30, slack_bytes=4 << 20)


BODY = gzip.compress(infer_json([1, 2, 3, 4], [1, 4]))

COMPRESSED = {
    "E1 a bomb": (gzip.compress, "gzip", 413, "`max_body_bytes`"),  # packs it when the test runs
    "E1 a deflated bomb": (zlib.compress, "deflate", 413, ""),
    "E2 cut off": (BODY[:-10], "gzip", 400, ""),
    "E2 trailing bytes": (BODY + b"rubbish", "gzip", 400, ""),
    "E2 plain bytes": (infer_json([1] * 4, [1, 4]), "gzip", 400, "gzip"),
    "E2 nothing": (b"", "gzip", 400, ""),
    "E3 br": (BODY, "br", 415, ""),
    "E3 zstd": (BODY, "zstd", 415, ""),
    "E3 twice": (BODY, "gzip, gzip", 415, ""),
    "E3 an escape": (BODY, "\x7f" * 20, 400, ""),
}


@pytest.mark.parametrize(
    ("body", "encoding", "status", "says"), COMPRESSED.values(), ids=COMPRESSED
)
def test_hostile_compressed_bodies_are_refused(
    small: Running, body: bytes | Callable[..., bytes], encoding: str, status: int, says: str
) -> None:
    body = body if isinstance(body, bytes) else body(bytes(100 << 20), 9)
    data = request("POST", INFER, body, Content_Encoding=encoding)
    survives(small, data, status, says=says, repeats=30)


NAMES = [
    *("../etc", "a/../b", "../../etc/passwd", "/etc/passwd", "model/..", "..", "model/"),
    *("%20..", "..%20", "%20", "%09", "%0a", "", "%2e%2e%2fetc", "m%00", "A" * 256, "<img>"),
    *("model.version1", "..my_model", "model..1", "model....1", "m\\x"),
]


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_model_name_is_not_found_and_opens_no_file(
    small: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N1, N2, N3, N5."""
    touched: list[object] = []
    for place, attribute in (("builtins", "open"), ("os", "stat"), ("os", "open")):
        module = __import__(place)
        real = getattr(module, attribute)

        def seen(*args, real=real, **more):
            if args and isinstance(args[0], (str, bytes)) and "/proc/self" not in str(args[0]):
                touched.append(args[0])
            return real(*args, **more)

        monkeypatch.setattr(module, attribute, seen)
    for method, end in (("POST", "/infer"), ("GET", ""), ("GET", "/config")):
        data = request(method, f"/v2/models/{name}{end}")
        reply = survives(small, data, (404, 400), repeats=2)
        assert "etc" not in reply.json["error"] or "etc" in name
    assert touched == []


def test_unknown_model_names_add_no_metrics(small: Running) -> None:
    """W6."""
    raw = small.connect()
    before = small.ask("GET", "/metrics").body.count(b"\ndeploykit_")
    for start in range(0, 2000, 10):
        raw.send(b"".join(request("POST", f"/v2/models/x{start + i}/infer") for i in range(10)))
        assert [raw.reply().status for _ in range(10)] == [404] * 10
    metrics = small.ask("GET", "/metrics").body.decode()
    assert set(re.findall(r'model="([^"]*)"', metrics)) == {"m"}
    assert metrics.count("\ndeploykit_") - before <= 1  # the status 404


def test_a_request_target_is_escaped_in_the_log(small: Running) -> None:
    target = "/v2/models/a%0aERROR\x1b[2J\xe9"
    survives(small, f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), (404, 400))


def test_json_that_decodes_above_the_body_limit_gets_413() -> None:
    """B8: 200,000 zeros are below the limit as JSON and above it as FP32."""
    with running({"m": free_axis()}, max_body_bytes=500_000) as server:
        item = {"name": "x", "datatype": "FP32", "shape": [1, 200_000]}
        body = json.dumps({"inputs": [{**item, "data": [0] * 200_000}]}, separators=(",", ":"))
        reply = server.ask("POST", INFER, body.encode())
        assert reply.status == 413
        assert "`max_body_bytes`" in reply.json["error"]
        assert server.ask("POST", INFER, infer_json([1] * 4, [1, 4])).status == 200


def test_nan_in_one_request_does_not_change_others_in_its_batch() -> None:
    """D10, and the fourth check: the answer equals that of the request alone, byte for byte."""
    with running() as server:
        rows = np.array([[1, 2, 3, 4]], np.float32)
        alone = server.ask("POST", INFER, infer_json(rows[0].tolist(), [1, 4])).body
        bad = binary_request(np.array([[np.nan, np.inf, -np.inf, 1e38]], np.float32))
        good = request("POST", INFER, infer_json(rows[0].tolist(), [1, 4]))
        raw = server.connect()
        raw.send((bad + good) * 4)
        for _ in range(4):
            assert raw.reply().status == 200
            assert raw.reply().body == alone
