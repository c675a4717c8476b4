"""Reply to GET /metrics, however many clients ask.

Writing the metrics takes some ms of Python, on any thread: done for each request, it would keep the
event loop from running. So they are written for all that wait, and not again at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from deploykit.core.errors import DeploykitError
from deploykit.serving.models.offload import Offload, Result
from deploykit.serving.observe.prometheus import Sample, expositions
from deploykit.serving.transport.call import Call, reply_exception

PAGE_HEADERS = (  # a page loads nothing from other sites and cannot be framed
    b"Content-Security-Policy: default-src 'self'; frame-ancestors 'none'\r\n"
    b"X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nContent-Type: %s\r\n"
)
_PAUSE_S = 0.01  # after one, while others wait
_REPLIES = 100  # in one turn of the event loop
_ACCEPT_BYTES = 1024  # of a longer header the rest is ignored

Expositions = dict[str, tuple[bytes, str]]


class Scrapes:
    """The route. A reply holds what was counted when its request came, or later."""

    def __init__(
        self,
        collect: Callable[[Callable[[Result[Iterable[Sample]]], None]], None],
        offload: Offload,
    ) -> None:
        """`collect` passes the samples, or a function that takes them, to its argument."""
        self._collect = collect
        self._offload = offload
        self._waiting: list[Call] = []
        self._busy = False

    def __call__(self, call: Call) -> None:
        self._waiting.append(call)
        if not self._busy:
            self._write()

    def _write(self) -> None:
        calls, self._waiting = self._waiting, []
        self._busy = bool(calls)
        if not calls:
            return
        self._collect(partial(self._expose, calls))

    def _expose(self, calls: list[Call], samples: Result[Iterable[Sample]]) -> None:
        accepts = {_accept(call) for call in calls}
        try:
            self._offload(
                lambda: expositions(samples(), accepts), partial(self._reply, deque(calls))
            )
        except DeploykitError as exc:
            self._busy = False
            for call in calls:
                reply_exception(call, exc)

    def _reply(self, calls: deque[Call], result: Result[Expositions]) -> None:
        for _ in range(min(_REPLIES, len(calls))):
            _answer(calls.popleft(), result)
        if calls:
            asyncio.get_running_loop().call_soon(self._reply, calls, result)
        elif self._waiting:
            asyncio.get_running_loop().call_later(_PAUSE_S, self._write)
        else:
            self._busy = False


def _accept(call: Call) -> str:
    return (call.head.accept or b"")[:_ACCEPT_BYTES].decode("latin-1")


def _answer(call: Call, result: Result[Expositions]) -> None:
    try:
        text, content_type = result()[_accept(call)]
        call.reply(200, PAGE_HEADERS % content_type.encode(), [text])
    except Exception as exc:  # noqa: BLE001 - every error is a reply
        reply_exception(call, exc)
