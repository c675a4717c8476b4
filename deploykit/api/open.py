"""Open an artefact for serving or timing; a TensorRT engine only once it is proven on its device.

An engine that was built where it could not run is run here first, against the graph it was built
from or the golden samples next to it; the result is written into its manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api.batching import add_evidence
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput

if TYPE_CHECKING:
    from deploykit.runtimes.engine import Engine

log = logging.getLogger(__name__)


def open_proven(
    source: ArtefactLike,
    device: str = "auto",
    *,
    threads: int | None = None,
    trust: bool = False,
    instances: int = 1,
    cuda_graphs: Sequence[int] = (),
    overlap: bool = True,
    shared: Path | None = None,
    on_note: Callable[[str], None] = log.warning,
) -> list[Engine]:
    """Open an artefact `instances` times; the caller closes the engines.

    Those of TensorRT share their weights. `cuda_graphs`, `overlap`, `shared`: see `load`.
    `trust`: open a TensorRT engine without a manifest too, one with code from elsewhere, or one
    that nothing here can prove; one whose outputs are wrong is never opened. `on_note` gets each
    warning once. Raises GateFailed for an engine whose outputs differ from its graph's, BadInput
    for one that cannot be proven, and as `load` does.
    """
    from deploykit.runtimes.engine import load

    if instances < 1:
        raise BadInput(f"`instances` {instances}: 1 or more is needed")
    artefact = Artefact.open(source)
    manifest = artefact.manifest if artefact.format == "tensorrt" else None
    engines: list[Engine] = []
    with ExitStack() as stack:
        for _ in range(instances):
            engine = engines[0].share() if engines else None
            engines.append(
                engine
                or load(
                    artefact,
                    device,
                    threads=threads,
                    trust=trust,
                    cuda_graphs=cuda_graphs,
                    overlap=overlap,
                    shared=shared,
                )
            )
            stack.callback(engines[-1].close)
            if len(engines) == 1 and manifest is not None:
                from deploykit.api.verify import check_proven

                check_proven(engines[0], artefact.path, manifest, trust, on_note)
        add_evidence(engines, artefact)
        stack.pop_all()
    for note in engines[0].notes:
        on_note(note)
    return engines
