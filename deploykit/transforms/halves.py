"""Cast a float32 ONNX graph to half precision.

In: a float32 model and the ranges seen by `calibrate`. Out: a model whose inputs and outputs are
still float32. Nodes whose activations come near 65504, the largest float16, stay float32: a CPU
would not show the overflow, a GPU would.

A tensor keeps its name where it is float32; its half twin is `NAME_float16`. So bodies of If and
Loop, which stay float32, still find the outer tensors that they name, and casts stand only where
the two worlds meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.inliner
from onnx import TensorProto, defs, helper, numpy_helper

from deploykit.core.errors import BadInput
from deploykit.transforms.checks import all_nodes, subgraphs
from deploykit.transforms.graph import element_types, opset

if TYPE_CHECKING:  # so that a cast needs no onnxruntime
    from deploykit.transforms.calibrate import Range

LARGEST = 65504.0
# Calibration sees a sample: what a model meets later may well be twice as large.
GUARD = LARGEST / 2
SMALLEST = 2.0**-25  # what lies below is rounded to 0

_SUFFIX = "_float16"
_FLOAT, _HALF = TensorProto.FLOAT, TensorProto.FLOAT16
# Sums over a whole axis, and coordinates in pixels: 11 bits are too few whatever the range.
_WIDE_OPERATORS = frozenset(("CumSum", "RoiAlign"))
_ARITHMETIC = frozenset(("Add", "Sub", "Mul", "Div", "Floor", "Ceil", "Round", "Sqrt", "Cast"))
_INTEGERS = frozenset((TensorProto.INT32, TensorProto.INT64))


def to_fp16(
    model: onnx.ModelProto, ranges: Mapping[str, Range] | None
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The model in float16, and the names of the nodes that the range guard kept in float32.

    A node stays float32 if a tensor or weight that it reads or writes came above half of 65504, or
    would become 0 as a whole (an epsilon of 1e-12); without `ranges` only weights are looked at.
    So do, without being named, operators that ONNX does not define for float16, bodies of If and
    Loop, and arithmetic that ends in integers. `model` is left as it is. Raises BadInput if it
    computes nothing in float32, or something in float16 already.
    """
    model = onnx.inliner.inline_local_functions(model) if model.functions else _copy(model)
    _name_nodes(model.graph)
    types = element_types(model)
    if _HALF in types.values():
        raise BadInput("the model holds float16 already", hint="quantize the float32 model")
    writer = _Writer(model, types)
    guarded = _guarded(model.graph, writer.constants, ranges or {}, types)
    wide = guarded | _indexing(model.graph, types)
    if not any(types.get(name) == _FLOAT for node in model.graph.node for name in node.output):
        raise BadInput("the model computes nothing in float32: there is nothing to cast to float16")
    for node in model.graph.node:
        inputs, outputs = _half_places(node, model, types)
        if node.name in wide or not (inputs or outputs):
            writer.add_wide(node)
        else:
            writer.add_half(node, inputs, outputs)
    writer.finish()
    return model, tuple(node.name for node in model.graph.node if node.name in guarded)


