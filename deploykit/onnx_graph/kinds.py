"""Sort nodes into kinds that run at one share of a machine's ceiling: dense convolutions, softmax.

Nodes of a kind do the same per operation, or per byte, whatever model they are in, so that a few
measurements stand for all.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import onnx

from deploykit.onnx_graph.flops import ELEMENTWISE, GATHERS, MOVES, REDUCES
from deploykit.onnx_graph.shapes import TensorShapes

# arithmetic: as fast as its operations allow
CONVOLUTION, POINTWISE, DEPTHWISE, STEM = "convolution", "convolution 1x1", "depthwise", "stem"
PRODUCT, ATTENTION, RECURRENT = "matrix product", "product of activations", "recurrent"
# the rest: as fast as its bytes pass
SIMPLE, FUNCTION, NORMALISATION = "elementwise", "function", "normalisation"
POOLING, MOVEMENT, OTHER = "pooling", "movement", "other"

ARITHMETIC = (CONVOLUTION, POINTWISE, DEPTHWISE, STEM, PRODUCT, ATTENTION, RECURRENT)
KINDS = (*ARITHMETIC, SIMPLE, FUNCTION, NORMALISATION, POOLING, MOVEMENT, OTHER)

_STEM_CHANNELS = 4  # of an image: too few to fill a vector
_CONVOLUTIONS = frozenset(("Conv", "ConvInteger", "ConvTranspose", "FusedConv", "QLinearConv"))
_PRODUCTS = frozenset(
    ("Gemm", "MatMul", "MatMulInteger", "QLinearMatMul", "QGemm", "FusedGemm", "Einsum")
)
_RECURRENT = frozenset(("LSTM", "DynamicQuantizeLSTM", "GRU", "RNN"))
_FUNCTION_NAMES = """
    Acos Acosh Asin Asinh Atan Atanh Celu Cos Cosh Elu Erf Exp Gelu HardSwish Log Mish Pow Selu
    Sigmoid Sin Sinh Softplus Softsign Tan Tanh"""
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_NORMALISING = """
    Softmax LogSoftmax BatchNormalization InstanceNormalization LayerNormalization
    GroupNormalization SimplifiedLayerNormalization SkipLayerNormalization LRN LpNormalization"""
_NORMALISES = frozenset(_NORMALISING.split())
_POOLS = frozenset(("MaxPool", "AveragePool", "LpPool", "Resize", "Upsample"))


def kind_of(node: onnx.NodeProto, known: TensorShapes, constants: Collection[str]) -> str:
    """One of KINDS. `constants`: names of tensors that are made of constants alone."""
    name = node.op_type
    if name in _CONVOLUTIONS:
        return _convolution(node, known)
    if name in _PRODUCTS:
        stored = any(each in constants for each in node.input if _is_matrix(each, known))
        return PRODUCT if stored else ATTENTION
    groups = (
        (_RECURRENT, RECURRENT),
        (_FUNCTIONS, FUNCTION),
        (ELEMENTWISE | {"Cast", "QuantizeLinear", "DequantizeLinear"}, SIMPLE),
        (_NORMALISES, NORMALISATION),
        (_POOLS | REDUCES, POOLING),
        (MOVES | GATHERS, MOVEMENT),
    )
    return next((kind for names, kind in groups if name in names), OTHER)


def steps_of(node: onnx.NodeProto, known: TensorShapes) -> int:
    """Time steps of a recurrent node, which wait for each other; 1 of any other."""
    shape = known.shapes.get(node.input[0]) if node.op_type in _RECURRENT else None
    return max(1, shape[0]) if shape else 1


def _convolution(node: onnx.NodeProto, known: TensorShapes) -> str:
    weight = known.shapes.get(node.input[3 if node.op_type.startswith("QLinear") else 1])
    groups = next((a.i for a in node.attribute if a.name == "group"), 1)
    if weight is None or len(weight) < 2:
        return CONVOLUTION
    if groups > 1 and weight[1] == 1:
        return DEPTHWISE
    if weight[1] <= _STEM_CHANNELS:
        return STEM
    return POINTWISE if math.prod(weight[2:]) == 1 else CONVOLUTION


def _is_matrix(name: str, known: TensorShapes) -> bool:
    return len(known.shapes.get(name, ())) >= 2
