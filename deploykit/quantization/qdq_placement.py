"""Decide where pairs go: which nodes compute in 8 bits, and which tensors get a scale.

TensorRT wants scales on what quantized nodes read, and on what is added to a convolution's result;
ONNX Runtime has integer kernels for a chain of nodes only if the tensors between have scales too.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto

from deploykit.core.errors import BadInput
from deploykit.core.runtime import RUNTIMES
from deploykit.graph.edit import Editor, fold
from deploykit.graph.graph import Graph
from deploykit.graph.parse import subgraphs
from deploykit.graph.storage import all_nodes, read_names

_PRODUCTS = frozenset(("Conv", "ConvTranspose", "Gemm", "MatMul"))
_CHOOSES = "NonMaxSuppression"
_OUTPUT = "boxes"  # ends the names of box outputs, of detectors without NMS too


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
    """Return the names of `first` and of all that is around them, up to a product."""
    left, found = list(first), set[str]()
    while left:
        node = left.pop()
        if node.op_type not in _PRODUCTS and node.name not in found:
            found.add(node.name)
            left += around(node)
    return found


_QUANTIZED = frozenset(
    ("DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QGemm")
)
_CONVOLUTIONS = ("Conv", "ConvTranspose")
_ACTIVATIONS = frozenset(("Relu", "Clip"))
# ONNX Runtime runs these on INT8: they move values and keep their scale ...
_MOVES = "MaxPool Flatten Reshape Transpose Squeeze Unsqueeze Slice Split Resize Gather"
MOVES = frozenset([*_MOVES.split(), "DepthToSpace", "Expand", "Tile"])
# ... and these compute new ones; Sigmoid and Mul are SiLU.
_COMPUTES = frozenset(
    ("Add", "Mul", "Sigmoid", "LeakyRelu", "GlobalAveragePool", "AveragePool", "Concat")
)

_LEAST_FP8, _MOST_FP8 = 16, 32  # channels, elements of the window


@dataclass(frozen=True)
class Placement:
    """`chosen`: places in the node list. `scaled`: tensor -> the one whose scale it shares.

    `residual`: the place of an Add -> which of its inputs is added to a chosen convolution's result
    and reads 8 bits, so that TensorRT fuses the two.
    """

    chosen: tuple[int, ...]
    scaled: Mapping[str, str]
    residual: Mapping[int, int] = field(default_factory=dict)


def operators(runtime: str, to: str = "int8") -> tuple[str, ...]:
    """Return the operators with weights that `runtime` computes in `to`, "int8" or "fp8".

    ONNX Runtime's CPU has no 8-bit ConvTranspose, and NVIDIA's own quantizer leaves it out of FP8.
    """
    transposed = to == "int8" and not RUNTIMES[runtime].scales_outputs
    return ("Conv", *(["ConvTranspose"] if transposed else []), "Gemm", "MatMul")


def quantizable_nodes(editor: Editor, kinds: Collection[str], to: str = "int8") -> list[int]:
    """Return places of the nodes of these operators that read an activation and float32 weights.

    For "fp8" without those that have no kernel.
    """
    found, constants = list[int](), editor.constants
    for n, node in enumerate(editor.graph.node):
        if node.op_type not in kinds or node.domain not in ("", "ai.onnx"):
            continue
        weight = constants.get(node.input[1])
        if (
            weight is not None
            and weight.data_type == TensorProto.FLOAT
            and len(weight.dims) >= 2
            and 0 not in weight.dims
            and node.input[0] not in constants
            and not (to == "fp8" and lacks_fp8_kernel(node, constants))
        ):
            found.append(n)
    return found


def lacks_fp8_kernel(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Return whether TensorRT has no FP8 kernel for a convolution: its build would fail.

    Sources: NVIDIA's quantizer (ModelOpt) leaves out fewer than 16 channels and windows above 32;
    TensorRT's release notes, 10.12: no FP8 in groups. The graph's types alone do not show it.
    """
    if node.op_type != "Conv":
        return False
    out, in_group, *window = constants[node.input[1]].dims
    groups = next((each.i for each in node.attribute if each.name == "group"), 1)
    return groups > 1 or min(out, in_group) < _LEAST_FP8 or math.prod(window) > _MOST_FP8


def place_pairs(
    editor: Editor,
    runtime: str,
    to: str = "int8",
    *,
    keep_float32: Collection[str] = (),
    holds: Callable[[str], bool] = lambda _: True,
) -> Placement:
    """Place pairs of `to` for `runtime`; nodes named in `keep_float32` stay as they are.

    `holds`: whether a scale can hold a tensor, given its name.
    """
    nodes = editor.graph.node
    chosen = [
        n
        for n in quantizable_nodes(editor, operators(runtime, to), to)
        if nodes[n].name not in keep_float32 and holds(nodes[n].input[0])
    ]
    scaled = {nodes[n].input[0]: nodes[n].input[0] for n in chosen}
    if RUNTIMES[runtime].scales_outputs:
        _spread(editor, scaled, set(chosen), {*keep_float32, *box_nodes(editor.graph)}, holds)
        return Placement(tuple(chosen), scaled)
    residual = {
        n: place
        for n, place in _residuals(editor, set(chosen)).items()
        if nodes[n].name not in keep_float32 and holds(nodes[n].input[place])
    }
    for n, place in residual.items():
        scaled.setdefault(nodes[n].input[place], nodes[n].input[place])
    return Placement(tuple(chosen), scaled, residual)


