"""Describe what is in an artefact: tensors, precision, operators, origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.core.artefact import Artefact, ArtefactLike, Manifest
from deploykit.core.errors import BadInput
from deploykit.core.json_value import Record
from deploykit.core.precision import names_of
from deploykit.core.profile import load_profile, profile_names
from deploykit.core.tensors import Specs
from deploykit.engines.batching import why_no_batch

# inputs, outputs, nodes by precision, details, profiles that it fits
Found = tuple[Specs, Specs, Mapping[str, int], dict[str, Any], tuple[str, ...]]


@dataclass(frozen=True)
class Inspection(Record):
    """The contents of an artefact. `details` depends on the format.

    `fits`: the profiles that offer its precisions; it was not run on them.
    """

    path: Path
    format: str
    size_bytes: int
    sha256: str
    inputs: Specs
    outputs: Specs
    precision: Mapping[str, int]
    details: Mapping[str, Any]
    fits: tuple[str, ...]
    manifest: Manifest | None


def inspect(path: ArtefactLike) -> Inspection:
    """Describe any artefact; a manifest next to it is read and checked against the file."""
    artefact = Artefact.open(path)
    read = {"onnx": _onnx, "torch": _torch, "safetensors": _torch}.get(artefact.format, _engine)
    inputs, outputs, precision, details, fits = read(artefact)
    if read is not _torch:
        details["batching"] = _batching(artefact, inputs, outputs)
    path, size, digest = artefact.path, artefact.path.stat().st_size, artefact.sha256
    facts = (inputs, outputs, precision, details, fits, artefact.manifest)
    return Inspection(path, artefact.format, size, digest, *facts)


def _batching(artefact: Artefact, inputs: Specs, outputs: Specs) -> str:
    """Return whether `serve` joins requests, as far as that is known without a run."""
    proof = artefact.manifest.evidence.batching if artefact.manifest else None
    why = proof.why if proof else why_no_batch(inputs, outputs)
    if why:
        return f"{'on' if proof and proof.passed else 'off'}: {why}"
    return "not proven yet: serve does it when it starts, build keeps it in the manifest"


def _onnx(artefact: Artefact) -> Found:
    from deploykit.graph import cost
    from deploykit.graph.graph import Graph
    from deploykit.graph.preflight import placed_for, why_not_tensorrt
    from deploykit.graph.storage import all_nodes

    graph = Graph.open(artefact.path)
    summary = graph.summary
    shown = summary.to_dict().items()
    details = {key: value for key, value in shown if key not in ("inputs", "outputs", "precision")}
    details["mix"] = cost.mix(graph, {})
    if runtime := placed_for(artefact, graph):
        details["pairs"] = f"placed for {runtime.title}"
    if why := why_not_tensorrt(artefact, graph):
        details["tensorrt"] = f"does not take it: {why}"
    own = {function.domain for function in graph.model.functions}
    domains = {node.domain for node in all_nodes(graph.model.graph)} - own
    standard = domains <= {"", "ai.onnx"}  # a file may import domains of which it uses nothing
    fits = _targets(summary.precision, standard=standard, tensorrt=not why)
    return summary.inputs, summary.outputs, summary.precision, details, fits


def _torch(artefact: Artefact) -> Found:
    from deploykit.engines.torch.open import look

    inputs, outputs, details = look(artefact.path)
    return inputs, outputs, {}, details, ("torch",)


def _engine(artefact: Artefact) -> Found:
    """Describe a file in a runtime's own format by its manifest."""
    manifest = artefact.manifest
    if manifest is None:
        raise BadInput(
            f"{artefact}: is a {artefact.runtime.title} engine without a manifest, so its content "
            "is unknown",
            hint="deploykit build writes one next to every engine",
        )
    evidence = manifest.evidence
    read, built = evidence.precision, evidence.build
    found = {
        "verified": evidence.verified,
        "flags": list(built.flags) if built and built.flags else None,
        "shares": read.shares if read else None,
        "time_shares": read.time_shares if read else None,
    }
    details = {key: value for key, value in found.items() if value is not None}
    profile = manifest.built_on.get("profile")
    fits = (profile,) if profile else ()
    return manifest.inputs, manifest.outputs, manifest.precision, details, fits


def _targets(precision: Mapping[str, int], *, standard: bool, tensorrt: bool) -> tuple[str, ...]:
    """Return the profiles with all of its precisions. `tensorrt`: whether TensorRT takes it.

    A graph with operators of another domain than ONNX's own, not `standard`, runs on ONNX Runtime
    alone.
    """
    needed = names_of(precision)
    return tuple(
        profile.name
        for profile in map(load_profile, profile_names())
        if needed <= set(profile.precisions)
        and (standard or profile.runtime == "onnxruntime")
        and (tensorrt or profile.runtime != "tensorrt")
    )
