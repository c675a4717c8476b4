"""The server processes that share one address, as one of them sees them.

A request reaches one process but may concern all: figures are collected from all, and a change is
made by all. `ServerGroup` is a single-process server; `Member` is one of several processes, whose
parent forwards its questions.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import pickle
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from mmap import mmap
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from deploykit.core.errors import DeploykitError, first_line
from deploykit.serving.models.model import ServedModel
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.options import ServeOptions
from deploykit.serving.transport.listener import bind
from deploykit.serving.workers.engines import EngineLink, FrontEnd, RemoteEngine
from deploykit.serving.workers.link import Channel, Message
from deploykit.serving.workers.signals import ENDING

Result = Callable[[], Any]  # returns the value, or raises the error
Then = Callable[[Result], None]
RESULT_BYTES = 32 << 10
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_ENDING_S = 0.01  # between two checks of a parent that ends
OnReady = Callable[[str, int, "int | None"], None]  # host, HTTP port, gRPC port
Act = Callable[[], None]
Makers = Mapping[str, Callable[[], Any]]
Logging = Callable[["int | None"], AbstractContextManager[object]]  # of a worker, or of the parent
ENGINE = 0  # the number of the process that runs the engines of all others


class ServerGroup:
    """A single-process server: its own figures and its own changes are complete."""

    count = 1
    runs_engines = False  # for other processes, which hold the client connections
    ends_process = False  # with the server, and no signal may interrupt its clean-up
    signals: tuple[signal.Signals, ...] = (*ENDING, signal.SIGINT)
    engines: Mapping[str, RemoteEngine] | None = None  # the engines of another process
    make_model: Callable[..., ServedModel] = ServedModel

    def __init__(self) -> None:
        self._reports: Makers = {}
        self._changes: Mapping[str, Callable[..., None]] = {}

    def offer(self, reports: Makers, changes: Mapping[str, Callable[..., None]]) -> None:
        """Set the `reports` to collect, by name, and the `changes` that all processes can make."""
        self._reports, self._changes = reports, changes

    def share_of(self, options: ServeOptions) -> ServeOptions:
        """Return the options with the queue of one process; that of the engines has all of it."""
        count = 1 if self.runs_engines else self.count
        return replace(options, queue=math.ceil(options.queue / count))

    def bind(self, host: str, port: int, parameter: str) -> socket.socket:
        """Return the socket to listen on. Raises BadInput."""
        return bind(host, port, parameter)

    async def join(self, repository: ModelRepository, drain: Act, abort: Act) -> None:
        """Wait until the server, which is ready, may accept its first connection.

        `drain`, `abort`: how a parent ends it.
        """

    def listening(self) -> None:
        """Report that the server accepts connections."""

    def report_state(self, not_ready: str | None) -> None:
        """Report why this process alone is not ready; called often."""

    def may_close(self) -> bool:
        """Return whether a server that has answered all requests may refuse connections now."""
        return True

    def collect(self, what: str, then: Then) -> None:
        """Call `then` with the figures `what` of all processes, now or later."""
        then(self._reports[what])

    def change(self, what: str, arguments: tuple[Any, ...], then: Then) -> None:
        """Make the change `what` in all processes; `then` gets None, or the first error."""
        then(partial(self._changes[what], *arguments))


class Member(ServerGroup):
    """One of `count` workers. `number`: from 1. `sockets`: by option, bound, not listening.

    `end`: the connection to the parent. Ctrl-C, which a terminal sends to all processes, is left to
    the parent. `engine`: the connection to the process of the engines, whose number is ENGINE.
    """

    ends_process = True
    signals = (signal.SIGTERM,)

    def __init__(
        self,
        number: int,
        count: int,
        end: socket.socket,
        sockets: Mapping[str, socket.socket],
        engine: EngineLink | None = None,
    ) -> None:
        super().__init__()
        self.number = number
        self.count = count
        self._engine = engine
        if engine is not None:
            self.make_model = engine.make_model
        self._end = end
        self._sockets = sockets
        self._link = Channel(self._follow, self._answer, self._on_lost)
        self._may_open = asyncio.Event()
        self._not_ready: str | None = None
        self.parent = os.getpid()  # the process that is about to fork

    def bind(self, host: str, port: int, parameter: str) -> socket.socket:  # noqa: ARG002 - bound
        return self._sockets[parameter]

    async def join(self, repository: ModelRepository, drain: Act, abort: Act) -> None:
        """Report to the parent that the models are ready; wait for the state of the others."""
        self._repository, self._drain, self._abort = repository, drain, abort
        await self._link.connect(self._end)
        if self.runs_engines:
            self._link.send("engines", self.engines)
        self._link.send("ready")
        await self._may_open.wait()
        if self._engine is not None:
            self._connecting = asyncio.ensure_future(self._engine.stay_connected(drain))
            await self._engine.ran.wait()

    def listening(self) -> None:
        self._link.send("listening")

    def report_state(self, not_ready: str | None) -> None:
        if not_ready != self._not_ready:
            self._not_ready = not_ready
            self._link.send("state", not_ready)

    def collect(self, what: str, then: Then) -> None:
        self._link.ask("collect", what).add_done_callback(lambda done: then(done.result))

    def change(self, what: str, arguments: tuple[Any, ...], then: Then) -> None:
        self._link.ask("change", what, arguments).add_done_callback(lambda done: then(done.result))

    def _on_lost(self) -> None:
        """Answer the accepted requests, then end, as the parent has ended."""
        if os.getppid() == self.parent:  # it still closes its files, some of them locks
            asyncio.get_running_loop().call_later(_ENDING_S, self._on_lost)
            return
        self.collect, self.change = super().collect, super().change  # type: ignore[method-assign]
        self._stop_waiting()
        self._drain()

    def _stop_waiting(self) -> None:
        """End `join`."""
        self._may_open.set()
        if self._engine is not None:
            self._engine.ran.set()

    def _follow(self, message: Message) -> None:
        match message:
            case "elsewhere", reason:
                self._repository.elsewhere = reason
            case "open", changes:
                for what, arguments in changes:
                    with contextlib.suppress(DeploykitError):
                        self._changes[what](*arguments)
                self._may_open.set()
            case ("drain" | "abort" as kind,):
                self._stop_waiting()
                (self._drain if kind == "drain" else self._abort)()

    async def _answer(self, question: Message) -> Any:
        if question[0] == "report":
            return {name: make() for name, make in self._reports.items()}
        _, what, arguments = question  # "change"
        return self._changes[what](*arguments)


class EngineMember(Member):
    """The process of the engines in the server's group. It ends after the front ends.

    `listener`: the socket that front ends connect to; `memories`: what each of them shares.
    """

    runs_engines = True

    def __init__(self, *more: Any, listener: socket.socket, memories: Sequence[mmap]) -> None:
        super().__init__(*more)
        self._listener = listener
        self._memories = memories
        self._fronts: set[FrontEnd] = set()

    async def join(self, repository: ModelRepository, drain: Act, abort: Act) -> None:
        self._models = repository.models
        models = list(self._models.values())
        self.engines = self._describe()
        await super().join(repository, drain, abort)
        accept = partial(FrontEnd, models, self._memories, self._fronts, lambda: self.engines)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(accept, sock=self._listener)

    def listening(self) -> None:
        """Do nothing: only front ends have clients."""

    def report_state(self, not_ready: str | None) -> None:
        """Report the state, and changes of the engines such as a replaced file."""
        super().report_state(not_ready)
        found = self._describe()
        if found != self.engines:
            self.engines = found
            self._link.send("engines", found)
            for front in self._fronts:
                front.send("models", found)

    def may_close(self) -> bool:
        return not self._fronts

    def _describe(self) -> dict[str, RemoteEngine]:
        return {name: RemoteEngine.of(each) for name, each in self._models.items()}


def of_model(name: str | None, statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics of one model, or of all."""
    found = [each for each in statistics["model_stats"] if name in (None, each["name"])]
    return {"model_stats": found}


