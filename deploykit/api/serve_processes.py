"""Serve from several processes: how many, the threads of each, and what only one process can do.

`auto` opens each model with one thread and with all. Where one thread computes a request almost as
fast, as for small models, the server's own work is the limit, and one process for each core serves
most; where it does not, a lone request would take longer, and one process keeps all threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deploykit.core.apart import run_apart
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.extras import installed
from deploykit.core.machine import usable_cores

if TYPE_CHECKING:
    from deploykit.api.running_server import OnStart
    from deploykit.serving.options import ServeOptions
    from deploykit.serving.workers.group import ServerGroup

log = logging.getLogger(__name__)

AUTO = "auto"
MOST_AUTO = 16  # more were not measured
MOST = 256
_GAIN = 1.25  # of all threads over one, from which on a lone request is worth them
_LONG_US = 1_000_000  # shorter runs are repeated

Timed = dict[str, tuple[int, int]]  # by model: us of one row on one thread, and on all


class _Opening(Protocol):
    @property
    def device(self) -> str: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def instances(self) -> int: ...


def parse_workers(workers: int | str) -> int | None:
    """The number of workers; None for "auto". Raises BadInput."""
    text = str(workers)
    if text == AUTO:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= MOST):
        raise BadInput(f"`workers` {text}: must be a number from 1 to {MOST}, or {AUTO}")
    return int(text)


def choose_workers(wanted: int | None, files: Mapping[str, Path], opening: _Opening) -> int:
    """How many workers to start. Raises Unsupported for engines that one process has to own."""
    if wanted == 1:
        return 1
    from deploykit.serving.workers.parent import check_supported

    only_one = _why_only_one(files, opening.device)
    if wanted is not None:
        if only_one:
            raise _only_one(only_one)
        check_supported()
        if wanted > usable_cores():
            log.warning("%d workers share %d cores", wanted, usable_cores())
        return wanted
    count, why = (1, only_one) if only_one else _measure(files, opening)
    log.info("workers: %s chose %d: %s", AUTO, count, why)
    return count


def threads_each(opening: _Opening, count: int) -> int | None:
    """CPU threads per call: `count` workers divide the cores, unless the number was given."""
    if count == 1 or opening.threads is not None:
        return opening.threads
    return max(1, usable_cores() // (count * opening.instances))


def check_on_cpu(name: str, device: str) -> None:
    """Raise Unsupported for an engine on a GPU, opened by one of several workers."""
    if device != "cpu":
        raise _only_one(f"model '{name}' runs on {device}")


def run_workers(
    count: int,
    serve: Callable[..., int],
    settings: ServeOptions,
    log_format: str,
    names: list[str],
    on_start: OnStart,
) -> int:
    """Run `serve(group=...)` in each of `count` processes; as `serve_until_stopped`."""
    import deploykit.serving.grpc.server
    import deploykit.serving.server
    from deploykit.runtimes.onnxruntime.mapped import copies_folder
    from deploykit.serving.observe import logs
    from deploykit.serving.workers.parent import Parent

    if installed("onnxruntime"):  # here it starts no thread, and what it loads is shared
        import deploykit.runtimes.onnxruntime.engine  # noqa: F401

    def worker(group: ServerGroup) -> int:
        return serve(lambda *_: None, group=group, shared=folder)

    def logging_of(number: int | None) -> AbstractContextManager[object]:
        return logs.configure(log_format, worker=number)

    with copies_folder() as folder:
        parent = Parent(count, worker, settings, logging_of)
        return parent.run(lambda host, port, grpc: on_start(None, host, port, grpc, names))


def _why_only_one(files: Mapping[str, Path], device: str) -> str:
    if device.startswith("cuda"):
        return f"`device` is {device}"
    for name, file in files.items():
        if not Artefact.open(file).runtime.on_cpu:
            return f"model '{name}' runs on a GPU"
    return ""


def _only_one(why: str) -> Unsupported:
    return Unsupported(
        f"`workers` above 1 serve engines on a CPU; {why}, which one process owns",
        hint="`workers` 1, or `device` cpu",
    )


def _measure(files: Mapping[str, Path], opening: _Opening) -> tuple[int, str]:
    if usable_cores() < 2:
        return 1, "there is one core"
    if opening.threads is not None or opening.instances > 1:
        return 1, "`threads` or `instances` are given"
    job = time_threads, dict(files), opening.device, usable_cores()
    timed: Timed | str = run_apart("`workers` auto", *job)
    if isinstance(timed, str):
        return 1, timed
    return decide_workers(timed, usable_cores())


def decide_workers(timed: Timed, cores: int) -> tuple[int, str]:
    """How many workers the times of one row speak for, and why."""
    for name, (one_us, all_us) in timed.items():
        if one_us > _GAIN * all_us:
            return 1, f"one row of '{name}' takes {one_us} us on 1 thread, {all_us} us on {cores}"
    pairs = [f"'{name}' {one_us} and {all_us} us" for name, (one_us, all_us) in timed.items()]
    why = f"{cores} threads do not compute one row much faster than 1: {', '.join(pairs)}"
    return min(cores, MOST_AUTO), why


def time_threads(
    files: Mapping[str, Path], device: str, cores: int, _on_progress: Callable[[str, float], Any]
) -> Timed | str:
    """Runs in a process of its own. Zeros where a model's axes leave nothing to run.

    A string says why several workers are out of the question.
    """
    from deploykit.runtimes.engine import load
    from deploykit.serving.batching.delivery import monotonic_us
    from deploykit.serving.models.compatibility import why_not_batched
    from deploykit.serving.models.warmup import WarmUp
    from deploykit.serving.options import ServeOptions

    timed = {}
    for name, file in files.items():
        found = []
        for threads in (1, cores):
            with load(file, device, threads=threads) as engine:
                if engine.device != "cpu":
                    return f"model '{name}' runs on {engine.device}"
                rows = 0 if why_not_batched(engine, ServeOptions()) else 1
                times, _ = WarmUp(name, engine, monotonic_us, max_batch=rows).run(again_us=_LONG_US)
                found.append(min(times.values(), default=0))
        timed[name] = (found[0], found[1])
    return timed
