"""Operations of a node, from its operator and the shapes of its tensors.

A multiply-add counts 2; a bias, where the sums begin, costs nothing. A convolution does
2 * outputs * (input channels / groups) * kernel of them, a matrix product 2 * M * N * K. So
ResNet-18 on 224x224 has 3.6e9, where torchvision states 1.81e9 multiply-adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import onnx
from onnx import helper

from deploykit.onnx_graph.node_precision import CONVERTS, DESCRIBES, GENERATES, VIEWS
from deploykit.onnx_graph.shapes import TensorShapes
from deploykit.onnx_graph.skeleton import subgraphs
from deploykit.onnx_graph.validate import STANDARD_DOMAINS

GATHERS = frozenset(("Gather", "GatherElements", "GatherND"))
_MOVING = """
    Transpose Concat Slice Split Pad Expand Tile DepthToSpace SpaceToDepth ScatterElements ScatterND
    EyeLike Trilu OneHot ReverseSequence Compress"""
_POINTWISE = """
    Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor
    Ceil Celu Clip Cos Cosh Div Dropout Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual
    HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg
    Not Or PRelu Pow Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum
    Tan Tanh ThresholdedRelu Where Xor"""
_REDUCING = """
    ReduceMax ReduceMean ReduceMin ReduceSum ReduceProd ReduceL1 ReduceL2 ReduceSumSquare CumSum
    ReduceLogSum ReduceLogSumExp ArgMax ArgMin GlobalAveragePool GlobalMaxPool GlobalLpPool"""
MOVES = frozenset(_MOVING.split())
ELEMENTWISE = frozenset(_POINTWISE.split())
REDUCES = frozenset(_REDUCING.split())
# Operations per output element, counted off the definitions: softmax takes the largest, subtracts,
# exponentiates, adds up and divides; a normalisation takes mean and variance, scales and shifts.
_PER_ELEMENT: Mapping[str, int] = {
    "Softmax": 5,
    "LogSoftmax": 5,
    "BatchNormalization": 2,
    "InstanceNormalization": 7,
    "LayerNormalization": 7,
    "GroupNormalization": 7,
    "LRN": 7,
    "LpNormalization": 3,
    "Resize": 8,  # a bilinear mean of four
    "Upsample": 8,
    "GridSample": 8,
}


def flops(node: onnx.NodeProto, known: TensorShapes) -> int | None:
    """Operations of one call; None for an operator that no formula is known for."""
    if any(subgraphs(node)):
        return None  # If, Loop, Scan: how often their bodies run is in the data
    kind = node.op_type
    counted = _FORMULAS.get(kind)
    if counted is not None:
        return counted(node, known)
    if node.domain not in STANDARD_DOMAINS:
        return None
    still = VIEWS | DESCRIBES | CONVERTS | GENERATES | GATHERS | MOVES
    if kind in still:
        return 0
    if kind in REDUCES:
        return known.elements(node.input[0])
    each = 1 if kind in ELEMENTWISE else _PER_ELEMENT.get(kind)
    outputs = known.elements(node.output[0])
    return None if each is None or outputs is None else each * outputs


def _convolution(node: onnx.NodeProto, known: TensorShapes) -> int | None:
    weight = known.shapes.get(node.input[3 if node.op_type.startswith("QLinear") else 1])
    transposed = node.op_type == "ConvTranspose"  # each input is multiplied, not each output
    places = known.elements(node.input[0] if transposed else node.output[0])
    return None if weight is None or places is None else 2 * places * math.prod(weight[1:])


def _matrices(node: onnx.NodeProto, known: TensorShapes) -> int | None:
    left, outputs = known.shapes.get(node.input[0]), known.elements(node.output[0])
    if not left or outputs is None:
        return None
    transposed = any(a.name == "transA" and a.i for a in node.attribute)
    return 2 * outputs * left[-2 if transposed else -1]


def _recurrent(node: onnx.NodeProto, known: TensorShapes) -> int | None:
    """Both matrices of every gate, direction and step; pointwise work is small."""
    x, w, r = (known.shapes.get(name) for name in node.input[:3])
    if x is None or w is None or r is None:
        return None
    return 2 * x[0] * x[1] * (math.prod(w) + math.prod(r))


def _pooling(node: onnx.NodeProto, known: TensorShapes) -> int | None:
    outputs = known.elements(node.output[0])
    kernel = next((a.ints for a in node.attribute if a.name == "kernel_shape"), ())
    return None if outputs is None else outputs * math.prod(kernel)


def _einsum(node: onnx.NodeProto, known: TensorShapes) -> int | None:
    """A multiply-add for each combination of all its indices."""
    equation = helper.get_node_attr_value(node, "equation").decode().replace(" ", "")
    if "." in equation:
        return None
    sizes: dict[str, int] = {}
    for letters, name in zip(equation.split("->")[0].split(","), node.input, strict=False):
        shape = known.shapes.get(name)
        if shape is None or len(shape) != len(letters):
            return None
        sizes |= dict(zip(letters, shape, strict=True))
    return 2 * math.prod(sizes.values())


_FORMULAS: Mapping[str, Callable[[onnx.NodeProto, TensorShapes], int | None]] = {
    **dict.fromkeys(
        ("Conv", "ConvInteger", "ConvTranspose", "FusedConv", "QLinearConv"), _convolution
    ),
    **dict.fromkeys(
        ("Gemm", "MatMul", "MatMulInteger", "QLinearMatMul", "QGemm", "FusedGemm"), _matrices
    ),
    **dict.fromkeys(("LSTM", "DynamicQuantizeLSTM", "GRU", "RNN"), _recurrent),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pooling),
    "Einsum": _einsum,
}
