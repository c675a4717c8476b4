"""Bodies of requests: in pieces, without a copy, and large JSON that delays no other client."""

from __future__ import annotations

import gzip
import itertools
import os
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, TooLarge
from deploykit.core.json_value import MOST_JSON_VALUES, ONE_JSON
from deploykit.serving.http.head import HttpLimits
from deploykit.serving.transport.call import choose_encoding, compress, decompress
from tests.support.fake_engine import FakeEngine
from tests.support.serving.memory import held_bytes
from tests.support.serving.requests import values
from tests.support.serving.running import (
    Raw,
    Running,
    binary_request,
    free_axis,
    infer_json,
    request,
    running,
)

LARGE, SMALL = "/v2/models/m/infer", "/v2/models/small/infer"
PATIENT = HttpLimits(header_s=600, stall_s=600, idle_s=600)  # this machine may be busy
ROW = infer_json([1, 2, 3, 4], [1, 4])
GOOD = request("POST", LARGE, ROW)
WIDTH = 100_000  # as JSON above 256 KiB, which another thread reads
BIG = infer_json([0.123456] * WIDTH, [1, WIDTH])
Eventually = Callable[[Callable[[], bool]], None]


@contextmanager
def serving(**options: Any) -> Iterator[Running]:
    """`m` takes rows of any length, `small` of four."""
    with running({"small": FakeEngine(), "m": free_axis()}, **options) as server:
        yield server


# -- in pieces, and without a copy


