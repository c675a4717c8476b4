"""A model as `export` leaves it, without torch: an ONNX file, its manifest and golden samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from deploykit.core.evidence import Evidence
from deploykit.core.manifest import write_manifest
from deploykit.engines.engine import load
from deploykit.evaluation import golden
from deploykit.evaluation.artefacts import onnx_manifest
from deploykit.graph.graph import Graph
from tests.support.onnx_zoo import linear, save


def proven_model(
    path: Path, model: onnx.ModelProto | None = None, *, external: bool = False
) -> Path:
    """Write `linear()`, or `model`, to `path`, with what `bundle` needs next to it.

    `external`: its weights in a second file, as those of a model above 2 GiB.
    """
    model = model or linear()
    if external:
        apart = {"save_as_external_data": True, "location": f"{path.name}.data"}
        onnx.save(model, path, size_threshold=0, **apart)
    else:
        save(model, path)
    with load(path, "cpu") as engine:
        feeds = {
            spec.name: np.random.default_rng(0)
            .normal(size=[4 if isinstance(n, str) else n for n in spec.shape])
            .astype(np.float32)
            for spec in engine.inputs
        }
        samples = golden.record(engine, feeds, path)
    evidence = Evidence(golden=samples)
    write_manifest(path, onnx_manifest(Graph.open(path), (), tools=("onnx",), evidence=evidence))
    return path
