"""Open the engines of a served file, and try a file that is to replace it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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


def open_engines(file: Path, options: ServeOptions, shared: Path | None = None) -> Sequence[Engine]:
    """Open the engines of a model. `shared`: see `load`."""
    threads, count = options.threads, options.instances
    if threads is None and count > 1:
        threads = max(1, usable_cores() // count)
    artefact = Artefact.open(file)
    artefact.sha256  # noqa: B018 - hashed now: later the file may be another one
    opened = partial(open_proven, artefact, threads=threads, instances=count, shared=shared)
    try:
        return opened(options.device, trust=options.trust, cuda_graphs=options.graph_sizes)
    except Unsupported as exc:
        cuda = options.device.startswith("cuda")
        if not (options.cpu_fallback and cuda and artefact.format == "onnx"):
            raise
        engines: list[Any] = opened("cpu")
        note = f"runs on the CPU, not on {options.device}: {exc.message}"
        for engine in engines:
            engine.notes = (*engine.notes, note)
        log.warning("%s: %s", file, note)
        return engines


def check_file(file: Path, device: str) -> None:
    """Open `file` and run it once on the CPU; only check the hash of a file that needs a GPU.

    A second copy might not fit on the GPU.
    """
    artefact = Artefact.open(file)
    artefact.manifest  # noqa: B018 - raises if the manifest describes another file
    if not artefact.runtime.on_cpu:
        return
    try:
        engine = load(artefact, "cpu", threads=1)
    except OutOfMemory:
        raise
    except Unsupported:
        if device == "cpu":
            raise
    else:
        WarmUp(file.name, engine, monotonic_us, max_batch=0).run()