class _Writer:
    """Emits nodes in order, and a Cast just before the first one that needs the other type."""

    def __init__(self, model: onnx.ModelProto, types: Mapping[str, int]) -> None:
        graph = model.graph
        fed = {value.name for value in graph.input}
        self.graph = graph
        self.types = types
        self.suffix = _SUFFIX
        while any(name.endswith(self.suffix) for name in types):
            self.suffix += "_"
        self.nodes: list[onnx.NodeProto] = []
        self.constants = {t.name: t for t in graph.initializer if t.name not in fed}
        self.kept: set[str] = set()  # constants that stay float32
        self.halves: dict[str, onnx.TensorProto] = {}  # constants in float16, by old name
        self.ready = fed | {tensor.name for tensor in graph.initializer}

    def add_wide(self, node: onnx.NodeProto) -> None:
        for name in _reads(node):
            self._need_float(name)
        self.nodes.append(node)
        self.ready.update(node.output)

    def add_half(self, node: onnx.NodeProto, inputs: set[int], outputs: set[int]) -> None:
        for place, name in enumerate(node.input):
            if place in inputs:
                node.input[place] = self._half(name)
            else:
                self._need_float(name)
        for place in outputs:
            node.output[place] += self.suffix
        for attribute in node.attribute:
            _retype(node, attribute)
        self.nodes.append(node)
        self.ready.update(node.output)

    def finish(self) -> None:
        for value in self.graph.output:
            self._need_float(value.name)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)
        constants = [t for t in self.graph.initializer if not self._dropped(t.name)]
        constants += self.halves.values()
        del self.graph.initializer[:]
        self.graph.initializer.extend(constants)
        self._write_value_info()

    def _dropped(self, name: str) -> bool:
        return name in self.halves and name not in self.kept

    def _half(self, name: str) -> str:
        half = name + self.suffix
        if half in self.ready:
            return half
        if name in self.constants:
            tensor = numpy_helper.to_array(self.constants[name]).astype(np.float16)
            self.halves[name] = numpy_helper.from_array(tensor, half)
        else:
            self._cast(name, half, _HALF)
        self.ready.add(half)
        return half

    def _need_float(self, name: str) -> None:
        self.kept.add(name)
        if name not in self.ready and name + self.suffix in self.ready:
            self._cast(name + self.suffix, name, _FLOAT)
            self.ready.add(name)

    def _cast(self, source: str, target: str, to: int) -> None:
        self.nodes.append(
            helper.make_node("Cast", [source], [target], name=f"Cast_{target}", to=to)
        )

    def _write_value_info(self) -> None:
        """Types and shapes of the tensors between, of both worlds."""
        known = {value.name: value for value in self.graph.value_info}
        known.update({value.name: value for value in (*self.graph.input, *self.graph.output)})
        outer = {value.name for value in (*self.graph.input, *self.graph.output)}
        written = []
        for name in (name for node in self.nodes for name in node.output):
            half = name.endswith(self.suffix) and name not in self.types
            source = known.get(name.removesuffix(self.suffix) if half else name)
            if source is None or name in outer:
                continue
            value = onnx.ValueInfoProto()
            value.CopyFrom(source)
            value.name = name
            if half:
                value.type.tensor_type.elem_type = _HALF
            written.append(value)
        del self.graph.value_info[:]
        self.graph.value_info.extend(written)


def _half_places(
    node: onnx.NodeProto, model: onnx.ModelProto, types: Mapping[str, int]
) -> tuple[set[int], set[int]]:
    """The float32 inputs and outputs of `node`, by place, that its schema allows to be float16."""
    nothing: tuple[set[int], set[int]] = set(), set()
    if node.op_type in _WIDE_OPERATORS or node.domain not in ("", "ai.onnx"):
        return nothing
    if any(True for _ in subgraphs(node)) or any(
        name and name not in types for name in (*node.input, *node.output)
    ):
        return nothing
    if node.op_type == "Cast" and helper.get_node_attr_value(node, "to") != _FLOAT:
        return nothing
    schema = defs.get_schema(node.op_type, opset(model), "")
    half = "tensor(float16)"
    fit = {c.type_param_str for c in schema.type_constraints if half in c.allowed_type_strs}

    def places(names: Iterable[str], formal: Sequence[defs.OpSchema.FormalParameter]) -> set[int]:
        return {
            place
            for place, name in enumerate(names)
            if types.get(name) == _FLOAT
            and formal[min(place, len(formal) - 1)].type_str in fit  # the last one may repeat
        }

    found = places(node.input, schema.inputs), places(node.output, schema.outputs)
    generates = not found[0] and node.op_type not in ("Cast", "Constant")
    return nothing if generates else found  # the type of what is generated has its own defaults


