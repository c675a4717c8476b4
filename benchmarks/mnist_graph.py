"""The MNIST CNN of models/ with random weights, as an .onnx file.

Conv 32, pool, conv 64, pool, conv 64, dense 64, dense 10 on images of 1x28x28. Only its size
matters to the serving benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Weights:
    """Makes seeded weights of a graph by name, and keeps them."""

    def __init__(self) -> None:
        self.tensors: list[TensorProto] = []
        self._rng = np.random.default_rng(0)

    def __call__(self, name: str, *shape: int) -> str:
        scale = np.sqrt(2 / np.prod(shape[1:])) if len(shape) > 1 else 0.1
        values = (self._rng.standard_normal(shape) * scale).astype(np.float32)
        self.tensors.append(numpy_helper.from_array(values, name))
        return name


def save_graph(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    image: Sequence[int],
    classes: int,
    weight: Weights,
    path: Path,
) -> Path:
    """Write float32 x [N, *image] to y [N, classes] (opset 17) to `path`."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *image])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", classes])
    graph = helper.make_graph(nodes, name, [x], [y], weight.tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path


def write_mnist(path: Path) -> Path:
    """Write the graph (opset 17, dynamic batch axis N, 93 322 weights) to `path`."""
    weight = Weights()

    def conv(number: int, source: str, fan_in: int, fan_out: int) -> list[onnx.NodeProto]:
        kernel = weight(f"w{number}", fan_out, fan_in, 3, 3)
        bias = weight(f"b{number}", fan_out)
        return [
            helper.make_node("Conv", [source, kernel, bias], [f"c{number}"], kernel_shape=[3, 3]),
            helper.make_node("Relu", [f"c{number}"], [f"r{number}"]),
        ]

    def pool(number: int) -> onnx.NodeProto:
        shape = {"kernel_shape": [2, 2], "strides": [2, 2]}
        return helper.make_node("MaxPool", [f"r{number}"], [f"p{number}"], **shape)

    nodes = [*conv(1, "x", 1, 32), pool(1), *conv(2, "p1", 32, 64), pool(2), *conv(3, "p2", 64, 64)]
    nodes += [
        helper.make_node("Flatten", ["r3"], ["f"]),
        helper.make_node("Gemm", ["f", weight("w4", 64, 576), weight("b4", 64)], ["d"], transB=1),
        helper.make_node("Relu", ["d"], ["e"]),
        helper.make_node("Gemm", ["e", weight("w5", 10, 64), weight("b5", 10)], ["y"], transB=1),
    ]
    return save_graph("mnist", nodes, [1, 28, 28], 10, weight, path)
