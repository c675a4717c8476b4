"""Find the nodes that decode and choose boxes: coordinates in pixels, which few bits would move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import onnx

_PRODUCTS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
_CHOOSES = "NonMaxSuppression"
_OUTPUT = "boxes"  # how the names of such outputs end, of detectors without NMS as well


def box_nodes(graph: onnx.GraphProto) -> set[str]:
    """Names of the nodes between boxes, or NonMaxSuppression, and the products nearest to them.

    float16 holds coordinates from 512 to 1024 to half a pixel, INT8 to several pixels.
    """
    makers = {name: node for node in graph.node for name in node.output}
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)

    def before(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        return [makers[name] for name in node.input if name in makers]

    def after(node: onnx.NodeProto) -> list[onnx.NodeProto]:
        return [each for name in node.output for each in readers[name]]

    chosen = [node for node in graph.node if node.op_type == _CHOOSES]
    named = (value.name for value in graph.output if value.name.endswith(_OUTPUT))
    made = [makers[name] for name in named if name in makers]
    return _reached([*chosen, *made], before) | _reached(chosen, after)


def _reached(
    first: Iterable[onnx.NodeProto], around: Callable[[onnx.NodeProto], list[onnx.NodeProto]]
) -> set[str]:
    """Names of `first` and of all that is around them, up to a product."""
    left, found = list(first), set[str]()
    while left:
        node = left.pop()
        if node.op_type not in _PRODUCTS and node.name not in found:
            found.add(node.name)
            left += around(node)
    return found
