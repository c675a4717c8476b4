"""The side of an HTTP/2 connection that counts: windows both ways, what is written, and the end.

In: calls that have something to send, or to receive. Out: as many bytes as the client's windows
take, and as much window for the client as its messages need, oldest first, within what one
connection may hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast

from deploykit.serving.http2.headers import Limits, Method
from deploykit.serving.http2.stream import (
    GOAWAY,
    NO_ERROR,
    ROOM,
    SETTINGS,
    WINDOW_UPDATE,
    Call,
    frame,
)
from deploykit.serving.transport.memory import MemoryBudget

log = logging.getLogger(__name__)

FRAME_BYTES = 1 << 14  # of the largest frame we take: what HTTP/2 starts with
FIRST_WINDOW = 65535
CONNECTION_ROOM = 1 << 24  # bytes of DATA that a client may send before it must see an update
BUDGET = 4  # messages of the largest size that one connection may be sending at once
ENHANCE_YOUR_CALM = 11
_TOGETHER_BYTES = 1 << 18  # written at once
_HIGH_WATER_BYTES = 1 << 20  # not taken by the client: it is not read from


class Shared:
    """What all connections of one server share."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        allows: Callable[[bytes | None], bool],
        limits: Limits,
        max_body_bytes: int,
        held: MemoryBudget,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.held = held
        self.methods = methods
        self.allows = allows
        self.limits = limits
        self.max_body_bytes = max_body_bytes
        self.connections: set[Flow] = set()
        self.clock_s = clock_s
        self.now_s = clock_s()

    def tick(self) -> None:
        """Close what took too long."""
        self.now_s = now_s = self.clock_s()
        for connection in list(self.connections):
            connection.check(now_s)

    @property
    def unanswered(self) -> int:
        return sum(connection.unanswered for connection in self.connections)


