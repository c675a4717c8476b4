"""Describe the file that a model was loaded from: its hash, its precision and its age."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploykit.core.artefact import Artefact
from deploykit.core.errors import DeploykitError, first_line
from deploykit.runtimes.engine import Engine
from deploykit.serving.models.model import ServedModel

log = logging.getLogger(__name__)


class ModelFiles:
    """Files by the model's name, each read once for the engines that serve it.

    A thread reads them, as hashing a large file takes seconds.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        self._known: dict[str, tuple[Sequence[Engine], dict[str, Any] | None]] = {}

    def facts(self, model: ServedModel) -> dict[str, Any] | None:
        """None for a model without a file, and until its file has been read."""
        path = self._paths.get(model.name)
        if path is None:
            return None
        engines, facts = self._known.get(model.name, ((), None))
        if engines is not model.engines:  # not read yet, or replaced since
            self._known[model.name] = (model.engines, None)
            args = (model.name, model.engines, path)
            threading.Thread(target=self._read, args=args, daemon=True).start()
            return None
        return facts

    def _read(self, name: str, engines: Sequence[Engine], path: Path) -> None:
        try:
            self._known[name] = (engines, file_facts(path))
        except (DeploykitError, OSError) as exc:
            log.warning("%s: its hash cannot be shown: %s", path, first_line(exc))


def file_facts(path: Path) -> dict[str, Any]:
    """Name, SHA-256, size, time of writing, and from the manifest the nodes of each precision."""
    artefact = Artefact(path)
    status, manifest = path.stat(), artefact.manifest
    return {
        "name": artefact.name,
        "sha256": artefact.sha256,
        "bytes": status.st_size,
        "written_s": status.st_mtime,
        "precision": dict(manifest.precision) if manifest else {},
    }