def become_worker(
    member: Member,
    serve: Callable[[Member], int],
    logging_of: Logging,
    result: mmap,
    keep: Sequence[int],
) -> NoReturn:
    """Run a forked process, which keeps nothing of the parent but the files `keep`.

    It leaves the number of unanswered requests, or why it ends, in the memory `result`.
    """
    code = 1
    try:
        signal.signal(signal.SIGTERM, _end)
        for number in (signal.SIGINT, signal.SIGHUP):  # signals of the terminal: the parent drains
            signal.signal(number, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != member.parent:
            os._exit(code)
        low = 3  # close what the parent had open, such as its ends of other workers' sockets
        for file in sorted(keep):
            os.closerange(low, file)
            low = file + 1
        os.closerange(low, max(low, os.sysconf("SC_OPEN_MAX")))
        os.register_at_fork(after_in_child=partial(_release, keep))
        with logging_of(member.number):
            _leave(serve(member), result)
        for each in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread has ended
                for pid in each.read_text().split():  # such as a pool's, which would never end
                    os.kill(int(pid), signal.SIGTERM)
        code = 0
    except (KeyboardInterrupt, SystemExit):
        pass
    except BaseException as exc:  # noqa: BLE001 - the parent raises it
        _leave(exc, result)
    finally:
        os._exit(code)


def _leave(value: int | BaseException, result: mmap) -> None:
    try:
        data = pickle.dumps(value)
        pickle.loads(data)  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - not every library's error can be pickled
        data = b""
    if not 0 < len(data) < RESULT_BYTES:
        assert isinstance(value, BaseException)
        data = pickle.dumps(DeploykitError(f"{type(value).__name__}: {first_line(value)}"))
    result[: len(data)] = data


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # no other signal may interrupt the end
    raise SystemExit(1)


def _release(files: Sequence[int]) -> None:
    """Close `files` in a process that a stage forks: it must not keep connections or links open."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in files:  # the numbers stay in use by the objects that this process inherits
        os.dup2(nothing, each, inheritable=False)
    os.close(nothing)
