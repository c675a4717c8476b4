"""Speak HTTP/1.1 on a connection of the load generator, and check what answers hold.

One request is in flight at a time. Heads of answers repeat, so each distinct one is parsed once. An
answer of status 200 may carry an error, be empty, or come from another service; those that begin
like a checked one are not parsed again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.tensors import DTYPE_BYTES, PROTOCOL_NAMES, carrier

DTYPES = {name: dtype for dtype, name in PROTOCOL_NAMES.items()}
NO_ANSWER, UNSENT, WRONG = 0, -1, -2  # statuses besides those of HTTP
LENGTH_BYTES = 4  # length prefix of a BYTES element


class Output(NamedTuple):
    """One output of an answer as the server sent it. `value`: bytes, or a list from JSON."""

    name: str
    datatype: Any
    shape: Any
    value: Any


Outputs = Sequence[Output]
# returns the outputs of a message and its size before the tensors, or raises WrongAnswerError
ReadMessage = Callable[[bytes], tuple[Outputs, int]]


class WrongAnswerError(Exception):
    """An answer of status 200 has no result or a wrong one."""


class AnswerCheck:
    """Checks tensors. `outputs`: names that each answer must have; if empty, any output will do.

    `expected`: the right outputs, if known, by request and name. `max_error`: max |a-b| / max |a|,
    as in `compare`.
    """

    def __init__(
        self,
        outputs: Iterable[str],
        expected: Sequence[Mapping[str, np.ndarray]] = (),
        max_error: float = 0.0,
    ) -> None:
        self.outputs = frozenset(outputs).union(*expected)
        self.expected, self.max_error = expected, max_error
        # the beginning and the size in bytes of the last right answer over HTTP with its head
        self.usual: tuple[bytes, int] = (b"", -1)
        # and of the last right one without, by request
        self._right: dict[int, tuple[bytes, int]] = {}

    def problem(self, message: bytes, request: int, read: ReadMessage) -> str | None:
        """Return what is wrong with an answer of status 200; None if it is right."""
        head, size = self._right.get(request, (b"", -1))
        if len(message) == size and message.startswith(head):
            return None
        try:
            head_bytes = self.check(message, request, read)
        except WrongAnswerError as exc:
            return str(exc)
        self._right[request] = message[:head_bytes], len(message)
        return None

    def check(self, message: bytes, request: int, read: ReadMessage) -> int:
        """Return how many bytes make an answer of this length right. Raises WrongAnswerError."""
        outputs, head_bytes = read(message)
        if missing := sorted(self.outputs - {output.name for output in outputs}):
            raise WrongAnswerError(f"200 without the output {', '.join(missing)}")
        if not outputs:
            raise WrongAnswerError("200 without outputs")
        for name, datatype, shape, value in outputs:
            is_raw = isinstance(value, bytes)
            expected = _size_of(datatype, shape, in_bytes=is_raw)
            if expected not in (None, got := len(value) if is_raw else _count(value)):
                unit = "bytes" if is_raw else "values"
                raise WrongAnswerError(f"200 with {got} {unit} of {name}, a {datatype}{shape}")
        if not self.expected:
            return head_bytes
        _compare(self.expected[request], outputs, self.max_error)
        return len(message)


class BodyCheck(AnswerCheck):
    """Checks other answers, in one BYTES of a message if `grpc`.

    `is_json`: they are JSON. `answers`: the right ones, if known.
    """

    def __init__(
        self, is_json: bool, answers: Sequence[Any], max_error: float, *, grpc: bool = False
    ) -> None:
        super().__init__((), (), max_error)
        self._is_json, self._answers, self._grpc = is_json, answers, grpc

    def check(self, message: bytes, request: int, read: ReadMessage) -> int:
        body = message
        if self._grpc:
            outputs, _ = read(message)
            if [(type(each.value), each.datatype) for each in outputs] != [(bytes, "BYTES")]:
                raise WrongAnswerError("an answer that is not one of BYTES")
            body = outputs[0].value[LENGTH_BYTES:]
        if not body:
            raise WrongAnswerError("200 with an empty body")
        if self._is_json:
            try:
                value = json.loads(body)
            except (ValueError, RecursionError):
                raise WrongAnswerError("200 with a body that is not JSON") from None
            if self._answers and not _same(self._answers[request], value, self.max_error):
                bound = short_bound(self.max_error)
                raise WrongAnswerError(f"a wrong answer: it differs by more than {bound}")
        return len(message)


def _same(right: Any, got: Any, max_error: float) -> bool:
    """Compare JSON values; numbers may differ by `max_error` times the right one, or times 1."""
    if isinstance(right, dict) and isinstance(got, dict):
        keys = right.keys()
        return keys == got.keys() and all(_same(right[k], got[k], max_error) for k in keys)
    if isinstance(right, list) and isinstance(got, list):
        pairs = zip(right, got, strict=False)
        return len(right) == len(got) and all(_same(*pair, max_error) for pair in pairs)
    numbers = isinstance(right, (int, float)) and isinstance(got, (int, float))
    if numbers and bool not in (type(right), type(got)):
        return bool(abs(right - got) <= max_error * max(1.0, abs(right)))
    return type(right) is type(got) and bool(right == got)


def read_body(body: bytes, json_bytes: int | None) -> tuple[Outputs, int]:
    """Return the outputs in an answer over HTTP, and the size of its JSON. Raises WrongAnswerError.

    `json_bytes`: None if all of it is JSON.
    """
    json_bytes = at = len(body) if json_bytes is None else json_bytes
    outputs = []
    try:
        for item in json.loads(body[:json_bytes])["outputs"]:
            value: Any = item.get("data")
            size: Any = (item.get("parameters") or {}).get("binary_data_size")
            if value is None or isinstance(size, int):
                value = body[at : at + size]
                at += size
            name = str(item["name"])
            outputs.append(Output(name, item.get("datatype"), item.get("shape"), value))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise WrongAnswerError(f"200 without outputs: {error_text(body)}") from None
    if at != len(body):
        got = len(body) - json_bytes
        raise WrongAnswerError(f"200 with {got} bytes of tensors, not {at - json_bytes}")
    return outputs, json_bytes


def _count(value: Any) -> int:
    return sum(map(_count, value)) if isinstance(value, list) else 1


def _size_of(datatype: Any, shape: Any, *, in_bytes: bool) -> int | None:
    """Return a tensor's size in bytes or values; None if none is fixed or known."""
    size = DTYPE_BYTES.get(DTYPES.get(str(datatype), "")) if in_bytes else 1
    try:
        return None if size is None else size * math.prod(shape)
    except TypeError:
        return None


