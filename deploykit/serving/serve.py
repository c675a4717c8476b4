"""Serve engines over HTTP and gRPC: open and prove them, watch their files, run their shadows.

`dk.serve` returns a server in a separate thread, the command line serves until it is stopped.

With several processes, engines on a GPU run in one, to which all others pass requests; on a CPU
each process has separate engines, unless `workers` is shared:N. `auto` opens each model with one
thread and with all: if one is almost as fast, as for small models, there is a process for each
core; otherwise one keeps all threads, so that no lone request waits.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from importlib import import_module
from pathlib import Path
from socket import SHUT_RDWR, socket, socketpair
from typing import TYPE_CHECKING, Any

from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput, DeploykitError, Unsupported
from deploykit.core.extras import check_installed, installed
from deploykit.core.files import check_readable
from deploykit.core.machine import return_large_blocks, this_machine, usable_cores
from deploykit.core.subprocesses import run_apart
from deploykit.engines.engine import Closing, Engine, load
from deploykit.engines.onnxruntime.file import copies_folder, use_copies
from deploykit.evaluation.verify import open_proven
from deploykit.pipelines.pipeline import ServedPipelines, models_to_serve
from deploykit.serving.batching.batcher import monotonic_us
from deploykit.serving.models.model import warm_up, why_not_batched
from deploykit.serving.models.reload import Reloader, Source
from deploykit.serving.models.shadow import Shadow, check_reference
from deploykit.serving.observe import logs
from deploykit.serving.observe.tracing import Tracer
from deploykit.serving.options import Models, ServeOptions, addresses, takes

if TYPE_CHECKING:
    from deploykit.serving.server import Server
    from deploykit.serving.workers.group import Logging, OnReady, ServerGroup

    # the server (None with several processes), host, HTTP port, gRPC port, the models' names
    OnStart = Callable[[Server | None, str, int, int | None, list[str]], None]

log = logging.getLogger(__name__)

PACKAGES = ("orjson", "uvloop", "httptools", "google.protobuf", "hpack", "prometheus_client")
_NAME = re.compile(r"(?!(\.|\.\.|stats)$)[A-Za-z0-9._-]{1,128}")  # "stats" is a route
AUTO, SHARED = "auto", "shared:"
MOST_AUTO = 16  # more were not measured
MOST = 256
_GAIN = 1.25  # speed-up of all threads over one, from which on a lone request is worth them
_LONG_US = 1_000_000  # shorter runs are repeated

Timed = dict[str, tuple[int, int]]  # by model: µs of one row on one thread, and on all


def name_models(values: Sequence[str]) -> dict[str, Path]:
    """Parse `FILE` or `NAME=FILE`; return files by name. Raises BadInput."""
    files: dict[str, Path] = {}
    for text in values:
        name, _, file = text.partition("=")
        found = Path(text).exists() and not Path(file).exists()  # such as epoch=3-loss=0.1.onnx
        if found or not file or "/" in name:
            name, file = Path(text).stem, text
        if name in files:
            raise BadInput(f"{text}: the name '{name}' is taken", hint="give it another: NAME=FILE")
        files[name] = Path(file)
    return files


def name_shadows(
    shadows: Mapping[str, ArtefactLike] | Sequence[str], models: Sequence[str]
) -> dict[str, Path]:
    """Return shadow files by the model that they belong to."""
    found: dict[str, Path] = {}
    if isinstance(shadows, Mapping):
        shadows = [f"{name}={file}" for name, file in shadows.items()]
    for text in shadows:
        name, equals, file = text.partition("=")
        if len(models) == 1 and (not equals or (name not in models and Path(text).exists())):
            name, file = models[0], text
        if name not in models or name in found:
            hint = f"served here: {', '.join(models)}"
            raise BadInput(f"`shadows` {text}: must be NAME=FILE, once for each NAME", hint=hint)
        found[name] = Path(file)
    return found


# -- how many processes, and which of them run the engines ------------------------------------


@dataclass(frozen=True)
class Workers:
    """`count`: workers that share the ports, None for auto. `shared`: one more runs the engines."""

    count: int | None
    shared: bool = False

    @property
    def several(self) -> bool:
        return self.shared or self.count != 1


def parse_workers(workers: int | str) -> Workers:
    """Parse the option `workers`. Raises BadInput."""
    text = str(workers)
    number = text.removeprefix(SHARED)
    if text == AUTO:
        return Workers(None)
    if not (number.isascii() and number.isdigit() and len(number) < 6 and 1 <= int(number) <= MOST):
        form = f"must be a number from 1 to {MOST}, {SHARED}N or {AUTO}"
        hint = f"{SHARED}2 are two, and one more process that runs the engines for both"
        raise BadInput(f"`workers` {text}: {form}", hint=hint)
    return Workers(int(number), number != text)


def choose_workers(files: Mapping[str, Path], options: ServeOptions) -> Workers:
    """Decide how many workers to start. Raises BadInput."""
    wanted = parse_workers(options.workers)
    if not wanted.several:
        return wanted
    why_shared = _why_shared(files, options.device)
    if wanted.count is not None:
        if wanted.count > usable_cores():
            log.warning("%d workers share %d cores", wanted.count, usable_cores())
        if why_shared and not wanted.shared:
            log.info("one process runs the engines of all workers: %s", why_shared)
        return replace(wanted, shared=wanted.shared or bool(why_shared))
    count, why = 1, why_shared
    if not why and usable_cores() < 2:
        why = "there is one core"
    elif not why and (options.threads is not None or options.instances > 1):
        why = "`threads` or `instances` are given"
    elif not why:
        job = time_threads, dict(files), options.device, usable_cores()
        timed: Timed | str = run_apart("`workers` auto", *job)
        count, why = (1, timed) if isinstance(timed, str) else decide_workers(timed, usable_cores())
    log.info("workers: %s chose %d: %s", AUTO, count, why)
    return Workers(count)


def threads_each(options: ServeOptions, workers: Workers) -> int | None:
    """Return CPU threads per call: workers with engines divide the cores, unless it was given."""
    if workers.shared or workers.count in (None, 1) or options.threads is not None:
        return options.threads
    return max(1, usable_cores() // (workers.count * options.instances))


def check_on_cpu(name: str, device: str) -> None:
    """Raise Unsupported for an engine on a GPU that one of several workers has opened."""
    if device != "cpu":
        hint = f"`workers` {SHARED}2, or `device` cpu"
        raise Unsupported(f"model '{name}' runs on {device}, which one process owns", hint=hint)


def _why_shared(files: Mapping[str, Path], device: str) -> str:
    """Return why one process has to run the engines; empty where each worker may have its own."""
    if device.startswith("cuda"):
        return f"`device` is {device}"
    for name, file in files.items():
        if not Artefact.open(file).runtime.on_cpu:
            return f"model '{name}' runs on a GPU"
    if device == "auto" and this_machine().gpus and run_apart("`workers`", _takes_cuda):
        return "ONNX Runtime runs on the GPU here"
    return ""


def _takes_cuda(_on_progress: object) -> bool:
    from deploykit.engines.onnxruntime.engine import providers

    return "CUDAExecutionProvider" in providers()


def decide_workers(timed: Timed, cores: int) -> tuple[int, str]:
    """Return how many workers to start given the times of one row, and the reason."""
    for name, (one_us, all_us) in timed.items():
        if one_us > _GAIN * all_us:
            return 1, f"one row of '{name}' takes {one_us} us on 1 thread, {all_us} us on {cores}"
    pairs = [f"'{name}' {one_us} and {all_us} us" for name, (one_us, all_us) in timed.items()]
    why = f"{cores} threads do not compute one row much faster than 1: {', '.join(pairs)}"
    return min(cores, MOST_AUTO), why if pairs else "there is no model"


def time_threads(
    files: Mapping[str, Path], device: str, cores: int, _on_progress: Callable[[str, float], Any]
) -> Timed | str:
    """Time each model, or return why there cannot be several workers; 0: nothing to run."""
    timed = {}
    for name, file in files.items():
        found = []
        for threads in (1, cores):
            with load(file, device, threads=threads) as engine:
                if engine.device != "cpu":
                    return f"model '{name}' runs on {engine.device}"
                rows = 0 if why_not_batched(engine) else 1
                timed_us = warm_up(name, engine, monotonic_us, max_batch=rows, again_us=_LONG_US)
                found.append(min(timed_us.values(), default=0))
        timed[name] = (found[0], found[1])
    return timed


# -- the servers --------------------------------------------------------------------------------


class RunningServer(Closing):
    """A server in a separate thread; a context manager that closes it.

    `url`: the address for HTTP. `grpc_url`: host:port, None without gRPC. `models`: their names.
    """

    def __init__(self, run: Callable[[OnStart, socket], int], settings: ServeOptions) -> None:
        """Start `run`; it ends once its socket's other end is shut down, or its server stops."""
        self._process = os.getpid()
        self._scheme = "https" if settings.tls_cert else "http"
        self._server: Server | None = None
        self._stopping = False
        self._started, self._ended = Future[None](), Future[int]()
        self._stop, self._stopped = socketpair()
        self._thread = threading.Thread(target=self._serve, args=(run,), name="deploykit serve")
        self._thread.start()
        try:
            self._started.result()
        except BaseException:  # Ctrl-C, too
            self._begin_stop()
            raise

    def _serve(self, run: Callable[[OnStart, socket], int]) -> None:
        try:
            with self._stop, self._stopped:
                unanswered = run(self._on_start, self._stopped)
            if not self._started.done():
                raise DeploykitError("the server was stopped before it was ready")
            self._ended.set_result(unanswered)
        except BaseException as exc:  # noqa: BLE001 - `wait` raises it again
            self._ended.set_exception(exc)
            if not self._started.done():
                self._started.set_exception(exc)

    def _on_start(
        self, server: Server | None, host: str, port: int, grpc_port: int | None, names: list[str]
    ) -> None:
        self._server = server
        self.models = tuple(names)
        place, self.grpc_url = addresses(host, port, grpc_port)
        self.url = place if place.startswith("unix:") else f"{self._scheme}://{place}"
        self._started.set_result(None)
        if self._stopping:
            self._begin_stop()

    def _begin_stop(self) -> None:
        self._stopping = True
        with suppress(OSError):  # the server has ended on its own
            self._stop.shutdown(SHUT_RDWR)
        if self._server is not None:
            with suppress(RuntimeError):  # the same
                self._server.stop()

    def wait(self) -> int:
        """Block until the server has ended; return the number of unanswered accepted requests.

        Raises the error that ended the server, if any, and Unsupported in a forked process.
        """
        if os.getpid() != self._process:
            raise Unsupported("the server belongs to the process that started it, not to its fork")
        self._ended.exception()  # after Ctrl-C in `join`, Python before 3.12 takes it for ended
        self._thread.join()
        return self._ended.result()

    def close(self) -> int:
        """Answer the accepted requests, then end; return as `wait`. Does nothing in a fork."""
        if os.getpid() != self._process:
            return 0
        self._begin_stop()
        return self.wait()

    def __repr__(self) -> str:
        state = "running" if self._thread.is_alive() else "closed"
        if os.getpid() != self._process:
            state = "of the parent process"
        return f"RunningServer({self.url!r}, models={list(self.models)}, {state})"

    def _repr_html_(self) -> str:
        return f'<a href="{escape(self.url)}">{escape(repr(self))}</a>'


