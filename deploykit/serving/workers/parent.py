"""Start workers that serve on one address, replace those that die, and end them together.

The parent has no engine, no thread and no client: workers are forked from it, so that all share the
memory of the modules. It adds up the figures of all workers and forwards changes to all.

Counters are added up, including those of workers that have ended; of a gauge, the result is the
value that an operator should see: METRICS says which.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import mmap
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, reduce
from typing import Any

from deploykit.core.errors import DeploykitError, OutOfMemory, Overloaded, Unsupported, os_reason
from deploykit.serving.observe.metrics import METRICS, BucketCounts, Sample
from deploykit.serving.options import ServeOptions
from deploykit.serving.transport.listener import address_of, remove_path, reserve, share_address
from deploykit.serving.workers.engines import EngineLink, RemoteEngine
from deploykit.serving.workers.group import (
    ENGINE,
    RESULT_BYTES,
    EngineMember,
    Logging,
    Member,
    OnReady,
    become_worker,
)
from deploykit.serving.workers.link import Channel, LinkLost, Message
from deploykit.serving.workers.signals import ENDING, Signals

log = logging.getLogger(__name__)

Serve = Callable[[Member], int]  # runs in a worker; returns the number of unanswered requests
REPORT_S = 1.0  # after so long a worker's last report is used
WATCH_S = 2.0
MOST_MISSED = 10  # reports in a row, half a minute: then its event loop hangs
LIVED_S = 10.0  # a worker that served for less counts as a failed start
MOST_FAILURES = 5  # in a row, of every worker: then the server ends
DELAY_S, LONGEST_DELAY_S = 0.25, 30.0  # before a worker is replaced, doubled for each failure
END_S = 50.0  # time limit for workers to drain, above their own limits
ABORT_S = 5.0
_PAUSE_S = 0.01  # those that ask for figures within it get the same ones
_POLL_S = 0.02
_NORESERVE = 0x4000  # of mmap(2): memory counts once it is used
SHARE_BYTES = 64 << 20  # per worker for requests, and for answers, above the largest body
Report = Mapping[str, Any]  # "samples", "statistics" and "status"
Figures = dict[str, Any]

_COUNTED = ("counter", "histogram", "shared")
_LATEST = ("last_ms", "last_inference", "at_s", "at_us", "loaded_s")
_JOIN: Mapping[str, Any] = {"least": min, "most": max, "shared": max}
# in a model's status: of all workers, and added up for those that run
_COUNTS = ("outcomes", "rows", "runs", "idle_us", "last_ms", "request", "stages_us", "batches")
_SUMS = ("engines", "queue", "waiting", "in_flight")


class Worker:
    """One process, and the connection to it.

    `ready`, `serving`: the states that it has reached. `report`: its last figures; `missed`: how
    many were asked for since it last answered.
    """

    def __init__(self, number: int, pid: int, result: mmap.mmap) -> None:
        self.number = number
        self.pid = pid
        self.begun_s = time.monotonic()
        self.link: Channel
        self.lost = asyncio.Event()  # it has ended, or is about to
        self.ready = self.serving = False
        self.missed = 0
        self.report: Report | None = None
        self.not_ready: str | None = None
        self._result = result

    @property
    def result(self) -> object:
        """Return what it left at its end: the unanswered requests, its error, or None."""
        return pickle.loads(self._result) if self._result[0] else None  # noqa: S301 - our child's

    async def refresh(self) -> None:
        """Get its figures, however long that takes."""
        with contextlib.suppress(LinkLost):
            self.report = await self.link.ask("report")
            self.missed = 0


class Hub:
    """Adds up what all workers counted, and forwards changes to all.

    `workers`: those that run, by process; the owner adds and removes them. `wanted`: how many there
    should be. `restarts`: how many were replaced.
    """

    def __init__(self, workers: Mapping[int, Worker], wanted: int) -> None:
        self._workers = workers
        self._wanted = wanted
        self.restarts = 0
        self.regions: dict[str, tuple[str, tuple[Any, ...]]] = {}  # for a new worker to repeat
        self._ended: list[Report] = []  # the counters of workers that have ended
        self._collecting: dict[str, asyncio.Future[Any]] = {}

    @property
    def serving(self) -> int:
        return sum(worker.serving for worker in self._workers.values())

    async def answer(self, question: Message) -> Any:
        """Answer a worker that asks for the figures of all, or for a change of all."""
        kind, what, *arguments = question
        if kind == "change":
            return await self._change(what, *arguments)
        if what not in self._collecting:
            self._collecting[what] = asyncio.ensure_future(self._collect(what))
        return await self._collecting[what]

    def end(self, worker: Worker) -> None:
        """Keep the counters of a worker that has ended."""
        if worker.report is not None:
            self._ended = [counters([*self._ended, worker.report])]

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

    async def _collect(self, what: str) -> Any:
        """Return figures that were counted after they were asked for. Raises DeploykitError."""
        await asyncio.sleep(_PAUSE_S)
        del self._collecting[what]
        reports = await self._reports()
        if all("ended" in report["status"] for report in reports):
            raise DeploykitError("no worker reports its figures")
        if what == "samples":
            return [
                *merge_samples(reports),
                Sample("deploykit_workers", {}, self.serving),
                Sample("deploykit_worker_restarts_total", {}, self.restarts),
            ]
        if what == "statistics":
            return merge_statistics(reports)
        workers = {"wanted": self._wanted, "serving": self.serving, "restarts": self.restarts}
        return {**merge_status(reports), "workers": workers}

    async def _reports(self) -> list[Report]:
        """Return the figures of all workers; the last ones of those that do not answer in time."""
        await _wait([asyncio.ensure_future(worker.refresh()) for worker in self._ready()])
        found = [each.report for each in self._workers.values() if each.report is not None]
        return [*found, *self._ended]

    async def _change(self, what: str, arguments: tuple[Any, ...]) -> None:
        """Make a change in all workers, in the order in which they asked; raise the first error."""
        asked = await _wait([each.link.ask("change", what, arguments) for each in self._ready()])
        late = Overloaded("a worker of this server does not answer", hint="try again later")
        problems = [each.exception() if each.done() else late for each in asked]
        problem = next((each for each in problems if not isinstance(each, LinkLost | None)), None)
        name = arguments[0]
        if what == "register" and problem is None:
            self.regions[name] = (what, arguments)
        elif what == "register" and None in problems and name not in self.regions:
            await self._change("unregister", (name,))  # some workers have it, some do not
        elif what == "unregister":
            for each in [each for each in self.regions if name in (None, each)]:
                del self.regions[each]
        if problem is not None:
            raise problem

    def _ready(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.ready]


async def _wait(asked: Sequence[asyncio.Future[Any]]) -> Sequence[asyncio.Future[Any]]:
    """Wait until the workers have answered, for REPORT_S at most."""
    if asked:
        await asyncio.wait(asked, timeout=REPORT_S)
    return asked


def counters(reports: Sequence[Report]) -> Report:
    """Return the counters, which remain valid after the workers have ended."""
    samples = merge_samples(reports)
    return {
        "samples": [each for each in samples if METRICS[each.name][0] in _COUNTED],
        "statistics": merge_statistics(reports),
        "status": merge_status([{"status": {**each["status"], "ended": True}} for each in reports]),
    }


def merge_samples(reports: Sequence[Report]) -> list[Sample]:
    """Merge samples of one name and the same labels into one."""
    found: dict[tuple[object, ...], Sample] = {}
    for sample in (each for report in reports for each in report["samples"]):
        key = (sample.name, *sample.labels.items())
        before = found.get(key)
        if before is None:
            found[key] = sample
            continue
        a, b = before.value, sample.value
        if isinstance(a, BucketCounts) and isinstance(b, BucketCounts):
            pairs = zip(a.counts, b.counts, strict=True)
            counts = [(bound, count + more) for (bound, count), (_, more) in pairs]
            found[key] = before._replace(value=BucketCounts(counts, a.total + b.total))
        else:
            join = _JOIN.get(METRICS[sample.name][0], sum)
            found[key] = before._replace(value=join((a, b)))
    return list(found.values())


def merge_statistics(reports: Sequence[Report]) -> Figures:
    """Merge the statistics of the Open Inference Protocol over all workers."""
    models: dict[str, Figures] = {}
    for each in (each for report in reports for each in report["statistics"]["model_stats"]):
        sizes = {batch["batch_size"]: dict(batch) for batch in each["batch_stats"]}
        for times in sizes.values():
            del times["batch_size"]
        found = {**each, "batch_stats": sizes}
        before = models.get(each["name"])
        models[each["name"]] = found if before is None else add(before, found)
    for model in models.values():
        batches = sorted(model["batch_stats"].items())
        model["batch_stats"] = [{"batch_size": size, **times} for size, times in batches]
    return {"model_stats": list(models.values())}


def merge_status(reports: Sequence[Report]) -> Figures:
    """Merge the dashboard's figures of running workers, with the counters of all workers."""
    statuses = [report["status"] for report in reports]
    running = [each for each in statuses if "ended" not in each] or statuses
    first = max(running, key=lambda each: len(each["models"]))  # not every process has pipelines
    processes = [each["process"] for each in running if each["process"]]
    process = None
    if processes:
        process = {key: sum(each[key] for each in processes) for key in processes[0]}
        process["started_s"] = min(each["started_s"] for each in processes)
        process["at_s"] = max(each["at_s"] for each in processes)
    models = []
    for each in first["models"]:
        name = each["name"]
        same, counted = (
            [m for status in found for m in status["models"] if m["name"] == name]
            for found in (running, statuses)
        )
        models.append(
            {
                **each,
                **{key: sum(model[key] for model in same) for key in _SUMS},
                "generation": min(model["generation"] for model in same),
                "notes": list(dict.fromkeys(note for model in same for note in model["notes"])),
                "not_ready": next((m["not_ready"] for m in same if m["not_ready"]), None),
                **reduce(add, [{key: model[key] for key in _COUNTS} for model in counted]),
            }
        )
    return {
        **first,
        "at_us": max(each["at_us"] for each in running),
        "at_s": max(each["at_s"] for each in running),
        "not_ready": next((each["not_ready"] for each in running if each["not_ready"]), None),
        "process": process,
        "models": models,
    }


