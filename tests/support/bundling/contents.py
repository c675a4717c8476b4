"""Contents of bundles with any inputs: a model that returns what it gets, with golden samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from deploykit.core.artefact import Artefact
from deploykit.core.evidence import Evidence, GoldenSamples, RowIndependence
from deploykit.core.files import sha256
from deploykit.core.manifest import Manifest, write_manifest
from deploykit.core.profile import load_profile
from deploykit.core.tensors import TensorSpec, carrier, concrete
from deploykit.deploying.folder import Contents
from deploykit.engines.data.samples import write_npz

INDEPENDENT = RowIndependence(True, "the same alone and joined", (1, 2))


def contents_of(
    folder: Path,
    specs: Sequence[TensorSpec],
    *,
    profile: str = "cpu",
    name: str = "m",
    proof: RowIndependence | None = INDEPENDENT,
    precision: dict[str, int] | None = None,
) -> Contents:
    """A model with the inputs `specs`, each also an output: `NAME out`."""
    path = folder / "model.onnx"
    path.write_bytes(_echo(specs).SerializeToString())
    feeds = {spec.name: _sample(spec) for spec in specs}
    golden = path.with_name(f"{path.name}.golden.npz")
    outputs = {f"{spec.name} out": feeds[spec.name] for spec in specs}
    arrays = {f"inputs/{n}": a for n, a in feeds.items()} | {
        f"outputs/{n}": a for n, a in outputs.items()
    }
    write_npz(golden, arrays)
    manifest = Manifest(
        format="onnx",
        inputs=tuple(specs),
        outputs=tuple(TensorSpec(f"{s.name} out", s.dtype, s.shape) for s in specs),
        precision=precision or {"float32": 1},
        sha256=sha256(path),
        evidence=Evidence(
            batching=proof,
            golden=GoldenSamples(golden.name, sha256(golden), "onnxruntime", 1e-3),
        ),
    )
    write_manifest(path, manifest)
    return Contents(Artefact.open(path), load_profile(profile), name, (1, 8, 32))


def _echo(specs: Sequence[TensorSpec]) -> onnx.ModelProto:
    def info(spec: TensorSpec, name: str) -> onnx.ValueInfoProto:
        kinds = {"float32": "FLOAT", "float64": "DOUBLE"}
        kind = getattr(TensorProto, kinds.get(spec.dtype, spec.dtype.upper()))
        return helper.make_tensor_value_info(name, kind, spec.shape)

    nodes = [helper.make_node("Identity", [s.name], [f"{s.name} out"]) for s in specs]
    graph = helper.make_graph(
        nodes,
        "echo",
        [info(spec, spec.name) for spec in specs],
        [info(spec, f"{spec.name} out") for spec in specs],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _sample(spec: TensorSpec) -> np.ndarray:
    shape = concrete(spec, {str(axis): 4 if axis == "N" else 3 for axis in spec.shape})
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    if spec.dtype == "string":
        return np.array([f"ü{value}" for value in values.reshape(-1)]).reshape(shape)
    return np.asarray(values % 2 if spec.dtype == "bool" else values, carrier(spec.dtype))
