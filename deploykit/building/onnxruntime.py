"""Write the graph that ONNX Runtime optimised, so that a server need not do it at each start.

The result has fused nodes and, for an INT8 graph, integer kernels.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from deploykit.building.builder import BuildResult, Shapes, check_one_file
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.extras import require
from deploykit.core.files import atomic_write, check_readable
from deploykit.core.profile import Profile
from deploykit.engines.onnxruntime.engine import (
    SLOWER_ON_CPU,
    onnxruntime_errors,
    read_weights,
    session_options,
)

ort = require("onnxruntime")


def build_engine(
    model: Artefact, out: Path, target: Profile, _shapes: Shapes, _on_progress: object
) -> BuildResult:
    return BuildResult({**build(model.path, out), "profile": target.name})


def build(path: Path, out: Path) -> dict[str, str]:
    """Optimise `path` into `out`; returns the facts for the manifest's `built_on`.

    The level is "extended", whose result runs on any CPU. The next level rewrites the memory layout
    for one machine, so the runtime applies it on loading. Raises BadInput or Unsupported for what
    ONNX Runtime refuses, and for a full disk; `out` is complete or unchanged.
    """
    check_readable(path)
    check_one_file(path)
    options = session_options(None, exact=False)  # loading makes it exact where needed
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    weights = read_weights(path, options)  # else the result would look for them next to itself
    with atomic_write(out) as tmp:
        options.optimized_model_filepath = str(tmp)
        try:
            with onnxruntime_errors(path):
                ort.InferenceSession(
                    str(path),
                    sess_options=options,
                    providers=["CPUExecutionProvider"],
                    disabled_optimizers=SLOWER_ON_CPU,
                )
        except BadInput as exc:  # ONNX Runtime does not report a full disk as such
            if "serialization failed" not in str(exc.__cause__):
                raise
            need, free = path.stat().st_size, shutil.disk_usage(out.parent).free
            why = "cannot be written" if free > need else "no space left on the disk"
            raise Unsupported(f"{out}: {why}: about {need:,} bytes are needed") from exc
    del weights
    return {
        "runtime": f"onnxruntime {ort.__version__}",
        "device": "cpu",
        "optimisation": "extended",
    }
