"""Tiny ONNX graphs for tests, made in memory: no binaries in git.

Each function returns a valid model whose axis 0 is the dynamic batch `N`. Weights are seeded: the
same call gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 18
IR_VERSION = 10

Shape = Sequence["int | str"]


def save(model: onnx.ModelProto, path: Path) -> Path:
    """Write `model` to `path` and return the path."""
    path.write_bytes(model.SerializeToString())
    return path


def linear() -> onnx.ModelProto:
    """One Gemm, y = x @ W + b: x float32[N,4] -> y float32[N,3]."""
    weights = _weights(1, W=(4, 3), b=(3,))
    nodes = [helper.make_node("Gemm", ["x", "W", "b"], ["y"], name="gemm")]
    return make(nodes, {"x": ("N", 4)}, {"y": ("N", 3)}, weights)


def conv_relu() -> onnx.ModelProto:
    """Image x float32[N,1,8,8] -> Conv 3x3 to 4 channels, padded -> Relu -> y float32[N,4,8,8]."""
    weights = _weights(2, W=(4, 1, 3, 3), b=(4,))
    nodes = [
        helper.make_node("Conv", ["x", "W", "b"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["y"], name="relu"),
    ]
    return make(nodes, {"x": ("N", 1, 8, 8)}, {"y": ("N", 4, 8, 8)}, weights)


def two_inputs() -> onnx.ModelProto:
    """Inputs a, b float32[N,4] -> sum = a + b, product = a * b, each float32[N,4]."""
    nodes = [
        helper.make_node("Add", ["a", "b"], ["sum"], name="add"),
        helper.make_node("Mul", ["a", "b"], ["product"], name="mul"),
    ]
    row = ("N", 4)
    return make(nodes, {"a": row, "b": row}, {"sum": row, "product": row}, {})


def overflow() -> onnx.ModelProto:
    """Compute y = (x * 1e4) * 1e-4 + 1: x float32[N,4] -> y float32[N,4].

    The tensor `product` leaves the range of float16 once |x| is above 6.55.
    """
    weights = {
        "up": np.array(1e4, np.float32),
        "down": np.array(1e-4, np.float32),
        "one": np.array(1.0, np.float32),
    }
    nodes = [
        helper.make_node("Mul", ["x", "up"], ["product"], name="scale_up"),
        helper.make_node("Mul", ["product", "down"], ["back"], name="scale_down"),
        helper.make_node("Add", ["back", "one"], ["y"], name="add_one"),
    ]
    return make(nodes, {"x": ("N", 4)}, {"y": ("N", 4)}, weights)


def int64_ids() -> onnx.ModelProto:
    """Inputs ids int64[N,5] in 0..9 -> embedding of 8 -> MatMul -> y float32[N,5,3]."""
    weights = _weights(3, table=(10, 8), W=(8, 3))
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["embedded"], name="embed", axis=0),
        helper.make_node("MatMul", ["embedded", "W"], ["y"], name="project"),
    ]
    return make(nodes, {"ids": ("N", 5)}, {"y": ("N", 5, 3)}, weights, integers=("ids",))


def mnist_like() -> onnx.ModelProto:
    """A small CNN: image float32[N,1,28,28] -> logits float32[N,10]."""
    weights = _weights(
        4, w1=(8, 1, 3, 3), b1=(8,), w2=(16, 8, 3, 3), b2=(16,), w3=(784, 10), b3=(10,)
    )
    same = {"pads": [1, 1, 1, 1]}
    half = {"kernel_shape": [2, 2], "strides": [2, 2]}
    nodes = [
        helper.make_node("Conv", ["image", "w1", "b1"], ["c1"], name="conv1", **same),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
        helper.make_node("MaxPool", ["r1"], ["p1"], name="pool1", **half),
        helper.make_node("Conv", ["p1", "w2", "b2"], ["c2"], name="conv2", **same),
        helper.make_node("Relu", ["c2"], ["r2"], name="relu2"),
        helper.make_node("MaxPool", ["r2"], ["p2"], name="pool2", **half),
        helper.make_node("Flatten", ["p2"], ["flat"], name="flatten"),
        helper.make_node("Gemm", ["flat", "w3", "b3"], ["logits"], name="head"),
    ]
    return make(nodes, {"image": ("N", 1, 28, 28)}, {"logits": ("N", 10)}, weights)


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
