"""Compressed bodies: size limit while decompressing, damaged bodies, and content negotiation."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploykit.core.errors import BadInput, TooLarge
from deploykit.serving.transport.call import choose_encoding, compress, decompress
from tests.support.serving.requests import values

LIMIT = 1 << 20
PACK = {b"gzip": gzip.compress, b"deflate": zlib.compress}


@pytest.mark.parametrize("encoding", PACK, ids=str)
@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, LIMIT - 1, LIMIT])
@pytest.mark.parametrize("noise", [False, True], ids=["zeros", "noise"])
def test_compressed_data_is_decompressed_unchanged(encoding: bytes, size: int, noise: bool) -> None:
    data = values("uint8", size).tobytes() if noise else bytes(size)
    assert decompress(PACK[encoding](data), encoding, LIMIT) == data
    assert decompress(memoryview(PACK[encoding](data)), encoding.upper(), LIMIT) == data


@pytest.mark.parametrize("encoding", PACK, ids=str)
@pytest.mark.parametrize("size", [LIMIT + 1, 2 * LIMIT])
def test_data_that_decompresses_above_the_limit_is_refused(encoding: bytes, size: int) -> None:
    with pytest.raises(TooLarge, match=f"above {LIMIT} bytes when decompressed") as caught:
        decompress(PACK[encoding](bytes(size)), encoding, LIMIT)
    assert "`max_body_bytes`" in (caught.value.hint or "")


@settings(deadline=None, database=None, derandomize=True)
@given(st.binary(max_size=500), st.integers(0, 500), st.sampled_from([*PACK]))
def test_the_size_limit_is_exact(data: bytes, limit: int, encoding: bytes) -> None:
    packed = PACK[encoding](data)
    if len(data) > limit:
        with pytest.raises(TooLarge):
            decompress(packed, encoding, limit)
    else:
        assert decompress(packed, encoding, limit) == data


@settings(deadline=None, database=None, derandomize=True)
@given(st.binary(max_size=200), st.sampled_from([*PACK]))
def test_any_bytes_are_decompressed_or_refused(body: bytes, encoding: bytes) -> None:
    for sent in (body, PACK[encoding](b"abc") + body, PACK[encoding](body)[:-1]):
        try:
            decompress(sent, encoding, LIMIT)
        except BadInput:
            continue


def test_a_gzip_body_of_several_members_is_joined() -> None:
    body = b"".join(gzip.compress(part) for part in (b"ab", b"", b"c" * 70_000))
    assert decompress(body, b"gzip", LIMIT) == b"ab" + b"c" * 70_000
    with pytest.raises(TooLarge):
        decompress(body, b"gzip", 70_001)


def test_a_gzip_body_of_too_many_members_is_refused() -> None:
    with pytest.raises(BadInput, match="more than 256 parts"):
        decompress(gzip.compress(b"") * 100_000, b"gzip", LIMIT)


WHOLE = gzip.compress(b"abc" * 1000)
BROKEN = {
    "empty": (b"", b"gzip"),
    "cut in the header": (WHOLE[:5], b"gzip"),
    "cut in the data": (WHOLE[:20], b"gzip"),
    "the last byte missing": (WHOLE[:-1], b"gzip"),
    "a wrong checksum": (WHOLE[:-8] + b"\0\0\0\0" + WHOLE[-4:], b"gzip"),
    "trailing bytes": (WHOLE + b"x", b"gzip"),
    "zeros after it": (WHOLE + bytes(8), b"gzip"),
    "a second, cut member": (WHOLE + WHOLE[:-1], b"gzip"),
    "plain bytes called gzip": (b'{"inputs": []}', b"gzip"),
    "deflate called gzip": (zlib.compress(b"abc"), b"gzip"),
    "gzip called deflate": (WHOLE, b"deflate"),
    "deflate without zlib around it": (zlib.compress(b"abc")[2:-4], b"deflate"),
    "deflate with trailing bytes": (zlib.compress(b"abc") + b"x", b"deflate"),
    "deflate twice": (zlib.compress(b"abc") * 2, b"deflate"),
    "deflate, the last byte missing": (zlib.compress(b"abc")[:-1], b"deflate"),
}


@pytest.mark.parametrize(("body", "encoding"), BROKEN.values(), ids=BROKEN)
def test_a_damaged_body_is_refused(body: bytes, encoding: bytes) -> None:
    with pytest.raises(BadInput, match=r"the body|bytes follow") as caught:
        decompress(body, encoding, LIMIT)
    assert caught.value.http_status == 400
    assert "Error -" not in caught.value.message


@pytest.mark.parametrize("encoding", [b"identity", b"", b" Identity "])
def test_the_identity_encoding_returns_the_body_itself(encoding: bytes) -> None:
    body = b"abc"
    assert decompress(body, encoding, 1) is body


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (b"gzip", b"gzip"),
        (b"deflate", b"deflate"),
        (b"gzip, deflate, br, zstd", b"gzip"),
        (b"deflate, gzip;q=0.5", b"deflate"),
        (b"GZIP ; Q=1.000", b"gzip"),
        (b"br, gzip;q=0.001", b"gzip"),
        (b"identity;q=0.5, gzip;q=0.5", b"gzip"),
        (b"identity;q=0, gzip;q=0.1", b"gzip"),
        (b"identity, gzip;q=0.5", None),
        (b"gzip;q=0", None),
        (b"gzip;q=0.000, deflate;q=0", None),
        (b"gzip;q=abc", None),
        (b"gzip;q=1.0001", None),
        (b"gzip;q=-1", None),
        (b"gzip;q=nan", None),
        (b"gzip;q=\xb2", None),
        (b"gzip;q=", None),
        (b"*", None),
        (b"*;q=0", None),
        (b"identity", None),
        (b"br", None),
        (b"", None),
        (b",,;;=,q=1", None),
        (b"\xff\0", None),
    ],
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
