"""Speak HTTP/1.1 on a connection of the load generator.

One request is in flight at a time. Heads of answers repeat, so each distinct one is parsed once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.loadtest.check import LENGTH_BYTES, AnswerCheck, error_text, one_line, read_body
from deploykit.loadtest.schedule import WRONG

MOST_BYTES, MOST_HEAD = 1 << 28, 1 << 16  # largest answer, largest head
TOO_LONG = f"is longer than {MOST_BYTES:,} bytes, or its head than {MOST_HEAD:,}"
MOST_HEADS = 1024  # cached heads
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: [^\r\n]*)?")
_SIZE = re.compile(rb"[0-9]{1,15}")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n]*?)[ \t]*")

Tensor = tuple[str, str, np.ndarray]  # name, datatype, values


class NotHttpError(Exception):
    """An answer does not follow the protocol, or its end cannot be found."""


class Wire:
    """One connection. After an answer `error` is its fault and `keep` whether it stays open.

    `greeting` is sent before the first request, `control` between requests. `buffer` holds an
    incomplete answer, `body` the last complete one. `unread`: the server says that it will not read
    the request in flight.
    """

    greeting = b""

    def __init__(self, requests: Sequence[bytes], check: AnswerCheck | None) -> None:
        self._requests, self._check = requests, check
        self._request = 0
        self.buffer, self.body, self.control = bytearray(), b"", b""
        self.error: str | None = None
        self.keep, self.unread = True, False

    def request(self, number: int) -> bytes:
        self._request = number
        return self._requests[number]

    def feed(self, data: bytes) -> int | None:
        """Return the status of the answer that `data` completes; else None. Raises NotHttpError."""
        raise NotImplementedError

    def end(self) -> int | None:
        """Return the status of an answer that ends with its connection; else None."""
        return None


class _Head(NamedTuple):
    status: int
    length: int | None  # bytes of the body; None: in chunks, or up to the connection's end
    chunked: bool
    keep: bool  # the connection stays open
    json_bytes: int | None
    location: bytes  # where it redirects to


class Http1(Wire):
    """An HTTP/1.1 connection."""

    def __init__(self, requests: Sequence[bytes], check: AnswerCheck | None) -> None:
        super().__init__(requests, check)
        self._needed = 0  # bytes to wait for before the next parse

    def feed(self, data: bytes) -> int | None:
        if self.buffer:
            self.buffer += data
            if len(self.buffer) < self._needed:
                return None
            data = bytes(self.buffer)
        while (at := data.find(b"\r\n\r\n")) >= 0:
            head = _parse_head(data[:at])
            if head.status >= 200:
                break
            data = data[at + 4 :]  # status 100: the answer follows
            self.buffer.clear()
        else:
            if not b"HTTP/1.".startswith(data[:7]):
                raise NotHttpError(f"begins with {data[:20]!r}")
            if len(data) > MOST_HEAD:
                raise NotHttpError(TOO_LONG)
            return self._wait_for(data, len(data) + 1)
        at += 4
        if head.length is None:
            body, end = _dechunk(data, at) if head.chunked else (None, 0)
            if body is None:
                return self._wait_for(data, len(data) + 1)
        else:
            end = at + head.length
            if len(data) < end:
                return self._wait_for(data, end)
            body = data[at:end]
        return self._complete(head, body, data, end)

    def end(self) -> int | None:
        data = bytes(self.buffer)
        at = data.find(b"\r\n\r\n")
        head = _parse_head(data[:at]) if at >= 0 else None
        if head is None or head.length is not None or head.chunked:
            return None
        return self._complete(head, data[at + 4 :], data, -1)

    def _wait_for(self, data: bytes, needed: int) -> int | None:
        if needed > MOST_BYTES:
            raise NotHttpError(TOO_LONG)
        if not self.buffer:
            self.buffer += data
        self._needed = needed
        return None

    def _complete(self, head: _Head, body: bytes, data: bytes, end: int) -> int:
        """Return the answer's status; bytes of `data` after `end` belong to no request."""
        self.buffer.clear()
        self.keep = head.keep and len(data) == end
        self.body = body
        if head.status != 200:
            text = one_line(head.location.decode("utf-8", "replace"))
            text = f"redirects to {text}" if 300 <= head.status < 400 and text else error_text(body)
            self.error = f"{head.status}: {text}"
            return head.status
        check = self._check
        if check is None:
            return 200
        read = partial(read_body, json_bytes=head.json_bytes)
        self.error = check.problem(body, self._request, read)
        if self.error is not None:
            return WRONG
        if self.keep and head.json_bytes is not None and not (head.chunked or check.expected):
            check.usual = data[: end - len(body) + head.json_bytes], end
        return 200


