"""Write the graph that ONNX Runtime optimised, so that a server does not do it again at each start.

In: an `.onnx` file. Out: an `.onnx` file with fused nodes and, for an INT8 graph, integer kernels.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.extras import require
from deploykit.core.files import atomic_write, check_readable
from deploykit.runtimes.onnxruntime.engine import onnxruntime_errors, session_options

ort = require("onnxruntime")


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
