"""An ONNX model with more weights than inputs, for what is done with large files alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tests.support.onnx_zoo import save


def write_model(path: Path, kind: str = "float32", size: int = 1024, seed: int = 0) -> Path:
    """A convolution, a product and a Gemm, with weights of more than 4 MiB."""
    random = np.random.default_rng(seed)
    half = kind == "float16"

    def weight(name: str, *shape: int) -> TensorProto:
        values = random.normal(size=shape) / np.sqrt(np.prod(shape[1:]))
        if kind == "int8" and name == "product":
            return numpy_helper.from_array((values * 127).astype(np.int8), name)
        return numpy_helper.from_array(values.astype(np.float16 if half else np.float32), name)

    weights = [
        weight("kernel", 256, 64, 3, 3),
        weight("product", 256, size),
        weight("last", size, size),
    ]
    node = helper.make_node
    nodes = [
        node("Conv", ["start", "kernel"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("GlobalAveragePool", ["r"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("Gemm", ["m", "last"], ["g"], transB=1),
    ]
    if kind == "int8":
        nodes += [
            node("DynamicQuantizeLinear", ["f"], ["q", "scale", "zero"]),
            node("MatMulInteger", ["q", "product", "zero"], ["i"]),
            node("Cast", ["i"], ["j"], to=TensorProto.FLOAT),
            node("Mul", ["j", "scale"], ["m"]),
        ]
    else:
        nodes.append(node("MatMul", ["f", "product"], ["m"]))
    kinds = (TensorProto.FLOAT16, TensorProto.FLOAT) if half else (TensorProto.FLOAT,) * 2
    nodes += [node("Cast", ["x"], ["start"], to=kinds[0]), node("Cast", ["g"], ["y"], to=kinds[1])]
    order = ["start", "c", "r", "p", "f", "q", "i", "j", "m", "g", "y"]
    nodes.sort(key=lambda each: order.index(each.output[0]))
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 64, "H", "W"])]
    found = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", size])]
    graph = helper.make_graph(nodes, "large", given, found, weights)
    opset = [helper.make_opsetid("", 17)]
    return save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
