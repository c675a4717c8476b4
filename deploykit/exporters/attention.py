"""Write attention as its formula has it, where torch's exporter adds steps that change no value.

It transposes the key of `scaled_dot_product_attention` in three nodes, and with a boolean mask it
looks for NaN in all weights, though the masks that it writes are finite. On a CPU these cost a
transformer up to a quarter of its time: benchmarks/cpu_attention.py.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from deploykit.core.extras import require

ir: ModuleType = require("onnxscript.ir")
common: ModuleType = require("onnxscript.ir.passes.common")

_LARGEST = float(np.finfo(np.float32).max)


def simplify_attention(model: Any) -> None:
    """Take both out of `model`, in place; what it computes stays the same to the bit.

    Masks of Attention nodes that are broadcast along queries or keys are expanded.

    Scores that are NaN, through a NaN in an input, now give NaN, as in PyTorch, in place of 0.
    """
    changed = False
    for node in list(model.graph):
        if node.op_type == "Attention" and node.domain == "":
            _expand_mask(node)
        elif node.op_type == "Where":
            changed |= _drop_guard(node)
        elif node.op_type == "Reshape":
            changed |= _transpose_once(node)
    if changed:
        common.RemoveUnusedNodesPass()(model)


def _drop_guard(node: Any) -> bool:
    """Let what reads Where(IsNaN(p), 0, p), p = Softmax(scores + finite mask), read p."""
    test, zero, kept = node.inputs
    softmax, found = _maker(kept, "Softmax"), _maker(test, "IsNaN")
    made = node.outputs[0]
    if softmax is None or found is None or found.inputs[0] is not kept or made.is_graph_output():
        return False
    added = _maker(softmax.inputs[0], "Add")
    if added is None or _held(zero) != (0.0, 0.0):
        return False
    scores, mask = added.inputs
    if _maker(scores, "MatMul") is None or not _finite(mask):
        return False
    ir.convenience.replace_all_uses_with(made, kept)
    return True


def _finite(mask: Any) -> bool:
    """Whether it is a float32 constant, or chosen from two, that float32 can hold."""
    where = _maker(mask, "Where")
    held = [_held(each) for each in (where.inputs[1:] if where is not None else (mask,))]
    return all(each is not None and max(map(abs, each)) <= _LARGEST for each in held)


def _transpose_once(node: Any) -> bool:
    """Replace Reshape, Transpose, Reshape that swap the last two axes by one Transpose."""
    turn = _maker(node.inputs[0], "Transpose")
    merge = _maker(turn.inputs[0], "Reshape") if turn is not None else None
    if merge is None or list(turn.attributes["perm"].as_ints()) != [0, 2, 1]:
        return False
    key, made = merge.inputs[0], node.outputs[0]
    before, between, after = map(_axes, (key, merge.outputs[0], made))
    rank = len(before)
    swapped = [*before[:-2], *before[:-3:-1]]
    if rank < 3 or None in before or between[1:] != before[-2:] or after != swapped:
        return False
    perm = [*range(rank - 2), rank - 1, rank - 2]
    once = ir.node("Transpose", [key], {"perm": perm}, name=node.name)
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], [once], [made], once.outputs)
    return True


def _expand_mask(node: Any) -> None:
    """Give the mask of an Attention its own axes of queries and keys, or what is not sure to be.

    ONNX Runtime's kernel does not broadcast along these, as the standard says: such a mask, one row
    for all queries, failed at every size but 1.
    """
    names = [*node.inputs, None, None, None]
    mask, past = names[3], names[4]
    if mask is None or mask.shape is None or any(len(_axes(x)) != 4 for x in names[:2]):
        return
    queries, keys = _axes(names[0])[2], _axes(names[1])[2]
    own = [1, 1, *_axes(mask)][-2:]
    narrow = own[1] == 1 and keys != 1 and past is None
    if own[0] is not None and own[0] == queries and len(mask.shape) > 1 and not narrow:
        return
    sizes = [ir.node("Shape", [names[0]], {"start": 2, "end": 3})]
    if narrow:
        sizes.append(ir.node("Shape", [names[1]], {"start": 2, "end": 3}))
    else:
        one = ir.tensor(np.ones(1, np.int64))
        sizes.append(ir.node("Constant", [], {"value": one}))
    shape = ir.node("Concat", [each.outputs[0] for each in sizes], {"axis": 0})
    expand = ir.node("Expand", [mask, shape.outputs[0]])
    node.graph.insert_before(node, [*sizes, shape, expand])
    node.replace_input_with(3, expand.outputs[0])


def _axes(value: Any) -> list[int | str | None]:
    """Sizes and names of its axes; None for what is not known."""
    shape = value.shape if value.shape is not None else ()
    return [dim if isinstance(dim, int) else dim.value for dim in shape]


def _maker(value: Any, kind: str) -> Any:
    """The node of operator `kind` that makes `value`; None for any other."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == kind and node.domain == "" else None


def _held(value: Any) -> tuple[float, float] | None:
    """The least and largest value of a float32 constant; None for others."""
    tensor = value.const_value if value is not None and not value.is_graph_input() else None
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or not tensor.size:
        return None
    array = tensor.numpy()
    return float(array.min()), float(array.max())
