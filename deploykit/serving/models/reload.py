"""Watch engine files and replace an engine when its file changes.

If the new file cannot be loaded or holds another model, the old engine keeps serving; the log and
`error` report why. The next attempt follows the next change of the file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from deploykit.core.errors import DeploykitError, NotFound, first_line
from deploykit.core.files import manifest_path
from deploykit.runtimes.engine import Closing, Engine
from deploykit.runtimes.onnxruntime.file import external_files
from deploykit.serving.observe.prometheus import Sample
from deploykit.serving.options import VERSION

log = logging.getLogger(__name__)

POLL_S = 1.0
CLOSE_S = 2.0

File = tuple[str, int, int, int]  # name, inode, bytes, modified in ns; zeros where there is none
Load = Callable[[], Sequence[Engine]]


class Replaces(Protocol):
    """The part of ModelRepository that is used here."""

    def replace(self, name: str, engines: Sequence[Engine]) -> None: ...


class Source:
    """The file of one model and how it is loaded. Create it before the first `load`.

    It detects changes since its creation, so none during start-up is missed.
    """

    def __init__(self, path: Path, load: Load) -> None:
        self.path = path
        self.load = load
        self._external: tuple[File, list[str]] | None = None
        self.settled = self.seen = self.files()

    def files(self) -> tuple[File, ...]:
        """The current state of the file, its external weights and, last, its manifest."""
        model = _file(self.path)
        if self._external is None or self._external[0] != model:
            self._external = model, external_files(self.path)
        external = [self.path.parent / location for location in self._external[1]]
        return (model, *map(_file, external), _file(manifest_path(self.path)))


class Reloader(Closing):
    """Polls every source each `poll_s`; loads a changed file once two polls find it unchanged."""

    def __init__(
        self, repository: Replaces, sources: Mapping[str, Source], *, poll_s: float = POLL_S
    ) -> None:
        self._repository = repository
        self._sources = dict(sources)
        self._poll_s = poll_s
        self._errors: dict[str, str] = {}
        self._reloads = dict.fromkeys(self._sources, 0)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="reload", daemon=True)
        self._thread.start()

    def error(self, name: str) -> str | None:
        """Why the newer file of model `name` is not in use; None if it is."""
        return self._errors.get(name)

    def samples(self) -> list[Sample]:
        """For Prometheus."""
        labels = {name: {"model": name, "version": VERSION} for name in self._sources}
        return [
            *(Sample("deploykit_reloads_total", labels[n], c) for n, c in self._reloads.items()),
            *(Sample("deploykit_reload_failed", labels[n], n in self._errors) for n in labels),
        ]

    def poll(self) -> None:
        """Poll every source; load those that changed, but not since the last poll."""
        for name, source in self._sources.items():
            files = source.files()
            stable, source.seen = files == source.seen, files
            # a changed manifest matters only for a file that was rejected: opening a file may
            # record its verification there
            end = None if name in self._errors else -1
            if stable and files[:end] != source.settled[:end]:
                self._reload(name, source)

    def close(self) -> None:
        """End the thread; does not wait long for one that is loading a large file."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _loop(self) -> None:
        while not self._closing.wait(self._poll_s):
            try:
                self.poll()
            except Exception:
                log.exception("checking for replaced engine files failed")

    def _reload(self, name: str, source: Source) -> None:
        files = source.seen
        problem, digest = None, ""
        try:
            if not files[0][1]:  # no inode
                raise NotFound("the file is gone")
            engines = self._swap(name, source)
            if engines is None:
                return  # changed while it was read: the next polls handle it
            file = engines[0].source
            digest = f", SHA-256 {file.sha256}" if file is not None else ""
        except DeploykitError as exc:
            text = exc.message.replace(f"{source.path.parent}/", "")
            problem = text.removeprefix(f"model '{name}': ")
        except Exception as exc:  # noqa: BLE001 - the old engine keeps serving
            problem = f"{type(exc).__name__}: {first_line(exc)}"
        source.settled = files
        if problem is None:
            self._reloads[name] += 1
            self._errors.pop(name, None)
            log.info("model '%s': %s was replaced and is in use%s", name, source.path.name, digest)
        else:
            self._errors[name] = problem
            log.error(
                "model '%s': the new file was rejected, the previous engine stays in use: %s",
                name,
                problem,
            )

    def _swap(self, name: str, source: Source) -> Sequence[Engine] | None:
        """Load the file and replace the engines. None if the file changed meanwhile.

        Raises whatever is wrong with the file.
        """
        engines = source.load()
        swapped = False
        try:
            if source.files()[:-1] == source.seen[:-1]:
                self._repository.replace(name, engines)
                swapped = True
        finally:
            if not swapped:
                for engine in engines:
                    engine.close()
        return engines if swapped else None


def _file(path: Path) -> File:
    try:
        info = path.stat()
    except (OSError, ValueError):
        return path.name, 0, 0, 0
    return path.name, info.st_ino, info.st_size, info.st_mtime_ns
