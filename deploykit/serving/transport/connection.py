"""The parts that all connections share: calls, memory, turns of the event loop, a port.

A `Call` is one HTTP request, independent of sockets, with its replies and error replies.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import heapq
import logging
import math
import re
import sys
import termios
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

import orjson

from deploykit.core.errors import DeploykitError, Overloaded, os_reason, quote
from deploykit.core.machine import memory_bytes
from deploykit.core.tensors import Bytes
from deploykit.pipelines.threads import Peer
from deploykit.serving.transport.encodings import choose_encoding, other_charset

log = logging.getLogger(__name__)
access_log = logging.getLogger("deploykit.access")

JSON = b"Content-Type: application/json\r\n"
RETRY = b"Retry-After: 1\r\n"
BUG = "an error inside the server; its log says more"
_UNKNOWN_MEMORY = 4 << 30
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_SIZE = re.compile(rb"\d{1,18}")  # of a part in bytes
SPARE = 512  # clients above the limit that may ask for the server's health; 2 turns of accepting
LEAST_BYTES_S = 4 << 10  # on average, of a client that sends a request or reads an answer
_IDLE_S = 1.0  # a connection idle for so long is closed to make room
CLOSED_AT_ONCE = 256  # in a tick, to make room

TURN_S = 0.01  # for one kind of work in a turn of the loop; a new connection takes four turns
# Bytes to receive at once when this turn of the event loop is used up; with TLS each byte may be a
# separate record, which takes a microsecond to decrypt.
BUSY_BYTES = {False: 4 << 10, True: 256}
_SHORT_S = 0.001  # shorter work adds up before a turn is counted


class MemoryBudget:
    """Counts `bytes` of unanswered requests, and of answers that clients have not read.

    It covers all connections of both protocols: each has limits, but thousands of them together
    could use all memory. It counts what was received, decompressed, or copied from shared memory,
    then the answer until its client has read it. Call all methods on the loop's thread.
    """

    def __init__(self, limit: int | None, max_body_bytes: int, parts: int = 1) -> None:
        """Set the budget of one of `parts` processes; `limit` None: a quarter of the memory."""
        if limit is None:
            limit = max(max_body_bytes * parts, (memory_bytes() or _UNKNOWN_MEMORY) // 4)
        self.limit = limit = max(1, limit // parts)
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
    json_bytes: int | None = None  # Inference-Header-Content-Length; -1 if it is not a number
    encoding: bytes | None = None  # Content-Encoding
    content_type: bytes | None = None
    charset: bytes | None = None  # of the Content-Type, unless it is UTF-8
    accept: bytes | None = None
    coding: bytes | None = None  # of the reply, by Accept-Encoding
    trace: str | None = None  # traceparent
    cors: bytes = b""  # CORS headers of the reply, for an allowed origin
    refusal: Refusal | None = None

    @classmethod
    def of(
        cls, method: str, target: str, path: str, headers: Mapping[bytes, bytes], **values: Any
    ) -> Head:
        """Build a head from headers whose names are in lower case."""
        trace, content_type = headers.get(b"traceparent"), headers.get(b"content-type")
        size = headers.get(b"inference-header-content-length")
        return cls(
            method,
            target,
            path,
            json_bytes=None if size is None else int(size) if _SIZE.fullmatch(size) else -1,
            encoding=headers.get(b"content-encoding"),
            content_type=content_type,
            charset=other_charset(content_type),
            accept=headers.get(b"accept"),
            coding=choose_encoding(headers.get(b"accept-encoding", b"")),
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


def refusal_of(error: Exception, what: str) -> DeploykitError:
    """Return the error for the client; Overloaded without descriptors or memory.

    A bug is logged instead of sent: `what` has failed.
    """
    if isinstance(error, DeploykitError):
        return error
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in EXHAUSTED):
        reason = os_reason(error) if isinstance(error, OSError) else "out of memory"
        log.warning("a request is refused: %s", reason)
        return Overloaded(f"the server cannot do this now ({reason}); try again later")
    log.error("%s failed", what, exc_info=error)
    return DeploykitError(BUG)


def message_of(error: DeploykitError) -> str:
    """Return the message and the hint in one line."""
    return f"{error.message}; {error.hint}" if error.hint else error.message


def reply_exception(call: Call, error: Exception) -> None:
    """Reply with an error; log a bug instead of sending it."""
    exc = refusal_of(error, f"a request to {quote(call.head.target)}")
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


class Turns:
    """Bounds the time that work takes in one turn of the loop; more waits for the next turns.

    `busy`: this turn is used up: call `wait`. Once a turn is counted, all work of the loop in it
    counts, such as reading and running engines.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.clock_s = clock_s
        self.waiting: deque[Callable[[], None]] = deque()
        self.busy = False
        self._spent_s = 0.0  # in short work, since the last counted turn
        self._begun_s = 0.0  # when the counted turn began
        self._scheduled = False  # a turn is being counted, until `_begin`

    def spend(self, since_s: float) -> None:
        """Count the time since `since_s`, by `clock_s`."""
        now_s = self.clock_s()
        if not self._scheduled:
            self._spent_s += now_s - since_s
            if self._spent_s <= _SHORT_S:
                return
            self._count_from(now_s - self._spent_s)
        self.busy = now_s - self._begun_s > TURN_S

    def late(self) -> bool:
        """Return whether work of many steps should wait with the next one."""
        now_s = self.clock_s()
        self._count_from(now_s)
        self.busy = now_s - self._begun_s > TURN_S
        return self.busy

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` now, or in one of the next turns if this one is used up."""
        if self.busy:
            self.wait(work)
            return
        begun_s = self.clock_s()
        work()
        self.spend(begun_s)

    def wait(self, work: Callable[[], None], *, urgent: bool = False) -> None:
        """Call `work` in one of the next turns, in order; urgent work comes first."""
        (self.waiting.appendleft if urgent else self.waiting.append)(work)
        self._count_from(self.clock_s())

    def _count_from(self, begun_s: float) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._begun_s = begun_s
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Begin a turn: half of it is for the work that waits, half for new work."""
        self._scheduled = self.busy = False
        self._spent_s = 0.0
        begun_s, waiting = self.clock_s(), self.waiting
        if waiting:
            self._count_from(begun_s)
        for _ in range(len(waiting)):
            try:
                waiting.popleft()()
            except Exception:  # the other work must not wait forever
                log.exception("work on the event loop failed")
            elapsed_s = self.clock_s() - begun_s
            self.busy = elapsed_s > TURN_S
            if elapsed_s > TURN_S / 2:
                break


def extend(by_s: float, size: int, now_s: float, stall_s: float) -> float:
    """Return by when a client, which has moved `size` bytes until now, must move more."""
    return min(now_s + stall_s, by_s + max(0, size) / LEAST_BYTES_S)


def unread_bytes(transport: asyncio.Transport) -> int:
    """Return how many written bytes the client has not received, in the system's buffer too.

    A third of that, often a megabyte, has to be free before the system takes more.
    """
    size, sending = transport.get_write_buffer_size(), transport.get_extra_info("socket")
    if sending is not None and sending.fileno() >= 0:
        queued = fcntl.ioctl(sending.fileno(), termios.TIOCOUTQ, bytes(4))
        size += int.from_bytes(queued, sys.byteorder)
    return size


class Connection(asyncio.BufferedProtocol, ABC):
    """One client of a port: what it sends waits for its turn, and it has to read its answers."""

    transport: asyncio.Transport

    def __init__(self, port: Port) -> None:
        self._port = port
        self.kept = b""  # bytes received and not processed; counted in the memory budget
        self.answering = False  # the next bytes wait for a reply
        self.queued = False  # what was received waits for a turn of the event loop
        self.paused = False  # nothing is received
        self.stalled = False  # the transport takes no more
        self.sent_bytes = 0  # written since the last check
        self.unsent_bytes = 0  # that the transport has not sent; counted in the memory budget
        self._unread = 0  # bytes that the client had not received at the last check
        self.read_by_s: float | None = None  # when the client must have read more

    @property
    @abstractmethod
    def idle_since_s(self) -> float | None: ...  # None while it has a request

    @property
    @abstractmethod
    def unanswered(self) -> int: ...  # complete requests whose replies have not been written

    @abstractmethod
    def process(self, data: bytes) -> None:
        """Process received bytes; `keep` those of an incomplete message."""

    @abstractmethod
    def check(self, now_s: float) -> None:
        """Close the connection if it is past a limit."""

    @abstractmethod
    def close(self) -> None:
        """Accept no more requests; close once all written data is sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.tls = transport.get_extra_info("sslcontext") is not None
        self._port.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._port.connections.discard(self)
        self._port.memory.release(self.unsent_bytes)
        self.unsent_bytes = 0
        self.take_kept()

    def part_of(self, buffer: memoryview) -> memoryview:
        """Return the part of a buffer that may be received into now."""
        turns = self._port.turns
        if turns.late() if self.tls else turns.busy:  # this turn is used up
            return buffer[: BUSY_BYTES[self.tls]]
        return buffer

    def data_received(self, data: bytes) -> None:
        """Process received bytes, now or in one of the next turns."""
        if self.kept:
            data = self.take_kept() + data
        turns = self._port.turns
        if turns.busy or self.paused or self.answering:
            self.keep(data)
            self.pause()
            self.go_on(urgent=self.is_urgent(data))
        else:
            begun_s = turns.clock_s()
            self.process(data)
            turns.spend(begun_s)

    def is_urgent(self, data: bytes) -> bool:  # noqa: ARG002 - for a subclass
        """Return whether these bytes are processed before those of other connections."""
        return False

    def go_on(self, *, urgent: bool = False) -> None:
        """Process what was received in one of the next turns, or receive more."""
        if self.queued or self.stalled or self.answering:
            return
        if self.kept:
            self.queued = True
            self.pause()
            self._port.turns.wait(self._take_turn, urgent=urgent)
        else:
            self.resume()

    def _take_turn(self) -> None:
        self.queued = False
        self.process(self.take_kept())
        if not (self.queued or self.stalled or (self.kept and self.answering)):
            self.resume()

    def keep(self, data: bytes) -> None:
        self.kept = data
        self._port.memory.add(len(data), 0)

    def take_kept(self) -> bytes:
        data, self.kept = self.kept, b""
        self._port.memory.release(len(data))
        return data

    def pause(self) -> None:
        self.paused = True
        self.transport.pause_reading()

    def resume(self) -> None:
        if not self.transport.is_closing():
            self.paused = False
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.stalled = True
        self.pause()
        self.count_unsent()

    def resume_writing(self) -> None:
        self.stalled = False
        self.go_on()

    def count_unsent(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._port.memory.add(size - self.unsent_bytes, 0)
        self.unsent_bytes = size

    def reads(self, now_s: float, *, waits: bool = False) -> bool:
        """Return whether the client reads fast enough; `waits`: more answers wait for it."""
        self.count_unsent()
        sent_bytes, self.sent_bytes = self.sent_bytes, 0
        if not (self.unsent_bytes or waits):
            self.read_by_s = None
            return True
        unread = unread_bytes(self.transport)
        size, self._unread = sent_bytes + self._unread - unread, unread
        stall_s = self._port.limits.stall_s
        by_s = now_s + stall_s
        if self.read_by_s is not None:
            by_s = extend(self.read_by_s, size, now_s, stall_s)
        self.read_by_s = by_s
        return now_s <= by_s


@dataclass(frozen=True)
class Limits:
    """Limits of one connection, and of their number: sizes, counts and times."""

    connections: int = 4096
    header_bytes: int = 64 << 10
    headers: int = 100
    header_s: float = 10.0  # from the connection or a header's first byte; also for TLS
    stall_s: float = 30.0  # a pause in a message, or of a client that does not read its reply
    idle_s: float = 75.0
    linger_s: float = 2.0  # for reading the error reply, or the reason of a close


class Port(ABC):
    """State that one protocol's connections share: memory budget, turns of the event loop, time."""

    def __init__(self, limits: Limits, memory: MemoryBudget) -> None:
        self.limits = limits
        self.memory = memory
        self.replies: dict[Any, int] = defaultdict(int)  # by status
        self.records = self.logs_access = False  # whether `record` has a use for requests
        # takes a request that failed before a model had it: its line, status, begin and trace
        self.trace_failure: Callable[[str, str, float, str | None], None] | None = None
        self.turns = Turns()
        self.connections: set[Connection] = set()
        self.draining = False
        self.now_s = self.turns.clock_s()
        self.tick_s = 0.0  # time between the last two ticks
        self._unchecked: list[Connection] = []
        self._closing = 0  # connections that are being closed to make room
        self._searched_s = math.nan  # when: it takes a millisecond

    @abstractmethod
    def connect(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection."""

    def record(
        self, call: Any, asked: str, status: str, transport: asyncio.Transport, *, failed: bool
    ) -> None:
        """Log an answered call, and trace one that failed before a model had it.

        `call`: an Exchange or a GrpcCall, with `begun_s`, `about` and `head.trace`.
        """
        about: About | None = call.about
        if failed and about is None and self.trace_failure is not None:
            self.trace_failure(asked, status, call.begun_s, call.head.trace)
        if self.logs_access:
            client = transport.get_extra_info("peername")
            place = f"{client[0]}:{client[1]}" if isinstance(client, tuple) else "-"
            ms = 1000 * (self.turns.clock_s() - call.begun_s)
            name, rows = about or (None, 0)
            facts = {"rows": rows, "id": name, "trace": call.head.trace}
            more = "".join(f" {key}={quote(value)}" for key, value in facts.items() if value)
            access_log.info("%s %s %s %.1f ms%s", place, asked, status, ms, more)

    @property
    def unanswered(self) -> int:
        return sum(connection.unanswered for connection in self.connections)

    def retire(self) -> None:
        """End each connection with its next reply: the server is about to stop."""
        self.draining = True

    def tick(self, now_s: float) -> None:
        """Update the time and check all connections, unless a check is still running."""
        if not self._unchecked:
            self.tick_s, self.now_s = now_s - self.now_s, now_s
            self._closing = 0
            self._unchecked = list(self.connections)
            self.turns.run(self._check_all)

    def _check_all(self) -> None:
        """Check in as many turns as needed: all may reach a limit at one moment."""
        while self._unchecked:
            if self.turns.late():
                self.turns.wait(self._check_all)
                return
            self._unchecked.pop().check(self.now_s)

    def has_place(self) -> bool:
        """Return whether the newest connection may stay; idle ones may be closed to make room."""
        above = len(self.connections) - self.limits.connections
        if above > self._closing and self._searched_s != self.now_s:
            self._searched_s = self.now_s
            self._closing = self.close_idle(_IDLE_S)
        return above <= self._closing

    def close_idle(self, least_s: float) -> int:
        """Close the connections that are idle for longest, `least_s` or more; return how many."""
        last_s = self.now_s - least_s
        found = [(each.idle_since_s, each) for each in self.connections]
        idle = [(since_s, each) for since_s, each in found if since_s and since_s <= last_s]
        chosen = heapq.nsmallest(CLOSED_AT_ONCE, idle, key=itemgetter(0))
        for _, connection in chosen:
            connection.transport.abort()
        return len(chosen)