@takes(ServeOptions)
def serve(options: ServeOptions) -> RunningServer:
    """Serve models over HTTP and gRPC from a thread of this process; return when it is ready.

    Takes the fields of `ServeOptions`: `dk.serve("model.onnx", max_batch=8)`. Several `workers` are
    children of this process, end with it, and log to its stderr.

    Raises BadInput, NotFound, MissingExtra, Unsupported (no such device), GateFailed (its proof).
    """
    return start_server(options)


def start_server(options: ServeOptions, *, apart: bool = False) -> RunningServer:
    """Serve as `serve` does. `apart`: a single worker is a process of its own, too."""
    check_installed(*PACKAGES)
    parse_workers(options.workers)

    def run(on_start: OnStart, stop: socket) -> int:
        service = _prepare(options)
        if apart or service.workers.several:
            return service.run_apart(on_start, stop)
        return service.run(on_start)

    return RunningServer(run, options)


def serve_until_stopped(
    options: ServeOptions,
    *,
    find: Callable[[], Mapping[str, Path]] | None = None,
    log_format: str = "text",
    on_start: OnStart = lambda *_: None,
    on_serve: Callable[[Server], None] | None = None,
) -> int:
    """Serve until SIGTERM or Ctrl-C, for the command line.

    Args:
        options: `models`, `pipelines` and `shadows` are strings `FILE` or `NAME=FILE`; for a shadow
            NAME is optional if there is one model.
        find: returns the models, once the log is configured.
        log_format: text or json lines on stderr.
        on_start: called once the ports are open, before the first request is read; with several
            workers, without a server.
        on_serve: called with each server, in its process.

    Returns how many accepted requests were left unanswered.
    """
    check_installed(*PACKAGES)
    parse_workers(options.workers)
    with logs.configure(log_format):
        if find is not None:
            options = replace(options, models=find())
        service = _prepare(options)
        if not service.workers.several:
            return service.run(on_start, on_serve)

    def logging_of(number: int | None) -> logs.LogQueue:
        return logs.configure(log_format, worker=number)

    return service.run_workers(on_start, logging_of, on_serve)


