"""Open an artefact for serving or timing; a TensorRT engine only once it is proven on its device.

An engine that was built where it could not run is run here first, against the graph it was built
from or the golden samples next to it; the result is written into its manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.core.artefact import Artefact, ArtefactLike, read_manifest
from deploykit.core.errors import BadInput, DeploykitError, GateFailed

if TYPE_CHECKING:
    from deploykit.core.evidence import Evidence, Layer
    from deploykit.core.manifest import Manifest
    from deploykit.runtimes.engine import Engine

log = logging.getLogger(__name__)


def open_proven(
    source: ArtefactLike,
    device: str = "auto",
    *,
    threads: int | None = None,
    trust: bool = False,
    instances: int = 1,
    on_note: Callable[[str], None] = log.warning,
) -> list[Engine]:
    """Open an artefact `instances` times; the caller closes the engines.

    `trust`: open a TensorRT engine without a manifest too, or one that nothing here can prove; one
    whose outputs are wrong is never opened. `on_note` gets each warning once. Raises GateFailed for
    an engine whose outputs differ from its graph's, BadInput for one that cannot be proven, and as
    `load` does.
    """
    from deploykit.runtimes.engine import load

    if instances < 1:
        raise BadInput(f"`instances` {instances}: 1 or more is needed")
    artefact = Artefact.open(source)
    manifest = artefact.manifest if artefact.format == "tensorrt" else None
    engines: list[Engine] = []
    with ExitStack() as stack:
        for _ in range(instances):
            engines.append(load(artefact, device, threads=threads, trust=trust))
            stack.callback(engines[-1].close)
            if len(engines) == 1 and manifest is not None:
                _check(engines[0], artefact.path, manifest, trust, on_note)
        stack.pop_all()
    for note in engines[0].notes:
        on_note(note)
    return engines


def _check(
    engine: Any, path: Path, manifest: Manifest, trust: bool, on_note: Callable[[str], None]
) -> None:
    """Prove the engine unless that was done before. Raises GateFailed, BadInput."""
    from deploykit.api import verify

    evidence = manifest.evidence
    if evidence.verified:
        return
    graph = verify.find_graph(path, manifest)
    parity, why = verify.prove(engine, path, manifest, graph, path.name)
    if parity is None:
        if not trust:
            raise BadInput(
                f"{path}: was never run on its device, and cannot be proven here: {why}",
                hint=f"put {manifest.built_on.get('model', 'its graph')} next to it, build it "
                "here, or open it unproven with `trust`",
            )
        on_note(f"{path}: opened unproven (`trust`): {why}")
        return
    read = evidence.precision
    if read is None or read.layers is None:
        read = verify.read_back(*_layers(path, manifest, graph))
    evidence = replace(evidence, parity=parity, precision=read)
    _write(path, manifest, evidence, on_note)
    if evidence.wrong:
        raise GateFailed(
            f"{path}: {evidence.wrong}",
            hint="its outputs differ from those of the graph it was built from: build it again",
        )
    if not evidence.verified:
        on_note(f"{path}: computes what its graph does; which types its layers run in is not known")


def _layers(
    path: Path, manifest: Manifest, graph: Path | None
) -> tuple[tuple[Layer, ...] | None, tuple[str, ...]]:
    """Read back a plan: its layers, and the nodes that run in more bits than asked for."""
    from deploykit.api.verify import requested_precisions
    from deploykit.builders.tensorrt import build, inspector
    from deploykit.onnx_graph.graph import Graph

    if graph is None:
        return None, ()
    layers, _ = build.read_back(path.read_bytes(), host_code=manifest.version_compatible)
    if not layers:
        return layers, ()
    return layers, inspector.mismatches(requested_precisions(Graph.open(graph)), layers)


def _write(
    path: Path, manifest: Manifest, evidence: Evidence, on_note: Callable[[str], None]
) -> None:
    """Write the evidence into the manifest; where the folder is read-only, pass a note on."""
    from deploykit.core.manifest import write_manifest

    try:
        if read_manifest(path) == manifest:  # else the engine was built anew meanwhile
            write_manifest(path, replace(manifest, evidence=evidence))
    except DeploykitError as exc:
        on_note(f"the proof could not be saved and will be made again: {exc.message}")
