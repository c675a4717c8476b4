"""Turn a graph into another one without copying its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from deploykit.core.errors import BadInput
from deploykit.graph import storage
from deploykit.graph.graph import Graph, opset
from deploykit.graph.storage import all_nodes, read_names, unused_name


class Editor:
    """A graph that is being rewritten: functions are inlined, every node has a name.

    `graph`: its nodes, which may be changed. `constants`: the tensors that no caller can feed, by
    name. The source's constants are shared with it and must not be changed: store a changed one
    under a new name.
    """

    def __init__(self, source: Graph) -> None:
        self.path = source.path
        self.model = onnx.ModelProto()
        self.model.CopyFrom(source.skeleton)
        self.graph = self.model.graph
        self.inputs = {value.name for value in source.model.graph.input}
        stored = source.initializers
        if self.model.ir_version < 4:  # there all constants are listed as inputs
            self.inputs -= stored.keys()
            self.model.ir_version = 4
        self.constants = {name: t for name, t in stored.items() if name not in self.inputs}
        self._defaults = [t for name, t in stored.items() if name in self.inputs]
        nodes = list(all_nodes(self.graph))
        self._taken = self.inputs | set(self.constants)
        self._taken.update(name for node in nodes for name in (*node.input, *node.output))
        self._named = {node.name for node in nodes}

    def array(self, name: str) -> np.ndarray:
        """Return the values of a constant; read only."""
        return storage.tensor_array(self.constants[name], self.path.parent)

    def store(self, name: str, values: np.ndarray | np.generic) -> str:
        """Add a constant under `name`, or a similar free name; return the name."""
        name = self.fresh(name)
        self.constants[name] = numpy_helper.from_array(np.asarray(values), name)
        return name

    def fresh(self, name: str) -> str:
        """Return an unused tensor name."""
        return unused_name(name, self._taken)

    def node(
        self, kind: str, inputs: Sequence[str], output: str, **attributes: Any
    ) -> onnx.NodeProto:
        """Return a new node with one output; attributes that are None are left out."""
        name = unused_name(f"{kind}_{output}", self._named)
        return helper.make_node(kind, inputs, [output], name=name, **attributes)

    def finish(self, nodes: Sequence[onnx.NodeProto]) -> Graph:
        """Return the graph of `nodes` and the constants they read. The editor is then unusable."""
        graph = self.graph
        replace(graph.node, list(nodes))
        replace(graph.input, [value for value in graph.input if value.name in self.inputs])
        made = {name for node in graph.node for name in node.output}
        replace(graph.value_info, [value for value in graph.value_info if value.name in made])
        used = {value.name for value in graph.output} | set(read_names(graph))
        del graph.initializer[:]
        graph.initializer.extend(self._defaults)
        for name in list(self.constants):  # one by one: protobuf copies, and the copied is freed
            tensor = self.constants.pop(name)
            if name in used:
                graph.initializer.add().CopyFrom(tensor)
        return Graph(self.model, self.path)


def replace(field: Any, values: list[Any]) -> None:
    """Replace the content of a repeated protobuf field by `values`."""
    del field[:]
    field.extend(values)


# Quantization needs weights that are constants, and convolutions that include the normalisation.
# No remaining tensor changes its name or meaning, so that ranges measured before stay valid.

# These are cheap operators between stored weights and the node that uses them.
_FOLDED = {"Constant", "Identity", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast"}
_FOLDED |= {"Slice", "Concat"}  # they put the gates of an LSTM in order


def fold(editor: Editor) -> None:
    """Fold constants, then BatchNormalizations into the convolutions that they alone read."""
    graph, constants = editor.graph, editor.constants
    outputs = {value.name for value in graph.output}
    kept = []
    for node in graph.node:
        known = all(not name or name in constants for name in node.input)
        if node.op_type not in _FOLDED or not known or outputs.intersection(node.output):
            kept.append(node)
            continue
        feeds = {name: editor.array(name) for name in node.input if name}
        values = evaluate_node(node, editor.model, feeds)
        constants[node.output[0]] = numpy_helper.from_array(values, node.output[0])
    replace(graph.node, kept)
    reads = Counter([*read_names(graph), *outputs])
    producers = {name: node for node in graph.node for name in node.output}
    kept = []
    for node in graph.node:
        conv = producers.get(node.input[0]) if node.input else None
        if (
            node.op_type == "BatchNormalization"
            and conv is not None
            and conv.op_type in ("Conv", "ConvTranspose")
            and reads[conv.output[0]] == 1
            and all(name in constants for name in (*node.input[1:], *conv.input[1:]))
            and len([name for name in node.output if name]) == 1
        ):
            _merge(editor, conv, node)
        else:
            kept.append(node)
    replace(graph.node, kept)


def evaluate_node(
    node: onnx.NodeProto, model: onnx.ModelProto, feeds: dict[str, np.ndarray]
) -> np.ndarray:
    """Return the first output of a node of `model` for `feeds`, by onnx's own evaluator."""
    inputs = [onnx.ValueInfoProto(name=name) for name in feeds]
    graph = helper.make_graph([node], "alone", inputs, [onnx.ValueInfoProto(name=node.output[0])])
    alone = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    (found,) = ReferenceEvaluator(alone).run(None, feeds)
    return np.asarray(found)


