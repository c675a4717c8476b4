"""Threads for a stage's own code, which may hang: they never keep the process from ending."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from deploykit.runtimes.engine import Closing

Work = Callable[[], None]


class StageThreads(Closing):
    """Up to `most` daemon threads, started as they are needed, that run one piece of work each."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._since: dict[int, float] = {}  # thread -> when its work began
        self._started = 0

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    def hanging(self, limit_s: float) -> bool:
        """Whether every thread has been in one piece of work for longer than that."""
        began = list(self._since.values())
        end_s = time.monotonic() - limit_s
        return len(began) == self._most and max(began) < end_s

    def submit(self, work: Work) -> None:
        """Raises RuntimeError where the system starts no thread."""
        with self._lock:
            if self._idle <= self._queue.qsize() and self._started < self._most:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._started += 1
        self._queue.put(work)

    def _run(self) -> None:
        me = threading.get_ident()
        while True:
            with self._lock:
                self._idle += 1
            work = self._queue.get()
            with self._lock:
                self._idle -= 1
            if work is None:
                return
            self._since[me] = time.monotonic()
            try:
                work()
            finally:
                del self._since[me], work

    def close(self) -> None:
        """End the threads that have nothing to do; the others end with the process."""
        for _ in range(self._started):
            self._queue.put(None)
