"""Start workers that serve on one address, replace those that die, and end them together.

The parent has no engine, no thread and no client: workers are forked from it, so that all share the
memory of the modules. It adds up the figures of all workers and forwards changes to all.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import mmap
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deploykit.core.errors import DeploykitError, OutOfMemory, Overloaded, Unsupported, os_reason
from deploykit.serving.observe.metrics import Sample
from deploykit.serving.options import ServeOptions
from deploykit.serving.transport.listener import address_of, remove_path, reserve, share_address
from deploykit.serving.workers import merge
from deploykit.serving.workers.engine import EngineMember
from deploykit.serving.workers.front import EngineLink, RemoteEngine
from deploykit.serving.workers.group import ENGINE, Logging, Member, become_worker
from deploykit.serving.workers.link import Link, Message
from deploykit.serving.workers.signals import ENDING, Signals

Serve = Callable[[Member], int]  # runs in a worker; returns the number of unanswered requests
REPORT_S = 1.0  # after so long a worker's last report is used
WATCH_S = 2.0
MOST_MISSED = 10  # reports in a row, half a minute: then its event loop hangs
_PAUSE_S = 0.01  # pause between two collections


@dataclass(eq=False)
class Forked:
    """One process. `report`: its last figures; `missed`: those asked for since it last answered.

    `ready`, `serving`: the states that it has reached.
    """

    number: int
    pid: int
    last: int  # a pipe for its result at its end
    begun_s: float
    send: Callable[..., None] = lambda *_: None  # a message, once it is connected
    ready: bool = False
    serving: bool = False
    missed: int = 0
    report: merge.Report | None = None
    not_ready: str | None = None
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)


class Hub:
    """Adds up what all workers counted, and forwards changes to all.

    `workers`: those that run, by process; the owner adds and removes them. `wanted`: how many there
    should be. `restarts`: how many were replaced. `run` runs a coroutine.
    """

    def __init__(
        self,
        workers: Mapping[int, Forked],
        wanted: int,
        run: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._workers = workers
        self._wanted = wanted
        self._run = run
        self.restarts = 0
        self._ended: merge.Report | None = None  # counters of workers that have ended
        self.regions: dict[str, tuple[str, tuple[Any, ...]]] = {}  # for a new worker to repeat
        self._asks: list[tuple[Forked, int, str]] = []
        self._collecting = False
        self._numbers = itertools.count()

    @property
    def serving(self) -> int:
        return sum(worker.serving for worker in self._workers.values())

    def receive(self, worker: Forked, message: Message) -> None:
        """Process a message about figures or about a change."""
        match message:
            case "done", number, value:
                worker.missed = 0
                future = worker.waiting.pop(number, None)
                if isinstance(value, dict):
                    worker.report = value
                if future is not None and not future.done():
                    future.set_result(value)
            case "collect", number, what:
                self._asks.append((worker, number, what))
                if not self._collecting:
                    self._collecting = True
                    self._run(self._collect())
            case "change", number, what, arguments:
                self._run(self._change(worker, number, what, arguments))

    def end(self, worker: Forked) -> None:
        """Keep the counters of a worker that has ended, and stop waiting for it."""
        for future in worker.waiting.values():
            if not future.done():
                future.set_result(None)
        if worker.report is not None:
            self._ended = merge.counters([each for each in (self._ended, worker.report) if each])

    async def watch(self) -> None:
        """Keep each worker's last figures and end those that hang, until it is cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            for worker in self._workers.values():
                worker.missed += worker.ready
            await self._reports()
            for worker in self._workers.values():
                if worker.missed >= MOST_MISSED:
                    log.error("worker %d does not answer its parent and is killed", worker.number)
                    os.kill(worker.pid, signal.SIGKILL)

    async def _collect(self) -> None:
        """Answer all requests for figures, with figures counted after they arrived."""
        while self._asks:
            asks, self._asks = self._asks, []
            reports = await self._reports()
            values = {what: self._merged(what, reports) for what in {what for _, _, what in asks}}
            for worker, number, what in asks:
                worker.send("answer", number, values[what])
            await asyncio.sleep(_PAUSE_S)
        self._collecting = False

    def _merged(self, what: str, reports: Sequence[merge.Report]) -> Any:
        if not any(report["status"] for report in reports):
            return DeploykitError("no worker reports its figures")
        if what == "samples":
            return [
                *merge.merge_samples(reports),
                Sample("deploykit_workers", {}, self.serving),
                Sample("deploykit_worker_restarts_total", {}, self.restarts),
            ]
        if what == "statistics":
            return merge.merge_statistics(reports)
        workers = {"wanted": self._wanted, "serving": self.serving, "restarts": self.restarts}
        return {**merge.merge_status(reports), "workers": workers}

    async def _reports(self) -> list[merge.Report]:
        """Return the figures of all workers; the last ones of those that do not answer in time."""
        await self._ask_all("report")
        found = [each.report for each in self._workers.values() if each.report is not None]
        return found if self._ended is None else [*found, self._ended]

    async def _ask_all(self, *message: Any) -> list[Any]:
        """Return the answers of the workers; an error for one that gives none in time."""
        number, futures = next(self._numbers), []
        kind, *content = message
        for worker in self._workers.values():
            if worker.ready:
                future = worker.waiting[number] = asyncio.get_running_loop().create_future()
                worker.send(kind, number, *content)
                futures.append(future)
        if futures:
            await asyncio.wait(futures, timeout=REPORT_S)
        for worker in self._workers.values():
            worker.waiting.pop(number, None)
        late = Overloaded("a worker of this server does not answer", hint="try again later")
        return [each.result() if each.done() else late for each in futures]

    async def _change(
        self, worker: Forked, number: int, what: str, arguments: tuple[Any, ...]
    ) -> None:
        """Make a worker's change in all workers, in the order in which workers asked."""
        answers = await self._ask_all("do", what, arguments)
        problem = next((each for each in answers if each is not None), None)
        name = arguments[0]
        if what == "register" and problem is None:
            self.regions[name] = (what, arguments)
        elif what == "register" and None in answers and name not in self.regions:
            await self._ask_all("do", "unregister", (name,))  # some workers have it, some do not
        elif what == "unregister":
            for each in [each for each in self.regions if name in (None, each)]:
                del self.regions[each]
        worker.send("answer", number, problem)


