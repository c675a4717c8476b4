"""Send prepared requests over persistent connections, and record when each was answered.

In the closed loop each connection sends its next request when the last is answered. In the open
loop requests are sent at given times. We use our own event loop, in which a request costs two
system calls. An answer counts from when the kernel reports it readable, not from when it is
processed; the generator's own lag is recorded separately.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import numpy as np

from deploykit.core.errors import os_reason
from deploykit.core.subprocesses import run_apart
from deploykit.evaluation.artefacts import Progress
from deploykit.loadtest.server import Server, tls_reason
from deploykit.loadtest.wire import NO_ANSWER, UNSENT, AnswerCheck, NotHttpError, Wire

READ_BYTES = 1 << 16  # malloc would map and unmap larger buffers per answer
RETRY_S = 0.1  # interval of attempts to connect to a server that refuses
REPORT_S = 0.5  # interval of progress reports
_POLL_S = 0.5  # interval of checks for Ctrl-C
_TOGETHER_S = 1.0  # time for several processes to get ready to begin together
_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)  # Linux, asm-generic/socket.h
_SPIN_S = 100e-6  # busy wait before a request is due, as a wait ends up to 90 us late
_OPEN_LOOP_START = 32  # connections opened beforehand; more follow when all are in use
_MAX_ERRORS = 8  # distinct error messages to keep
_WAKING_S = 50e-6  # any client needs this from an answer to its next request
_TCP_CLOSED = 7  # state after a reset, enum in Linux's tcp_states.h
_OWN_LIMITS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True)
class Load:
    """The load on a server. If `rate_per_s` is None, it is a closed loop of `connections`."""

    rate_per_s: float | None
    connections: int
    warmup_s: float
    duration_s: float
    drain_s: float = 5.0
    slo_ms: float | None = None

    @property
    def end_s(self) -> float:
        return self.warmup_s + self.duration_s

    def due_s(self, seed: int) -> array[float] | None:
        """Return the ascending send times of an open loop, a Poisson process."""
        if self.rate_per_s is None:
            return None
        random = np.random.default_rng(seed)
        count = random.poisson(self.rate_per_s * self.end_s)
        return array("d", np.sort(random.uniform(0.0, self.end_s, count)).tobytes())


@dataclass
class RunRecord:
    """The record of one process. The first three fields have an item per request, by end.

    `read_lags_s`: how long answers were readable before the generator woke, per wake-up; `reads`
    has the number of answers of each. `behind_s`: time that connections waited for the generator,
    summed over connections. Lags and busy times cover the measured time.
    """

    starts_s: array[float] = field(default_factory=lambda: array("d"))
    ends_s: array[float] = field(default_factory=lambda: array("d"))
    statuses: array[int] = field(default_factory=lambda: array("h"))
    send_lags_s: array[float] = field(default_factory=lambda: array("d"))
    read_lags_s: array[float] = field(default_factory=lambda: array("d"))
    reads: array[int] = field(default_factory=lambda: array("l"))
    behind_s: float = 0.0
    busy: float = 0.0  # share of one core
    waited: int = 0  # requests that were due when all allowed connections were in use
    opened: int = 0  # most connections at once
    limit: str = ""  # why no more were opened
    resent: int = 0  # requests whose connection the server had closed before it read them
    errors: dict[str, int] = field(default_factory=dict)

    @classmethod
    def join(cls, records: Sequence[RunRecord]) -> RunRecord:
        whole = cls(
            behind_s=sum(each.behind_s for each in records),
            busy=max(each.busy for each in records),
            waited=sum(each.waited for each in records),
            resent=sum(each.resent for each in records),
            opened=sum(each.opened for each in records),
            limit=next((each.limit for each in records if each.limit), ""),
            errors=dict(sum((Counter(each.errors) for each in records), Counter())),
        )
        for each in records:
            for name in ("starts_s", "ends_s", "statuses", "send_lags_s", "read_lags_s", "reads"):
                getattr(whole, name).extend(getattr(each, name))
        return whole

    def progress(self) -> str:
        """Describe the number of answered requests and the percentiles of the last 1,000."""
        lists = self.starts_s, self.ends_s, self.statuses
        last = zip(*(each[-1000:] for each in lists), strict=True)
        taken_s = sorted(end_s - start_s for start_s, end_s, status in last if status == 200)
        text = f"{len(self.ends_s):,} requests"
        if taken_s:
            p50, p99 = (taken_s[int(len(taken_s) * share)] * 1e3 for share in (0.5, 0.99))
            text += f", p50 {p50:.2f} ms, p99 {p99:.2f} ms"
        return text


@dataclass(frozen=True)
class SendPlan:
    """The plan of one process. `due_s`: ascending times to send at, None for the closed loop."""

    server: Server
    requests: Sequence[bytes]
    check: AnswerCheck
    load: Load
    due_s: Sequence[float] | None

    def share(self, processes: int) -> list[SendPlan]:
        """Return a plan for each process: every n-th time, and an equal number of connections."""
        plans = []
        for number in range(processes):
            connections = (self.load.connections + processes - 1 - number) // processes
            due_s = None if self.due_s is None else self.due_s[number::processes]
            load = replace(self.load, connections=connections)
            plans.append(replace(self, load=load, due_s=due_s))
        return plans


def run_plans(plans: Sequence[SendPlan], on_progress: Progress | None = None) -> list[RunRecord]:
    """Carry out each plan in a separate process; all begin together, and Ctrl-C ends all."""
    stop = threading.Event()
    start_s = time.perf_counter() + _TOGETHER_S if len(plans) > 1 else 0.0

    def carry_out(plan: SendPlan) -> RunRecord:
        def report(message: str, part: float) -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            if on_progress is not None and plan is plans[-1]:
                on_progress(message, part)

        name = "the load generator"
        record: RunRecord = run_apart(name, run_plan, plan, start_s, on_progress=report)
        return record

    with ThreadPoolExecutor(len(plans)) as pool:
        runs = [pool.submit(carry_out, plan) for plan in plans]
        try:
            left = set(runs)
            while left:  # without a timeout a Ctrl-C just before the wait would be missed
                done, left = wait(left, _POLL_S)
                for run in done:
                    run.result()
        except BaseException:
            stop.set()  # each ends at its next report of progress
            raise
        return [run.result() for run in runs]


def run_plan(plan: SendPlan, start_s: float, on_progress: Progress | None) -> RunRecord:
    """Carry out a plan in this process, from `start_s` of `time.perf_counter` on."""
    client = Client(plan, on_progress)
    gc.collect()
    gc.disable()  # the generator's pauses must not count as latency
    return client.run(start_s)


class _Connection:
    __slots__ = ("connected", "place", "reused", "secure", "socket", "start_s", "unsent", "wire")

    def __init__(self, server: Server, wire: Wire) -> None:
        """Make a socket, not yet connected. Raises OSError."""
        self.socket, self.place = server.new_socket()
        # connecting a Unix socket takes no time, but would fail while the server's queue is full
        self.socket.settimeout(RETRY_S if server.unix else 0.0)
        with contextlib.suppress(OSError):  # a Unix socket has neither
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.setsockopt(socket.SOL_SOCKET, _TIMESTAMPNS, 1)
        self.connected, self.secure, self.reused, self.wire = False, False, False, wire
        self.start_s: float | None = None  # the request in flight
        self.unsent: memoryview | None = None

    def read_with_lag(self) -> tuple[bytes, float]:
        """Return received data and how many seconds it had been readable, by the kernel's clock."""
        if self.secure:  # the kernel's clock is asked before the data are decrypted
            peek = socket.socket.recvmsg(self.socket, 1, 64, socket.MSG_PEEK)
            data, extra = self.receive(READ_BYTES), peek[1]
        else:
            data, extra, *_ = self.socket.recvmsg(READ_BYTES, 64)
        if not extra:  # no timestamp: an old kernel, or the connection's end
            return data, 0.0
        seconds, nanoseconds = struct.unpack("qq", extra[0][2][:16])
        return data, max(0.0, (time.time_ns() - seconds * 1_000_000_000 - nanoseconds) * 1e-9)

    def unread(self, exc: OSError | None) -> bool:
        """Return whether the server closed an idle connection before it read this request.

        It has answered before, no byte of this answer has come, and the kernel says that the
        request was not received: it was reset, or has not been acknowledged.
        """
        if not self.reused or self.wire.buffer:
            return False
        if self.wire.unread or isinstance(exc, (BrokenPipeError, ConnectionResetError)):
            return True
        try:
            state = socket.socket.getsockopt(self.socket, socket.IPPROTO_TCP, socket.TCP_INFO, 28)
        except OSError:
            return False
        return state[0] == _TCP_CLOSED or struct.unpack_from("I", state, 24)[0] > 0

    def receive(self, size: int) -> bytes:
        """Return received data; of TLS all that is decrypted, for which no event would come."""
        data = self.socket.recv(size)
        while self.secure and (left := self.socket.pending()):  # type: ignore[attr-defined]
            data += self.socket.recv(left)
        return data