def _prepare(options: ServeOptions) -> _Service:
    """Check the options; return what to serve, and from how many processes."""
    files, pipelines = _files_by_name(options.models), _files_by_name(options.pipelines)
    job = models_to_serve, pipelines, files
    # a pipeline may start threads, after which a fork would hang forever
    apart = pipelines and parse_workers(options.workers).several
    served = run_apart("`pipelines`", *job) if apart else job[0](*job[1:])
    references = name_shadows(options.shadows, list(served))
    if not files and not pipelines:
        raise BadInput("no engine to serve", hint="give one as FILE or NAME=FILE")
    for file in (*files.values(), *references.values()):
        check_readable(file)
    for name, file in (*served.items(), *pipelines.items()):
        if not _NAME.fullmatch(name):  # a part of a URL's path
            form = "1 to 128 letters, digits, '.', '_' or '-', not 'stats'"
            hint = f"NAME=FILE, with a NAME of {form}: NAME={file}"
            raise BadInput(f"{file}: '{name}' cannot be the name of a model", hint=hint)
    workers = choose_workers(served, options)
    threads = threads_each(options, workers)
    settings = replace(options, models=(), pipelines=(), shadows=(), threads=threads)
    return _Service(files, pipelines, references, settings, workers, [*served, *pipelines])


