"""A classifier that answers with the names of its classes, as skl2onnx writes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

NAMES = np.array(["setosa", "versicolor", "virginica"], object)
_WEIGHTS = [[0.1, 0.2, 0.3, 0.4], [-0.1, 0.3, 0.2, -0.5], [0.2, -0.2, 0.1, 0.9]]


def write_classifier(path: Path, scale: float = 1.0) -> Path:
    """`X` float32[N,4] gives `label` string[N] and `probabilities` float32[N,3]."""
    node = helper.make_node(
        "LinearClassifier",
        ["X"],
        ["label", "probabilities"],
        domain="ai.onnx.ml",
        classlabels_strings=list(NAMES),
        coefficients=[scale * value for row in _WEIGHTS for value in row],
        intercepts=[0.0, 0.0, 0.0],
        multi_class=1,
        post_transform="SOFTMAX",
    )
    graph = helper.make_graph(
        [node],
        "classifier",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["N", 4])],
        [
            helper.make_tensor_value_info("label", TensorProto.STRING, ["N"]),
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", 3]),
        ],
    )
    versions = [helper.make_opsetid("", 15), helper.make_opsetid("ai.onnx.ml", 1)]
    onnx.save(helper.make_model(graph, opset_imports=versions, ir_version=8), path)
    return path


def samples(count: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, 4)).astype(np.float32)


def labels_of(x: np.ndarray) -> list[str]:
    return [str(name) for name in NAMES[(x @ np.array(_WEIGHTS, np.float32).T).argmax(1)]]
