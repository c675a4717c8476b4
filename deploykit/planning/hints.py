"""Sizes that leave parts of a Tensor Core idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploykit.core.json_value import Record
from deploykit.onnx_graph import kinds
from deploykit.onnx_graph.cost import NodeCost
from deploykit.onnx_graph.shapes import TensorShapes

# A matrix instruction takes 16 bytes of a row at a time: NVIDIA, Deep Learning Performance Guide,
# "Tensor Core requirements": multiples of 8 in half precision, of 16 in INT8.
ALIGNED = {"fp16": 8, "bf16": 8, "int8": 16, "fp8": 16}
_DENSE = (kinds.CONVOLUTION, kinds.POINTWISE, kinds.STEM, kinds.PRODUCT)


@dataclass(frozen=True)
class Hint(Record):
    """`node` has `size` where a multiple of `multiple` fills the hardware in `precision`.

    `what`: "input channels", "output channels" or "features". `share`: of the model's operations.
    """

    node: str
    operator: str
    what: str
    size: int
    precision: str
    multiple: int
    share: float


def alignment(known: TensorShapes, costs: Sequence[NodeCost]) -> tuple[Hint, ...]:
    """The dense nodes with sizes that are no multiple, those with most operations first.

    Each is named once, with the coarsest multiple that it misses: of 8, else of 16.
    """
    whole = sum(cost.flops or 0 for cost in costs) or 1
    nodes = {node.name: node for node in known.nodes}
    found = []
    for cost in costs:
        if cost.kind not in _DENSE or not cost.flops or cost.name not in nodes:
            continue
        weight = known.shapes.get((*nodes[cost.name].input, "", "")[1], ())
        if len(weight) < 2:
            continue
        convolves = cost.kind != kinds.PRODUCT
        names = ("output channels", "input channels") if convolves else ("features", "features")
        sizes = weight[:2] if convolves else weight[-2:]
        for precision in ("fp16", "int8"):
            wrong = [(n, s) for n, s in zip(names, sizes, strict=True) if s % ALIGNED[precision]]
            if wrong:
                (what, size), share = wrong[0], cost.flops / whole
                multiple = ALIGNED[precision]
                found.append(Hint(cost.name, cost.operator, what, size, precision, multiple, share))
                break
    return tuple(sorted(found, key=lambda hint: -hint.share))
