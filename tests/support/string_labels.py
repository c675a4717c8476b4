"""A classifier that answers with the names of its classes, as skl2onnx writes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx

NAMES = np.array(["setosa", "versicolor", "virginica"], object)
_WEIGHTS = [[0.1, 0.2, 0.3, 0.4], [-0.1, 0.3, 0.2, -0.5], [0.2, -0.2, 0.1, 0.9]]


def write_classifier(path: Path, scale: float = 1.0) -> Path:
    """`X` float32[N,4] gives `label` string[N] and `probabilities` float32[N,3]."""
    names, weights = json.dumps([*NAMES]), [scale * value for row in _WEIGHTS for value in row]
    text = f"""<ir_version: 8, opset_import: ["" : 15, "ai.onnx.ml" : 1]>
    classifier (float[N,4] X) => (string[N] label, float[N,3] probabilities) {{
        label, probabilities = ai.onnx.ml.LinearClassifier <classlabels_strings = {names},
            coefficients = {weights}, intercepts = [0.0, 0.0, 0.0], multi_class = 1,
            post_transform = "SOFTMAX"> (X)
    }}"""
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def samples(count: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, 4)).astype(np.float32)


def labels_of(x: np.ndarray) -> list[str]:
    return [str(name) for name in NAMES[(x @ np.array(_WEIGHTS, np.float32).T).argmax(1)]]