@lru_cache(MOST_HEADS)
def _parse_head(head: bytes) -> _Head:
    first, *lines = head.split(b"\r\n")
    start = _STATUS.fullmatch(first)
    matches = [_FIELD.fullmatch(line) for line in lines]
    if start is None or None in matches:
        raise NotHttpError(f"begins with {first[:40]!r}")
    fields = {match[1].lower(): match[2] for match in matches if match}
    status, coding = int(start[2]), fields.get(b"transfer-encoding", b"").lower()
    sizes = [fields.get(b"content-length"), fields.get(b"inference-header-content-length")]
    readable = all(_SIZE.fullmatch(size or b"0") for size in sizes)
    if not readable or coding not in (b"", b"chunked"):
        raise NotHttpError("declares no length that can be read")
    length, json_bytes = (None if size is None else int(size) for size in sizes)
    if status < 200 or status in (204, 304):
        length = 0
    connection = fields.get(b"connection", b"").lower()
    keep = b"close" not in connection if start[1] == b"1" else b"keep-alive" in connection
    chunked = bool(coding)
    if chunked:
        length = None
    encoding = fields.get(b"content-encoding", b"").lower()
    if encoding not in (b"", b"identity"):
        raise NotHttpError(f"is encoded as {encoding[:20]!r}, which was not asked for")
    location = fields.get(b"location", b"")
    return _Head(status, length, chunked, keep, json_bytes, location)


def _dechunk(data: bytes, at: int) -> tuple[bytes | None, int]:
    """Return the chunked body from `at` and its end; None while it is incomplete."""
    parts = []
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return None, 0
        digits = data[at:end].partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", digits):
            raise NotHttpError("has a chunk without a length")
        size, at = int(digits, 16), end + 2
        if size == 0:
            break
        if len(data) < at + size + 2:
            return None, 0
        parts.append(data[at : at + size])
        at += size + 2
    end = data.find(b"\r\n\r\n", at - 2)  # of the trailers, if there are any
    return (None, 0) if end < 0 else (b"".join(parts), end + 4)


def infer_body(tensors: Sequence[Tensor], *, binary: bool) -> tuple[dict[str, str], bytes]:
    """Return the header fields and the body of an inference.

    With `binary`, the protocol's extension, tensors are bytes both ways; else they are JSON, which
    every server takes. Raises BadInput for NaN and infinity in JSON.
    """
    items: list[dict[str, Any]] = [
        {"name": name, "shape": list(array.shape), "datatype": datatype}
        for name, datatype, array in tensors
    ]
    if not binary:
        for item, (_, _, array) in zip(items, tensors, strict=True):
            item["data"] = _json(array)
        try:
            text = json.dumps({"id": "1", "inputs": items}, allow_nan=False)  # KServe needs an id
        except ValueError as exc:
            raise BadInput("the inputs hold NaN or infinity, which JSON cannot") from exc
        return {"Content-Type": "application/json"}, text.encode()
    raws = [raw_bytes(datatype, array) for _, datatype, array in tensors]
    for item, raw in zip(items, raws, strict=True):
        item["parameters"] = {"binary_data_size": len(raw)}
    head = json.dumps({"inputs": items, "parameters": {"binary_data_output": True}}).encode()
    fields = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    return fields, b"".join([head, *raws])


def raw_bytes(datatype: str, array: np.ndarray) -> bytes:
    """Return a tensor as the protocol's bytes; BF16 are the upper halves of float32."""
    if datatype == "BYTES":
        items = map(as_bytes, array.flat)
        return b"".join(len(each).to_bytes(LENGTH_BYTES, "little") + each for each in items)
    raw = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return (raw.view("<u2")[..., 1::2] if datatype == "BF16" else raw).tobytes()


def as_bytes(item: object) -> bytes:
    return item if isinstance(item, bytes) else str(item).encode()


def _json(array: np.ndarray) -> list[Any]:
    if array.dtype.hasobject:
        return [as_bytes(each).decode("utf-8", "replace") for each in array.flat]
    values: list[Any] = array.ravel().tolist()
    return values
