"""One HTTP request as a route sees it, and error replies. Independent of sockets."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from deploykit.core.errors import DeploykitError, Overloaded, os_reason, quote
from deploykit.core.tensors import Bytes

log = logging.getLogger(__name__)

JSON = b"Content-Type: application/json\r\n"
RETRY = b"Retry-After: 1\r\n"
BUG = "an error inside the server; its log says more"
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused before its body is read; `headers` belong to the reply."""

    status: int
    text: str
    headers: bytes = b""


@dataclass(frozen=True, slots=True)
class Head:
    """A request's first line and the headers in use. Equal bytes give an equal Head."""

    method: str = ""
    target: str = ""
    path: str = ""  # the target without its query
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
    authorization: bytes | None = None
    trace: bytes | None = None  # traceparent
    cors: bytes = b""  # CORS headers of the reply, for an allowed origin
    refusal: Refusal | None = None


class Call(Protocol):
    """One request and the connection back to its client."""

    head: Head
    body: Bytes
    cancel: Callable[[], object] | None  # called if the client disconnects before the reply

    @property
    def gone(self) -> bool:
        """Whether the client has disconnected."""

    def reserve(self, size: int) -> bool:
        """Count `size` more bytes in the memory budget until the reply; whether they fit."""

    def reply(self, status: int, headers: bytes, parts: Sequence[Bytes]) -> None: ...


def refusal_of(error: Exception) -> DeploykitError | None:
    """The error as a client gets it; Overloaded without file descriptors or memory. None: a bug."""
    if isinstance(error, DeploykitError):
        return error
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in EXHAUSTED):
        reason = os_reason(error) if isinstance(error, OSError) else "out of memory"
        log.warning("a request is refused: %s", reason)
        return Overloaded(f"the server cannot do this now ({reason}); try again later")
    return None


def reply_exception(call: Call, error: Exception) -> None:
    """Reply with an error; a bug is logged and not sent."""
    exc = refusal_of(error)
    if exc is None:
        log.error("a request to %s failed", quote(call.head.target), exc_info=error)
        reply_error(call, 500, BUG)
        return
    text = f"{exc.message}; {exc.hint}" if exc.hint else exc.message
    reply_error(call, exc.http_status, text, RETRY if exc.http_status == 503 else b"")


def reply_error(call: Call, status: int, text: str, headers: bytes = b"") -> None:
    """The protocol's error body, `{"error": "one sentence"}`, and one line in the log."""
    if log.isEnabledFor(logging.INFO):
        log.info(
            "%s %s: %d %s",
            quote(call.head.method),
            quote(call.head.target),
            status,
            quote(text),
        )
    call.reply(status, JSON + headers, [orjson.dumps({"error": text})])
