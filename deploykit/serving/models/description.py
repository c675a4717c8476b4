"""Describe a served model: the protocol's metadata and Triton's configuration."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from deploykit.core.runtime import RUNTIMES
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Engine
from deploykit.serving.batching.queue import DEFAULT_LEVEL, LEVELS, BatchPolicy
from deploykit.serving.oip.request import Signature
from deploykit.serving.oip.tensors import Slot
from deploykit.serving.options import VERSION

_PLATFORMS: Mapping[str, tuple[str, str]] = {  # Triton's names (platform, backend)
    "onnxruntime": ("onnxruntime_onnx", "onnxruntime"),
    "tensorrt": ("tensorrt_plan", "tensorrt"),
    "torch": ("pytorch_libtorch", "pytorch"),
}


class InUse(NamedTuple):
    """The file in use, as `Artefact.facts` describes it; None for an engine without a file.

    `generation`: 1, and one more for each reload. `loaded_s`: seconds since 1970.
    """

    file: Mapping[str, Any] | None
    generation: int
    loaded_s: float

    @classmethod
    def of(cls, engine: Engine, generation: int) -> InUse:
        return cls(engine.source.facts if engine.source else None, generation, time.time())

    @property
    def labels(self) -> dict[str, str]:
        file = self.file or {"name": "", "sha256": ""}
        return {"file": file["name"], "sha256": file["sha256"]}

    @property
    def parameters(self) -> dict[str, str]:
        """Return the labels and the time of loading, for the model's metadata."""
        loaded = datetime.fromtimestamp(self.loaded_s, timezone.utc).isoformat(timespec="seconds")
        return {**self.labels, "generation": str(self.generation), "loaded": loaded}


def metadata(
    name: str, engine: Engine, signature: Signature, parameters: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "name": name,
        "versions": [VERSION],
        "platform": _platform(engine)[0],
        "inputs": [_describe(slot) for slot in signature.inputs.values()],
        "outputs": [_describe(slot) for slot in signature.outputs.values()],
        "parameters": dict(parameters),
    }


def config(
    name: str, engines: Sequence[Engine], signature: Signature, policy: BatchPolicy
) -> dict[str, Any]:
    platform, backend = _platform(engines[0])
    kind, _, number = engines[0].device.partition(":")
    group: dict[str, Any] = {"name": f"{name}_0", "count": len(engines), "kind": "KIND_CPU"}
    if kind == "cuda":
        group |= {"kind": "KIND_GPU", "gpus": [int(number or 0)]}
    batched = signature.max_batch > 0
    found: dict[str, Any] = {
        "name": name,
        "platform": platform,
        "backend": backend,
        "max_batch_size": signature.max_batch,
        "input": [_config_entry(slot, batched) for slot in signature.inputs.values()],
        "output": [_config_entry(slot, batched) for slot in signature.outputs.values()],
        "instance_group": [group],
        "model_transaction_policy": {"decoupled": False},
    }
    if batched:
        found["dynamic_batching"] = {
            "preferred_batch_size": [],
            "max_queue_delay_microseconds": policy.max_delay_us,
            "priority_levels": LEVELS,
            "default_priority_level": DEFAULT_LEVEL,
        }
    return found


def describe_pipeline(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ModelConfig of a pipeline: one string in, one out, no batch."""
    found = {name: metadata[name] for name in ("name", "platform")}
    entries = {
        kind: [
            {"name": each["name"], "data_type": "TYPE_STRING", "dims": each["shape"]}
            for each in metadata[f"{kind}s"]
        ]
        for kind in ("input", "output")
    }
    parameters = {k: {"string_value": v} for k, v in metadata["parameters"].items()}
    return {
        **found,
        "backend": "deploykit",
        "max_batch_size": 0,
        **entries,
        "parameters": parameters,
        "model_transaction_policy": {"decoupled": False},
    }


def misplaced_pairs(engine: Engine) -> str:
    """Return a note if the manifest shows that the engine computes INT8 nodes in float32.

    ONNX Runtime finds its integer kernels only between pairs that are placed for a CPU.
    """
    manifest = engine.source.manifest if engine.source else None
    record = manifest.evidence.quantize if manifest else None
    if manifest is None or record is None or not manifest.precision.get("int8"):
        return ""
    made, runs = (RUNTIMES.get(each) for each in (record.runtime, engine.runtime.split()[0]))
    if made is None or runs is None or made.scales_outputs or not runs.scales_outputs:
        return ""
    if engine.device != "cpu" or manifest.built_on:
        return ""
    return (
        f"its INT8 pairs are placed for {made.title}: {runs.title} computes in float32, slower "
        f"than the model before; move them with: deploykit build {engine.source} --profile cpu"
    )


def largest_output_bytes(signature: Signature) -> float:
    """Return the most bytes of an output; inf for strings and for other dynamic axes."""
    most = 0
    for slot in signature.outputs.values():
        first = [signature.max_batch] if signature.max_batch else []
        axes = [*first, *slot.spec.shape[len(first) :]]
        if not slot.item_bytes or any(isinstance(axis, str) for axis in axes):
            return math.inf
        most = max(most, math.prod(map(int, axes)) * slot.dtype.itemsize)
    return most


def _platform(engine: Engine) -> tuple[str, str]:
    runtime = engine.runtime.partition(" ")[0]
    return _PLATFORMS.get(runtime, (f"deploykit_{runtime}", runtime))


def _config_entry(slot: Slot, batched: bool) -> dict[str, Any]:
    dims = _shape(slot.spec)[1 if batched else 0 :]
    kind = "STRING" if slot.datatype == "BYTES" else slot.datatype
    return {"name": slot.spec.name, "data_type": f"TYPE_{kind}", "dims": dims}


def _shape(spec: TensorSpec) -> list[int]:
    return [-1 if isinstance(axis, str) else axis for axis in spec.shape]


def _describe(slot: Slot) -> dict[str, Any]:
    return {"name": slot.spec.name, "datatype": slot.datatype, "shape": _shape(slot.spec)}