@pytest.mark.parametrize("count", [1, 15_000, 16_384, 500_000])
def test_a_body_of_any_size_split_anywhere_arrives_whole(count: int) -> None:
    """From one packet to many; a body after its head is received directly into its buffer."""
    rows = np.random.default_rng(count).random((1, count), dtype=np.float32)
    data = binary_request(rows)
    with running({"m": free_axis()}, PATIENT) as server:
        raw = server.connect()
        raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        cuts = [0, 7, 150, len(data) // 2, len(data) - 1, len(data)]
        for begin, end in itertools.pairwise(sorted(cuts)):
            raw.send(data[begin:end])
        sender = threading.Thread(target=raw.send, args=(data + GOOD + data,))
        sender.start()
        for expected in (rows, rows, None, rows):
            reply = raw.reply()
            assert reply.status == 200
            if expected is not None:
                size = int(reply.headers["inference-header-content-length"])
                found = np.frombuffer(reply.body[size:], np.float32)
                np.testing.assert_array_equal(found, expected[0] * 2 + 1)
        sender.join()


def test_a_large_body_reaches_the_engine_without_a_copy() -> None:
    """The engine gets an aligned view of the received buffer, not a joined copy."""
    seen: list[np.ndarray] = []

    class Seeing(FakeEngine):
        def __call__(self, feeds):
            seen.append(feeds["x"])
            return super().__call__(feeds)

    rows = np.random.default_rng(0).random((1, 500_000), dtype=np.float32)
    with running({"m": Seeing(width=500_000)}, max_batch=1) as server:
        raw = server.connect()
        for name in ("", "a", "bb", "ccc"):  # the values then begin at any byte of the body
            assert raw.ask(binary_request(rows, id=name)).status == 200
            assert seen[-1].flags.aligned
            np.testing.assert_array_equal(seen[-1], rows)
            owner: Any = seen[-1]
            while getattr(owner, "base", None) is not None or isinstance(owner, memoryview):
                owner = owner.obj if isinstance(owner, memoryview) else owner.base
            assert owner.nbytes > rows.nbytes  # the buffer holds the JSON part too


def test_a_content_length_without_a_body_allocates_nothing() -> None:
    def rss_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    with running(max_body_bytes=1 << 30) as server:
        before = rss_bytes()
        for raw in [server.connect() for _ in range(20)]:
            raw.send(request("POST", LARGE, Content_Length=str(1 << 30)) + b"{")
        assert server.ask("POST", LARGE, ROW).status == 200
        assert rss_bytes() - before < 64 << 20


# -- large JSON: limited, read one at a time, and no delay for other clients


def in_work(server: Running, count: int, **headers: str) -> list[Raw]:
    """Clients whose large requests wait for a parser."""
    raws = [server.connect() for _ in range(count)]
    for raw in raws:
        raw.send(request("POST", LARGE, gzip.compress(BIG, 1) if headers else BIG, **headers))
    return raws


@pytest.mark.parametrize("headers", [{}, {"Content_Encoding": "gzip"}], ids=["plain", "gzip"])
def test_small_requests_are_answered_while_large_ones_wait(headers: dict[str, str]) -> None:
    with serving() as server:
        with ONE_JSON:
            raws = in_work(server, 6, **headers)
            for accept in ("gzip, deflate, br", "identity", "*", "gzip;q=0"):
                assert server.ask("POST", SMALL, ROW, Accept_Encoding=accept).status == 200
            small = gzip.compress(ROW)
            assert server.ask("POST", SMALL, small, Content_Encoding="gzip").status == 200
            assert server.ask("GET", "/metrics").status == 200
            raws[0].send(GOOD + request("GET", "/v2/health/live"))
        assert [raw.status() for raw in raws] == [200] * 6
        assert raws[0].reply().json["outputs"][0]["data"] == [3, 5, 7, 9]  # in their order
        assert raws[0].reply().json == {"live": True}


def test_a_large_request_waits_for_its_time_limit_at_most(eventually: Eventually) -> None:
    with serving(timeout_ms=500) as server:
        with ONE_JSON:
            replies = [raw.reply() for raw in in_work(server, 4)]
        assert [reply.status for reply in replies] == [504] * 4
        assert "time limit" in replies[0].json["error"]
        eventually(lambda: held_bytes(server) == 0)


def test_the_clients_own_time_limit_includes_the_decoding() -> None:
    with serving() as server:
        body = infer_json([0.5] * WIDTH, [1, WIDTH], parameters={"timeout": 1})
        assert server.ask("POST", LARGE, body).status == 504


def test_a_thread_that_cannot_start_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with serving() as server:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        packed = gzip.compress(ROW)
        assert server.ask("POST", LARGE, BIG).status == 503
        assert server.ask("POST", SMALL, packed, Content_Encoding="gzip").status == 503
        assert server.ask("GET", "/metrics").status == 503
        assert server.ask("POST", SMALL, ROW).status == 200
        monkeypatch.undo()


@pytest.mark.parametrize("count", [1000, 150_000])
def test_an_answer_is_the_same_wherever_its_json_is_decoded(count: int) -> None:
    """On the event loop or in a thread, written in one part or in several."""
    body = infer_json([0.5] * count, [1, count])
    with serving() as server:
        plain = server.ask("POST", LARGE, body)
        packed = {"Content_Encoding": "gzip", "Accept_Encoding": "gzip"}
        small = server.ask("POST", LARGE, gzip.compress(body), **packed)
        wrong = server.ask("POST", LARGE, infer_json([0.5] * count, [1, count + 1]))
    assert plain.status == 200
    assert plain.json["outputs"][0]["data"] == [2.0] * count
    assert gzip.decompress(small.body) == plain.body
    assert (wrong.status, f"'data' has {count}" in wrong.json["error"]) == (400, True)


@pytest.mark.parametrize("text", ["1", '{"a":1}'])
def test_json_of_more_values_than_a_parser_may_hold_is_refused(text: str) -> None:
    data = ",".join([text] * MOST_JSON_VALUES)
    body = infer_json("data", [1, 1]).replace(b'"data"}', b"[%s]}" % data.encode())
    with serving() as server:
        refused = server.ask("POST", LARGE, body)
        packed = server.ask("POST", LARGE, gzip.compress(body), Content_Encoding="gzip")
        values = np.ones((1, 2 * MOST_JSON_VALUES), np.float32)
        assert server.connect().ask(binary_request(values)).status == 200  # which have no limit
    assert (refused.status, packed.status) == (413, 413)
    assert f"more than {MOST_JSON_VALUES} values" in refused.json["error"]
    assert "binary_data_size" in refused.json["error"]


def test_a_body_being_decoded_at_shutdown_is_answered(eventually: Eventually) -> None:
    with serving() as server:
        with ONE_JSON:
            (raw,) = in_work(server, 1)
            eventually(lambda: server.server._listener.unanswered == 1)
            server.server.stop()
            eventually(lambda: server.server.repository.leaving)
        assert raw.status() == 200
        assert raw.ended()
        assert server.stop() == 0


# -- Compressed bodies, and content negotiation


LIMIT = 1 << 20
PACK = {b"gzip": gzip.compress, b"deflate": zlib.compress}


@pytest.mark.parametrize("encoding", PACK, ids=str)
@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, LIMIT])
@pytest.mark.parametrize("noise", [False, True], ids=["zeros", "noise"])
def test_data_are_decompressed_unchanged_up_to_the_limit(
    encoding: bytes, size: int, noise: bool
) -> None:
    data = values("uint8", size).tobytes() if noise else bytes(size)
    packed = PACK[encoding](data)
    assert decompress(packed, encoding, size) == data
    assert decompress(memoryview(packed), encoding.upper(), LIMIT) == data
    with pytest.raises(TooLarge, match=f"above {size} bytes when decompressed") as caught:
        decompress(PACK[encoding](data + b"x"), encoding, size)
    assert "`max_body_bytes`" in (caught.value.hint or "")


