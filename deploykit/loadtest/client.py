"""Send prepared requests over persistent connections, and record when each was answered.

Closed loop: each connection sends its next request when it has the answer to the last. Open loop:
requests are sent at given times. An event loop of our own: a request costs two system calls and a
few numbers. An answer counts from when the kernel reports it readable, not from when its turn
comes among others; how late the generator itself was is recorded apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import select
import socket
import struct
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Union

from deploykit.core.errors import Unsupported, os_reason
from deploykit.loadtest.http import Http1, NotHttpError
from deploykit.loadtest.result import NO_ANSWER, UNSENT, RunRecord, SendPlan

if TYPE_CHECKING:
    from deploykit.loadtest.grpc import Grpc


# Sockets that do not wait, with the kernel's own time of what arrived (Linux).

READ_BYTES = 1 << 16  # larger ones would be mapped and unmapped for each answer
USUAL_BYTES = 1 << 12  # enough for most answers, and sooner allocated
_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)  # Linux, asm-generic/socket.h
_SHORTEST_SPIN_S, _LONGEST_SPIN_S = 50e-6, 200e-6
_TIMER_SLACK = 29  # prctl(2), PR_SET_TIMERSLACK: by default a wait ends up to 50 us late


def open_socket(address: str) -> socket.socket:
    """A TCP socket for an IP address, not yet connected. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setblocking(False)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        found.setsockopt(socket.SOL_SOCKET, _TIMESTAMPNS, 1)
    return found


def read_with_lag(sock: socket.socket) -> tuple[bytes, float]:
    """What came, and for how many seconds it had been there, by the kernel's own clock."""
    data, extra, *_ = sock.recvmsg(READ_BYTES, 64)
    if not extra:  # a kernel, or an end of the connection, without a time
        return data, 0.0
    seconds, nanoseconds = struct.unpack("qq", extra[0][2][:16])
    return data, max(0.0, (time.time_ns() - seconds * 1_000_000_000 - nanoseconds) * 1e-9)


def spin_s(requests: int, seconds: float) -> float:
    """How long before a request is due to stay awake: asleep until then, a thread wakes late.

    A tenth of the time between two requests, 50 to 200 us.
    """
    return min(max(_SHORTEST_SPIN_S, seconds / max(1, requests) / 10), _LONGEST_SPIN_S)


