"""Send prepared HTTP requests over persistent connections, and record when each was answered.

Closed loop: each connection sends its next request when it has the answer to the last. Open loop:
requests are sent at given times. One request costs a write, a parse and three numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import selectors
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import cast

from deploykit.core.extras import installed, require
from deploykit.measure.load.target import RemoteModel, error_text

httptools = require("httptools")

RETRY_S = 0.1  # between two attempts to connect to a server that refuses
NO_ANSWER = 0  # the status of a request without an answer
_OPEN_LOOP_START = 32  # connections opened beforehand; more follow when all are in use
_MAX_ERRORS = 8  # different error messages that are kept


class _PreciseSelector(selectors.DefaultSelector):
    """Waits to the microsecond; epoll's own timeout is rounded up to whole milliseconds."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0 and self.fileno() < 1024:  # the most select() takes
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


@contextlib.contextmanager
def event_loop(*, precise: bool) -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop: uvloop where installed, or `precise`, one that wakes when it is due.

    The timers of uvloop have a resolution of 1 ms: in an open loop each request would lag by that.
    """
    loop: asyncio.AbstractEventLoop
    if precise and hasattr(selectors.DefaultSelector, "fileno"):
        loop = asyncio.SelectorEventLoop(_PreciseSelector())
    elif installed("uvloop"):
        import uvloop

        loop = uvloop.new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        loop.run_until_complete(asyncio.sleep(0))  # the transports that were closed go now
        loop.close()


class Client:
    """One run: its plan, its connections and what came back. Times are seconds since its start.

    `due_s`: when requests are due, ascending; None is the closed loop. Requests start before
    `end_s`; lags are recorded from `begin_s`, where the warm-up ends.
    """

    def __init__(
        self,
        remote: RemoteModel,
        requests: Sequence[bytes],
        *,
        connections: int,
        due_s: Sequence[float] | None,
        begin_s: float,
        end_s: float,
        drain_s: float,
    ) -> None:
        self.remote, self.requests = remote, requests
        self.most = connections  # that may be open at once
        self.due_s, self.begin_s, self.end_s, self.drain_s = due_s, begin_s, end_s, drain_s
        self.starts_s, self.ends_s, self.statuses = array("d"), array("d"), array("h")
        self.lags_s = array("d")  # open loop: how late the generator handed a request over
        self.errors: dict[str, int] = {}
        self.interrupted = False
        self.busy = 0.0  # share of one core that the run used
        self._waiting: deque[float] = deque()  # open loop: due, but no connection is free
        self._idle: list[_Connection] = []
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening = self._next_due = self._turn = 0
        self._ended = False

    def interrupt(self) -> None:
        """End the run at once; it has no result then."""
        self.interrupted = True
        self._finish()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    async def run(self) -> None:
        """Send until `end_s`, wait at most `drain_s` for the last answers, close."""
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.create_future()
        cpu_s = time.thread_time()
        self._zero = time.perf_counter()
        try:
            at_once = self.most if self.due_s is None else min(_OPEN_LOOP_START, self.most)
            for _ in range(at_once):
                self._open()
            self._send_due()
            self._loop.call_later(self.end_s, self._end)
            await self._done
        finally:
            self.busy = (time.thread_time() - cpu_s) / self.now()
            self._finish()
            for task in self._tasks:
                task.cancel()
            for connection in list(self._connections):
                connection.give_up()
            while self._waiting:
                self.record(self._waiting.popleft(), NO_ANSWER, "no connection was free in time")

    def _send_due(self) -> None:
        """Open loop: start every request whose time has come, and sleep until the next is due."""
        due_s = self.due_s or ()
        now = self.now()
        while self._next_due < len(due_s) and due_s[self._next_due] <= now:
            start_s = due_s[self._next_due]
            self._next_due += 1
            if start_s >= self.begin_s:
                self.lags_s.append(now - start_s)
            if self._idle:
                self._idle.pop().send(start_s)
            else:
                self._waiting.append(start_s)
                if self._opening < len(self._waiting):
                    self._open()
            now = self.now()
        if self._next_due < len(due_s):
            self._loop.call_later(due_s[self._next_due] - now, self._send_due)

    def free(self, connection: _Connection) -> None:
        """Give this connection its next request, if there is one."""
        if self.due_s is None:
            now = self.now()
            if now < self.end_s:
                connection.send(now)
                return
        elif self._waiting:
            connection.send(self._waiting.popleft())
            return
        self._idle.append(connection)
        self._finish_if_quiet()

    def payload(self) -> bytes:
        self._turn += 1
        return self.requests[self._turn % len(self.requests)]

    def record(self, start_s: float, status: int, error: str | None) -> None:
        """One request is over."""
        self.starts_s.append(start_s)
        self.ends_s.append(self.now())
        self.statuses.append(status)
        if error is not None and (error in self.errors or len(self.errors) < _MAX_ERRORS):
            self.errors[error] = self.errors.get(error, 0) + 1

    def on_open(self, connection: _Connection) -> None:
        self._connections.add(connection)
        self.free(connection)

    def on_close(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)
        self._open_if_wanted()
        self._finish_if_quiet()

    def _open_if_wanted(self) -> None:
        if self._waiting or (self.due_s is None and not self._ended):
            self._open()

    def _open(self) -> None:
        if self._done.done() or self._opening + len(self._connections) >= self.most:
            return
        self._opening += 1
        task = self._loop.create_task(self._connect())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> None:
        address, port = self.remote.address, self.remote.port
        try:
            await self._loop.create_connection(lambda: _Connection(self), address, port)
            self._opening -= 1
        except OSError as exc:
            self._opening -= 1
            self._not_connected(os.strerror(exc.errno) if exc.errno else str(exc))
            await asyncio.sleep(RETRY_S)
            self._open_if_wanted()

    def _not_connected(self, reason: str) -> None:
        """Fail the requests without a connection to wait for; in a closed loop that is one."""
        if self.due_s is None and not self._ended:
            self.record(self.now(), NO_ANSWER, f"cannot connect: {reason}")
        while self._waiting and not self._connections:
            self.record(self._waiting.popleft(), NO_ANSWER, f"cannot connect: {reason}")
        self._finish_if_quiet()

    def _end(self) -> None:
        left_s = self.end_s - self.now()  # a timer may be a little early
        if left_s > 0:
            self._loop.call_later(left_s, self._end)
            return
        self._ended = True
        self._loop.call_later(self.drain_s, self._finish)
        self._finish_if_quiet()

    def _finish_if_quiet(self) -> None:
        if self._ended and not self._waiting and not any(c.in_flight for c in self._connections):
            self._finish()

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


class _Connection(asyncio.Protocol):
    """One persistent HTTP/1.1 connection with at most one request in flight."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self._start_s: float | None = None  # of the request in flight
        self._complete = self._keep = False
        self._body = b""

    @property
    def in_flight(self) -> bool:
        return self._start_s is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._client.on_open(self)

    def send(self, start_s: float) -> None:
        self._start_s = start_s
        self._transport.write(self._client.payload())

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._fail(f"not an HTTP answer: {exc}")
            return
        if self._complete:
            self._complete = False
            self._on_answer()

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200 and len(self._body) < 4096:
            self._body += body

    def on_message_complete(self) -> None:
        self._complete = True
        self._keep = self._parser.should_keep_alive()  # afterwards the parser does not know

    def _on_answer(self) -> None:
        start_s, self._start_s = self._start_s, None
        if start_s is None:  # for example a 408 before the server closes an idle connection
            self._transport.abort()
            return
        status = self._parser.get_status_code()
        error = None if status == 200 else f"{status}: {error_text(self._body)}"
        self._body = b""
        self._client.record(start_s, status, error)
        if self._keep:
            self._client.free(self)
        else:
            self._transport.abort()

    def _fail(self, error: str) -> None:
        start_s, self._start_s = self._start_s, None
        if start_s is not None:
            self._client.record(start_s, NO_ANSWER, error)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._fail("the server closed the connection before it answered")
        del self._parser  # a reference cycle: without it nothing waits for the garbage collector
        self._client.on_close(self)

    def give_up(self) -> None:
        self._fail(f"no answer within {self._client.drain_s:g} s of the end")
