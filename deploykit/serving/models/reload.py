"""Watch engine files and replace an engine when its file changes.

A new file is loaded and run on a separate thread, which is abandoned after a time limit. If it
cannot be loaded or contains another model, the old engine keeps serving; the log and `error`
report why. The next attempt follows the file's next change.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.core.errors import DeploykitError, NotFound, first_line
from deploykit.core.files import manifest_path
from deploykit.core.subprocesses import INSIDE
from deploykit.engines.engine import Closing, Engine
from deploykit.graph.parse import external_files
from deploykit.serving.models.model import ServedModel
from deploykit.serving.observe.metrics import Sample
from deploykit.serving.options import VERSION

if TYPE_CHECKING:
    from deploykit.serving.models.repository import ModelRepository

log = logging.getLogger(__name__)

POLL_S = 1.0
CLOSE_S = 2.0
LIMIT_S = 60.0  # the time limit for a new file, or TIMES the first loading time if that is longer
TIMES = 10

File = tuple[str, int, int, int]  # name, inode, bytes, modified in ns; zeros where there is none
Load = Callable[[], Sequence[Engine]]


class Source:
    """The file of one model, the function that loads it, and what became of its newer versions.

    It detects changes since its creation, so none during start-up is missed.
    """

    def __init__(self, path: Path, load: Load) -> None:
        self.path = path
        self.load = load
        self.load_s = 0.0
        self.problem: str | None = None  # why the newest file is not in use
        self.reloads = self.given_up = 0
        self.external = external_files(path)
        self.settled = self.seen = self.files()

    def open(self) -> Sequence[Engine]:
        """Load the file at the start, and measure how long that takes."""
        begun_s = time.monotonic()
        engines = self.load()
        self.load_s = time.monotonic() - begun_s
        return engines

    def files(self) -> tuple[File, ...]:
        """Return the current state of the file, its external weights and, last, its manifest."""
        external = [self.path.parent / location for location in self.external]
        return (_file(self.path), *map(_file, external), _file(manifest_path(self.path)))


class Reloader(Closing):
    """Polls every source each `poll_s`; loads a changed file once two polls find it unchanged.

    Each source has a thread: a file system that hangs blocks no other model's reload.
    """

    def __init__(
        self,
        repository: ModelRepository,
        sources: Mapping[str, Source],
        *,
        poll_s: float = POLL_S,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.repository = repository
        self.poll_s = poll_s
        self.limit_s = limit_s
        self._sources = sources
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=each, name="reload", daemon=True)
            for each in sources.items()
        ]
        for thread in self._threads:
            thread.start()

    def error(self, name: str) -> str | None:
        """Return why the newer file of model `name` is not in use; None if it is."""
        return self._sources[name].problem

    def samples(self) -> list[Sample]:
        return [
            Sample(f"deploykit_{metric}", {"model": name, "version": VERSION}, value)
            for name, source in self._sources.items()
            for metric, value in (
                ("reloads_total", source.reloads),
                ("reload_failed", source.problem is not None),
                ("reloads_given_up_total", source.given_up),
            )
        ]

    def poll(self) -> None:
        """Poll every source now; load files that have changed, but not since the last poll."""
        for name, source in self._sources.items():
            self._poll(name, source)

    def close(self) -> None:
        """End the threads; do not wait long for one that is loading or whose files hang."""
        self._closing.set()
        end_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _watch(self, name: str, source: Source) -> None:
        while not self._closing.wait(self.poll_s):
            try:
                self._poll(name, source)
            except Exception:
                log.exception("checking for a replaced engine file failed")

    def _poll(self, name: str, source: Source) -> None:
        files = source.files()
        stable, source.seen = files == source.seen, files
        # a changed manifest matters only for a file that was rejected: opening a file may
        # record its verification there
        end = None if source.problem is not None else -1
        if not stable or files[:end] == source.settled[:end]:
            return
        source.external = external_files(source.path)
        source.seen = source.files()
        problem = None
        try:
            engines = self._load(name, source)
            if engines is None:
                return  # the file changed while it was read: the next polls handle it
            text = f"{source.path.name} was replaced and is in use"
            if file := engines[0].source:
                text += f", SHA-256 {file.sha256}"
            source.reloads += 1
            log.info("model '%s': %s", name, text)
        except DeploykitError as exc:
            text = exc.message.replace(f"{source.path.parent}/", "")
            problem = text.removeprefix(f"model '{name}': ")
        except Exception as exc:  # noqa: BLE001 - the old engine keeps serving
            problem = f"{type(exc).__name__}: {first_line(exc)}"
        if problem is not None and problem != source.problem:
            text = "the new file was rejected, the previous engine stays in use"
            log.error("model '%s': %s: %s", name, text, problem)
        source.settled, source.problem = source.seen, problem

    def _load(self, name: str, source: Source) -> Sequence[Engine] | None:
        """Load the file on a thread that is abandoned after a time limit, and put it into use.

        Returns None if the file changed meanwhile. Raises the errors of the file.
        """
        model, files = self.repository.find(name), source.seen
        if not files[0][1]:  # no inode
            raise NotFound("the file is gone")
        outcome = Future[Sequence[Engine] | None]()
        decision = threading.Lock()  # who acquires it decides: to use the file, or to give it up

        def load() -> None:
            try:
                outcome.set_result(_replace(model, source, files, decision))
            except Exception as exc:  # noqa: BLE001 - raised by `outcome.result`
                outcome.set_exception(exc)

        limit_s = max(self.limit_s, TIMES * (source.load_s + model.warm_up_s))
        end_s = time.monotonic() + limit_s
        threading.Thread(target=load, name="reload attempt", daemon=True).start()
        while not wait([outcome], min(self.poll_s, limit_s)).done:
            changed, late = source.files()[0] != files[0], time.monotonic() >= end_s
            if (changed or late or self._closing.is_set()) and decision.acquire(blocking=False):
                if late and not changed:
                    source.given_up += 1
                    raise DeploykitError(f"it was given up: not loaded within {limit_s:.0f} s")
                return None
        return outcome.result()


def _replace(
    model: ServedModel, source: Source, files: tuple[File, ...], decision: threading.Lock
) -> Sequence[Engine] | None:
    """Load `files` and serve with them, unless they have changed or were given up meanwhile."""
    with INSIDE, ExitStack() as stack:
        engines = source.load()
        for engine in engines:
            stack.callback(engine.close)
        if source.files()[:-1] != files[:-1] or decision.locked():
            return None
        model.replace(engines, partial(decision.acquire, blocking=False))
        stack.pop_all()
        return engines


def _file(path: Path) -> File:
    try:
        info = path.stat()
    except (OSError, ValueError):
        return path.name, 0, 0, 0
    return path.name, info.st_ino, info.st_size, info.st_mtime_ns
