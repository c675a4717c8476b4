"""Open the engines of a served file, and try a file that is to replace it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deploykit.core.artefact import Artefact
from deploykit.core.errors import OutOfMemory, Unsupported
from deploykit.core.machine import usable_cores
from deploykit.engines.engine import Engine, load
from deploykit.evaluation.verify import open_proven
from deploykit.serving.batching.batcher import monotonic_us
from deploykit.serving.models.warmup import WarmUp
from deploykit.serving.options import ServeOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opening:
    """How the models' engines are opened."""

    device: str
    threads: int | None
    instances: int
    trust: bool
    cpu_fallback: bool
    shared: Path | None = None  # see `load`

    def __call__(self, file: Path, settings: ServeOptions) -> Sequence[Engine]:
        threads, count = self.threads, self.instances
        if threads is None and count > 1:
            threads = max(1, usable_cores() // count)
        artefact = Artefact.open(file)
        artefact.sha256  # noqa: B018 - hashed now: later the file may be another one
        opened = partial(
            open_proven, artefact, threads=threads, instances=count, shared=self.shared
        )
        try:
            graphs, overlap = settings.graph_sizes, settings.overlap
            return opened(self.device, trust=self.trust, cuda_graphs=graphs, overlap=overlap)
        except Unsupported as exc:
            cuda = self.device.startswith("cuda")
            if not (self.cpu_fallback and cuda and artefact.format == "onnx"):
                raise
            engines: list[Any] = opened("cpu")
            note = f"runs on the CPU, not on {self.device}: {exc.message}"
            for engine in engines:
                engine.notes = (*engine.notes, note)
            log.warning("%s: %s", file, note)
            return engines

    def check(self, file: Path) -> None:
        """Open `file` and run it once, on the CPU; of what only a GPU runs, check the hash.

        A second copy might not fit on the GPU.
        """

        artefact = Artefact.open(file)
        artefact.manifest  # noqa: B018 - raises for a file that is not the one it describes
        if not artefact.runtime.on_cpu:
            return
        try:
            engine = load(artefact, "cpu", threads=1)
        except OutOfMemory:
            raise
        except Unsupported:
            if self.device == "cpu":
                raise
        else:
            WarmUp(file.name, engine, monotonic_us, max_batch=0).run()
