"""Raise a graph, in place, to a newer opset where nothing in it changes its meaning.

Newer opsets mostly allow more types. An operator that changed otherwise is refused, not rewritten:
the exporter can write the newer form itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import defs

from deploykit.core.errors import BadInput
from deploykit.onnx_graph.graph import opset
from deploykit.onnx_graph.skeleton import all_nodes

# The IR version that came with an opset's new types: 8-bit floats, INT4, FP4.
_IR_VERSIONS = ((13, 7), (15, 8), (19, 9), (21, 10), (23, 11))
# Changes of meaning that the schemas' signatures do not show: operator -> opset that made it.
_CHANGED = {
    "GroupNormalization": 21,  # scale and bias per channel instead of per group
    "Resize": 18,  # anti-aliasing, and rounding of sizes
    "RoiAlign": 16,  # where a pixel's centre is
    "Split": 18,  # equal parts need a count
}


def raise_opset(model: onnx.ModelProto, least: int) -> None:
    """Let `model` be of opset `least` or newer; it holds no local functions.

    Raises BadInput naming a node that would mean something else.
    """
    now = opset(model)
    if now >= least:
        return
    for number, node in enumerate(all_nodes(model.graph)):
        if node.domain in ("", "ai.onnx") and not _same(node, now, least):
            raise BadInput(
                f"node '{node.name or f'#{number}'}': {node.op_type} of opset {now} means "
                f"something else in opset {least}, which this precision needs",
                hint=f"deploykit export MODEL --opset {least}",
            )
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = least
    needed = max((ir for version, ir in _IR_VERSIONS if version <= least), default=0)
    model.ir_version = max(model.ir_version, needed)


def _same(node: onnx.NodeProto, now: int, least: int) -> bool:
    """Whether `node` means the same in both: no attribute, input or output of it has changed."""
    try:
        old, new = (defs.get_schema(node.op_type, version, "") for version in (now, least))
    except defs.SchemaError:
        return False
    if old.since_version == new.since_version:
        return True
    if node.op_type == "AveragePool" and any(a.name == "ceil_mode" and a.i for a in node.attribute):
        return False  # opset 19 corrected which windows count
    if new.deprecated or now < _CHANGED.get(node.op_type, 0) <= least:
        return False
    return (
        all(_kept(old.attributes[name], new.attributes.get(name)) for name in old.attributes)
        and not any(
            name not in old.attributes and attribute.required
            for name, attribute in new.attributes.items()
        )
        and _names(old.inputs) == _names(new.inputs)[: len(old.inputs)]
        and new.min_input <= old.min_input
        and _names(old.outputs) == _names(new.outputs)[: len(old.outputs)]
    )


def _kept(old: defs.OpSchema.Attribute, new: defs.OpSchema.Attribute | None) -> bool:
    return new is not None and old.type == new.type and old.default_value == new.default_value


def _names(formal: Sequence[defs.OpSchema.FormalParameter]) -> list[str]:
    return [parameter.name for parameter in formal]
