"""Prove a TensorRT engine on its device: against the graph it was built from, or golden samples.

The graph is the better reference, as it runs at every size; golden samples need no second file and
no ONNX Runtime.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.core.artefact import Artefact, ArtefactLike, Manifest, write_manifest
from deploykit.core.errors import BadInput, DeploykitError, GateFailed, Unsupported
from deploykit.core.evidence import (
    AskedNode,
    Drop,
    Evidence,
    Gate,
    GoldenSamples,
    Parity,
    PrecisionReadBack,
)
from deploykit.core.precision import max_engine_error
from deploykit.engines.data.samples import Samples
from deploykit.engines.engine import Arrays, Engine, load
from deploykit.engines.tensorrt import inspector
from deploykit.engines.tensorrt.compatibility import place_of
from deploykit.evaluation import golden
from deploykit.evaluation.accuracy import MAX_DROP, MIN_SQNR_DB
from deploykit.evaluation.artefacts import find_sources
from deploykit.evaluation.feeds import comparison_feeds, small_batches
from deploykit.evaluation.parity import compare_engines

if TYPE_CHECKING:
    from deploykit.graph.graph import Graph


_FLOAT32_SQNR_DB = 25.0  # 6 % of the outputs; TF32 has 50 dB and more


def asked_of(graph: Graph) -> tuple[AskedNode, ...]:
    """Return the nodes that ask for a precision, by the names that TensorRT's parser gives.

    Source, for nodes without a name: `getNodeName` of github.com/onnx/onnx-tensorrt.
    """
    from deploykit.graph import cost

    costs, nodes = cost.node_costs(graph, {}), graph.model.graph.node
    names = [node.name or f"node_of_{next(iter(node.output), '')}" for node in nodes]
    if len(names) != len(costs):  # functions were inlined
        names = [each.name for each in costs]
    return tuple(
        AskedNode(name, each.precision, each.flops or 0)
        for name, each in zip(names, costs, strict=True)
        if each.precision is not None
    )


def read_engine(engine: Any, before: PrecisionReadBack) -> PrecisionReadBack:
    """Compare the precisions of an open engine's layers with those that its graph asked for.

    Returns `before` where the engine does not report its layers.
    """
    try:
        layers = inspector.read_layers(engine.layer_information())
    except (DeploykitError, ValueError):
        return before
    precisions = {node.name: node.precision for node in before.asked}
    counted = any(node.operations for node in before.asked)
    work = {node.name: node.operations if counted else 1 for node in before.asked}

    def share(nodes: Iterable[str]) -> float:
        return sum([work[node] for node in nodes]) / (sum(work.values()) or 1)

    wider = inspector.mismatches(precisions, layers)
    return PrecisionReadBack(
        tuple(layers),
        tuple(wider.values()),
        inspector.shares(layers),
        seen=1 - share(inspector.unseen(precisions, layers)),
        wider_share=share(wider),
        allow_wider=before.allow_wider,
        asked=before.asked,
    )


def prove_engine(
    engine: Engine,
    path: Path,
    manifest: Manifest,
    graph: Path | None,
    name: str,
    samples: Samples | None = None,
) -> tuple[Parity | None, str]:
    """Compare `engine` with `graph` on the CPU, else with the golden samples next to `path`.

    `name`: what messages call the engine. `samples`: those to compare on, instead of random inputs.
    Returns None and the reason where neither is there or runs here.
    """
    why = "the graph it was built from is not next to it"
    if graph is not None:
        try:
            bound, names = max_engine_error(manifest.precision), (graph.name, name)
            with load(graph, "cpu") as reference:
                feeds, _ = comparison_feeds(reference, engine, samples, graph)
                if samples is not None:
                    feeds = [*small_batches(samples, feeds, engine), *feeds]
                return compare_engines(
                    reference, engine, feeds, max_error=bound, names=names, random=samples is None
                ), ""
        except Unsupported as exc:  # no ONNX Runtime, or a type that its CPU provider lacks
            why = exc.message
    try:
        found = golden.find_samples(path, manifest)
        if found is None:
            return None, f"{why}, and it has no golden samples"
        return golden.replay(found, path, engine, name), ""
    except (BadInput, Unsupported) as exc:
        return None, f"{why}, and its golden samples cannot be replayed: {exc.message}"


def record_on_cpu(graph: Artefact, path: Path, feeds: Arrays) -> GoldenSamples | None:
    """Record golden samples of `graph` next to `path`, run on the CPU.

    Returns None where the graph does not run here, or its tensors are large.
    """
    try:
        with load(graph, "cpu") as reference:
            return golden.record(reference, feeds, path)
    except DeploykitError:
        return None


def check_proven(
    engine: Any, path: Path, manifest: Manifest, trust: bool, on_note: Callable[[str], None]
) -> Manifest:
    """Prove the engine unless that was done on this GPU with this TensorRT; return its manifest.

    A plan may run on other GPUs (`hardware_compatible`) and later versions (`version_compatible`)
    than those it was proven on; it is proven again there. Raises GateFailed, BadInput.
    """
    evidence = manifest.evidence
    place, built_on = getattr(engine, "place", None), place_of(manifest.built_on)
    proven = evidence.proven_on or ((built_on,) if evidence.parity is not None else ())
    moved = bool(proven) and place not in proven
    if evidence.verified and not moved:
        return manifest
    built_from = replace(manifest, made_from=manifest.made_from[-1:])  # the graph itself
    graph = next(find_sources(path, built_from), None)
    parity, why = prove_engine(engine, path, manifest, graph, path.name)
    if parity is None:
        if not trust:
            places = " and ".join(filter(None, proven)) or "another machine"
            state = f"was proven on {places} only" if moved else "was never run on its device"
            raise BadInput(
                f"{path}: {state}, and cannot be proven here: {why}",
                hint=f"put {manifest.built_on.get('model', 'its graph')} next to it, build it "
                "here, or open it unproven with `trust`",
            )
        on_note(f"{path}: opened unproven (`trust`): {why}")
        return manifest
    read = evidence.precision
    if read is not None and not read.known:
        read = read_engine(engine, read)
    before, evidence = evidence, replace(evidence, parity=parity, precision=read)
    if moved and parity.passed:
        evidence = replace(before, precision=read, proven_on=(*proven, str(place)))
        if before.batching is not None and before.batching.passed:
            rows = golden.prove_batch(engine, path, before.golden)
            evidence = evidence if rows.passed else replace(evidence, batching=rows)
    elif not proven and place != built_on:
        evidence = replace(evidence, proven_on=(str(place),))
    if not (moved and evidence.wrong):  # it stays right where it was proven
        _write(path, manifest, evidence, on_note)
    if evidence.wrong:
        raise GateFailed(
            f"{path}: {evidence.wrong}",
            hint="its outputs differ from those of the graph it was built from: build it again",
        )
    if not evidence.verified:
        on_note(f"{path}: computes what its graph does; which types its layers run in is not known")
    return replace(manifest, evidence=evidence)


def _write(
    path: Path, manifest: Manifest, evidence: Evidence, on_note: Callable[[str], None]
) -> None:
    """Write the evidence into the manifest; where the folder is read-only, pass a note on."""
    if evidence == manifest.evidence:
        return
    try:
        if Artefact(path).manifest == manifest:  # else the engine was built anew meanwhile
            write_manifest(path, replace(manifest, evidence=evidence))
    except DeploykitError as exc:
        on_note(f"the proof could not be saved and will be made again: {exc.message}")


def outputs_gate(artefact: Artefact, parity: Parity, drop: Drop | None, precision: str) -> Gate:
    """Return whether an artefact computes its model, so that its speed counts.

    It passes within the parity's bound; else by the bounds of its accuracy gate or of `quantize`:
    on the accuracy where there are labels, else on the signal-to-noise ratio, which must be higher
    for float32, as that rounds nothing.
    """
    manifest = artefact.manifest
    gated = manifest.evidence.accuracy if manifest else None
    most = (gated.max_drop if gated else None) or MAX_DROP
    usual_db = _FLOAT32_SQNR_DB if precision == "fp32" else MIN_SQNR_DB
    least_db = gated.min_sqnr_db if gated else usual_db
    name = f"outputs of {artefact.name}"
    if parity.passed:
        return Gate(name, True, parity.why)
    worst = min(parity.rows, key=lambda row: (not row.problem, row.sqnr_db))
    if drop is not None and drop.drop.high <= most:
        return Gate(name, True, f"by their accuracy: {drop.describe()}; {parity.why}")
    if worst.problem:
        return Gate(name, False, parity.why)
    asked = f"SQNR {worst.sqnr_db:.1f} dB, {least_db:g} or more is asked"
    if worst.sqnr_db >= least_db:
        return Gate(name, True, f"against {parity.a}: {asked}")
    return Gate(name, False, f"{parity.why}; {asked}")


# An engine that was built where it could not run is run here first, against the graph it was built
# from or the golden samples next to it; the result is written into its manifest.

log = logging.getLogger(__name__)


def open_proven(
    source: ArtefactLike,
    device: str = "auto",
    *,
    threads: int | None = None,
    trust: bool = False,
    instances: int = 1,
    open_engine: Callable[..., Engine] = load,
    on_note: Callable[[str], None] = log.warning,
) -> list[Engine]:
    """Open an artefact `instances` times; the caller closes the engines.

    TensorRT engines share their weights. `open_engine`: `load`, with further options of its own.
    `trust`: open a TensorRT engine without a manifest too, one with code from elsewhere, or one
    that nothing here can prove; one whose outputs are wrong is never opened. `on_note` gets each
    warning once. Raises GateFailed for an engine whose outputs differ from its graph's, BadInput
    for one that cannot be proven, and as `load` does.
    """
    if instances < 1:
        raise BadInput(f"`instances` {instances}: 1 or more is needed")
    artefact = Artefact.open(source)
    manifest = artefact.manifest if artefact.format == "tensorrt" else None
    engines: list[Engine] = []
    with ExitStack() as stack:
        for _ in range(instances):
            engine = engines[0].share() if engines else None
            engine = engine or open_engine(artefact, device, threads=threads, trust=trust)
            engines.append(engine)
            stack.callback(engine.close)
            if len(engines) == 1 and manifest is not None:
                manifest = check_proven(engines[0], artefact.path, manifest, trust, on_note)
                artefact = Artefact.from_manifest(artefact.path, manifest)
        golden.add_evidence(engines, artefact)
        stack.pop_all()
    for note in engines[0].notes:
        on_note(note)
    return engines
