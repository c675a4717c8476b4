"""Graphs of equal nodes one after the other, to time what one node of a kind takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from deploykit.onnx_graph import kinds
from deploykit.onnx_graph.graph import Graph

_OPSET, _IR = 17, 8  # the first with LayerNormalization
_SEED = 0


@dataclass(frozen=True)
class Chain:
    """`count` nodes of one `kind`. `work` of each: operations per step, or bytes where it has none.

    `flops` and `weight_bytes`: of each node. The graph has one float32 input, `x` of `shape`.
    """

    kind: str
    precision: str
    graph: Graph
    shape: tuple[int, ...]
    count: int
    work: float
    flops: float = 0.0
    weight_bytes: float = 0.0
    steps: int = 1


def convolution(
    kind: str, channels: int, size: int, kernel: int, *, precision: str = "fp32"
) -> Chain:
    """Convolutions of `channels` to as many, on images of `size` squared; depthwise by `kind`.

    A stem begins with three channels, at stride 2, and is alone.
    """
    stem, depthwise = kind == kinds.STEM, kind == kinds.DEPTHWISE
    inputs = 3 if stem else channels
    count, stride = (1, 2) if stem else (3, 1)
    weight, shape = (channels, 1 if depthwise else inputs, kernel, kernel), (1, inputs, size, size)
    options = {
        "pads": [kernel // 2] * 4,
        "strides": [stride] * 2,
        "group": channels if depthwise else 1,
    }
    flops, nbytes = 2.0 * math.prod(weight) * (size // stride) ** 2, 4.0 * math.prod(weight)
    made = _Builder(precision)
    for _ in range(count):
        made.add("Conv", weight, **options)
    return Chain(kind, precision, made.graph(shape), shape, count, flops, flops, nbytes)


def product(rows: int, width: int, *, count: int = 3, precision: str = "fp32") -> Chain:
    """Matrix products of (rows, width) by stored (width, width)."""
    made = _Builder(precision)
    for _ in range(count):
        made.add("MatMul", (width, width))
    shape, flops, weights = (rows, width), 2.0 * rows * width * width, 4.0 * width * width
    return Chain(kinds.PRODUCT, precision, made.graph(shape), shape, count, flops, flops, weights)


def repeated(rows: int, width: int, precision: str) -> Chain:
    """Products of (rows, width) by one stored (width, width), "fp32" or "fp16", to load a GPU."""
    made, count = _Builder(precision), 8
    name = made.weight((width, width))
    for _ in range(count):
        made.plain("MatMul", [made.last, name])
    shape, flops = (rows, width), 2.0 * rows * width * width
    return Chain(kinds.PRODUCT, precision, made.graph(shape), shape, count, flops, flops)


def attention(heads: int, rows: int) -> Chain:
    """Products of activations: (1, heads, rows, rows) by itself."""
    made, count = _Builder("fp32"), 2
    for _ in range(count):
        made.plain("MatMul", [made.last, "x"])
    flops = 2.0 * heads * rows**3
    shape = (1, heads, rows, rows)
    return Chain(kinds.ATTENTION, "fp32", made.graph(shape), shape, count, flops, flops)


def recurrent(width: int, steps: int, batch: int) -> Chain:
    """An LSTM of `width` over `steps`."""
    made = _Builder("fp32")
    names = [made.weight((1, 4 * width, width)) for _ in range(2)]
    made.plain("LSTM", ["x", *names], hidden_size=width)
    flops, weights = 2.0 * batch * 8 * width * width, 4.0 * 8 * width * width
    shape = (steps, batch, width)
    return Chain(
        kinds.RECURRENT, "fp32", made.graph(shape), shape, 1, flops, flops * steps, weights, steps
    )


def passing(kind: str, elements: int, *, count: int = 4) -> Chain:
    """Nodes without arithmetic to speak of, on `elements` values: `work` is what they move."""
    side = 32
    shape: tuple[int, ...] = (1, elements // side**2 or 1, side, side)
    made, moved = _Builder("fp32"), 2
    for _ in range(count):
        if kind == kinds.SIMPLE:
            made.plain("Add", [made.last, "x"])
            moved = 3
        elif kind == kinds.FUNCTION:
            made.plain("Tanh", [made.last])
        elif kind == kinds.NORMALISATION:
            made.plain("Softmax", [made.last], axis=-1)
        elif kind == kinds.POOLING:
            pads, kernel = [1] * 4, [3, 3]
            made.plain("AveragePool", [made.last], kernel_shape=kernel, pads=pads)
        else:  # the first two axes change places: a cycle of two would be taken out
            made.plain("Transpose", [made.last], perm=[0, 2, 3, 1])
    return Chain(kind, "fp32", made.graph(shape), shape, count, 4.0 * moved * math.prod(shape))


class _Builder:
    """The nodes so far; `last`: the tensor that the next one reads. In "fp16" between casts."""

    def __init__(self, precision: str) -> None:
        self.last = "x"
        self._int8, self._half = precision == "int8", precision == "fp16"
        self._nodes: list[onnx.NodeProto] = []
        self._stored: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(_SEED)
        if self._half:
            self.plain("Cast", ["x"], to=TensorProto.FLOAT16)

    def add(self, operator: str, weight: Sequence[int], **options: Any) -> None:
        """A node with stored weights, in INT8 between pairs of QuantizeLinear and its inverse."""
        if self._int8:
            self._quantize()
            values = self._random.integers(-64, 64, weight).astype(np.int8)
            name = self._dequantize(self._store(values))
        else:
            name = self.weight(weight)
        self.plain(operator, [self.last, name], **options)
        if self._int8:
            self._quantize()

    def weight(self, shape: Sequence[int]) -> str:
        scale = np.float32(1 / math.sqrt(max(1, math.prod(shape[1:]))))
        values = self._random.standard_normal(shape, np.float32) * scale
        return self._store(values.astype(np.float16) if self._half else values)

    def plain(self, operator: str, inputs: Sequence[str], **options: Any) -> None:
        self.last = f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [self.last], **options))

    def graph(self, shape: Sequence[int]) -> Graph:
        if self._half:
            self.plain("Cast", [self.last], to=TensorProto.FLOAT)
        values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        ends = [helper.make_tensor_value_info(self.last, TensorProto.FLOAT, None)]
        body = helper.make_graph(self._nodes, "chain", values, ends, self._stored)
        opsets = [helper.make_opsetid("", _OPSET)]
        return Graph(helper.make_model(body, opset_imports=opsets, ir_version=_IR))

    def _quantize(self) -> None:
        if self._nodes and self._nodes[-1].op_type == "DequantizeLinear":
            return  # between two nodes one pair is enough
        scale, zero = self._store(np.float32(0.05)), self._store(np.uint8(128))
        self.plain("QuantizeLinear", [self.last, scale, zero])
        self.plain("DequantizeLinear", [self.last, scale, zero])

    def _dequantize(self, name: str) -> str:
        before = self.last
        scale, zero = self._store(np.float32(0.01)), self._store(np.int8(0))
        self.plain("DequantizeLinear", [name, scale, zero])
        name, self.last = self.last, before
        return name

    def _store(self, values: np.ndarray | np.generic) -> str:
        name = f"w{len(self._stored)}"
        self._stored.append(numpy_helper.from_array(np.asarray(values), name))
        return name
