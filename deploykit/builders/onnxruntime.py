"""Write the graph that ONNX Runtime optimised, so that a server need not do it at each start.

The result has fused nodes and, for an INT8 graph, integer kernels.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from deploykit.builders.builder import Built, Shapes
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.extras import require
from deploykit.core.files import atomic_write, check_readable
from deploykit.core.profile import Profile
from deploykit.runtimes.onnxruntime.engine import onnxruntime_errors, session_options

ort = require("onnxruntime")


def build_engine(
    model: Artefact,
    out: Path,
    target: Profile,
    shapes: Shapes,
    on_progress: Callable[[str, float], None] | None = None,  # noqa: ARG001 - takes seconds
) -> Built:
    """As `build`; raises BadInput for shapes, which ONNX Runtime has no use for."""
    if shapes != Shapes():
        raise BadInput(
            f"profile '{target.name}' runs ONNX Runtime, which takes any batch and needs no shapes",
            hint="batch, axes, level, DLA and the compatibility options are for TensorRT",
        )
    return Built({**build(model.path, out), "profile": target.name})


def build(path: Path, out: Path, *, threads: int | None = None) -> dict[str, str]:
    """Optimise `path` into `out`; returns what it was built on, for the manifest.

    The level is "extended": its result runs on any CPU. The one above it, which rewrites the
    memory layout for the machine at hand, is applied by the runtime on loading. `threads`: as in
    `load`, for the work done here. Raises BadInput or Unsupported for a graph that ONNX Runtime
    refuses or a full disk, BadInput when `out` cannot be written; `out` is whole or as it was.
    """
    check_readable(path)
    options = session_options(threads)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    with atomic_write(out) as tmp:
        options.optimized_model_filepath = str(tmp)
        try:
            with onnxruntime_errors(path):
                ort.InferenceSession(
                    str(path), sess_options=options, providers=["CPUExecutionProvider"]
                )
        except BadInput as exc:  # of a full disk ONNX Runtime says only that it could not write
            need, free = path.stat().st_size, shutil.disk_usage(out.parent).free
            if "serialization failed" not in str(exc.__cause__) or free > need:
                raise
            raise Unsupported(
                f"{out}: no space left on the disk: about {need:,} bytes needed"
            ) from exc
    return {
        "runtime": f"onnxruntime {ort.__version__}",
        "device": "cpu",
        "optimisation": "extended",
    }