def add(a: Any, b: Any) -> Any:
    """Add up numbers within the same structure; use the latest time and the first string."""
    if isinstance(a, dict):
        found = {**a, **b}
        for key in a.keys() & b.keys():
            found[key] = max(a[key], b[key]) if key in _LATEST else add(a[key], b[key])
        return found
    if isinstance(a, list):
        return [add(*pair) for pair in zip(a, b, strict=True)]
    return a if isinstance(a, str) else a + b


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
        Raises Unsupported where the system does not divide connections among processes.
        """
        if sys.platform != "linux":
            what = "`workers` above 1 need Linux, which divides connections among processes"
            raise Unsupported(f"{what}; this is {sys.platform}", hint="`workers` 1")
        self._stop = stop
        self._count = count
        self._serve = serve
        self._logging_of = logging_of
        self._log: AbstractContextManager[object] | None = None
        ports = {"`http_port`": options.http_port, "`grpc_port`": options.grpc_port}
        self._ports = {  # HTTP's first
            name: reserve(options.host, port, name)
            for name, port in ports.items()
            if port is not None
        }
        self._workers: dict[int, Worker] = {}  # by pid
        self._hub = Hub(self._workers, count)
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
        self._dropped = 0

    def run(self, on_ready: OnReady) -> int:
        """Serve as `serving.server.run`; raise the error that keeps the workers from starting."""
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._signals = Signals(self._loop, self._stopped.set)
        self._signals.handle((*ENDING, signal.SIGINT) if self._stop is None else ENDING)
        gc.collect()
        gc.freeze()  # otherwise the children's collectors would write to the shared memory
        try:
            self._loop.run_until_complete(self._run(on_ready))
        finally:
            gc.unfreeze()
            self._close_log()
            self._signals.restore()
            self._loop.close()
            self._listener.close()
            for each in self._ports.values():
                remove_path(each)
                each.close()
        if self._signals.count > 1 or self._signals.interrupted:
            raise KeyboardInterrupt
        if self._failure is not None:
            raise self._failure
        return self._dropped

    async def _run(self, on_ready: OnReady) -> None:
        stopped = self._stopped.is_set
        if self._stop is not None:
            self._loop.add_reader(self._stop, self._on_stop, self._stop)
        self._open_log()
        tasks = [asyncio.ensure_future(self._hub.watch())]
        if self._shared:
            tasks.append(asyncio.ensure_future(self._keep(ENGINE)))
            await self._until(lambda: self._engines is not None or stopped())
        tasks += [asyncio.ensure_future(self._keep(n)) for n in range(1, self._count + 1)]
        await self._until(lambda: self._hub.serving == self._count or stopped())
        if not stopped():
            self._started = True
            log.info("%d workers serve", self._count)
            (host, port), *grpc = map(address_of, self._ports.values())
            on_ready(host, port, grpc[0][1] if grpc else None)
        await self._stopped.wait()
        for worker in self._workers.values():
            if worker.ready:
                worker.link.send("drain")
            else:  # it still opens its models
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGTERM)
        await self._until(self._ended, self._drain_s - 2 * _POLL_S)
        for each in self._ports.values():
            remove_path(each)  # just before the workers accept the last clients of a path
        await self._until(self._ended, self._end_s)
        for worker in self._workers.values():
            worker.link.send("abort")
        await self._until(lambda: not self._workers, ABORT_S)
        for worker in self._workers.values():
            log.error("worker %d does not end and is killed", worker.number)
            os.kill(worker.pid, signal.SIGKILL)
        await self._until(lambda: not self._workers, ABORT_S)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

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

    async def _keep(self, number: int) -> None:
        """Start a process, and another one whenever it has ended, until the server ends.

        Gives up once every process that could answer fails at each start.
        """
        while not self._stopped.is_set():
            try:
                worker = await self._fork(number)
            except OSError as exc:  # the system has no file descriptor, process or memory left
                why = f"`workers` {self._count}: a process cannot be started: {os_reason(exc)}"
                hint = "fewer `workers`, or more files and processes: ulimit -n, -u"
                error: BaseException = Unsupported(why, hint=hint)
                lived = False
            else:
                await worker.lost.wait()
                while not (ended := os.waitpid(worker.pid, os.WNOHANG))[0]:
                    await asyncio.sleep(_POLL_S / 4)
                del self._workers[worker.pid]
                why, error = self._on_end(worker, os.waitstatus_to_exitcode(ended[1]))
                worked = worker.ready if number == ENGINE else worker.serving
                lived = worked and time.monotonic() - worker.begun_s > LIVED_S
            if self._stopped.is_set():
                return
            self._failures[number] = failures = 0 if lived else self._failures[number] + 1
            fronts = [count for each, count in self._failures.items() if each != ENGINE]
            alone = number == ENGINE or not self._hub.serving
            most = failures if number == ENGINE else min(fronts)
            if not self._started or (alone and most >= MOST_FAILURES):
                if self._started:
                    log.error("%s; no worker is left, and %d starts of each failed", why, most)
                    error = error if isinstance(error, DeploykitError) else DeploykitError(why)
                self._failure = self._failure or error
                self._stopped.set()
                return
            delay_s = min(LONGEST_DELAY_S, DELAY_S * 2 ** (failures - 1)) if failures else 0.0
            log.error("%s; another is started in %g s", why, delay_s)
            self._hub.restarts += 1
            await asyncio.sleep(delay_s)

    async def _fork(self, number: int) -> Worker:
        """Start a process and connect to it. Raises OSError."""
        self._close_log()  # which has a thread: a fork copies locks
        try:
            ours, theirs = socket.socketpair()
            sockets = {name: share_address(each) for name, each in self._ports.items()}
            inherited, result = [theirs, *sockets.values()], mmap.mmap(-1, RESULT_BYTES)
            common, keep = (number, self._count, theirs, sockets), [e.fileno() for e in inherited]
            if number == ENGINE:
                keep.append(self._listener.fileno())
                listener, memories = self._listener, self._memories
                member: Member = EngineMember(*common, listener=listener, memories=memories)
            else:
                engine = None
                if self._shared:
                    address = self._listener.getsockname()
                    engine = EngineLink(number, self._memories[number - 1], address)
                member = Member(*common, engine)
                member.engines = self._engines
            pid = os.fork()
            if pid == 0:
                become_worker(member, self._serve, self._logging_of, result, keep)
            for each in inherited:  # now: the log takes a file
                each.close()
        finally:
            self._open_log()
        worker = self._workers[pid] = Worker(number, pid, result)
        follow = partial(self._follow, worker)
        worker.link = Channel(follow, self._hub.answer, worker.lost.set)
        await worker.link.connect(ours)
        return worker

    def _open_log(self) -> None:
        self._log = self._logging_of(None)
        self._log.__enter__()

    def _close_log(self) -> None:
        before, self._log = self._log, None
        if before is not None:
            before.__exit__(None, None, None)

    def _on_end(self, worker: Worker, code: int) -> tuple[str, BaseException]:
        """Return why a worker has ended, as text for the log and as an error."""
        result, how = worker.result, f"exit code {code}"
        if code < 0:
            how = signal.Signals(-code).name
        self._hub.end(worker)
        self._share_state()
        if isinstance(result, int):
            self._dropped += result
        elif self._stopped.is_set() and worker.serving and self._signals.count < 2:
            log.error("worker %d was ended by %s before it had answered", worker.number, how)
            self._dropped += 1  # at least
        number = worker.number
        name = "the process of the engines" if number == ENGINE else f"worker {number}"
        if isinstance(result, BaseException):
            return f"{name}: {result}", result
        why = f"{name} was ended by {how}"
        if code != -signal.SIGKILL:
            return why, DeploykitError(why)
        text = f"{why}, as the system does where memory runs out"
        return why, OutOfMemory(text, hint="fewer `workers`")

    # -- messages of workers ---------------------------------------------------------------------

    def _follow(self, worker: Worker, message: Message) -> None:
        match message:
            case "state", not_ready:
                worker.not_ready = not_ready
                self._share_state()
            case ("ready",):
                worker.ready = True
                if self._stopped.is_set():
                    worker.link.send("drain")
                else:
                    worker.link.send("open", list(self._hub.regions.values()))
                    self._share_state()
            case "engines", engines:
                self._engines = engines
            case ("listening",):
                worker.serving, worker.begun_s = True, time.monotonic()
                if self._started:
                    log.info("worker %d serves", worker.number)

    def _share_state(self) -> None:
        """Send each worker the reason why another one is not ready."""
        for worker in self._workers.values():
            others = [each.not_ready for each in self._workers.values() if each is not worker]
            if worker.ready:
                worker.link.send("elsewhere", next((each for each in others if each), None))
