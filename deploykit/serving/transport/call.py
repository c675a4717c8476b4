"""HTTP requests, independent of sockets: replies, error replies, memory and compression."""

from __future__ import annotations

import codecs
import errno
import io
import logging
import re
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from deploykit.core.errors import (
    BadInput,
    DeploykitError,
    Overloaded,
    TooLarge,
    UnknownEncoding,
    os_reason,
    quote,
)
from deploykit.core.machine import memory_bytes
from deploykit.core.tensors import Bytes
from deploykit.pipelines.threads import Peer

log = logging.getLogger(__name__)

JSON = b"Content-Type: application/json\r\n"
RETRY = b"Retry-After: 1\r\n"
COMPRESSED = b"Content-Encoding: %s\r\nVary: Accept-Encoding\r\n"
BUG = "an error inside the server; its log says more"
_UNKNOWN_MEMORY = 4 << 30
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class MemoryBudget:
    """Counts `bytes` of unanswered requests, and of answers that clients have not read.

    It covers all connections of both protocols: each has limits, but thousands of them together
    could use all memory. It counts what was received, decompressed, or copied from shared memory,
    then the answer until its client has read it. Call all methods on the loop's thread.
    """

    def __init__(self, limit: int | None, max_body_bytes: int, parts: int = 1) -> None:
        """Set the budget of one of `parts` processes; `limit` None: a quarter of the memory."""
        if limit is None:
            limit = max(max_body_bytes, (memory_bytes() or _UNKNOWN_MEMORY) // 4 // parts)
        self.limit = limit
        self.bytes = 0
        self.message = f"the server holds {limit} bytes of requests and answers already"

    def add(self, size: int, own: int) -> bool:
        """Count `size` more bytes of a request or answer, which has `own` in total then.

        Returns whether they fit; they are counted in any case, until `release`. A request that is
        alone in the server may exceed the budget; its own limit bounds it.
        """
        self.bytes += size
        return self.bytes <= self.limit or self.bytes == own

    def release(self, size: int) -> None:
        """Remove `size` bytes from the count."""
        self.bytes -= size


@dataclass(frozen=True)
class Refusal:
    """The reason why a request is refused before its body is read, and the reply's headers."""

    status: int
    text: str
    headers: bytes = b""


@dataclass(frozen=True, slots=True)
class Head:
    """A request's first line and the headers in use. Equal bytes give an equal Head."""

    method: str = ""
    target: str = ""
    path: str = ""  # the target without its query, and without `root_path`
    host: bytes | None = None
    keep_alive: bool = False
    old: bool = False  # HTTP/1.0
    length: int | None = 0  # of the body in bytes; None: chunked
    expect: bool = False  # the client waits for "100 Continue"
    json_bytes: bytes | None = None  # the header Inference-Header-Content-Length
    encoding: bytes | None = None  # Content-Encoding
    content_type: bytes | None = None
    accept: bytes | None = None
    accept_encoding: bytes | None = None
    trace: str | None = None  # traceparent
    cors: bytes = b""  # CORS headers of the reply, for an allowed origin
    refusal: Refusal | None = None

    @classmethod
    def of(
        cls, method: str, target: str, path: str, headers: Mapping[bytes, bytes], **values: Any
    ) -> Head:
        """Build a head from headers whose names are in lower case."""
        trace = headers.get(b"traceparent")
        return cls(
            method,
            target,
            path,
            json_bytes=headers.get(b"inference-header-content-length"),
            encoding=headers.get(b"content-encoding"),
            content_type=headers.get(b"content-type"),
            accept=headers.get(b"accept"),
            accept_encoding=headers.get(b"accept-encoding"),
            trace=trace.decode("latin-1") if trace else None,
            **values,
        )


About = tuple[str | None, int]  # the id and the rows of a request that has reached its model


class Call:
    """One request, and the way to reply to it."""

    __slots__ = ("about", "body", "cancel", "gone", "head", "held_bytes", "memory")

    def __init__(self, head: Head, memory: MemoryBudget, body: Bytes = b"") -> None:
        self.head = head
        self.memory = memory
        self.body = body
        self.cancel: Callable[[], object] | None = None  # called if the client disconnects
        self.gone = False  # the client has disconnected: no reply can be sent
        self.held_bytes = 0  # bytes counted in the memory budget
        self.about: About | None = None

    @abstractmethod
    def reply(self, status: int, headers: bytes, parts: Sequence[Bytes]) -> None: ...

    @property
    def peer(self) -> Peer:
        """Return the connection, with whose other work this request's waits, if it is known."""
        return Peer(None, self)

    def reserve(self, size: int) -> bool:
        """Count `size` more bytes until the reply; return whether they fit into the budget."""
        self.held_bytes += size
        return self.memory.add(size, self.held_bytes)

    def release(self) -> None:
        self.memory.release(self.held_bytes)
        self.held_bytes = 0

    def abandon(self) -> None:
        """Cancel the request: nobody waits for the reply any more."""
        self.gone = True
        self.release()
        cancel, self.cancel = self.cancel, None
        if cancel is not None:
            cancel()


def refusal_of(error: Exception) -> DeploykitError | None:
    """Return the error for the client; Overloaded without descriptors or memory. None: a bug."""
    if isinstance(error, DeploykitError):
        return error
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in EXHAUSTED):
        reason = os_reason(error) if isinstance(error, OSError) else "out of memory"
        log.warning("a request is refused: %s", reason)
        return Overloaded(f"the server cannot do this now ({reason}); try again later")
    return None


