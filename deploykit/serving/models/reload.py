"""Watch engine files and replace an engine when its file changes.

A new file is loaded and run on a separate thread, which is abandoned after a time limit. If it
cannot be loaded or contains another model, the old engine keeps serving; `announce` and `error`
report why. The next attempt follows the file's next change.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.core.errors import DeploykitError, NotFound, first_line
from deploykit.core.files import manifest_path
from deploykit.core.subprocesses import INSIDE
from deploykit.engines.engine import Closing, Engine
from deploykit.graph.facts import external_files
from deploykit.serving.models.model import ServedModel
from deploykit.serving.observe.prometheus import Sample
from deploykit.serving.options import VERSION

if TYPE_CHECKING:
    from deploykit.serving.models.repository import ModelRepository

log = logging.getLogger(__name__)

POLL_S = 1.0
CLOSE_S = 2.0
LIMIT_S = 60.0  # the time limit for a new file, or TIMES the first loading time if that is longer
TIMES = 10
_LEAST_S = 0.02

File = tuple[str, int, int, int]  # name, inode, bytes, modified in ns; zeros where there is none
Load = Callable[[], Sequence[Engine]]
Announce = Callable[[str, int, str], None]  # model, level of the log, message


def announce(_model: str, level: int, message: str) -> None:
    log.log(level, "%s", message)


class Source:
    """The file of one model, and the function that loads it.

    It detects changes since its creation, so none during start-up is missed.
    """

    def __init__(self, path: Path, load: Load) -> None:
        self.path = path
        self.load = load
        self.load_s = 0.0
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
    """Polls every source each `poll_s`; loads a changed file once two polls find it unchanged."""

    def __init__(
        self,
        repository: ModelRepository,
        sources: Mapping[str, Source],
        *,
        announce: Announce = announce,
        poll_s: float = POLL_S,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.repository = repository
        self.announce = announce
        self.poll_s = poll_s
        self.limit_s = limit_s
        self.closing = threading.Event()
        self._watches = {name: _Watch(name, source, self) for name, source in sources.items()}
        for watch in self._watches.values():
            watch.start()

    def error(self, name: str) -> str | None:
        """Return why the newer file of model `name` is not in use; None if it is."""
        return self._watches[name].problem

    def samples(self) -> list[Sample]:
        found = []
        for name, watch in self._watches.items():
            labels = {"model": name, "version": VERSION}
            found += [
                Sample("deploykit_reloads_total", labels, watch.reloads),
                Sample("deploykit_reload_failed", labels, watch.problem is not None),
                Sample("deploykit_reloads_given_up_total", labels, watch.given_up),
            ]
        return found

    def poll(self) -> None:
        """Poll every source now; load files that have changed, but not since the last poll."""
        for watch in self._watches.values():
            watch.poll()

    def close(self) -> None:
        """End the threads; do not wait long for one that is loading or whose files hang."""
        self.closing.set()
        end_s = time.monotonic() + CLOSE_S
        for watch in self._watches.values():
            watch.join(max(0.0, end_s - time.monotonic()))


class _Watch(threading.Thread):
    """Polls one source on its own thread: a hanging file system blocks no other model's reload."""

    def __init__(self, name: str, source: Source, reloader: Reloader) -> None:
        super().__init__(name="reload", daemon=True)
        self._model = name
        self._source = source
        self._reloader = reloader
        self.problem: str | None = None
        self.reloads = self.given_up = 0

    def run(self) -> None:
        while not self._reloader.closing.wait(self._reloader.poll_s):
            try:
                self.poll()
            except Exception:
                log.exception("checking for a replaced engine file failed")

    def poll(self) -> None:
        source, files = self._source, self._source.files()
        stable, source.seen = files == source.seen, files
        # a changed manifest matters only for a file that was rejected: opening a file may
        # record its verification there
        end = None if self.problem is not None else -1
        if stable and files[:end] != source.settled[:end]:
            self._reload(files)

    def _reload(self, files: tuple[File, ...]) -> None:
        source, problem, digest = self._source, None, ""
        try:
            if not files[0][1]:  # no inode
                raise NotFound("the file is gone")
            engines = self._attempt(files)
            if engines is None:
                return  # the file changed while it was read: the next polls handle it
            file = engines[0].source
            digest = f", SHA-256 {file.sha256}" if file is not None else ""
        except DeploykitError as exc:
            text = exc.message.replace(f"{source.path.parent}/", "")
            problem = text.removeprefix(f"model '{self._model}': ")
        except Exception as exc:  # noqa: BLE001 - the old engine keeps serving
            problem = f"{type(exc).__name__}: {first_line(exc)}"
        source.settled = source.seen if files[0] == source.seen[0] else files
        level, text = logging.INFO, f"{source.path.name} was replaced and is in use{digest}"
        if problem is None:
            self.reloads += 1
        else:
            stays = "the new file was rejected, the previous engine stays in use"
            level, text = logging.ERROR, f"{stays}: {problem}"
        if problem is None or problem != self.problem:
            self._reloader.announce(self._model, level, f"model '{self._model}': {text}")
        self.problem = problem

    def _attempt(self, files: tuple[File, ...]) -> Sequence[Engine] | None:
        """Load the file on a thread that is abandoned after a time limit.

        Returns None if the file changed meanwhile. Raises the errors of the file.
        """
        reloader = self._reloader
        model = reloader.repository.find(self._model)
        limit_s = max(reloader.limit_s, TIMES * (self._source.load_s + model.warm_up_s))
        attempt = _Attempt(self._source, model, files)
        end_s = time.monotonic() + limit_s
        attempt.start()
        while not wait(
            [attempt.outcome], min(reloader.poll_s, max(_LEAST_S, end_s - time.monotonic()))
        ).done:
            changed = self._source.files()[0] != files[0]
            late = time.monotonic() >= end_s
            if (changed or late or reloader.closing.is_set()) and attempt.give_up():
                if late and not changed:
                    self.given_up += 1
                    raise DeploykitError(f"it was given up: not loaded within {limit_s:.0f} s")
                return None
        return attempt.outcome.result()


