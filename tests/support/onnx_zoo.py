"""Tiny ONNX graphs for tests, made in memory: no binaries in git.

Each function returns a valid model whose axis 0 is the dynamic batch `N`. Weights are seeded: the
same call gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

OPSET = 18
IR_VERSION = 10

Shape = Sequence["int | str"]


def save(model: onnx.ModelProto, path: Path) -> Path:
    """Write `model` to `path` and return the path."""
    path.write_bytes(model.SerializeToString())
    return path


def zoo(text: str, weights: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """A checked model in ONNX's own text, with these initializers."""
    head = f'<ir_version: {IR_VERSION}, opset_import: ["" : {OPSET}], producer_name: "zoo">'
    model = parser.parse_model(f"{head} zoo {text}")
    model.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in weights.items())
    onnx.checker.check_model(model, full_check=True)
    return model


def linear() -> onnx.ModelProto:
    """One Gemm, y = x @ W + b."""
    text = "(float[N,4] x) => (float[N,3] y) { [gemm] y = Gemm(x, W, b) }"
    return zoo(text, _weights(1, W=(4, 3), b=(3,)))


def conv_relu() -> onnx.ModelProto:
    text = """(float[N,1,8,8] x) => (float[N,4,8,8] y) {
        [conv] c = Conv <pads = [1, 1, 1, 1]> (x, W, b)
        [relu] y = Relu(c)
    }"""
    return zoo(text, _weights(2, W=(4, 1, 3, 3), b=(4,)))


def two_inputs() -> onnx.ModelProto:
    text = """(float[N,4] a, float[N,4] b) => (float[N,4] sum, float[N,4] product) {
        [add] sum = Add(a, b)
        [mul] product = Mul(a, b)
    }"""
    return zoo(text, {})


def overflow() -> onnx.ModelProto:
    """Compute y = (x * 1e4) * 1e-4 + 1.

    The tensor `product` leaves the range of float16 once |x| is above 6.55.
    """
    text = """(float[N,4] x) => (float[N,4] y) {
        [scale_up] product = Mul(x, up)
        [scale_down] back = Mul(product, down)
        [add_one] y = Add(back, one)
    }"""
    weights = {"up": 1e4, "down": 1e-4, "one": 1.0}
    return zoo(text, {name: np.array(value, np.float32) for name, value in weights.items()})


def int64_ids() -> onnx.ModelProto:
    """Ids in 0..9 -> embedding of 8 -> MatMul."""
    text = """(int64[N,5] ids) => (float[N,5,3] y) {
        [embed] embedded = Gather <axis = 0> (table, ids)
        [project] y = MatMul(embedded, W)
    }"""
    return zoo(text, _weights(3, table=(10, 8), W=(8, 3)))


def mnist_like() -> onnx.ModelProto:
    """A small CNN."""
    text = """(float[N,1,28,28] image) => (float[N,10] logits) {
        [conv1] c1 = Conv <pads = [1, 1, 1, 1]> (image, w1, b1)
        [relu1] r1 = Relu(c1)
        [pool1] p1 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r1)
        [conv2] c2 = Conv <pads = [1, 1, 1, 1]> (p1, w2, b2)
        [relu2] r2 = Relu(c2)
        [pool2] p2 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r2)
        [flatten] flat = Flatten(p2)
        [head] logits = Gemm(flat, w3, b3)
    }"""
    shapes = {"w1": (8, 1, 3, 3), "b1": (8,), "w2": (16, 8, 3, 3), "b2": (16,)}
    return zoo(text, _weights(4, **shapes, w3=(784, 10), b3=(10,)))


def make(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape],
    weights: Mapping[str, np.ndarray],
    *,
    integers: Sequence[str] = (),
) -> onnx.ModelProto:
    """A checked model; inputs named in `integers` are int64, all else is float32."""

    def value(name: str, shape: Shape) -> onnx.ValueInfoProto:
        kind = TensorProto.INT64 if name in integers else TensorProto.FLOAT
        return helper.make_tensor_value_info(name, kind, list(shape))

    graph = helper.make_graph(
        list(nodes),
        "zoo",
        [value(*item) for item in inputs.items()],
        [value(*item) for item in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="zoo",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def _weights(seed: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Normal weights scaled by 1/sqrt(fan in), so that activations stay near 1."""
    random = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes.items():
        fan_in = {1: 1, 2: shape[0]}.get(len(shape), int(np.prod(shape[1:])))
        found[name] = (random.standard_normal(shape) / np.sqrt(fan_in)).astype(np.float32)
    return found
