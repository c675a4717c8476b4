"""Serve from several processes: choose their number, their threads, and who runs the engines.

Engines on a GPU run in one process, to which all others pass requests; on a CPU each process has
separate engines, unless `workers` is shared:N.

`auto` opens each model with one thread and with all: if one is almost as fast, as for small models,
there is a process for each core; otherwise one keeps all threads, so that no lone request waits.
"""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.extras import installed
from deploykit.core.machine import this_machine, usable_cores
from deploykit.core.subprocesses import run_apart
from deploykit.engines.engine import load
from deploykit.engines.onnxruntime.file import copies_folder, use_copies
from deploykit.serving.batching.batcher import monotonic_us
from deploykit.serving.models.model import why_not_batched
from deploykit.serving.models.warmup import WarmUp
from deploykit.serving.observe import logs
from deploykit.serving.options import ServeOptions

if TYPE_CHECKING:
    from deploykit.serving.workers.group import Logging, OnReady, ServerGroup

log = logging.getLogger(__name__)

AUTO, SHARED = "auto", "shared:"
MOST_AUTO = 16  # more were not measured
MOST = 256
_GAIN = 1.25  # speed-up of all threads over one, from which on a lone request is worth them
_LONG_US = 1_000_000  # shorter runs are repeated

Timed = dict[str, tuple[int, int]]  # by model: µs of one row on one thread, and on all


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
    """Decide how many workers to start. Raises BadInput, and Unsupported on other systems."""
    wanted = parse_workers(options.workers)
    if not wanted.several:
        return wanted
    from deploykit.serving.workers.parent import check_supported

    why_shared = _why_shared(files, options.device)
    if wanted.count is not None:
        check_supported()
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


def run_workers(
    workers: Workers,
    serve: Callable[..., int],
    settings: ServeOptions,
    logging_of: Logging,
    on_ready: OnReady,
    *,
    stop: int | None = None,
) -> int:
    """Run `serve(group=...)` in each process. `stop`: see `Parent`."""
    import deploykit.serving.grpc.methods
    import deploykit.serving.server
    from deploykit.serving.workers.parent import Parent

    if installed("onnxruntime"):  # it starts no thread here, and its memory is shared
        import deploykit.engines.onnxruntime.engine  # noqa: F401

    def worker(group: ServerGroup) -> int:
        with use_copies(folder):
            return serve(lambda *_: None, group=group, shared=folder)

    count = workers.count or 1
    with copies_folder() as folder:
        parent = Parent(count, worker, settings, logging_of, shared=workers.shared, stop=stop)
        return parent.run(on_ready)


def run_workers_apart(
    workers: Workers,
    serve: Callable[..., int],
    settings: ServeOptions,
    on_ready: OnReady,
    stop: socket,
) -> int:
    """Do the same from a separate process: this one may have threads, which a fork does not copy.

    It ends once the other end of `stop` is shut down. Ctrl-C, which a terminal sends to all
    processes, is left to this process.
    """

    def ready(address: str, _part: float) -> None:
        on_ready(*json.loads(address))

    level, end = logging.getLogger("deploykit").getEffectiveLevel(), stop.fileno()
    job = _be_parent, workers, serve, settings, level, end
    left: int = run_apart("the parent of the workers", *job, on_progress=ready, inherit=(end,))
    return left


def _be_parent(
    workers: Workers,
    serve: Callable[..., int],
    settings: ServeOptions,
    level: int,
    stop: int,
    on_progress: Callable[[str, float], None],
) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def logging_of(number: int | None) -> AbstractContextManager[object]:
        return logs.configure("text", worker=number, level=level)

    def on_ready(*address: object) -> None:
        on_progress(json.dumps(address), 1.0)

    return run_workers(workers, serve, settings, logging_of, on_ready, stop=stop)


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
                times = WarmUp(name, engine, monotonic_us, max_batch=rows).run(again_us=_LONG_US)
                found.append(min(times.values(), default=0))
        timed[name] = (found[0], found[1])
    return timed