def wake_on_time() -> None:
    """Let waits of this thread end when they are due."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)


RETRY_S = 0.1  # between two attempts to connect to a server that refuses
REPORT_S = 0.5  # between two reports of progress
_OPEN_LOOP_START = 32  # connections opened beforehand; more follow when all are in use
_MAX_ERRORS = 8  # different error messages that are kept
_RECENT = 1000  # answers that a report of progress is about
_WAKING_S = 50e-6  # that any client needs from an answer to its next request
_OWN_LIMITS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}

Wire = Union[Http1, "Grpc"]
Report = Callable[[str, float], None]


class _Connection:
    __slots__ = ("connected", "socket", "start_s", "unsent", "wire")

    def __init__(self, connected: bool, sock: socket.socket, wire: Wire) -> None:
        self.connected, self.socket, self.wire = connected, sock, wire
        self.start_s: float | None = None  # of the request in flight
        self.unsent: memoryview | None = None


class Client:
    """Carries out a plan, in one thread."""

    def __init__(self, plan: SendPlan, on_progress: Report | None = None) -> None:
        if not hasattr(select, "epoll"):
            raise Unsupported("load tests need Linux: its event notification, epoll")
        self.plan, self.outcome, self._on_progress = plan, RunRecord(), on_progress
        self._due_s = array("d", plan.due_s or ())
        self._spin_s = spin_s(len(self._due_s), plan.end_s)
        self._waiting: deque[float] = deque()  # open loop: due, but no connection is free
        self._idle: list[_Connection] = []
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._opening = self._next_due = 0
        self._numbers = itertools.cycle([*range(1, len(plan.requests)), 0])  # 0 was the probe
        self._clock = time.perf_counter
        self._read_bytes = USUAL_BYTES
        self._full = False  # all connections that may be open are
        self._retry_s = self._report_s = float("inf")
        self._cpu_s: tuple[float, float] | None = None  # thread and run time where measuring began
        self._at = 0.0  # when the events were reported that are now handled

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def run(self, zero: float | None = None) -> RunRecord:
        """Send until the plan ends, wait for the last answers, close.

        `zero`: what `time.perf_counter` shows at the start; now, where that is past.
        """
        self._zero = max(zero or 0.0, time.perf_counter())
        wake_on_time()
        self._epoll = select.epoll()
        if self._on_progress is not None:
            self._report_s = 0.0
        while (early_s := -self.now()) > 0:
            time.sleep(early_s)  # until the time that all processes begin at
        try:
            at_once = self.plan.connections
            for _ in range(at_once if self.plan.due_s is None else min(_OPEN_LOOP_START, at_once)):
                self._open()
            while not self._step():
                pass
        finally:
            self._close()
        return self.outcome

    def _step(self) -> bool:
        """Send what is due, wait for events and handle them. True: the run is over."""
        plan, now = self.plan, self.now()
        if self._next_due < len(self._due_s):
            now = self._send_due(now)
        if now >= plan.end_s:
            if self._cpu_s is not None:
                self.outcome.busy = _share(self._cpu_s, now)
                self._cpu_s = None
            if self._is_quiet() or now >= plan.end_s + plan.drain_s:
                return True
        elif now >= plan.begin_s and self._cpu_s is None:
            self._cpu_s = (time.thread_time(), now)
        if now >= self._retry_s:
            self._retry_s = float("inf")
            self._open_if_wanted()
        if now >= self._report_s:
            self._report(now)
        events = self._wait(now)
        if events:
            self._handle(events)
        return False

    def _is_quiet(self) -> bool:
        """Whether nothing is due, waits to be sent or waits for its answer."""
        open_requests = any(each.start_s is not None for each in self._connections.values())
        return not (open_requests or self._waiting or self._next_due < len(self._due_s))

    def _wait(self, now: float) -> list[tuple[int, int]]:
        """Events; none when it is time for something else, to some microseconds."""
        plan = self.plan
        until_s = plan.begin_s if now < plan.begin_s else plan.end_s
        if now >= plan.end_s:
            until_s = plan.end_s + plan.drain_s
        until_s = min(until_s, self._retry_s, self._report_s)
        if self._next_due >= len(self._due_s):
            return self._epoll.poll(max(0.0, until_s - now))
        until_s = min(until_s, self._due_s[self._next_due])
        wait_s = until_s - self.now()
        if wait_s > self._spin_s:  # epoll's own timeout is rounded up to whole milliseconds
            select.select([self._epoll], [], [], wait_s - self._spin_s)
        return self._epoll.poll(0)

    def _handle(self, events: list[tuple[int, int]]) -> None:
        """Read what came. `_at` is when all of it was there; later steps are our own time.

        It came after the events before it: where these were just now, that is all that is needed
        of the kernel's own time, which costs more than a plain read.
        """
        before_s, self._at = self._at, self._clock() - self._zero
        at, outcome, check = self._at, self.outcome, self.plan.check
        starts_s, ends_s, statuses = outcome.starts_s, outcome.ends_s, outcome.statuses
        done = len(ends_s)
        lag_s = at - before_s if at - before_s <= _WAKING_S else -1.0
        for fd, mask in events:
            connection = self._connections.get(fd)
            if connection is None:
                continue
            if mask & select.EPOLLOUT:
                self._on_writable(connection)
            if mask == select.EPOLLOUT or not connection.connected:
                continue
            try:
                if lag_s < 0:
                    data, lag_s = read_with_lag(connection.socket)
                else:
                    data = connection.socket.recv(self._read_bytes)
            except BlockingIOError:
                continue
            except OSError as exc:
                self._fail(connection, f"the connection broke: {os_reason(exc)}")
                continue
            start_s, (usual, size) = connection.start_s, check.usual
            if (
                len(data) != size
                or start_s is None
                or connection.wire.buffer
                or connection.unsent is not None
                or not data.startswith(usual)
            ):
                self._on_data(connection, data)
                continue
            starts_s.append(start_s)  # in short what `_on_data` comes to
            ends_s.append(at)
            statuses.append(200)
            connection.start_s = None
            self._free(connection)
        if self.plan.begin_s <= at < self.plan.end_s and lag_s >= 0:
            answers = len(ends_s) - done
            outcome.read_lags_s.append(lag_s)
            outcome.reads.append(answers)
            own_s = (self.now() - at) * (answers + 1) / 2  # they are handled one after another
            outcome.behind_s += max(0.0, answers * (lag_s - _WAKING_S) + own_s)

    def _send_due(self, now: float) -> float:
        """Open loop: start every request whose time has come."""
        due_s, plan, lags_s = self._due_s, self.plan, self.outcome.send_lags_s
        late = bisect_right(due_s, now, self._next_due) - self._next_due
        for _ in range(late):
            start_s = due_s[self._next_due]
            self._next_due += 1
            if self._idle:
                self._send(self._idle.pop(), start_s)
            else:
                self._waiting.append(start_s)
                if self._opening < len(self._waiting):
                    self._open()
                if self._full and start_s >= plan.begin_s:
                    self.outcome.waited += 1
            now = self.now()
            if start_s >= plan.begin_s:
                lags_s.append(now - start_s)
        return now

    def _free(self, connection: _Connection) -> None:
        """Give this connection its next request, if there is one."""
        if self.plan.due_s is None:
            now = self._clock() - self._zero
            if now < self.plan.end_s:
                self._send(connection, now)
                return
        elif self._waiting:
            self._send(connection, self._waiting.popleft())
            return
        self._idle.append(connection)

    def _send(self, connection: _Connection, start_s: float) -> None:
        connection.start_s = start_s
        self._write(connection, connection.wire.request(next(self._numbers)))

    def _write(self, connection: _Connection, data: bytes | memoryview) -> None:
        if connection.unsent is not None:  # control messages wait behind what is being sent
            connection.unsent = memoryview(bytes(connection.unsent) + data)
            return
        try:
            sent = connection.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as exc:
            self._fail(connection, f"the connection broke: {os_reason(exc)}")
            return
        if sent < len(data):
            connection.unsent = memoryview(data)[sent:]
            self._epoll.modify(connection.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _on_writable(self, connection: _Connection) -> None:
        if not connection.connected:
            self._on_connected(connection)
            return
        left, connection.unsent = connection.unsent, None
        self._epoll.modify(connection.socket.fileno(), select.EPOLLIN)
        if left is not None:
            self._write(connection, left)

    def _on_data(self, connection: _Connection, data: bytes) -> None:
        wire = connection.wire
        if len(data) >= USUAL_BYTES:
            self._read_bytes = READ_BYTES
        try:
            status = wire.feed(data) if data else wire.end()
        except NotHttpError as exc:
            self._fail(connection, f"not an answer of this protocol: it {exc}")
            return
        if wire.control:
            control, wire.control = wire.control, b""
            self._write(connection, control)
        if status is None:
            if not data:
                self._fail(connection, "the server closed the connection before it answered")
            return
        start_s, connection.start_s = connection.start_s, None
        if start_s is None:  # for example a 408 before the server closes an idle connection
            self._drop(connection)
            return
        self._record(start_s, self._at, status, wire.error)
        if wire.keep and data and connection.unsent is None:
            self._free(connection)
        else:
            self._drop(connection)

    def _record(self, start_s: float, end_s: float, status: int, error: str | None) -> None:
        """One request is over."""
        outcome = self.outcome
        outcome.starts_s.append(start_s)
        outcome.ends_s.append(end_s)
        outcome.statuses.append(status)
        if error is not None and (error in outcome.errors or len(outcome.errors) < _MAX_ERRORS):
            outcome.errors[error] = outcome.errors.get(error, 0) + 1

    def _fail(self, connection: _Connection, error: str) -> None:
        """The request in flight, if any, has no answer; its connection is of no more use."""
        start_s, connection.start_s = connection.start_s, None
        if start_s is not None:
            self._record(start_s, self.now(), NO_ANSWER, error)
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection.socket.fileno(), None)
        connection.socket.close()
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)
        self._open_if_wanted()

    def _wire(self) -> Wire:
        plan = self.plan
        if not plan.block:
            return Http1(plan.requests, plan.check)
        from deploykit.loadtest.grpc import Grpc  # needs a package that HTTP/1.1 does not

        return Grpc(plan.block, plan.requests, plan.check)

    def _open_if_wanted(self) -> None:
        if self._waiting or (self.plan.due_s is None and self.now() < self.plan.end_s):
            self._open()

    def _open(self) -> None:
        """Begin to connect, unless all connections that may be open are."""
        self._full = len(self._connections) >= self.plan.connections
        if self._full or self._retry_s < float("inf"):
            return
        try:
            sock = open_socket(self.plan.address)
        except OSError as exc:
            self._limit(os_reason(exc))
            return
        connection = _Connection(False, sock, self._wire())
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock.fileno(), select.EPOLLOUT)
        self._opening += 1
        self.outcome.opened = max(self.outcome.opened, len(self._connections))
        code = sock.connect_ex((self.plan.address, self.plan.port))
        if code not in (0, errno.EINPROGRESS):
            self._not_connected(connection, code)

    def _on_connected(self, connection: _Connection) -> None:
        code = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._not_connected(connection, code)
            return
        self._opening -= 1
        connection.connected = True
        self._epoll.modify(connection.socket.fileno(), select.EPOLLIN)
        if connection.wire.greeting:
            self._write(connection, connection.wire.greeting)
        if connection.socket.fileno() >= 0:
            self._free(connection)

    def _not_connected(self, connection: _Connection, code: int) -> None:
        """Fail the requests without a connection to wait for; in a closed loop that is one."""
        self._opening -= 1
        self._connections.pop(connection.socket.fileno())
        connection.socket.close()
        if code in _OWN_LIMITS:
            self._limit(os.strerror(code))
            return
        self._retry_s = self.now() + RETRY_S
        error = f"cannot connect: {os.strerror(code)}"
        if self.plan.due_s is None and self.now() < self.plan.end_s:
            self._record(self.now(), self.now(), NO_ANSWER, error)
        while self._waiting and not self._connections:
            self._record(self._waiting.popleft(), self.now(), NO_ANSWER, error)

    def _limit(self, reason: str) -> None:
        self.outcome.limit, self._full = reason, True
        self._retry_s = self.now() + RETRY_S

    def _report(self, now: float) -> None:
        """Tell how far the run is, with percentiles of the last answers."""
        self._report_s = now + REPORT_S
        if self._on_progress is None:
            return
        self._on_progress(self.outcome.progress(_RECENT), min(now / self.plan.end_s, 1.0))

    def _close(self) -> None:
        """Count what is still open as unanswered, or never sent, and close all connections."""
        now, plan = self.now(), self.plan
        if self._cpu_s is not None:
            self.outcome.busy = _share(self._cpu_s, now)
        for connection in list(self._connections.values()):
            if connection.start_s is not None:
                error = f"no answer within {plan.drain_s:g} s of the end"
                self._record(connection.start_s, now, NO_ANSWER, error)
            connection.socket.close()
        for start_s in self._waiting:
            if self._full:
                self._record(start_s, now, UNSENT, None)
            else:
                self._record(start_s, now, NO_ANSWER, "no connection was open in time")
        self._epoll.close()


def _share(began: tuple[float, float], now: float) -> float:
    """Of one core, since `began`."""
    cpu_s, at_s = began
    return (time.thread_time() - cpu_s) / (now - at_s) if now > at_s else 0.0
