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