class Flow(asyncio.Protocol):
    """One client's connection; `grpc_wire.Connection` reads its frames."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.calls: dict[int, Call] = {}
        self.frame_bytes = FRAME_BYTES  # of the largest frame that the client takes
        self.window = FIRST_WINDOW  # bytes of DATA that the client will take
        self.first_window = FIRST_WINDOW  # and on a new stream
        self.last = 0  # the highest stream that the client has opened
        self.deaf = False  # nothing more is read
        self.settled = False  # the client has sent its settings
        self.amid_headers = False
        self.nuisances = 0
        self.since_s = shared.now_s  # without a call, or with half a header block
        self._received = 0  # bytes of DATA since our last update
        self._reserved = 0  # bytes that large messages were given
        self._asking: deque[Call] = deque()
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._stalled_s: float | None = None  # since when the client does not read
        self._blocked_s: float | None = None  # since when its windows hold an answer back

    @property
    def unanswered(self) -> int:
        return sum(call.unanswered for call in self.calls.values())

    # -- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._loop = asyncio.get_running_loop()
        self._transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
        self.shared.connections.add(self)
        limits = self.shared.limits
        values = ((3, limits.calls), (4, ROOM), (6, limits.header_bytes))
        settings = b"".join(n.to_bytes(2, "big") + v.to_bytes(4, "big") for n, v in values)
        more = (CONNECTION_ROOM - 65535).to_bytes(4, "big")
        self.write(frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, more))
        if len(self.shared.connections) > limits.connections:
            self.end(ENHANCE_YOUR_CALM, f"there are {limits.connections} connections already")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.deaf = True
        self.shared.connections.discard(self)
        for call in list(self.calls.values()):
            call.gone()

    def pause_writing(self) -> None:
        self._stalled_s = self.shared.now_s
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._stalled_s = None
        self._transport.resume_reading()
        self.push()

    # -- windows ---------------------------------------------------------------------------------

    def received(self, size: int) -> None:
        """Bytes of DATA have come, on whatever stream; the client may send as many more."""
        self._received += size
        if self._received > CONNECTION_ROOM // 2:
            self._update(0, self._received)
            self._received = 0

    def ask(self, call: Call, more: int) -> None:
        """Let the client send `more` bytes of a large message, when the connection may hold it."""
        if not call.asked_bytes:
            call.asked_bytes = more
            self._asking.append(call)
            self._grant()

    def release(self, call: Call) -> None:
        """What was given for a large message is free again."""
        self._reserved -= call.granted_bytes
        call.granted_bytes = 0
        if self._asking:
            self._grant()

    def _grant(self) -> None:
        budget = BUDGET * self.shared.max_body_bytes
        while self._asking:
            call = self._asking[0]
            more = call.asked_bytes
            if not call.finished and self._reserved and self._reserved + more > budget:
                return
            self._asking.popleft()
            call.asked_bytes = 0
            if not call.finished:
                call.granted_bytes += more
                self._reserved += more
                self.allow(call, more)

    def allow(self, call: Call, more: int) -> None:
        call.room += more
        self._update(call.id, more)

    def _update(self, number: int, more: int) -> None:
        self.write(frame(WINDOW_UPDATE, 0, number, more.to_bytes(4, "big")))

    def can_send(self, call: Call) -> int:
        """Bytes of DATA that may go out for this call now."""
        if self._stalled_s is not None:
            return 0
        return min(self.window, call.window)

    def sent(self, call: Call, size: int) -> None:
        self.window -= size
        call.window -= size
        self._blocked_s = None

    def push(self) -> None:
        for call in list(self.calls.values()):
            if call.out or call.trailers is not None:
                call.push()

    # -- deadlines and the end -------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send, together with what else is written in this turn of the loop."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)
        self._out_bytes += len(data)
        if self._out_bytes > _TOGETHER_BYTES:
            self._flush()

    def later(self, what: Callable[[], None]) -> None:
        """Call it in the loop's next turn."""
        self._loop.call_soon(what)

    def _flush(self) -> None:
        if self._out and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()
        self._out_bytes = 0

    def drop(self, call: Call) -> None:
        """The call is over."""
        self.calls.pop(call.id, None)
        call.release(call.held)
        self.release(call)
        if not self.calls:
            self.since_s = self.shared.now_s

    def check(self, now_s: float) -> None:
        """Close the connection, or end a call, that is past a limit."""
        limits, waited_s = self.shared.limits, now_s - self.since_s
        self.nuisances = 0
        for call in list(self.calls.values()):
            if call.deadline_s is not None and call.deadline_s <= now_s:
                call.fail("DEADLINE_EXCEEDED", "the call's deadline has passed")
            elif call.reading and now_s - call.since_s > limits.body_s:
                call.fail("DEADLINE_EXCEEDED", "the message took too long to come")
        if not any(call.out for call in self.calls.values()):
            self._blocked_s = None
        elif self._blocked_s is None:
            self._blocked_s = now_s
        since_s = self._stalled_s if self._stalled_s is not None else self._blocked_s
        late = since_s is not None and now_s - since_s > limits.write_s
        if self.deaf:
            late = late or waited_s > limits.linger_s
        elif self.amid_headers or not self.settled:
            late = late or waited_s > limits.header_s
        if late:
            self._transport.abort()
        elif not self.calls and waited_s > limits.idle_s:
            self.close()

    def close(self) -> None:
        """Say that no call will be taken any more, and close once what was written has gone out."""
        self.end(NO_ERROR, "")

    def end(self, code: int, text: str) -> None:
        """Read no more. `code` is HTTP/2's; a client at fault gets time to read why."""
        if self.deaf:
            return
        self.deaf = True
        about = self.last.to_bytes(4, "big") + code.to_bytes(4, "big") + text.encode()
        self.write(frame(GOAWAY, 0, 0, about))
        self._flush()
        if not code:
            self._transport.close()
            return
        log.info("a gRPC connection is closed: %s", text)
        for call in list(self.calls.values()):
            call.gone()
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self.since_s = self.shared.now_s
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
