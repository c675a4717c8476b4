"""An engine that keeps calls in flight, whose ends a test decides: as a GPU has them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from deploykit.engines.engine import Arrays
from tests.support.fake_engine import FakeEngine
from tests.support.serving.running import WAIT_S


class Call:
    """A call in flight; it ends when the test lets it."""

    def __init__(self, engine: OverlappingEngine, feeds: Arrays) -> None:
        self.engine, self.feeds = engine, {name: x.copy() for name, x in feeds.items()}
        self.may_end = threading.Event()

    @property
    def first(self) -> float:
        return float(self.feeds["x"][0, 0])

    def result(self) -> dict[str, np.ndarray]:
        engine = self.engine
        assert engine.calls[0] is self, "answers are waited for in the order of their calls"
        engine.events.append(("wait", self.first))
        engine.waiting.release()
        if not engine.free:
            assert self.may_end.wait(WAIT_S)
        engine.calls.popleft()
        return engine.compute(self.feeds)


def raise_one(errors: Mapping[float, Exception], feeds: Arrays) -> None:
    """Raise the error of a row, if there is one."""
    for value in feeds["x"][:, 0]:
        if float(value) in errors:
            raise errors[float(value)]


class OverlappingEngine(FakeEngine):
    """y = 2x + 1. `free`: calls end by themselves. `fail`: first values whose call fails, and how.

    `refuse`: the same of calls that do not even start.
    """

    slots = 2

    def __init__(self, *, free: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.free = free
        self.calls: deque[Call] = deque()
        self.events: list[tuple[str, float]] = []
        self.submitted, self.waiting = threading.Semaphore(0), threading.Semaphore(0)
        self.fail: dict[float, Exception] = {}
        self.refuse: dict[float, Exception] = {}
        self.most = 0  # calls in flight at once
        self.on_submit: Callable[[], None] = lambda: None

    def submit(self, feeds: Arrays) -> Call:
        assert not self.closed
        assert len(self.calls) < self.slots
        call = Call(self, feeds)
        self.events.append(("submit", call.first))
        try:
            raise_one(self.refuse, feeds)
            self.calls.append(call)
            self.most = max(self.most, len(self.calls))
            self.on_submit()
        finally:
            self.submitted.release()
        return call

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        assert len(self.calls) < self.slots, "no slot is free for it"
        self.events.append(("call", float(feeds["x"][0, 0])))
        raise_one(self.refuse, feeds)
        return self.compute(feeds)

    def compute(self, feeds: Arrays) -> dict[str, np.ndarray]:
        raise_one(self.fail, feeds)
        return super().__call__(feeds)

    def end_one(self) -> None:
        self.calls[0].may_end.set()

    def end_all(self) -> None:
        """From now on calls end by themselves."""
        self.free = True
        for call in list(self.calls):
            call.may_end.set()

    def close(self) -> None:
        assert not self.calls, "closed with a call in flight"
        super().close()