def _guarded(
    graph: onnx.GraphProto,
    constants: Mapping[str, onnx.TensorProto],
    ranges: Mapping[str, Range],
    types: Mapping[str, int],
) -> set[str]:
    """Names of nodes that float16 cannot hold."""
    unfit = {name for name, seen in ranges.items() if not _holds(_finite_peak(seen))}
    unfit |= {n for n, t in constants.items() if types.get(n) == _FLOAT and not _holds(_peak(t))}
    for node in graph.node:
        if not all(_holds(peak) for peak in _attribute_peaks(node)):
            unfit.update(node.output)
    return {node.name for node in graph.node if unfit.intersection((*node.input, *node.output))}


def _holds(peak: float) -> bool:
    """Whether float16 holds values up to `peak`, and more than zeros of them."""
    return peak == 0 or SMALLEST < peak <= GUARD


def _finite_peak(seen: Range) -> float:
    """A low end of -infinity is a mask, which float16 holds as well: the high end decides."""
    return abs(seen.high) if seen.low == -np.inf else seen.peak


def _attribute_peaks(node: onnx.NodeProto) -> Iterator[float]:
    """The largest values of the float constants that a Constant or ConstantOfShape holds."""
    for attribute in node.attribute:
        if attribute.t.data_type == _FLOAT:
            yield _peak(attribute.t)
        elif attribute.name in ("value_float", "value_floats"):
            yield max((abs(value) for value in (attribute.f, *attribute.floats)), default=0.0)


def _peak(tensor: onnx.TensorProto) -> float:
    array = numpy_helper.to_array(tensor)
    return float(np.abs(array[array != -np.inf]).max(initial=0.0))


def _indexing(graph: onnx.GraphProto, types: Mapping[str, int]) -> set[str]:
    """Names of nodes whose floats only become integers: sizes above 2048 need more bits."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in _reads(node):
            readers.setdefault(name, []).append(node)
    outputs = {value.name for value in graph.output}
    found: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type not in _ARITHMETIC or outputs.intersection(node.output):
            continue
        floats = [name for name in node.output if types.get(name) == _FLOAT]
        ends = [reader for name in floats for reader in readers.get(name, [])]
        if ends and all(reader.name in found or _to_integer(reader) for reader in ends):
            found.add(node.name)
    return found


def _to_integer(node: onnx.NodeProto) -> bool:
    return node.op_type == "Cast" and helper.get_node_attr_value(node, "to") in _INTEGERS


def _reads(node: onnx.NodeProto) -> list[str]:
    """The tensors that a node reads, by name; for If and Loop also those that their bodies name."""
    inner = [name for body in subgraphs(node) for n in all_nodes(body) for name in n.input]
    inner += [value.name for body in subgraphs(node) for value in body.output]
    return [*node.input, *inner]


def _retype(node: onnx.NodeProto, attribute: onnx.AttributeProto) -> None:
    """Attributes that name or hold float32: Cast's `to`, `dtype`, the value of a Constant."""
    if attribute.name in ("to", "dtype", "output_dtype") and attribute.i == _FLOAT:
        attribute.i = _HALF
    elif attribute.HasField("t") and attribute.t.data_type == _FLOAT:
        array = numpy_helper.to_array(attribute.t).astype(np.float16)
        attribute.t.CopyFrom(numpy_helper.from_array(array, attribute.t.name))
    elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
        floats = attribute.f if attribute.name == "value_float" else list(attribute.floats)
        tensor = numpy_helper.from_array(np.array(floats, np.float16))
        attribute.CopyFrom(helper.make_attribute("value", tensor))


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node a name of its own: the guard and its report go by names."""
    taken: set[str] = set()
    for number, node in enumerate(graph.node):
        if not node.name or node.name in taken:
            node.name = f"{node.op_type}_{number}"
        taken.add(node.name)