class _Attempt(threading.Thread):
    """Loads one new file and puts it into use."""

    def __init__(self, source: Source, model: ServedModel, files: tuple[File, ...]) -> None:
        super().__init__(name="reload attempt", daemon=True)
        self._source = source
        self._model = model
        self._files = files
        self._wanted = True
        self._used = False
        self._lock = threading.Lock()
        # the engines in use, None if the file changed meanwhile, or the error of the file
        self.outcome = Future[Sequence[Engine] | None]()

    def run(self) -> None:
        try:
            self.outcome.set_result(self._load())
        except Exception as exc:  # noqa: BLE001 - raised by `outcome.result`
            self.outcome.set_exception(exc)

    def _load(self) -> Sequence[Engine] | None:
        source = self._source
        external = external_files(source.path)
        with self._lock:
            if self._wanted:  # the state of the files before they are read
                source.external = external
                self._files = source.seen = source.files()
        with INSIDE:
            engines = source.load()
            try:
                if source.files()[:-1] == self._files[:-1] and self._wanted:
                    self._model.replace(engines, self._take)
            finally:
                if not self._used:
                    for engine in engines:
                        engine.close()
        return engines if self._used else None

    def give_up(self) -> bool:
        """Never use the file; return False if it is in use already, or was found invalid."""
        with self._lock:
            if self.outcome.done() or self._used:
                return False
            self._wanted = False
            return True

    def _take(self) -> bool:
        """Return whether the file may be used; it cannot be abandoned afterwards."""
        with self._lock:
            self._used = self._wanted
            return self._wanted


def _file(path: Path) -> File:
    try:
        info = path.stat()
    except (OSError, ValueError):
        return path.name, 0, 0, 0
    return path.name, info.st_ino, info.st_size, info.st_mtime_ns