class Client:
    """Carries out a plan in one thread."""

    def __init__(self, plan: SendPlan, on_progress: Progress | None = None) -> None:
        self.plan, self.record, self._on_progress = plan, RunRecord(), on_progress
        self._due_s = array("d", plan.due_s or ())
        self._begin_s, self._end_s = plan.load.warmup_s, plan.load.end_s
        self._waiting: deque[float] = deque()  # open loop: due, but no connection is free
        self._idle: list[_Connection] = []
        self._connections: dict[int, _Connection] = {}  # by descriptor
        self._opening = self._next_due = 0
        self._numbers = itertools.cycle([*range(1, len(plan.requests)), 0])  # 0 was the probe
        self._clock = time.perf_counter
        self._full = False  # no more connections may be opened
        self._retry_s = math.inf
        self._report_s = math.inf if on_progress is None else 0.0
        self._measured_from: tuple[float, float] | None = None  # thread's CPU time, now()
        self._at = 0.0  # when the current events were reported

    def now(self) -> float:
        return self._clock() - self._zero

    def run(self, start_s: float = 0.0) -> RunRecord:
        """Send from `start_s` of `time.perf_counter`, or now; await the last answers and close."""
        self._zero = max(start_s, self._clock())
        self._epoll = select.epoll()
        while (early_s := -self.now()) > 0:
            time.sleep(early_s)
        try:
            at_once = self.plan.load.connections
            for _ in range(at_once if self.plan.due_s is None else min(_OPEN_LOOP_START, at_once)):
                self._open()
            while not self._step():
                pass
        finally:
            self._close()
        return self.record

    def _step(self) -> bool:
        """Send due requests, wait for events and handle them; return True when the run is over."""
        plan, now = self.plan, self.now()
        if self._next_due < len(self._due_s):
            now = self._send_due(now)
        if now >= self._end_s:
            self._note_busy(now)
            in_flight = any(each.start_s is not None for each in self._connections.values())
            quiet = not (in_flight or self._waiting or self._next_due < len(self._due_s))
            if quiet or now >= self._end_s + plan.load.drain_s:
                return True
        elif now >= self._begin_s and self._measured_from is None:
            self._measured_from = time.thread_time(), now
        if now >= self._retry_s:
            self._retry_s = math.inf
            self._open_if_wanted()
        if now >= self._report_s and self._on_progress is not None:
            self._report_s = now + REPORT_S
            self._on_progress(self.record.progress(), min(now / self._end_s, 1.0))
        events = self._wait(now)
        if events:
            self._handle(events)
        return False

    def _note_busy(self, now: float) -> None:
        cpu_s, begun_s = self._measured_from or (0.0, now)
        if now > begun_s and not self.record.busy:
            self.record.busy = (time.thread_time() - cpu_s) / (now - begun_s)

    def _wait(self, now: float) -> list[tuple[int, int]]:
        """Return events, or none when the next action is due, precise to some microseconds."""
        plan = self.plan
        until_s = self._begin_s if now < self._begin_s else self._end_s
        if now >= self._end_s:
            until_s = self._end_s + plan.load.drain_s
        until_s = min(until_s, self._retry_s, self._report_s)
        if self._next_due >= len(self._due_s):
            return self._epoll.poll(max(0.0, until_s - now))
        wait_s = min(until_s, self._due_s[self._next_due]) - self.now()
        if wait_s > _SPIN_S:  # epoll's own timeout is rounded up to whole milliseconds
            select.select([self._epoll], [], [], wait_s - _SPIN_S)
        return self._epoll.poll(0)

    def _handle(self, events: list[tuple[int, int]]) -> None:
        """Read the answers. By `_at` all were readable; later steps are the generator's own time.

        They came after the previous events. If those were within `_WAKING_S`, that bounds the lag
        and the kernel's timestamp, which costs more than a plain read, is not needed.
        """
        before_s, self._at = self._at, self._clock() - self._zero
        at, record, check = self._at, self.record, self.plan.check
        starts_s, ends_s, statuses = record.starts_s, record.ends_s, record.statuses
        done = len(ends_s)
        lag_s = at - before_s if at - before_s <= _WAKING_S else -1.0
        for fd, mask in events:
            connection = self._connections.get(fd)
            if connection is None:
                continue
            if mask & select.EPOLLOUT or not connection.connected:
                self._on_writable(connection)
            if mask == select.EPOLLOUT or not connection.connected:
                continue
            try:
                if lag_s < 0:
                    data, lag_s = connection.read_with_lag()
                else:
                    data = connection.receive(READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                continue
            except OSError as exc:
                self._fail(connection, f"the connection broke: {os_reason(exc)}", exc)
                continue
            start_s, (usual, size) = connection.start_s, check.usual
            busy = connection.wire.buffer or connection.unsent is not None
            if len(data) != size or start_s is None or busy or not data.startswith(usual):
                self._on_data(connection, data)
                continue
            starts_s.append(start_s)  # the fast path of `_on_data`
            ends_s.append(at)
            statuses.append(200)
            connection.start_s, connection.reused = None, True
            self._free(connection)
        if self._begin_s <= at < self._end_s and lag_s >= 0:
            answers = len(ends_s) - done
            record.read_lags_s.append(lag_s)
            record.reads.append(answers)
            own_s = (self.now() - at) * (answers + 1) / 2  # handled one by one
            record.behind_s += max(0.0, answers * (lag_s - _WAKING_S) + own_s)

    def _send_due(self, now: float) -> float:
        due_s, lags_s = self._due_s, self.record.send_lags_s
        for _ in range(bisect_right(due_s, now, self._next_due) - self._next_due):
            start_s = due_s[self._next_due]
            self._next_due += 1
            if self._idle:
                self._send(self._idle.pop(), start_s)
            else:
                self._waiting.append(start_s)
                if self._opening < len(self._waiting):
                    self._open()
                if self._full and start_s >= self._begin_s:
                    self.record.waited += 1
            now = self.now()
            if start_s >= self._begin_s:
                lags_s.append(now - start_s)
        return now

    def _free(self, connection: _Connection) -> None:
        if self._waiting:
            self._send(connection, self._waiting.popleft())
            return
        if self.plan.due_s is None:
            now = self._clock() - self._zero
            if now < self._end_s:
                self._send(connection, now)
                return
        self._idle.append(connection)

    def _send(self, connection: _Connection, start_s: float) -> None:
        connection.start_s = start_s
        self._write(connection, connection.wire.request(next(self._numbers)))

    def _write(self, connection: _Connection, data: bytes | memoryview) -> None:
        if connection.unsent is not None:  # control messages follow unsent data
            connection.unsent = memoryview(bytes(connection.unsent) + data)
            return
        try:
            sent = connection.socket.send(data)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            sent = 0
        except OSError as exc:
            self._fail(connection, f"the connection broke: {os_reason(exc)}", exc)
            return
        if sent < len(data):
            connection.unsent = memoryview(data)[sent:]
            self._epoll.modify(connection.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _on_writable(self, connection: _Connection) -> None:
        if not connection.connected:
            code = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._not_connected(connection, code)
                return
            if self.plan.server.tls and not self._handshake(connection):
                return
            self._opening -= 1
            connection.connected = True
            self._epoll.modify(connection.socket.fileno(), select.EPOLLIN)
            if connection.wire.greeting:
                self._write(connection, connection.wire.greeting)
            if connection.socket.fileno() >= 0:
                self._free(connection)
            return
        left, connection.unsent = connection.unsent, None
        self._epoll.modify(connection.socket.fileno(), select.EPOLLIN)
        if left is not None:
            self._write(connection, left)

    def _handshake(self, connection: _Connection) -> bool:
        try:
            if not connection.secure:
                connection.socket = self.plan.server.secure(connection.socket, handshake=False)
                connection.secure = True
            connection.socket.do_handshake()  # type: ignore[attr-defined]
        except ssl.SSLWantReadError:
            self._epoll.modify(connection.socket.fileno(), select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self._epoll.modify(connection.socket.fileno(), select.EPOLLOUT)
        except OSError as exc:
            self._not_connected(connection, 0, f"TLS: {tls_reason(exc)}")
        else:
            return True
        return False

    def _on_data(self, connection: _Connection, data: bytes) -> None:
        wire = connection.wire
        if not data:
            self._fail(connection, "the server closed the connection before it answered")
            return
        try:
            status = wire.feed(data)
        except NotHttpError as exc:
            self._fail(connection, f"not an answer of this protocol: it {exc}")
            return
        if wire.control:
            control, wire.control = wire.control, b""
            self._write(connection, control)
        if status is None:
            return
        if wire.unread:
            self._fail(connection, str(wire.error))
            return
        start_s, connection.start_s, connection.reused = connection.start_s, None, True
        if start_s is None:  # for example a 408 before the server closes an idle connection
            self._drop(connection)
            return
        self._record(start_s, self._at, status, wire.error)
        if wire.keep and connection.unsent is None:
            self._free(connection)
        else:
            self._drop(connection)

    def _record(self, start_s: float, end_s: float, status: int, error: str | None) -> None:
        record = self.record
        record.starts_s.append(start_s)
        record.ends_s.append(end_s)
        record.statuses.append(status)
        if error is not None and (error in record.errors or len(record.errors) < _MAX_ERRORS):
            record.errors[error] = record.errors.get(error, 0) + 1

    def _fail(self, connection: _Connection, error: str, exc: OSError | None = None) -> None:
        """Drop a connection. Its request fails, or waits for another one if it was not read."""
        start_s, connection.start_s = connection.start_s, None
        if start_s is not None and connection.unread(exc):
            self._waiting.appendleft(start_s)
            self.record.resent += 1
        elif start_s is not None:
            self._record(start_s, self.now(), 503 if connection.wire.unread else NO_ANSWER, error)
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection.socket.fileno(), None)
        connection.socket.close()
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)
        self._open_if_wanted()

    def _open_if_wanted(self) -> None:
        if self._waiting or (self.plan.due_s is None and self.now() < self._end_s):
            self._open()

    def _open(self) -> None:
        """Begin to connect, unless no more connections may be opened."""
        server = self.plan.server
        self._full = len(self._connections) >= self.plan.load.connections
        if self._full or self._retry_s < math.inf:
            return
        try:
            wire = server.wire(self.plan.requests, self.plan.check)
            connection = _Connection(server, wire)
        except OSError as exc:
            self._limit(os_reason(exc))
            return
        self._connections[connection.socket.fileno()] = connection
        self._epoll.register(connection.socket.fileno(), select.EPOLLOUT)
        self._opening += 1
        self.record.opened = max(self.record.opened, len(self._connections))
        code = connection.socket.connect_ex(connection.place)
        connection.socket.setblocking(False)
        if code not in (0, errno.EINPROGRESS):
            self._not_connected(connection, code)

    def _not_connected(self, connection: _Connection, code: int, reason: str = "") -> None:
        """Fail the waiting requests without a connection; in a closed loop that is one."""
        self._opening -= 1
        self._connections.pop(connection.socket.fileno())
        connection.socket.close()
        if code in _OWN_LIMITS:
            self._limit(os.strerror(code))
            return
        self._retry_s = self.now() + RETRY_S
        error = f"cannot connect: {reason or os.strerror(code)}"
        if self.plan.due_s is None and self.now() < self._end_s and not self._waiting:
            self._record(self.now(), self.now(), NO_ANSWER, error)
        while self._waiting and not self._connections:
            self._record(self._waiting.popleft(), self.now(), NO_ANSWER, error)

    def _limit(self, reason: str) -> None:
        self.record.limit, self._full = reason, True
        self._retry_s = self.now() + RETRY_S

    def _close(self) -> None:
        """Record open requests as unanswered, waiting ones as never sent; close all connections."""
        now, plan = self.now(), self.plan
        self._note_busy(now)
        for connection in self._connections.values():
            if connection.start_s is not None:
                error = f"no answer within {plan.load.drain_s:g} s of the end"
                self._record(connection.start_s, now, NO_ANSWER, error)
            connection.socket.close()
        for start_s in self._waiting:
            if self._full:
                self._record(start_s, now, UNSENT, None)
            else:
                self._record(start_s, now, NO_ANSWER, "no connection was open in time")
        self._epoll.close()
