"""An ONNX model with more weights than inputs, for what is done with large files alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.graphs.small import parse
from tests.support.onnx_zoo import save

SHAPES = {"kernel": (256, 64, 3, 3), "product": (256, 0), "last": (0, 0)}  # 0: the size
PRODUCT = "m = MatMul(f, product)"
INT8 = """q, scale, zero = DynamicQuantizeLinear(f)
    i = MatMulInteger(q, product, zero) j = Cast <to = 1> (i) m = Mul(j, scale)"""


def write_model(path: Path, kind: str = "float32", size: int = 1024, seed: int = 0) -> Path:
    """A convolution, a product and a Gemm, with weights of more than 4 MiB."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, axes in SHAPES.items():
        shape = [axis or size for axis in axes]
        values = random.normal(size=shape) / np.sqrt(np.prod(shape[1:]))
        weights[name] = values.astype(np.float16 if kind == "float16" else np.float32)
    if kind == "int8":
        weights["product"] = (weights["product"] * 127).astype(np.int8)
    body = f"""start = Cast <to = {10 if kind == "float16" else 1}> (x)
        c = Conv <pads = [1, 1, 1, 1]> (start, kernel) r = Relu(c)
        p = GlobalAveragePool(r) f = Flatten(p) {INT8 if kind == "int8" else PRODUCT}
        g = Gemm <transB = 1> (m, last) y = Cast <to = 1> (g)"""
    head = f"(float[N,64,H,W] x) => (float[N,{size}] y)"
    return save(parse(head, body, 17, **weights), path)
