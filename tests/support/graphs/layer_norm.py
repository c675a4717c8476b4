"""A LayerNorm with outlier channels, and MatMuls that meet them with small weights."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from tests.support.onnx_zoo import make

WIDTH, OUTLIERS = 32, (3, 17)


def layer_norm(
    *, residual: bool = False, gemm: bool = False, peak: float = 100.0
) -> onnx.ModelProto:
    """A LayerNorm and two MatMuls of its output, added up.

    `residual`: an Add reads the LayerNorm, too. `gemm`: the second of them is a Gemm with
    transposed weights. `peak`: of the outlier channels.
    """
    rng = np.random.default_rng(0)
    weights = {
        "scale": rng.uniform(0.5, 1.5, WIDTH).astype(np.float32),
        "bias": rng.standard_normal(WIDTH).astype(np.float32) / 10,
        "Q": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32),
        "K": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32),
    }
    for channel in OUTLIERS:
        for name in ("scale", "bias"):
            weights[name][channel] *= peak
        for name in ("Q", "K"):
            weights[name][channel] /= peak
    second = helper.make_node("MatMul", ["normal", "K"], ["k"], name="key")
    if gemm:
        weights["K"] = np.ascontiguousarray(weights["K"].T)
        second = helper.make_node("Gemm", ["normal", "K"], ["k"], name="key", transB=1)
    nodes = [
        helper.make_node(
            "LayerNormalization", ["x", "scale", "bias"], ["normal"], name="norm", axis=-1
        ),
        helper.make_node("MatMul", ["normal", "Q"], ["q"], name="query"),
        second,
        helper.make_node("Add", ["q", "k"], ["sum" if residual else "y"], name="add"),
    ]
    if residual:
        nodes.append(helper.make_node("Add", ["sum", "normal"], ["y"], name="residual"))
    return make(nodes, {"x": ("N", WIDTH)}, {"y": ("N", WIDTH)}, weights)