@dataclass(frozen=True)
class _Service:
    """Runs the server in any of its processes; can be pickled. `references`: files of shadows."""

    files: Mapping[str, Path]
    pipelines: Mapping[str, Path]
    references: Mapping[str, Path]
    settings: ServeOptions
    workers: Workers
    names: list[str]

    def run(
        self,
        on_start: OnStart,
        on_serve: Callable[[Server], None] | None = None,
        group: ServerGroup | None = None,
        shared: Path | None = None,
    ) -> int:
        """Open and serve the models. `group`: processes on the ports; `shared`: see `load`."""
        from deploykit.serving import server as http
        from deploykit.serving.workers.group import ServerGroup

        settings, steps = self.settings, ServedPipelines(self.pipelines, self.files)
        group = group or ServerGroup()
        return_large_blocks()
        if settings.max_pixels != ServeOptions.max_pixels:
            import_module("deploykit.engines.data.images").limit_pixels(settings.max_pixels)
        with ExitStack() as stack:
            models: dict[str, Sequence[Engine]] = {}
            sources, shadows = dict[str, Source](), dict[str, Shadow]()
            for name, remote in (group.engines or {}).items():
                models[name] = [remote] * remote.count
            if group.engines is None:  # otherwise the process of the engines does both
                for name, file in steps.files.items():
                    again = partial(open_engines, file, settings, shared)
                    source = sources[name] = Source(file, again)
                    models[name] = source.open()
                    for engine in models[name]:
                        stack.callback(engine.close)
                        if group.count > 1 and not group.runs_engines:
                            check_on_cpu(name, engine.device)
                for name, file in self.references.items():
                    (reference,) = open_proven(file, "cpu", threads=1)  # cores are for serving
                    stack.callback(reference.close)
                    check_reference(models[name][0], reference)
                    shadows[name] = stack.enter_context(Shadow(name, reference))
            graphs = {} if group.runs_engines else steps.graphs(models)
            server = http.Server(models, settings, group=group, pipelines=graphs)
            self._watch(server, sources, shadows, group, stack)
            if on_serve is not None:
                on_serve(server)
            ready = self._report_to(on_start, server)
            if threading.current_thread() is threading.main_thread():
                return http.run(server, ready)
            return server.run(ready)  # in the process of a user's program

    def run_workers(
        self,
        on_start: OnStart,
        logging_of: Logging,
        on_serve: Callable[[Server], None] | None = None,
        stop: int | None = None,
    ) -> int:
        """Run the server in each worker. `stop`: see `Parent`."""
        import deploykit.serving.grpc.methods
        import deploykit.serving.server
        from deploykit.serving.workers.parent import Parent

        if installed("onnxruntime"):  # it starts no thread here, and its memory is shared
            import deploykit.engines.onnxruntime.engine  # noqa: F401

        def worker(group: ServerGroup) -> int:
            with use_copies(folder):
                return self.run(lambda *_: None, on_serve, group, folder)

        count, shared = self.workers.count or 1, self.workers.shared
        with copies_folder() as folder:
            parent = Parent(count, worker, self.settings, logging_of, shared=shared, stop=stop)
            return parent.run(self._report_to(on_start))

    def run_apart(self, on_start: OnStart, stop: socket) -> int:
        """Do the same from a separate process: this one may have threads, which no fork copies.

        It ends once the other end of `stop` is shut down. Ctrl-C, which a terminal sends to all
        processes, is left to this process.
        """
        level, end = logging.getLogger("deploykit").getEffectiveLevel(), stop.fileno()
        job = "the parent of the workers", self._be_parent, level, end
        left: int = run_apart(
            *job, on_progress=lambda place, _: on_start(*json.loads(place)), inherit=(end,)
        )
        return left

    def _be_parent(self, level: int, stop: int, on_progress: Callable[[str, float], None]) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

        def logging_of(number: int | None) -> AbstractContextManager[object]:
            return logs.configure("text", worker=number, level=level)

        def on_start(*started: object) -> None:
            on_progress(json.dumps(started), 1.0)

        return self.run_workers(on_start, logging_of, stop=stop)

    def _report_to(self, on_start: OnStart, server: Server | None = None) -> OnReady:
        """Return what calls `on_start` with the addresses and the names of the models."""
        return lambda host, port, grpc: on_start(server, host, port, grpc, self.names)

    def _watch(
        self,
        server: Server,
        sources: Mapping[str, Source],
        shadows: Mapping[str, Shadow],
        group: ServerGroup,
        stack: ExitStack,
    ) -> None:
        """Add shadows, traces and the log's metrics; replace engines whose files change."""
        repository = server.repository
        repository.add_metrics(logs.samples)
        for name, shadow in shadows.items():
            repository.find(name).watch(shadow)
            repository.add_metrics(shadow.samples)
        if self.settings.otlp is not None and group.engines is None:
            tracer = stack.enter_context(Tracer(self.settings.otlp))
            repository.add_metrics(tracer.samples)
            server.trace_failures(tracer.add_failure)
            for name, model in repository.models.items():
                model.watch(tracer.watch(name))
        if sources and self.settings.reload:
            reloader = stack.enter_context(Reloader(repository, sources))
            repository.add_metrics(reloader.samples)
            for name, model in repository.models.items():
                model.remark = partial(reloader.error, name)


