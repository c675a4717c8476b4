"""The headers of gRPC calls: HPACK blocks to what they say, or why the call is refused.

In: header blocks of one connection, in order. Out: a `Head` each. `hpack` decodes; a block that
came before is looked up instead, as clients send the same one again and again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from hpack import Decoder
from hpack.table import HeaderTable

from deploykit.core.errors import quote

if TYPE_CHECKING:
    from deploykit.serving.http2.stream import Call

_CACHED = 64
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS_US = {b"H": 3.6e9, b"M": 6e7, b"S": 1e6, b"m": 1e3, b"u": 1.0, b"n": 1e-3}


@dataclass(frozen=True)
class Limits:
    """What one connection may send and how long it may take."""

    connections: int = 4096
    calls: int = 512  # at once on one connection
    outstanding: int = 256  # answers of one streaming call
    header_bytes: int = 64 << 10
    headers: int = 100
    nuisances: int = 2000  # frames between two ticks that carry nothing: pings, resets, ...
    header_s: float = 10.0  # from the connection to its settings; from a header block to its end
    body_s: float = 30.0  # of one message
    idle_s: float = 75.0  # without a call
    write_s: float = 30.0  # a client that does not take its answer
    linger_s: float = 2.0  # to let it read why its connection is closed


@dataclass(frozen=True)
class Method:
    """What answers a method. `message(call, data, at)`: a message is `data[at:]`.

    `ended(call)`: the client may send several messages, and has sent its last. `open`: needs no
    token.
    """

    message: Callable[[Call, bytes, int], None]
    ended: Callable[[Call], None] | None = None
    open: bool = False


@dataclass(frozen=True)
class Head:
    """What the headers of a call say. `refusal`: the status and the text to answer at once."""

    path: str
    method: Method | None
    timeout_us: int | None
    trace: str | None
    encoding: bytes  # of compressed messages
    refusal: tuple[str, str] | None


class _Table(HeaderTable):
    """HPACK's dynamic table, telling when it has changed: equal blocks then mean other things."""

    changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)

    def _shrink(self) -> None:
        self.changes += 1
        super()._shrink()


class Heads:
    """Reads the header blocks of one connection."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        allows: Callable[[bytes | None], bool],
        limits: Limits,
    ) -> None:
        self._methods = methods
        self._allows = allows
        self._limits = limits
        self._decoder = Decoder(limits.header_bytes)
        self._table = self._decoder.header_table = _Table()
        self._known: dict[bytes, Head] = {}

    def read(self, block: bytes) -> Head:
        """Raises HPACKError, after which the connection cannot go on."""
        head = self._known.get(block)
        if head is not None:
            return head
        changes = self._table.changes
        head = self._head(cast("list[tuple[bytes, bytes]]", self._decoder.decode(block, raw=True)))
        if self._table.changes != changes:
            self._known.clear()
        elif len(self._known) < _CACHED:
            self._known[block] = head
        return head

    def _head(self, pairs: list[tuple[bytes, bytes]]) -> Head:
        values = dict(pairs)
        path = values.get(b":path", b"").decode("latin-1")
        method = self._methods.get(path)
        trace = values.get(b"traceparent")
        timeout = values.get(b"grpc-timeout")
        match = None if timeout is None else _TIMEOUT.fullmatch(timeout)
        refusal: tuple[str, str] | None = None
        if values.get(b":method") != b"POST" or not values.get(b"content-type", b"").startswith(
            b"application/grpc"
        ):
            refusal = ("UNIMPLEMENTED", "this port speaks gRPC only")
        elif len(pairs) > self._limits.headers:
            refusal = ("RESOURCE_EXHAUSTED", f"there are more than {self._limits.headers} headers")
        elif not (method and method.open) and not self._allows(values.get(b"authorization")):
            text = "a token is needed: send the metadata 'authorization: Bearer TOKEN'"
            refusal = ("UNAUTHENTICATED", text)
        elif method is None:
            refusal = ("UNIMPLEMENTED", f"there is no method {quote(path)}")
        elif timeout is not None and match is None:
            refusal = ("INVALID_ARGUMENT", f"grpc-timeout is {quote(timeout)}")
        return Head(
            path,
            method,
            None if match is None else max(1, int(int(match[1]) * _UNITS_US[match[2]])),
            None if trace is None else trace.decode("latin-1"),
            values.get(b"grpc-encoding", b"identity"),
            refusal,
        )
