"""A small ONNX file that tests replace while it is served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LIMIT_S = 60  # against hanging, not a measure


def model(path: Path, value: float, *, width: int = 4, external: bool = False) -> Path:
    """Write y = x + value; with `external` the value is in a separate file."""
    weights = numpy_helper.from_array(np.full((1, width), value, np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", width])],
        [weights],
    )
    found = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(found, path, save_as_external_data=external, location="w.bin", size_threshold=0)
    return path


def replace(new: Path, path: Path) -> None:
    """Rename over the old file, as `build` does."""
    new.replace(path)