log = logging.getLogger(__name__)

LIVED_S = 10.0  # a worker that served for less counts as a failed start
MOST_FAILURES = 5  # in a row, of every worker: then the server ends
DELAY_S, LONGEST_DELAY_S = 0.25, 30.0  # before a worker is replaced, doubled for each failure
END_S = 50.0  # time limit for workers to drain, above their own limits
ABORT_S = 5.0
_POLL_S = 0.02
_NORESERVE = 0x4000  # of mmap(2): memory counts once it is used
_END_POLLS = 6000  # half a minute and more: then a worker without its link is killed
SHARE_BYTES = 64 << 20  # per worker for requests, and for answers, above the largest body

OnReady = Callable[[str, int, "int | None"], None]  # host, HTTP port, gRPC port


def check_supported() -> None:
    """Raise Unsupported where the system does not divide connections among processes."""
    if sys.platform != "linux" or not hasattr(socket, "SO_REUSEPORT"):
        what = "`workers` above 1 need Linux, which divides connections among processes"
        raise Unsupported(f"{what}; this is {sys.platform}", hint="`workers` 1")


class Parent:
    """Runs `count` workers, each with `serve`, on the addresses of `options`."""

    def __init__(
        self,
        count: int,
        serve: Serve,
        options: ServeOptions,
        logging_of: Logging,
        *,
        shared: bool = False,
        stop: int | None = None,
    ) -> None:
        """Prepare the workers. `shared`: one more process, number ENGINE, runs all engines.

        `stop`: a socket that belongs to another program; its end stops the server, Ctrl-C does not.
        """
        check_supported()
        self._stop = stop
        self._count = count
        self._serve = serve
        self._logging_of = logging_of
        self._log: AbstractContextManager[object] | None = None
        self._http = reserve(options.host, options.http_port, "`http_port`")
        self._grpc = None
        if options.grpc_port is not None:
            self._grpc = reserve(options.host, options.grpc_port, "`grpc_port`")
        self._workers: dict[int, Forked] = {}  # by pid
        self._hub = Hub(self._workers, count, self._do)
        self._shared = shared
        self._drain_s = options.drain_s
        self._end_s = END_S + options.drain_s
        self._listener = socket.socket(socket.AF_UNIX)
        self._memories: list[mmap.mmap] = []
        if shared:  # in front ends as in engines, and in those that replace them
            self._listener.bind("")  # the system chooses a name
            self._listener.listen(count)
            size = 2 * (options.max_body_bytes + SHARE_BYTES)
            flags = mmap.MAP_SHARED | _NORESERVE
            try:
                self._memories = [mmap.mmap(-1, size, flags=flags) for _ in range(count)]
            except OSError as exc:
                why = f"`workers` {count}: {size} bytes for each cannot be shared: {os_reason(exc)}"
                hint = "fewer `workers`, or a smaller `max_body_bytes`"
                raise Unsupported(why, hint=hint) from exc
        self._engines: Mapping[str, RemoteEngine] | None = None  # None until they are known
        self._failures = dict.fromkeys(range(ENGINE if shared else 1, count + 1), 0)
        self._failure: BaseException | None = None
        self._started = False  # whether all were ready once
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropped = 0

    def run(self, on_ready: OnReady) -> int:
        """Serve as `serving.server.run`; raise the error that keeps the workers from starting."""
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._signals = Signals(self._loop, self._stopped.set)
        self._signals.handle((*ENDING, signal.SIGINT) if self._stop is None else ENDING)
        try:
            self._loop.run_until_complete(self._run(on_ready))
        finally:
            self._close_log()
            self._signals.restore()
            self._loop.close()
            self._listener.close()
            for each in filter(None, (self._http, self._grpc)):
                remove_path(each)
                each.close()
        if self._signals.count > 1 or self._signals.interrupted:
            raise KeyboardInterrupt
        if self._failure is not None:
            raise self._failure
        return self._dropped

    async def _run(self, on_ready: OnReady) -> None:
        if self._stop is not None:
            self._loop.add_reader(self._stop, self._on_stop, self._stop)
        if self._shared:
            self._start_first([ENGINE])
            await self._until(lambda: self._engine is not None or self._stopped.is_set())
        if not self._stopped.is_set():
            self._start_first(range(1, self._count + 1))
        await self._until(lambda: self._hub.serving == self._count or self._stopped.is_set())
        if not self._stopped.is_set():
            self._started = True
            log.info("%d workers serve", self._count)
            host, port = address_of(self._http)
            on_ready(host, port, address_of(self._grpc)[1] if self._grpc else None)
        ticking = asyncio.ensure_future(self._hub.watch())
        await self._stopped.wait()
        for worker in self._workers.values():
            if worker.ready:
                worker.send("drain")
            else:  # it still opens its models
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGTERM)
        await self._until(self._ended, self._drain_s - 2 * _POLL_S)
        for each in filter(None, (self._http, self._grpc)):
            remove_path(each)  # just before the workers accept the last clients of a path
        await self._until(self._ended, self._end_s)
        for worker in self._workers.values():
            worker.send("abort")
        await self._until(lambda: not self._workers, ABORT_S)
        for worker in self._workers.values():
            log.error("worker %d does not end and is killed", worker.number)
            os.kill(worker.pid, signal.SIGKILL)
        await self._until(lambda: not self._workers, ABORT_S)
        ticking.cancel()

    def _on_stop(self, end: int) -> None:
        self._loop.remove_reader(end)
        self._stopped.set()

    def _ended(self) -> bool:
        """Return whether no worker is left, or a second signal came."""
        return not self._workers or self._signals.count > 1

    async def _until(self, reached: Callable[[], bool], limit_s: float = math.inf) -> None:
        end_s = time.monotonic() + limit_s
        while not reached() and time.monotonic() < end_s:
            await asyncio.sleep(_POLL_S)

    # -- processes ---------------------------------------------------------------------------------

    def _start_first(self, numbers: Sequence[int]) -> None:
        if problem := self._start(numbers):
            why = f"`workers` {self._count}: a process cannot be started: {problem}"
            self._end_with(Unsupported(why, hint="fewer `workers`, or more with ulimit -n, -u"))

    def _start(self, numbers: Sequence[int]) -> str:
        """Fork workers; return why not all. The log has no thread then: a fork copies locks."""
        problem = ""
        self._close_log()
        gc.collect()
        gc.freeze()  # otherwise the children's collectors would write to the shared memory
        try:
            for number in numbers:
                self._fork(number)
        except OSError as exc:  # the system has no file descriptor, process or memory left
            problem = os_reason(exc)
        gc.unfreeze()
        self._log = self._logging_of(None)
        self._log.__enter__()
        return problem

    def _fork(self, number: int) -> None:
        http, grpc = share_address(self._http), self._grpc and share_address(self._grpc)
        (ours, theirs), (last, written) = socket.socketpair(), os.pipe()
        common = number, self._count, theirs, http, grpc, written
        inherited = [theirs, http, *([grpc] if grpc else [])]
        keep = [written, *(each.fileno() for each in inherited)]
        if number == ENGINE:
            keep.append(self._listener.fileno())
            listener, memories = self._listener, self._memories
            member: Member = EngineMember(*common, listener=listener, memories=memories)
        else:
            engine = None
            if self._shared:
                address = self._listener.getsockname()
                engine = EngineLink(number, self._memories[number - 1], address)
            member = Member(*common, self._engines, engine)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(last)
            os.close(written)
            raise
        if pid == 0:
            become_worker(member, self._serve, self._logging_of, parent, keep)
        os.close(written)
        for each in inherited:
            each.close()
        worker = self._workers[pid] = Forked(number, pid, last, time.monotonic())
        self._do(self._connect(worker, ours))

    def _close_log(self) -> None:
        before, self._log = self._log, None
        if before is not None:
            before.__exit__(None, None, None)

    async def _connect(self, worker: Forked, end: socket.socket) -> None:
        link = Link(partial(self._receive, worker), lambda: self._do(self._reap(worker)))
        worker.send = link.send
        await link.connect(end)

    async def _reap(self, worker: Forked) -> None:
        """Wait for a worker that has closed its end: it ends, or has ended."""
        polls = itertools.count()  # not seconds: this process may be stopped with all others
        while not (ended := os.waitpid(worker.pid, os.WNOHANG))[0]:
            if next(polls) == _END_POLLS:
                os.kill(worker.pid, signal.SIGKILL)
            await asyncio.sleep(_POLL_S / 4)
        del self._workers[worker.pid]
        self._on_end(worker, os.waitstatus_to_exitcode(ended[1]), last_words(worker.last))

    def _on_end(self, worker: Forked, code: int, last: object) -> None:
        number = worker.number
        self._hub.end(worker)
        self._share_state()
        if isinstance(last, int):
            self._dropped += last
        if self._stopped.is_set():
            if not isinstance(last, int) and worker.serving and self._signals.count < 2:
                how = how_it_ended(code)
                log.error("worker %d was ended by %s before it had answered", number, how)
                self._dropped += 1  # at least
            return
        name = f"worker {number}" if number != ENGINE else "the process of the engines"
        error = last if isinstance(last, BaseException) else None
        why = f"{name}: {error}" if error else f"{name} was ended by {how_it_ended(code)}"
        if not self._started:
            self._end_with(error or _crash(f"{why} at its start", code))
            return
        worked = worker.ready if number == ENGINE else worker.serving
        lived = worked and time.monotonic() - worker.begun_s > LIVED_S
        self._failures[number] = 0 if lived else self._failures[number] + 1
        self._replace(
            number, why, error if isinstance(error, DeploykitError) else _crash(why, code)
        )

    def _replace(self, number: int, why: str, error: DeploykitError) -> None:
        """Start another process later, unless every one that could answer fails at each start."""
        failures, engines = self._failures[number], number == ENGINE
        fronts = [count for each, count in self._failures.items() if each != ENGINE]
        alone = engines or not self._hub.serving
        if alone and (failures if engines else min(fronts)) >= MOST_FAILURES:
            log.error("%s; no worker is left, and %d starts of each failed", why, MOST_FAILURES)
            self._end_with(error)
            return
        delay_s = min(LONGEST_DELAY_S, DELAY_S * 2 ** (failures - 1)) if failures else 0.0
        log.error("%s; another is started in %g s", why, delay_s)
        self._hub.restarts += 1
        self._loop.call_later(delay_s, self._restart, number)

    def _restart(self, number: int) -> None:
        if not self._stopped.is_set() and (problem := self._start([number])):
            self._failures[number] += 1
            why = f"process {number} of the server cannot be started: {problem}"
            self._replace(number, why, Unsupported(why))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end_with(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stopped.set()

    # -- messages of workers ---------------------------------------------------------------------

    def _receive(self, worker: Forked, messages: Sequence[Message]) -> None:
        for message in messages:
            self._follow(worker, message)

    def _follow(self, worker: Forked, message: Message) -> None:
        match message:
            case "state", not_ready:
                worker.not_ready = not_ready
                self._share_state()
            case ("ready",):
                worker.ready = True
                if self._stopped.is_set():
                    worker.send("drain")
                else:
                    worker.send("open", list(self._hub.regions.values()))
                    self._share_state()
            case "engines", engines:
                self._engines = engines
            case ("listening",):
                worker.serving, worker.begun_s = True, time.monotonic()
                if self._started:
                    log.info("worker %d serves", worker.number)
            case _:
                self._hub.receive(worker, message)

    @property
    def _engine(self) -> Forked | None:
        """Return the process of the engines, once it is ready."""
        found = (each for each in self._workers.values() if each.number == ENGINE and each.ready)
        return next(found, None)

    def _share_state(self) -> None:
        """Send each worker the reason why another one is not ready."""
        for worker in self._workers.values():
            others = [each.not_ready for each in self._workers.values() if each is not worker]
            if worker.ready:
                worker.send("elsewhere", next((each for each in others if each), None))


def _crash(text: str, code: int) -> DeploykitError:
    if code == -signal.SIGKILL:
        return OutOfMemory(
            f"{text}, as the system does where memory runs out", hint="fewer `workers`"
        )
    return DeploykitError(text)


def last_words(pipe: int) -> object:
    """Return the result that a worker wrote at its end: a number, an error, or nothing."""
    with os.fdopen(pipe, "rb") as stream:
        data = stream.read()
    try:
        return pickle.loads(data) if data else None  # noqa: S301 - our own child wrote it
    except Exception as exc:  # noqa: BLE001 - an error of a library that is no value
        return DeploykitError(f"a worker's error could not be read: {exc}")


def how_it_ended(code: int) -> str:
    """Return the name of the signal, or the exit code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