def _compare(expected: Mapping[str, np.ndarray], outputs: Outputs, max_error: float) -> None:
    by_name = {output.name: output for output in outputs}
    for name, right in expected.items():
        _, datatype, shape, value = by_name[name]
        try:
            dtype = np.dtype(carrier(DTYPES[datatype])).newbyteorder("<")
            read = np.frombuffer if isinstance(value, bytes) else np.array
            got = read(value, dtype).reshape(right.shape)
            a, b = right.astype(np.float64), got.astype(np.float64)
            comparable = tuple(shape) == right.shape and not dtype.hasobject
        except (ValueError, TypeError, KeyError, OverflowError):
            comparable = False
        if not comparable:
            wanted = f"{right.dtype}{list(right.shape)}"
            raise WrongAnswerError(f"an answer whose {name}, {datatype}{shape}, is no {wanted}")
        largest = float(np.abs(a).max(initial=0.0)) or 1.0
        error = float(np.abs(a - b).max(initial=0.0)) / largest
        if not (math.isfinite(error) and error <= max_error):
            bound = short_bound(max_error)
            raise WrongAnswerError(f"a wrong answer: {name} differs by more than {bound}")


def short_bound(bound: float) -> str:
    """Write a number as 0.001, never as 1e-3."""
    return f"{bound:f}".rstrip("0").rstrip(".") or "0"


def error_text(body: bytes) -> str:
    """Return the message of an error answer, its `error` member or its start, as one line."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    text = document.get("error") if isinstance(document, dict) else None
    text = text if isinstance(text, str) else body[:200].decode("utf-8", "replace")
    return one_line(text) or "no message"


def one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text[:300]).split())


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


class _Head(NamedTuple):
    status: int
    length: int | None  # bytes of the body; None: in chunks
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
            body, end = _dechunk(data, at)
            if body is None:
                return self._wait_for(data, len(data) + 1)
        else:
            end = at + head.length
            if len(data) < end:
                return self._wait_for(data, end)
            body = data[at:end]
        return self._complete(head, body, data, end)

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
        if self.keep and head.json_bytes and head.length is not None and not check.expected:
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
    if status < 200 or status in (204, 304):
        sizes[0] = b"0"
    readable = all(_SIZE.fullmatch(size or b"0") for size in sizes)
    if not readable or coding not in (b"", b"chunked") or not (coding or sizes[0]):
        raise NotHttpError("declares no length that can be read")
    length, json_bytes = (None if size is None else int(size) for size in sizes)
    connection = fields.get(b"connection", b"").lower()
    keep = b"close" not in connection if start[1] == b"1" else b"keep-alive" in connection
    encoding = fields.get(b"content-encoding", b"").lower()
    if encoding not in (b"", b"identity"):
        raise NotHttpError(f"is encoded as {encoding[:20]!r}, which was not asked for")
    location = fields.get(b"location", b"")
    return _Head(status, None if coding else length, keep, json_bytes, location)


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
            strings = (as_bytes(each).decode("utf-8", "replace") for each in array.flat)
            item["data"] = [*strings] if array.dtype.hasobject else array.ravel().tolist()
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
