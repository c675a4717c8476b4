"""The type that each node of a main graph computes in, as summaries count it and costs price it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from deploykit.core.precision import FLOATS
from deploykit.onnx_graph.validate import RUNTIME_DOMAINS

# Another name for the same memory.
VIEWS = frozenset(("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"))
DESCRIBES = frozenset(("Constant", "Shape", "Size"))
CONVERTS = frozenset(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Cast"))
GENERATES = frozenset(("ConstantOfShape", "Range", "CastLike"))
_FUSED = frozenset(("QGemm", "QAttention", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"))
_SILENT = CONVERTS | DESCRIBES | GENERATES | VIEWS
_FLOATS = FLOATS | {"float64"}


class NodePrecision:
    """`types`: tensor name to dtype name; `constants`: initializers.

    `on_cpu`: as ONNX Runtime's CPU runs the nodes: few in integers if their results have no scale.
    """

    def __init__(
        self,
        nodes: Sequence[onnx.NodeProto],
        types: Mapping[str, str],
        constants: Mapping[str, onnx.TensorProto],
        *,
        on_cpu: bool = False,
    ) -> None:
        self._types = types
        self._constants = constants
        self._on_cpu = on_cpu
        self._makers = {name: node for node in nodes for name in node.output if name}
        self._readers: defaultdict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in nodes:
            for name in node.input:
                self._readers[name].append(node)
        # what ONNX Runtime could run in integers it has already replaced: a pair left over is float
        self._final = any(
            node.domain.startswith(RUNTIME_DOMAINS) and node.op_type not in CONVERTS
            for node in nodes
        )

    def precision(self, node: onnx.NodeProto) -> str | None:
        """'float32', 'float16', 'bfloat16', 'float64', 'int8' or 'float8'.

        None for a node that computes nothing in these: it moves, converts or describes data.
        """
        if node.op_type in _SILENT:
            return None
        if _in_integers(node):
            return "int8"
        names = [*node.output, *node.input]  # an input's where ONNX has no schema for the node
        kinds = (self._types[name] for name in names if self._types.get(name) in _FLOATS)
        return (None if self._final else self._fed(node)) or next(kinds, None)

    def _fed(self, node: onnx.NodeProto) -> str | None:
        """'int8' or 'float8' if all its inputs but constants (a float bias) are dequantized.

        A node with quantized weights and float activations computes in float: not counted here.
        """
        stored = set()
        for name in node.input:
            maker = self._makers.get(name)
            if not name or (name in self._constants and maker is None):
                continue
            if maker is None or maker.op_type != "DequantizeLinear":
                return None
            if maker.input[0] not in self._constants:
                stored.add(self._types.get(maker.input[0], "int8"))
        kind = min(stored, default=None)
        if kind is None or (self._on_cpu and not self._has_kernel(node)):
            return None
        return "float8" if kind.startswith("float8") else kind.removeprefix("u")

    def _has_kernel(self, node: onnx.NodeProto) -> bool:
        """Whether ONNX Runtime's CPU runs a node that reads dequantized tensors in integers.

        Its result is quantized next, after a ReLU that the zero point makes needless; of products
        alone the result may stay float, without a ReLU or a float bias. Seen with 1.32.0.
        """
        after = self._readers[node.output[0]]
        cut = len(after) == 1 and after[0].op_type in ("Relu", "Clip")
        if cut:
            after = self._readers[after[0].output[0]]
        if len(after) == 1 and after[0].op_type == "QuantizeLinear":
            return not cut or self._starts_at_zero(after[0])
        pairs = all(name not in self._constants for name in node.input)
        return node.op_type in ("Gemm", "MatMul") and pairs and not cut

    def _starts_at_zero(self, quantize: onnx.NodeProto) -> bool:
        """Whether its zero point is the lowest value of its type, which cuts what is negative."""
        point = self._constants.get("".join(quantize.input[2:]))
        if point is None:
            return len(quantize.input) < 3  # uint8, from 0
        values = numpy_helper.to_array(point)
        return values.dtype.kind in "iu" and bool((values == np.iinfo(values.dtype).min).all())


def _in_integers(node: onnx.NodeProto) -> bool:
    """Whether the operator computes in integers by definition: QLinearConv, MatMulInteger."""
    name = node.op_type
    fused = node.domain.startswith(RUNTIME_DOMAINS) and name in _FUSED
    return fused or name.startswith("QLinear") or "Integer" in name
