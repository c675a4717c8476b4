"""Answers of status 200 that are none, and HTTP as servers write it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deploykit.loadtest.check import AnswerCheck
from deploykit.loadtest.http import Http1, NotHttpError
from deploykit.loadtest.schedule import WRONG
from tests.support.stand_in import ANSWER, reply

Y = np.array([[0.25, -1.0]], np.float32)


def binary(
    array: np.ndarray, size: int = 0, datatype: object = "FP32", shape: object = ()
) -> bytes:
    """An answer whose head says `size`, `datatype` and `shape` of the bytes of `array`."""
    item = {"name": "y", "datatype": datatype}
    item["shape"] = list(array.shape) if shape == () else shape
    item["parameters"] = {"binary_data_size": size or array.nbytes}
    head = json.dumps({"outputs": [item]}).encode()
    return reply(200, head + array.tobytes(), f"Inference-Header-Content-Length: {len(head)}\r\n")


class Wire(Http1):
    """HTTP/1.1 of one request whose answer came; its status is in `status`."""

    status: int | None


def read(answer: bytes, check: AnswerCheck | None = None, piece: int = 1 << 20) -> Wire:
    """One answer in pieces."""
    wire = Wire([b""], check or AnswerCheck(["y"]))
    wire.request(0)
    found = [wire.feed(answer[at : at + piece]) for at in range(0, len(answer), piece)]
    assert set(found[:-1]) <= {None}
    wire.status = found[-1]
    return wire


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "200 with an empty body"),
        (b"<html>", "200 with a body that is not JSON"),
        (b"[" * 100_000, "200 with a body that is not JSON"),
        (b'{"error": "out of\\n memory"}', "200 with an error: out of memory"),
        (b"{}", "200 without outputs"),
        (b"null", "200 without outputs"),
        (b'{"outputs": [3]}', "200 with an output that has no name"),
        (b'{"outputs": [{"name": "z", "data": []}]}', "200 without the output y"),
        (b'{"outputs": [{"name": "y"}]}', "200 without the values of y"),
    ],
)
def test_status_200_without_a_result_is_a_failure(body: bytes, why: str) -> None:
    wire = read(reply(200, body))
    assert (wire.status, wire.error) == (WRONG, why)


@pytest.mark.parametrize("answer", [reply(200, ANSWER), binary(Y)], ids=["JSON", "binary"])
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_an_answer_in_any_pieces_is_one(answer: bytes, piece: int) -> None:
    wire = read(answer, piece=piece)
    assert (wire.status, wire.error, wire.keep) == (200, None, True)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (binary(Y, size=4), "200 with 8 bytes of tensors, not 4"),
        (binary(Y, shape=[1, 3]), "200 with 8 bytes of y, a FP32[1, 3]"),
        (binary(Y, datatype="FP64"), "200 with 8 bytes of y, a FP64[1, 2]"),
        (binary(Y, datatype="INT64", shape=[]), None),
        (binary(Y, datatype="BYTES", shape=[7]), None),
        (binary(Y, datatype="NEW", shape=[7]), None),
        (binary(Y, datatype=["FP32"], shape=[7]), None),
        (binary(Y, shape=None), None),
    ],
)
def test_a_tensor_has_as_many_bytes_as_its_shape_says(answer: bytes, why: str | None) -> None:
    assert read(answer).error == why


def test_an_answer_that_begins_as_a_right_one_is_still_looked_at() -> None:
    """The head of the right one is remembered."""
    check, right = AnswerCheck(["y"]), binary(Y)
    assert [read(right, check).error for _ in range(2)] == [None, None]
    size = int(right.split(b"\r\nContent-Length: ")[1].split(b"\r\n")[0])
    cut = right[:-4].replace(
        b"\r\nContent-Length: %d" % size, b"\r\nContent-Length: %d" % (size - 4)
    )
    assert read(cut, check).error == "200 with 4 bytes of tensors, not 8"


@pytest.mark.parametrize(
    ("got", "why"),
    [
        (Y, None),
        (Y + np.float32(1e-5), None),
        (Y * 2, "a wrong answer: y differs by more than 0.001"),
        (np.full_like(Y, np.nan), "a wrong answer: y differs by more than 0.001"),
        (Y.T, "an answer whose y has the shape [2, 1], not [1, 2]"),
    ],
)
def test_answers_are_compared_with_those_expected(got: np.ndarray, why: str | None) -> None:
    check = AnswerCheck(["y"], [{"y": Y}], 1e-3)
    for _ in range(2):
        assert read(binary(got), check).error == why
    data = {"name": "y", "datatype": "FP32", "shape": list(got.shape)}
    text = json.dumps({"outputs": [{**data, "data": got.ravel().tolist()}]}).encode()
    assert read(reply(200, text), check).error == why


def test_chunks_a_continue_and_a_body_to_the_end_are_read() -> None:
    body = json.dumps(ANSWER).encode()
    parts = (5, body[:5], len(body) - 5, body[5:])
    chunks = b"%x;ext\r\n%s\r\n%x\r\n%s\r\n0\r\nTrailer: x\r\n\r\n" % parts
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    for piece, early in ((1, 1), (1 << 20, 2000)):
        interim = b"HTTP/1.1 100 Continue\r\n\r\n" * early
        assert read(interim + head + chunks, piece=piece).error is None
    wire = read(b"HTTP/1.0 200 OK\r\n\r\n" + body)
    assert (wire.status, wire.end(), wire.keep) == (None, 200, False)


@pytest.mark.parametrize(
    ("head", "more", "keep"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", b"", False),
        (b"HTTP/1.0 200 OK\r\n", b"", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", b"", True),
        (b"HTTP/1.1 200\r\n", b"", True),
        (b"HTTP/1.1 200\r\n", b"HTTP", False),  # what comes behind an answer ends it
    ],
)
def test_whether_a_connection_goes_on(head: bytes, more: bytes, keep: bool) -> None:
    body = json.dumps(ANSWER).encode()
    wire = read(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body + more))
    assert (wire.status, wire.keep) == (200, keep)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0",
        b"HTTP/2 200 OK",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5",
        b"HTTP/1.1 200 OK\r\nContent-Length: %s" % (b"9" * 5000),
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n",
        b"HTTP/1.1 200 OK" + b"\r\nx: y" * 20_000,
    ],
)
def test_what_is_no_http_is_refused(answer: bytes) -> None:
    with pytest.raises(NotHttpError):
        read(answer + b"\r\n\r\n", piece=5000)
