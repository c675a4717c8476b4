"""Where pairs go: which nodes compute in 8 bits, and which tensors get a scale.

TensorRT wants scales on what quantized nodes read and on nothing else; ONNX Runtime has integer
kernels for a chain of nodes only if the tensors between them have scales too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from deploykit.core.errors import BadInput
from deploykit.core.runtime import RUNTIMES, TARGET_RUNTIMES
from deploykit.onnx_graph.editor import Editor

QUANTIZED = ("Conv", "Gemm", "MatMul")

_ACTIVATIONS = frozenset(("Relu", "Clip"))
# What ONNX Runtime runs on INT8: these move values and keep their scale ...
_MOVES = frozenset(("MaxPool", "Flatten", "Reshape", "Transpose", "Squeeze", "Unsqueeze"))
# ... and these compute new ones.
_COMPUTES = frozenset(("Add", "Mul", "GlobalAveragePool", "AveragePool", "Concat", "LeakyRelu"))


@dataclass(frozen=True)
class Placement:
    """`chosen`: places in the node list. `scaled`: tensor -> the one whose scale it shares."""

    chosen: tuple[int, ...]
    scaled: Mapping[str, str]


def quantizable_nodes(editor: Editor) -> list[int]:
    """Places of the Conv, Gemm and MatMul of an activation and of constant float32 weights."""
    return [n for n, node in enumerate(editor.graph.node) if _quantizable(node, editor.constants)]


def place_pairs(
    editor: Editor,
    runtime: str,
    *,
    keep_float32: Collection[str] = (),
    holds: Callable[[str], bool] = lambda _: True,
) -> Placement:
    """The placement for `runtime`; nodes named in `keep_float32` stay as they are.

    `holds`: whether a scale can hold a tensor, given its name. Raises BadInput for a name in
    `keep_float32` that no node has.
    """
    if runtime not in TARGET_RUNTIMES:
        raise BadInput(f"unknown runtime '{runtime}'", hint="one of: " + ", ".join(TARGET_RUNTIMES))
    nodes = editor.graph.node
    check_names(editor, keep_float32)
    chosen = [
        n
        for n in quantizable_nodes(editor)
        if nodes[n].name not in keep_float32 and holds(nodes[n].input[0])
    ]
    scaled = {nodes[n].input[0]: nodes[n].input[0] for n in chosen}
    if RUNTIMES[runtime].scales_outputs:
        _spread(editor, scaled, set(chosen), keep_float32, holds)
    return Placement(tuple(chosen), scaled)


def check_names(editor: Editor, names: Collection[str]) -> None:
    """Raise BadInput for a name that no node of the graph has."""
    unknown = sorted(set(names) - {node.name for node in editor.graph.node})
    if unknown:
        raise BadInput(
            f"no node is named '{unknown[0]}'", hint="deploykit inspect MODEL lists the nodes"
        )


def _quantizable(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    if node.op_type not in QUANTIZED or node.domain not in ("", "ai.onnx"):
        return False
    weight = constants.get(node.input[1])
    return (
        weight is not None
        and weight.data_type == TensorProto.FLOAT
        and len(weight.dims) >= 2
        and node.input[0] not in constants
    )


def _spread(
    editor: Editor,
    scaled: dict[str, str],
    chosen: set[int],
    keep_float32: Collection[str],
    holds: Callable[[str], bool],
) -> None:
    """Add to `scaled` the tensors that follow, as long as ONNX Runtime has integer kernels."""
    outputs = {value.name for value in editor.graph.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in editor.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def after_activation(out: str) -> str:
        after = readers.get(out, [])
        fused = len(after) == 1 and after[0].op_type in _ACTIVATIONS and out not in outputs
        return str(after[0].output[0]) if fused else out

    for number, node in enumerate(editor.graph.node):
        inputs = [name for name in node.input if name]
        out = node.output[0] if node.output else ""
        if node.name in keep_float32:
            continue
        if node.op_type in _MOVES and inputs[0] in scaled:
            scaled[out] = scaled[inputs[0]]  # its own scale would need arithmetic in between
            continue
        computes = node.op_type in _COMPUTES and all(name in scaled for name in inputs)
        if number not in chosen and not computes:
            continue
        out = after_activation(out)
        if out not in outputs and holds(out):
            scaled.setdefault(out, out)