def test_a_gzip_body_of_several_members_is_joined() -> None:
    body = b"".join(gzip.compress(part) for part in (b"ab", b"", b"c" * 70_000))
    assert decompress(body, b"gzip", LIMIT) == b"ab" + b"c" * 70_000
    with pytest.raises(TooLarge):
        decompress(body, b"gzip", 70_001)


def test_a_gzip_body_of_too_many_members_is_refused() -> None:
    with pytest.raises(BadInput, match="more than 256 parts"):
        decompress(gzip.compress(b"") * 100_000, b"gzip", LIMIT)


WHOLE, DEFLATED = gzip.compress(b"abc" * 1000), zlib.compress(b"abc")
BROKEN = {
    "empty": (b"", b"gzip"),
    "cut in the header": (WHOLE[:5], b"gzip"),
    "the last byte missing": (WHOLE[:-1], b"gzip"),
    "a wrong checksum": (WHOLE[:-8] + b"\0\0\0\0" + WHOLE[-4:], b"gzip"),
    "trailing bytes": (WHOLE + b"x", b"gzip"),
    "zeros after it": (WHOLE + bytes(8), b"gzip"),
    "a second, cut member": (WHOLE + WHOLE[:-1], b"gzip"),
    "deflate called gzip": (DEFLATED, b"gzip"),
    "gzip called deflate": (WHOLE, b"deflate"),
    "deflate without zlib around it": (DEFLATED[2:-4], b"deflate"),
    "deflate twice": (DEFLATED * 2, b"deflate"),
    "deflate, the last byte missing": (DEFLATED[:-1], b"deflate"),
}


@pytest.mark.parametrize(("body", "encoding"), BROKEN.values(), ids=BROKEN)
def test_a_damaged_body_is_refused(body: bytes, encoding: bytes) -> None:
    with pytest.raises(BadInput, match=r"the body|bytes follow") as caught:
        decompress(body, encoding, LIMIT)
    assert caught.value.http_status == 400
    assert "Error -" not in caught.value.message


def test_the_identity_encoding_returns_the_body_itself() -> None:
    body = b"abc"
    for encoding in (b"identity", b"", b" Identity "):
        assert decompress(body, encoding, 1) is body


ACCEPTED = {
    b"gzip": (
        *(b"gzip", b"gzip, deflate, br, zstd", b"GZIP ; Q=1.000", b"br, gzip;q=0.001"),
        *(b"identity;q=0.5, gzip;q=0.5", b"identity;q=0, gzip;q=0.1"),
    ),
    b"deflate": (b"deflate", b"deflate, gzip;q=0.5"),
    None: (
        *(b"identity, gzip;q=0.5", b"gzip;q=0", b"gzip;q=0.000, deflate;q=0", b"gzip;q=abc"),
        *(b"gzip;q=1.0001", b"gzip;q=-1", b"gzip;q=nan", b"gzip;q=\xb2", b"gzip;q=", b"*"),
        *(b"*;q=0", b"identity", b"br", b"", b",,;;=,q=1", b"\xff\0"),
    ),
}


@pytest.mark.parametrize(
    ("accept", "expected"),
    [(accept, expected) for expected, each in ACCEPTED.items() for accept in each],
)
def test_the_answers_encoding_follows_accept_encoding(
    accept: bytes, expected: bytes | None
) -> None:
    assert choose_encoding(accept) == expected


@pytest.mark.parametrize("coding", PACK, ids=str)
def test_a_compressed_answer_contains_all_parts(coding: bytes) -> None:
    parts = [b'{"outputs": []}', bytes(1000), memoryview(b"tail")]
    unpack = gzip.decompress if coding == b"gzip" else zlib.decompress
    packed = compress(parts, coding)
    assert unpack(packed) == b"".join(parts)
    assert packed == compress(parts, coding)  # no timestamp in it