def edit_float32(source: Graph) -> Editor:
    """An editor with constants folded. Raises BadInput for a graph that has 8 bits already."""
    kinds = {node.op_type for node in all_nodes(source.model.graph)}
    if kinds & _QUANTIZED or any(kind.startswith("QLinear") for kind in kinds):
        name = source.path.name
        raise BadInput(f"{name}: is quantized already", hint="quantize the float32 model")
    editor = Editor(source)
    fold(editor)
    return editor


def nothing_to_quantize(editor: Editor, kinds: Sequence[str], weights: str, hint: str) -> BadInput:
    """Return the error for a graph in which no node of these operators has such weights."""
    bodies = (body for node in editor.graph.node for body in subgraphs(node))
    if not {node.op_type for body in bodies for node in all_nodes(body)}.isdisjoint(kinds):
        weights += " outside the bodies of If, Loop and Scan"
        hint = "these stay as they are: export the body as a model of its own"
    names = " or ".join((", ".join(kinds[:-1]), kinds[-1]))
    return BadInput(f"the model has no {names} with {weights}", hint=hint)


def _moves(node: onnx.NodeProto) -> bool:
    if node.op_type == "Resize":
        return any(each.name == "mode" and each.s == b"nearest" for each in node.attribute)
    return node.op_type in MOVES


def _residuals(editor: Editor, chosen: set[int]) -> dict[int, int]:
    """Map each Add of a chosen convolution's result to its other input, of the shorter path."""
    reads = Counter([*read_names(editor.graph), *(value.name for value in editor.graph.output)])
    depth: dict[str, int] = {}  # tensor -> number of nodes on the longest path to it
    fused: set[str] = set()
    found = {}
    for number, node in enumerate(editor.graph.node):
        here = 1 + max((depth.get(name, 0) for name in node.input), default=0)
        depth.update((name, here) for name in node.output)
        if number in chosen and node.op_type in _CONVOLUTIONS and reads[node.output[0]] == 1:
            fused.add(node.output[0])
        names = list(node.input)
        if node.op_type != "Add" or editor.constants.keys() & names or not fused & set(names):
            continue
        first, second = (depth.get(name, 0) if name in fused else -1 for name in names)
        found[number] = 1 if first >= second else 0
    return found


def _spread(  # noqa: C901 - the kernels of ONNX Runtime, one rule each
    editor: Editor,
    scaled: dict[str, str],
    chosen: set[int],
    keep_float32: Collection[str],
    holds: Callable[[str], bool],
) -> None:
    """Add to `scaled` the tensors that follow, as long as ONNX Runtime has integer kernels."""
    outputs = {value.name for value in editor.graph.output}
    ranks = {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in editor.graph.value_info
        if value.type.tensor_type.HasField("shape")
    }
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in editor.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def after_activation(out: str) -> str:
        after = readers.get(out, [])
        fused = len(after) == 1 and after[0].op_type in _ACTIVATIONS and out not in outputs
        return str(after[0].output[0]) if fused else out

    def writes_floats(kind: str, out: str) -> bool:
        """Return whether its kernel reads integers and writes floats, with no scale."""
        after = readers.get(out, [])
        if kind == "MatMul" and ranks.get(out, 2) == 2 and any(n.op_type == "Add" for n in after):
            return False  # ONNX Runtime would make a Gemm of float32 of the two
        integers = any(_moves(node) or node.op_type in _COMPUTES - {"Add", "Mul"} for node in after)
        added = [n for n in after if n.op_type in ("Add", "Mul")]
        integers |= any(not editor.constants.keys() & n.input for n in added)
        return kind in ("Gemm", "MatMul") and not integers

    for number, node in enumerate(editor.graph.node):
        inputs = [name for name in node.input if name]
        out = node.output[0] if node.output else ""
        if node.name in keep_float32:
            continue
        if _moves(node) and inputs[0] in scaled:
            for each in node.output:  # a scale of its own would need arithmetic in between
                scaled[each] = scaled[inputs[0]]
            continue
        if node.op_type == "Concat" and out in scaled and scaled.keys() & set(inputs):
            # If a Concat's result is quantized, each part that is float can be quantized before it.
            alone = [name for name in inputs if len(readers[name]) == 1 and name not in outputs]
            alone = [name for name in alone if name not in editor.constants and holds(name)]
            scaled.update((name, name) for name in alone if name not in scaled)
        computes = node.op_type in _COMPUTES and all(name in scaled for name in inputs)
        if number not in chosen and not computes:
            continue
        out = after_activation(out)
        if writes_floats(node.op_type, out):
            continue
        if out not in outputs and holds(out):
            scaled.setdefault(out, out)