def _merge(editor: Editor, conv: onnx.NodeProto, norm: onnx.NodeProto) -> None:
    """Merge `norm` into `conv`; the new weights and bias are computed in float64."""
    weight = editor.array(conv.input[1]).astype(np.float64)
    scale, shift, mean, variance = (
        editor.array(name).astype(np.float64) for name in norm.input[1:5]
    )
    biased = len(conv.input) > 2 and conv.input[2]
    old = editor.array(conv.input[2]) if biased else np.zeros_like(mean)
    epsilon = next((a.f for a in norm.attribute if a.name == "epsilon"), 1e-5)
    factor = scale / np.sqrt(variance + epsilon)
    kernel = [1] * (weight.ndim - 2)
    if conv.op_type == "Conv":
        weight *= factor.reshape(-1, 1, *kernel)
    else:  # the kernel is [inputs, outputs / groups, ...], the inputs of a group being adjacent
        groups = next((a.i for a in conv.attribute if a.name == "group"), 1)
        rows = np.repeat(factor.reshape(groups, -1), weight.shape[0] // groups, axis=0)
        weight *= rows.reshape(*rows.shape, *kernel)
    bias = (old - mean) * factor + shift
    out = norm.output[0]
    names = [
        editor.store(f"{out}_folded_{kind}", array.astype(np.float32))
        for kind, array in (("weight", weight), ("bias", bias))
    ]
    replace(conv.input, [conv.input[0], *names])
    conv.output[0] = out


# Newer opsets mostly allow more types. An operator that changed in another way is refused, not
# rewritten: the exporter can write the newer form itself.

# Operator -> the opset that changed its meaning, where the schema's signature does not show it.
_CHANGED = {
    "GroupNormalization": 21,  # scale and bias became per channel, not per group
    "Resize": 18,  # it got anti-aliasing, and sizes round otherwise
    "RoiAlign": 16,  # a pixel's centre moved
    "Split": 18,  # equal parts need a count
}


def raise_opset(model: onnx.ModelProto, least: int) -> None:
    """Raise the opset of `model`, which has no local functions, to `least` if it is older.

    Raises BadInput naming a node that would change its meaning.
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
    # each IR version came with an opset's new types: 8-bit floats, INT4, FP4
    needed = helper.find_min_ir_version_for([helper.make_opsetid("", least)])
    model.ir_version = max(model.ir_version, needed)


def _same(node: onnx.NodeProto, now: int, least: int) -> bool:
    """Return whether `node` means the same in both: its attributes, inputs and outputs do."""
    try:
        old, new = (defs.get_schema(node.op_type, version, "") for version in (now, least))
    except defs.SchemaError:
        return False
    if old.since_version == new.since_version:
        return True
    if node.op_type == "AveragePool" and any(a.name == "ceil_mode" and a.i for a in node.attribute):
        return False  # opset 19 corrected the number of windows
    if new.deprecated or now < _CHANGED.get(node.op_type, 0) <= least:
        return False
    before, after = old.attributes, new.attributes
    kept = all(
        name in after
        and (each.type, each.default_value) == (after[name].type, after[name].default_value)
        for name, each in before.items()
    )
    tensors = ((old.inputs, new.inputs), (old.outputs, new.outputs))
    names = [tuple([each.name for each in formal] for formal in pair) for pair in tensors]
    same = all(ours == theirs[: len(ours)] for ours, theirs in names)
    return kept and same  # no version needs another input or attribute while all of these stay