def message_of(error: DeploykitError) -> str:
    """Return the message and the hint in one line."""
    return f"{error.message}; {error.hint}" if error.hint else error.message


def body_too_large(most_bytes: int, when: str = "") -> TooLarge:
    hint = "start the server with a larger `max_body_bytes`"
    return TooLarge(f"the body is above {most_bytes} bytes{when}", hint=hint)


def reply_exception(call: Call, error: Exception) -> None:
    """Reply with an error; log a bug instead of sending it."""
    exc = refusal_of(error)
    if exc is None:
        log.error("a request to %s failed", quote(call.head.target), exc_info=error)
        reply_error(call, 500, BUG)
        return
    headers = RETRY if exc.http_status == 503 else b""
    reply_error(call, exc.http_status, message_of(exc), headers)


def reply_error(call: Call, status: int, text: str, headers: bytes = b"") -> None:
    """Reply with the protocol's body, `{"error": "one sentence"}`, and log one line."""
    if log.isEnabledFor(logging.INFO):
        method, target = quote(call.head.method), quote(call.head.target)
        log.info("%s %s: %d %s", method, target, status, quote(text))
    call.reply(status, JSON + headers, [orjson.dumps({"error": text})])


def reply_with(call: Call, make: Callable[[], Bytes], headers: bytes = JSON) -> None:
    """Reply with the value of `make`, or with the error that it raises."""
    try:
        call.reply(200, headers, [make()])
    except Exception as exc:  # noqa: BLE001 - every error is a reply
        reply_exception(call, exc)


_CHARSET = re.compile(rb';\s*charset="?([^\s;"]+)', re.I)
_KNOWN = re.compile(  # no codec that is slow, or unpacks data
    r"iso8859-\d+|cp\d+|utf-(16|32)(-[lb]e)?|shift_jis\w*|euc_\w+|gb\w*|big5\w*|koi8-\w"
)
_MOST_DECODED_BYTES = 4 << 20  # a few milliseconds


def to_utf8(body: Bytes, content_type: bytes) -> Bytes:
    """Return text in UTF-8 that has the charset of its Content-Type. Raises UnknownEncoding."""
    match = _CHARSET.search(content_type)
    if match is None:
        return body
    name = match[1].decode("latin-1")
    try:
        charset = codecs.lookup(name).name
        if charset in ("utf-8", "ascii"):
            return body
        if _KNOWN.fullmatch(charset) and len(body) <= _MOST_DECODED_BYTES:
            return str(body, charset).encode()
    except UnicodeError as exc:
        raise BadInput(f"the body is not {quote(name)}, as its Content-Type says") from exc
    except (LookupError, ValueError):
        pass
    raise UnknownEncoding(f"the charset {quote(name)} is not offered", hint="send UTF-8")


