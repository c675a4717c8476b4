"""Threads that clients share: whatever one client sends, the work of another is soon next.

The client whose work has taken the least CPU time is next (start-time fair queuing; Goyal et al.,
1996), first among addresses, then among the connections of an address. So more connections bring a
client no more time, and clients behind one proxy take turns all the same. Another client waits for
the work that runs, not for what the first has queued. While work waits itself, for the event loop
or a lock, nothing is charged: others may have caused it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from heapq import heappop, heappush
from ipaddress import IPv6Address, ip_address
from itertools import count, pairwise
from typing import NamedTuple

from deploykit.engines.engine import Closing

Job = Callable[..., None]
_HOST_BITS = 64  # of an IPv6 address: a client may have all addresses of its network
_numbers = count()
_parse = lru_cache(4096)(ip_address)


class Peer(NamedTuple):
    """Whose work it is: an address, and one of its connections."""

    address: Hashable = None
    connection: Hashable = None

    @staticmethod
    def of(name: object, connection: Hashable) -> Peer:
        """Return the peer of a connection. `name`: the socket's, from which its address is read."""
        if not isinstance(name, tuple):
            return Peer(None, connection)  # a Unix socket
        address = _parse(name[0])
        if isinstance(address, IPv6Address):
            return Peer(address.ipv4_mapped or int(address) >> _HOST_BITS, connection)
        return Peer(address, connection)


NOBODY = Peer()


@dataclass(eq=False)
class _Share:
    """The work of everybody, of an address or of a connection.

    `spent_s`: the virtual time at which its next work may start. `now_s`: the virtual time of its
    parts, which advances by the work done for each of the `active` ones: whoever sends all of its
    requests as new clients is not ahead of one that comes back. `turns`: the parts, but those whose
    work all runs.
    """

    key: Hashable = None
    spent_s: float = 0.0
    now_s: float = 0.0
    waiting: int = 0
    running: int = 0
    active: int = 0
    in_turns: bool = False
    jobs: deque[Job] = field(default_factory=deque)
    parts: dict[Hashable, _Share] = field(default_factory=dict)
    turns: list[tuple[float, int, int, _Share]] = field(default_factory=list)  # a heap

    def part(self, key: Hashable) -> _Share:
        part = self.parts.setdefault(key, _Share(key))
        if not (part.waiting or part.running):  # while it was idle it saved no time
            part.spent_s = max(part.spent_s, self.now_s)
            self.active += 1
        part.waiting += 1
        self._queue(part)
        return part

    def next_part(self) -> _Share:
        """Return the part that is next, with one more job that runs."""
        while True:
            spent_s, _, _, part = heappop(self.turns)
            part.in_turns = False
            if part.spent_s > spent_s:  # its work has ended since
                self._queue(part)
            elif part.waiting:
                break
            else:  # the others have caught up with it: nothing of it is to be remembered
                del self.parts[part.key]
        self.now_s = max(self.now_s, spent_s)
        part.waiting -= 1
        part.running += 1
        if part.waiting:
            self._queue(part)
        return part

    def end(self, part: _Share, took_s: float) -> None:
        part.running -= 1
        part.spent_s += took_s
        self.now_s += took_s / self.active
        if not part.running:
            self.active -= not part.waiting
            self._queue(part)

    def _queue(self, part: _Share) -> None:
        if not part.in_turns:
            part.in_turns = True
            heappush(self.turns, (part.spent_s, part.running, next(_numbers), part))


class FairQueue:
    """Jobs of clients, in the order in which they should run. Not thread-safe."""

    def __init__(self) -> None:
        self._all = _Share()

    @property
    def waiting(self) -> int:
        return self._all.waiting

    def add(self, job: Job, peer: Peer) -> None:
        share = self._all
        for key in peer:
            share = share.part(key)
        share.jobs.append(job)
        self._all.waiting += 1

    def take(self) -> tuple[Job, Callable[[float], None]]:
        """Begin the job that is next; also return the function that ends it, given its cost."""
        path = [self._all]
        while not path[-1].jobs:
            path.append(path[-1].next_part())
        self._all.waiting -= 1
        self._all.running += 1
        return path[-1].jobs.popleft(), partial(self._end, path)

    def _end(self, path: Sequence[_Share], cost: float) -> None:
        for share, part in pairwise(path):
            share.end(part, cost)
        self._all.running -= 1
        if not (self._all.waiting or self._all.running):
            self._all = _Share()


class FairGate:
    """Begins up to `most` jobs at a time on one thread; each calls its argument at its end."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._queue = FairQueue()
        self._entering = False

    def enter(self, begin: Callable[[Job], None], peer: Peer) -> None:
        self._queue.add(begin, peer)
        self._begin_next()

    def _begin_next(self) -> None:
        if self._entering:  # called by a job that has ended at once
            return
        self._entering = True
        try:
            while self._free and self._queue.waiting:
                self._free -= 1
                begin, end = self._queue.take()
                begin(partial(self._leave, end))
        finally:
            self._entering = False

    def _leave(self, end: Callable[[float], None]) -> None:
        self._free += 1
        end(1.0)
        self._begin_next()


class FairThreads(Closing):
    """Up to `most` daemon threads, started on demand: one that hangs does not keep the process."""

    def __init__(
        self, most: int, name: str, clock_s: Callable[[], float] = time.thread_time
    ) -> None:
        self._most = most
        self._name = name
        self._clock_s = clock_s
        self._changed = threading.Condition()
        self._queue = FairQueue()
        self._idle = self._started = 0
        self._since_s: dict[int, float] = {}  # thread -> when its job began
        self._closed = False

    def submit(self, job: Job, peer: Peer = NOBODY) -> None:
        """Run `job`, which raises nothing. Raises RuntimeError if no thread can be started."""
        with self._changed:
            if self._closed:
                raise RuntimeError("it is closed")
            if self._idle <= self.waiting and self._started < self._most:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._started += 1
            self._queue.add(job, peer)
            self._changed.notify()

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    def hanging(self, limit_s: float) -> bool:
        """Return whether every thread has run one job for longer than `limit_s`."""
        began_s = list(self._since_s.values())
        return len(began_s) == self._most and max(began_s) < time.monotonic() - limit_s

    def close(self) -> None:
        """Start no more jobs, and wait for none."""
        with self._changed:
            self._closed = True
            self._queue = FairQueue()
            self._changed.notify_all()

    def _run(self) -> None:
        while self._run_next():
            pass  # between two jobs the thread refers to none, nor to its client

    def _run_next(self) -> bool:
        """Run the job that is next; wait until there is one. Return False once closed."""
        me = threading.get_ident()
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self.waiting or self._closed)
            self._idle -= 1
            if self._closed:
                return False
            job, end = self._queue.take()
            began_s, self._since_s[me] = self._clock_s(), time.monotonic()
        try:
            job()
        finally:
            with self._changed:
                del self._since_s[me]
                end(self._clock_s() - began_s)
        return True
