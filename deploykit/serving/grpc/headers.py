"""Parse the headers of a gRPC call, or say why it is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deploykit.core.errors import quote

_CONTENT_TYPE = re.compile(rb"application/grpc(\+proto)?[ \t]*(;.*)?", re.IGNORECASE)
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS_US = {b"H": 3.6e9, b"M": 6e7, b"S": 1e6, b"m": 1e3, b"u": 1.0, b"n": 1e-3}


@dataclass(frozen=True)
class Method:
    """The handlers of a method. `message(call, data, at)`: the message is `data[at:]`.

    `ended(call)`: for methods with several messages, after the last. `public`: needs no token.
    `max_bytes`: of a message; the server's limit applies too.
    """

    message: Callable[[Any, bytes, int], None]  # called with the Call
    ended: Callable[[Any], None] | None = None
    public: bool = False
    max_bytes: int = 1 << 32


@dataclass(frozen=True)
class CallHead:
    """The parsed headers of a call. `refusal`: status and message of an immediate error reply.

    `speaks_grpc`: the client expects a gRPC status. `length`: the Content-Length, if it was sent.
    """

    path: str
    method: Method | None
    timeout_us: int | None
    trace: str | None
    encoding: bytes  # for compressed messages
    refusal: tuple[str, str] | None
    speaks_grpc: bool = True
    length: int | None = None


class HeadParser:
    """Makes a CallHead from a call's headers. `allows`: whether an authorization is valid."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        allows: Callable[[bytes | None], bool],
        max_headers: int,
    ) -> None:
        self._methods = methods
        self._allows = allows
        self._max_headers = max_headers

    def __call__(self, pairs: list[tuple[bytes, bytes]]) -> CallHead:
        values = dict(pairs)
        content_type = values.get(b"content-type", b"")
        speaks_grpc = _CONTENT_TYPE.fullmatch(content_type) is not None
        length = values.get(b"content-length")
        path = values.get(b":path", b"").decode("latin-1")
        method = self._methods.get(path)
        trace = values.get(b"traceparent")
        timeout = values.get(b"grpc-timeout")
        match = None if timeout is None else _TIMEOUT.fullmatch(timeout)
        refusal: tuple[str, str] | None = None
        if not speaks_grpc:
            got = quote(content_type.decode("latin-1"))
            text = f"send 'content-type: application/grpc', not {got}"
            refusal = ("UNIMPLEMENTED", f"this port speaks gRPC with protobuf only: {text}")
        elif values.get(b":method") != b"POST":
            refusal = ("UNIMPLEMENTED", "this port speaks gRPC only: send POST")
        elif len(pairs) > self._max_headers:
            refusal = ("RESOURCE_EXHAUSTED", f"there are more than {self._max_headers} headers")
        elif not (method and method.public) and not self._allows(values.get(b"authorization")):
            text = "a token is needed: send the metadata 'authorization: Bearer TOKEN'"
            refusal = ("UNAUTHENTICATED", text)
        elif method is None:
            refusal = ("UNIMPLEMENTED", f"there is no method {quote(path)}")
        elif timeout is not None and match is None:
            refusal = ("INVALID_ARGUMENT", f"grpc-timeout is {quote(timeout)}")
        return CallHead(
            path,
            method,
            None if match is None else max(1, int(int(match[1]) * _UNITS_US[match[2]])),
            None if trace is None else trace.decode("latin-1"),
            values.get(b"grpc-encoding", b"identity"),
            refusal,
            speaks_grpc,
            None if length is None else int(length),
        )