def _files_by_name(models: Models) -> dict[str, Path]:
    if isinstance(models, Mapping):
        return {name: Path(file) for name, file in models.items()}
    several = [models] if isinstance(models, (str, os.PathLike, Artefact)) else models
    return name_models([str(each) for each in several])


def open_engines(file: Path, options: ServeOptions, shared: Path | None = None) -> Sequence[Engine]:
    """Open the engines of a model. `shared`: see `load`."""
    threads, count = options.threads, options.instances
    if threads is None and count > 1:
        threads = max(1, usable_cores() // count)
    artefact = Artefact.open(file)
    artefact.sha256  # noqa: B018 - hashed now: later the file may be another one
    opened = partial(open_proven, artefact, threads=threads, instances=count)
    graphs = partial(load, shared=shared, cuda_graphs=options.graph_sizes)
    try:
        return opened(options.device, trust=options.trust, open_engine=graphs)
    except Unsupported as exc:
        cuda = options.device.startswith("cuda")
        if not (options.cpu_fallback and cuda and artefact.format == "onnx"):
            raise
        engines: list[Any] = opened("cpu", open_engine=partial(load, shared=shared))
        note = f"runs on the CPU, not on {options.device}: {exc.message}"
        for engine in engines:
            engine.notes = (*engine.notes, note)
        log.warning("%s: %s", file, note)
        return engines