_WINDOWS = {b"gzip": 31, b"deflate": 15}  # zlib's `wbits`; deflate has zlib's header
_PIECE_BYTES = 1 << 16  # input of zlib in one step
_GROWTH_BYTES = 1 << 20  # output of zlib in one step
_MEMBERS = 256  # members of one gzip body: each costs time, however short
_QUALITY = re.compile(rb"0(\.\d{0,3})?|1(\.0{0,3})?")
_FAST = 1  # compression level: higher ones cost a server more than they save


def decompress(body: Bytes, encoding: bytes | None, max_bytes: int) -> Bytes:
    """Return `body` decompressed; unchanged if the encoding is None or identity.

    Raises UnknownEncoding unless it is gzip or deflate, BadInput for a truncated or damaged body or
    trailing bytes, and TooLarge above `max_bytes`, which is checked during decompression.
    """
    if encoding is None:
        return body
    text = encoding.decode("latin-1")
    names = [name.strip().removeprefix("x-") for name in text.lower().split(",")]
    names = [name for name in names if name not in ("identity", "")]
    if not names:
        return body
    name = names[0]
    if len(names) > 1 or name.encode() not in _WINDOWS:
        hint = "send gzip, deflate or plain bytes"
        raise UnknownEncoding(f"Content-Encoding {quote(text)} is not supported", hint=hint)
    try:
        return _inflate(body, name, max_bytes)
    except zlib.error as exc:
        raise BadInput(f"the body is not valid {name}") from exc


def _inflate(body: Bytes, name: str, max_bytes: int) -> bytes:
    out = io.BytesIO()
    at, members, remaining = 0, 0, max_bytes
    while at < len(body) or members == 0:
        if members == _MEMBERS:
            raise BadInput(f"the body is {name} in more than {_MEMBERS} parts")
        members += 1
        stream = zlib.decompressobj(_WINDOWS[name.encode()])
        while not stream.eof:
            piece: Bytes = stream.unconsumed_tail
            if not piece:
                piece, at = body[at : at + _PIECE_BYTES], at + _PIECE_BYTES
            if not piece:
                raise BadInput(f"the body ends in the middle of its {name} data")
            got = stream.decompress(piece, min(remaining + 1, _GROWTH_BYTES))
            if len(got) > remaining:
                raise body_too_large(max_bytes, " when decompressed")
            remaining -= len(got)
            out.write(got)
        at = min(at, len(body)) - len(stream.unused_data)
        if name != "gzip" and at < len(body):  # only gzip may have several members
            raise BadInput(f"{len(body) - at} bytes follow the body's {name} data")
    return out.getvalue()


@lru_cache(maxsize=256)
def choose_encoding(accept: bytes) -> bytes | None:
    """Return b"gzip" or b"deflate" if Accept-Encoding names and prefers it, else None."""
    weights = {}
    for item in accept.lower().split(b","):
        name, *parameters = (part.strip() for part in item.split(b";"))
        pairs = (parameter.partition(b"=") for parameter in parameters)
        quality = next((value.strip() for key, _, value in pairs if key.strip() == b"q"), b"1")
        weights[name] = float(quality) if _QUALITY.fullmatch(quality) else 0.0
    best = max(_WINDOWS, key=lambda name: weights.get(name, 0.0))
    weight = weights.get(best, 0.0)
    return best if weight > 0 and weight >= weights.get(b"identity", 0.0) else None


def compress(parts: Iterable[Bytes], coding: bytes) -> bytes:
    """Return the parts as one compressed body; `coding` as returned by `choose_encoding`."""
    stream = zlib.compressobj(_FAST, zlib.DEFLATED, _WINDOWS[coding])
    return b"".join([*map(stream.compress, parts), stream.flush()])
