"""Cast a float32 ONNX graph to half precision, float16 or bfloat16, and run it as a GPU would.

Nodes whose activations come near 65504, the largest float16, stay float32: a CPU would not show the
overflow, a GPU would. bfloat16 has the range of float32 and needs no guard. Inputs and outputs keep
their types; pairs of INT8 or FP8 may be in the graph.

A tensor keeps its name where it is float32; its half twin is `NAME_float16` (`NAME_bfloat16`). So
bodies of If and Loop, which stay float32, still find the outer tensors that they name, and there
are casts only between the two types.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, numpy_helper

from deploykit.core import precision
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.extras import installed
from deploykit.core.runtime import RUNTIMES
from deploykit.engines.engine import Engine, OpenEngine, load
from deploykit.graph.edit import Editor, raise_opset, replace
from deploykit.graph.graph import Graph, opset
from deploykit.graph.parse import subgraphs
from deploykit.graph.preflight import NO_BFLOAT16
from deploykit.graph.storage import inner_reads, reads, stored_elements
from deploykit.quantization.qdq import Range, box_nodes

# Half precision would round positions, lengths and sizes: float16 holds integers up to 2048,
# bfloat16 up to 256. Values computed from integers and constants alone are followed until they meet
# activations; from there on they are as coarse as these.

_FLOATS = frozenset((TensorProto.FLOAT, TensorProto.DOUBLE))
# uint8 and int8 are exact in either half type: bytes of an image are no indices
_INTEGERS = frozenset(
    getattr(TensorProto, name) for name in ("INT16", "INT32", "INT64", "UINT16", "UINT32", "UINT64")
)
_COMPARISONS = frozenset(("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"))
_ARITHMETIC = _COMPARISONS | {
    *("Add", "Sub", "Mul", "Div", "Mod", "Pow", "Neg", "Abs", "Sign", "Floor", "Ceil", "Round"),
    *("Sqrt", "Reciprocal", "Exp", "Log", "Sin", "Cos", "Min", "Max", "Clip", "Where", "Cast"),
    *("Identity", "Sum", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand"),
    *("Tile", "Slice", "Gather", "GatherND", "GatherElements", "Concat", "Split", "Pad", "Trilu"),
    *("ReduceSum", "ReduceMax", "ReduceMin", "Range", "ConstantOfShape"),
    *("MatMul", "Einsum"),  # of positions and frequencies
}
_EXACT = 2.0**24  # the integers that float32 itself holds
_MOST = 1 << 20  # elements; a larger constant is a weight
# operator -> the float inputs that are coordinates or sizes
_ENDS = {"Range": (0, 1, 2), "Resize": (1, 2), "GridSample": (1,)}


def index_nodes(
    editor: Editor, types: Mapping[str, int], rounded: Callable[[np.ndarray], np.ndarray]
) -> set[str]:
    """Names of nodes that compute indices or lengths in float32. `rounded`: to the half type."""
    nodes = list(editor.graph.node)
    indices, constants = _integral_constants(editor, types, rounded), set(editor.constants)
    stay: set[str] = set()
    for node in nodes:
        floats = [name for name in node.input if types.get(name) in _FLOATS]
        known = node.op_type == "Range" or all(n in indices or n in constants for n in floats)
        makes = node.op_type == "Cast" and types.get(node.input[0]) in _INTEGERS
        counts = makes or node.op_type == "Range" or not indices.isdisjoint(floats)
        # rows of a table that the caller's integers choose
        embedding = node.op_type.startswith("Gather") and node.input[1] not in constants
        if node.op_type in _COMPARISONS and counts:
            stay.add(node.name)
        elif known and node.op_type in _ARITHMETIC and (counts or not embedding):
            if counts:
                stay.add(node.name)
            made = {name for name in node.output if types.get(name) in _FLOATS}
            (indices if counts else constants).update(made)
    stay |= _sources(editor.graph, types, stay)
    used = {name for node in nodes if node.name in stay for name in node.input}
    used |= {value.name for value in editor.graph.output}
    # a cast straight to the half type rounds no more than one by way of float32
    return stay - {n.name for n in nodes if n.op_type == "Cast" and used.isdisjoint(n.output)}


def _sources(graph: onnx.GraphProto, types: Mapping[str, int], stay: set[str]) -> set[str]:
    """Names of nodes whose floats all end in integers, in coordinates or in a node of `stay`."""
    ends: dict[str, list[bool]] = {value.name: [False] for value in graph.output}
    found: set[str] = set()
    for node in reversed(graph.node):
        floats = [name for name in node.output if types.get(name) in _FLOATS]
        read = [end for name in floats for end in ends.get(name, [])]
        inner = node.op_type in _ARITHMETIC and bool(read) and all(read)
        if inner:
            found.add(node.name)
        places = _ENDS.get(node.op_type, ())
        integer = node.op_type == "Cast" and helper.get_node_attr_value(node, "to") in _INTEGERS
        for place, name in enumerate(node.input):
            end = inner or node.name in stay or integer or place in places
            ends.setdefault(name, []).append(end)
        for name in inner_reads(node):
            ends.setdefault(name, []).append(False)
    return found


def _integral_constants(
    editor: Editor, types: Mapping[str, int], rounded: Callable[[np.ndarray], np.ndarray]
) -> set[str]:
    """Constants of integers that the half type does not hold, such as a table of positions."""
    found = set()
    for name in _floats(editor, types):
        if stored_elements(editor.constants[name]) <= _MOST:
            values = editor.array(name)
            whole = bool((np.abs(values) <= _EXACT).all() and (values == np.rint(values)).all())
            if whole and not np.array_equal(rounded(values), values):
                found.add(name)
    return found


# Constants that mask attention, -1e9 or -3.4e38, are clamped to what float16 holds: exp() of either
# is 0. With -infinity instead, a row that is masked as a whole would become NaN.

MASK = -1e30  # smaller values can only be masks
_CONSTANT_MASK = -1e8  # where they are constants that end in a Softmax
_BOUNDS = frozenset(("Clip", "Max", "Min"))  # a constant there bounds values
_SUMS = frozenset(("Add", "Sub", "Sum"))
# A mask ends at these operators: as zeros, or as a boolean.
_ENDS_MASKS = {
    *("Softmax", "LogSoftmax", "Exp", "Sigmoid", "ReduceLogSumExp", "ReduceMax", "ReduceMin"),
    *("Attention", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsInf", "IsNaN"),
    *("ArgMax", "ArgMin", "TopK"),
}


def _store_constants(editor: Editor, types: dict[str, int]) -> None:
    """Turn nodes that hold float32 into constants; a ConstantOfShape expands one."""
    outputs = {value.name for value in editor.graph.output}
    nodes = []
    for node in editor.graph.node:
        values = _held(node)
        if values is None or (node.op_type == "Constant" and node.output[0] in outputs):
            nodes.append(node)
        elif node.op_type == "Constant":
            name = node.output[0]
            editor.constants[name] = numpy_helper.from_array(values, name)
        else:
            name = editor.store(f"{node.output[0]}_value", values.reshape(()))
            types[name] = TensorProto.FLOAT
            nodes.append(helper.make_node("Expand", [name, *node.input], node.output, node.name))
    replace(editor.graph.node, nodes)


def _held(node: onnx.NodeProto) -> np.ndarray | None:
    """Return the float32 constant of a Constant or ConstantOfShape."""
    if node.op_type in ("Constant", "ConstantOfShape"):
        for each in node.attribute:
            if each.name == "value" and each.t.data_type == TensorProto.FLOAT:
                return numpy_helper.to_array(each.t)
            if each.name in ("value_float", "value_floats"):
                return np.array(helper.get_attribute_value(each), np.float32)
    return None


def _clamp_masks(editor: Editor, types: Mapping[str, int]) -> set[str]:
    """Raise constants below -1e8 to what float16 holds, and return the tensors that they reach.

    Nothing is changed where a bound of Clip is such a constant, or a mask reaches an output.
    """

    def masks(values: np.ndarray) -> np.ndarray:
        return np.asarray(np.isfinite(values) & (values < _CONSTANT_MASK))

    stored = [name for name in _floats(editor, types) if masks(editor.array(name)).any()]
    reached = set(stored)
    for node in editor.graph.node:
        if not reached.isdisjoint(reads(node)):
            if node.op_type in _BOUNDS and reached.intersection(node.input[1:]):
                return set()
            if node.op_type not in _ENDS_MASKS:
                reached.update(node.output)
    if any(value.name in reached for value in editor.graph.output):
        return set()
    for name in stored:
        values = editor.array(name)
        clamped = np.where(masks(values), np.float32(-GUARD), values)
        editor.constants[name] = numpy_helper.from_array(clamped, name)
    return reached


def _clamp_to(editor: Editor, types: Mapping[str, int], most: float) -> None:
    """Replace finite constants beyond +-`most` by it."""
    for name in _floats(editor, types):
        values = editor.array(name)
        if (beyond := np.isfinite(values) & (np.abs(values) > most)).any():
            clamped = np.where(beyond, np.copysign(np.float32(most), values), values)
            editor.constants[name] = numpy_helper.from_array(clamped, name)


def _floats(editor: Editor, types: Mapping[str, int]) -> list[str]:
    return [name for name in editor.constants if types.get(name) == TensorProto.FLOAT]


# A constant that float16 does not hold keeps its node in float32. That is not enough where the
# result is such a value as well: as float16, 0 + 1e-10 is 0 again, and -1e5 in a masked row is
# -infinity. So all nodes stay float32 from there to the one that needs the value.

_NEEDS_SMALL = frozenset(("Log", "Reciprocal", "Sqrt", "Pow", "Div"))
_MOVED = "Reshape Flatten Squeeze Unsqueeze Transpose Expand Tile Slice Gather Concat Split Cast"
_COMPUTED = "Identity Neg Abs Mul Div Where Clip Max Min ReduceSum ReduceMean ReduceMax ReduceMin"
_PASSES = frozenset([*_MOVED.split(), *_COMPUTED.split()])
_PASSES_LARGE = _PASSES - _BOUNDS | {"Add", "Sub", "ScatterND", "ScatterElements"}


def nodes_of_lost_values(
    editor: Editor, peaks: Mapping[str, float], ranges: Mapping[str, Range]
) -> set[str]:
    """Return the names of nodes between a value that float16 loses and the one that needs it.

    `peaks`: the largest magnitude in each constant.
    """
    nodes = [node for node in editor.graph.node if not any(True for _ in subgraphs(node))]
    small = {name: peak for name, peak in peaks.items() if 0 < peak < 1 / GUARD}
    small |= {name: seen.low for name, seen in ranges.items() if 0 < seen.low < 1 / GUARD}
    gone = [name for name, value in small.items() if value <= SMALLEST]
    large = [name for name, peak in peaks.items() if GUARD < peak < np.inf]
    shares = [n.output[0] for n in nodes if n.op_type in ("Softmax", "Sigmoid")]
    stay = _between(nodes, gone, _PASSES | {"Sqrt", "Pow"}, _NEEDS_SMALL)
    stay |= _between(nodes, small, _PASSES, {"Log", "Reciprocal", "Div"})  # 1 / small is too large
    stay |= _between(nodes, shares, _PASSES, {"Log"})
    inverse = [
        node.output[0]
        for node in nodes
        if node.name in stay
        and (
            node.op_type in ("Reciprocal", "Pow")
            or (node.op_type == "Div" and node.input[0] in peaks)
        )
    ]
    products = {"Mul", "Div"}
    stay |= _between(nodes, inverse, _PASSES - products, products)
    return stay | _between(nodes, large, _PASSES_LARGE, _ENDS_MASKS)


def _between(
    nodes: Sequence[onnx.NodeProto],
    lost: Collection[str],
    passes: Collection[str],
    needs: Collection[str],
) -> set[str]:
    """Return the names of the nodes from where a lost value is made to where it is needed.

    `lost`: tensors. `passes`, `needs`: operators. A sum passes only what is lost itself: plus
    another tensor it is no longer small.
    """
    first, reached = set(lost), set(lost)
    for node in nodes:
        source = first if node.op_type in _SUMS - set(passes) else reached
        if node.op_type in _SUMS.union(passes) and not source.isdisjoint(node.input):
            reached.update(node.output)
    stay, wanted = set[str](), set[str]()
    for node in reversed(nodes):
        makes = not wanted.isdisjoint(node.output)
        names = reached.intersection(node.input) if makes or node.op_type in needs else set()
        if makes or names:
            stay.add(node.name)
            wanted |= names
    return stay


LARGEST = precision.BY_NAME["fp16"].max_stored
# Calibration sees only a sample: values that a model meets later may be twice as large.
GUARD = LARGEST / 2
SMALLEST = 2.0**-25  # smaller values are rounded to 0
_LARGEST_BFLOAT16 = 0xFF * 2.0**120  # just below float32's

_FLOAT = TensorProto.FLOAT
_NAMES_A_TYPE = ("to", "dtype", "output_dtype")  # attributes
_PAIR = ("QuantizeLinear", "DequantizeLinear")
PAIR_OPSET = 19  # the first whose pairs take half scales
# A scale may be off by what INT8 itself rounds away: half a step of 127.
_SCALE_ERROR = 1 / 254
# Sums over a whole axis, coordinates in pixels and edges in Hertz: 11 bits are too few whatever the
# range. MeanVarianceNormalization is defined by other operators, with constants of float32.
_FLOAT32_OPERATORS = frozenset(
    ("CumSum", "RoiAlign", "GridSample", "MelWeightMatrix", "MeanVarianceNormalization")
)


@dataclass(frozen=True)
class _Half:
    """A type of 16 bits: its names in messages and in schemas, and ONNX's number.

    `largest`: its largest number, or for float16 the half of it that the guard allows.
    """

    name: str
    kind: int
    largest: float

    def stored(self, values: np.ndarray) -> np.ndarray:
        """float32 values rounded to nearest, ties to even."""
        with np.errstate(over="ignore"):
            return values.astype(helper.tensor_dtype_to_np_dtype(self.kind))

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Return the values in float32, rounded to this type."""
        return self.stored(values).astype(np.float32)

    def holds_scale(self, scale: np.ndarray) -> bool:
        """Return whether the error of a scale in this type is below what INT8 rounds away."""
        off = np.abs(self.rounded(scale) - scale)
        return scale.dtype == np.float32 and bool((off <= _SCALE_ERROR * np.abs(scale)).all())


_HALVES = {
    each.name: _Half(
        each.dtype,
        TensorProto.DataType.Value(each.onnx_type),
        GUARD if each.guarded else _LARGEST_BFLOAT16,
    )
    for each in precision.HALVES
}


def lacking_in(to: str, runtime: str) -> frozenset[str]:
    """Return the operators that `runtime` has in float32 and not in `to`."""
    return NO_BFLOAT16 if (to, runtime) == ("bf16", "tensorrt") else frozenset()


def to_half(
    source: Graph,
    to: str = "fp16",
    ranges: Mapping[str, Range] | None = None,
    *,
    keep_float32: Collection[str] = (),
    runtime: str = "tensorrt",
) -> tuple[Graph, tuple[str, ...]]:
    """Return the graph in `to`, "fp16" or "bf16", and the nodes that the guard kept in float32.

    In float16 a node stays float32 if a tensor or weight that it reads or writes came above half of
    65504, or would become 0 as a whole (an epsilon of 1e-12); without `ranges` only weights are
    looked at. A Q/DQ node stays float32 if its scale loses more than an INT8 step does. So do,
    without being named, nodes in `keep_float32`, operators that ONNX does not define for the type
    or that `runtime` does not take in it, bodies of If and Loop, arithmetic of indices and lengths,
    and nodes that decode boxes. For
    bfloat16 the newest definition counts: TensorRT takes a bfloat16 Conv in any opset, ONNX defines
    it from 22 on. A model with pairs is raised to opset 19 for their scales. `source` is left as it
    is. Raises BadInput if it computes nothing in float32, something in a half type already,
    integers that each call scales (`quantize_dynamic`), or cannot be raised.
    """
    half = _HALVES[to]
    editor = Editor(source)
    raise_opset(editor.model, precision.BY_NAME[to].min_opset)
    types = dict(source.element_types)
    _store_constants(editor, types)
    lacking = lacking_in(to, runtime)
    for other in _HALVES.values():
        if other.kind in types.values():
            raise BadInput(
                f"the model holds {other.name} already", hint="quantize the float32 model"
            )
    if any(node.op_type.endswith("Integer") for node in editor.graph.node):
        raise BadInput(
            "the model multiplies integers that each call scales", hint="quantize the float32 model"
        )
    if not any(types.get(name) == _FLOAT for node in editor.graph.node for name in node.output):
        raise BadInput(
            f"the model computes nothing in float32: there is nothing to cast to {half.name}"
        )
    if any(node.op_type in _PAIR for node in editor.graph.node):
        raise_opset(editor.model, PAIR_OPSET)
    guarded = {  # Q/DQ nodes one of whose scales the half type cannot hold well
        node.name
        for node in editor.graph.node
        if node.op_type in _PAIR
        and node.input[1] in editor.constants
        and not half.holds_scale(editor.array(node.input[1]))
    }
    ranges, stay = ranges or {}, set(keep_float32)
    if precision.BY_NAME[to].guarded:
        masked = _clamp_masks(editor, types)
        peaks = {name: _largest(editor.array(name)) for name in _floats(editor, types)}
        guarded |= _names_to_guard(editor.graph, peaks, ranges, masked)
        stay |= nodes_of_lost_values(editor, peaks, ranges)
    else:
        _clamp_to(editor, types, half.largest)
    stay |= guarded | index_nodes(editor, types, half.rounded) | box_nodes(editor.graph)
    kept = tuple(node.name for node in editor.graph.node if node.name in guarded)
    writer = _Writer(editor, types, half, ranges)
    for node in editor.graph.node:
        inputs, outputs = _half_places(node, editor.model, types, half, lacking)
        if node.name in stay or not (inputs or outputs):
            writer.add_float32(node)
        else:
            writer.add_half(node, inputs, outputs)
    return writer.finish(), kept


class _Writer:
    """Emits nodes in order, and a Cast just before the first one that needs the other type."""

    def __init__(
        self, editor: Editor, types: Mapping[str, int], half: _Half, ranges: Mapping[str, Range]
    ) -> None:
        self.editor = editor
        self.types = types
        self.half = half
        self.ranges = ranges
        self.suffix = f"_{half.name}"
        while any(name.endswith(self.suffix) for name in types):
            self.suffix += "_"
        self.nodes: list[onnx.NodeProto] = []
        self.ready = editor.inputs | set(editor.constants)

    def add_float32(self, node: onnx.NodeProto) -> None:
        for name in reads(node):
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
            if attribute.name in _NAMES_A_TYPE and attribute.i == _FLOAT:
                attribute.i = self.half.kind
        self.nodes.append(node)
        self.ready.update(node.output)

    def finish(self) -> Graph:
        for value in self.editor.graph.output:
            self._need_float(value.name)
        self._write_value_info()
        return self.editor.finish(self.nodes)

    def _half(self, name: str) -> str:
        twin = name + self.suffix
        if twin in self.ready:
            return twin
        if name in self.editor.constants:
            self.editor.store(twin, self.half.stored(self.editor.array(name)))
        else:
            self._cast(self._clamped(name), twin, self.half.kind)
        self.ready.add(twin)
        return twin

    def _clamped(self, name: str) -> str:
        """Return the tensor, clamped if it holds a mask that the cast would make infinite."""
        seen, most = self.ranges.get(name), np.float32(self.half.largest)
        if seen is None or not most < seen.peak < np.inf:
            return name
        ends = [
            self.editor.store(f"{name}_{key}", end)
            for key, end in (("least", -most), ("most", most))
        ]
        clamped = self.editor.fresh(f"{name}_clamped")
        self.nodes.append(self.editor.node("Clip", [name, *ends], clamped))
        return clamped

    def _need_float(self, name: str) -> None:
        if name not in self.ready and name + self.suffix in self.ready:
            self._cast(name + self.suffix, name, _FLOAT)
            self.ready.add(name)

    def _cast(self, source: str, target: str, to: int) -> None:
        self.nodes.append(self.editor.node("Cast", [source], target, to=to))

    def _write_value_info(self) -> None:
        """Write the types and shapes of the half tensors, from those of their twins."""
        graph = self.editor.graph
        known = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
        for name in [name for node in self.nodes for name in node.output]:
            source = known.get(name.removesuffix(self.suffix))
            if name in self.types or name in known or source is None:
                continue
            value = graph.value_info.add()
            value.CopyFrom(source)
            value.name = name
            value.type.tensor_type.elem_type = self.half.kind


def _half_places(
    node: onnx.NodeProto,
    model: onnx.ModelProto,
    types: Mapping[str, int],
    half: _Half,
    lacking: frozenset[str],
) -> tuple[set[int], set[int]]:
    """The float32 inputs and outputs of `node`, by place, that its schema allows to be half."""
    newest = half.kind != TensorProto.FLOAT16
    version = defs.onnx_opset_version() if newest and node.op_type not in _PAIR else opset(model)
    if (
        node.op_type in _FLOAT32_OPERATORS | lacking
        or node.domain not in ("", "ai.onnx")
        or any(subgraphs(node))
        or any(name and name not in types for name in (*node.input, *node.output))
        or (node.op_type == "Cast" and helper.get_node_attr_value(node, "to") != _FLOAT)
        or not defs.has(node.op_type, version, "")  # ONNX Runtime's optimizer wrote it
    ):
        return set(), set()
    schema = defs.get_schema(node.op_type, version, "")
    name = f"tensor({half.name})"
    fit = {c.type_param_str for c in schema.type_constraints if name in c.allowed_type_strs}

    def places(names: Iterable[str], formal: Sequence[defs.OpSchema.FormalParameter]) -> set[int]:
        return {
            place
            for place, name in enumerate(names)
            if types.get(name) == _FLOAT
            and formal[min(place, len(formal) - 1)].type_str in fit  # the last one may repeat
        }

    inputs, outputs = places(node.input, schema.inputs), places(node.output, schema.outputs)
    # the type of what is generated has its own defaults
    return (inputs, outputs) if inputs or node.op_type == "Cast" else (set(), set())


def _names_to_guard(
    graph: onnx.GraphProto,
    peaks: Mapping[str, float],
    ranges: Mapping[str, Range],
    masked: Collection[str],
) -> set[str]:
    """Return the names of nodes that float16 cannot hold.

    The low end of a range below -1e30, or of a tensor in `masked`, is a mask.
    """
    unfit = {name for name, peak in peaks.items() if not _holds(peak)}
    for name, seen in ranges.items():
        masks = seen.low < MASK or (name in masked and seen.low < _CONSTANT_MASK / 2)
        peak = (abs(seen.high) if seen.high > MASK else 0.0) if masks else seen.peak
        if not _holds(peak):
            unfit.add(name)
    return {node.name for node in graph.node if unfit.intersection((*node.input, *node.output))}


def _holds(peak: float) -> bool:
    """Return whether float16 holds values up to `peak`, and does not round all of them to 0."""
    return peak == 0 or SMALLEST < peak <= GUARD


def _largest(array: np.ndarray) -> float:
    """Return the largest absolute value, -infinity left out: it masks."""
    low, high = float(array.min(initial=0.0)), float(array.max(initial=0.0))
    if low == -np.inf:
        low = float(array.min(initial=0.0, where=array != -np.inf))
    return max(high, -low) if low == low else low  # NaN comes back as NaN


# A GPU's matrix units take half inputs and add up in float32: each result is rounded to its type,
# and overflows to infinity. ONNX Runtime's own CPU kernels for float16 hide both: what they lack
# they compute in float32, through a whole chain of nodes without rounding. For bfloat16 it has
# hardly any. So on a CPU a graph is run in float32, with every half tensor rounded.

_HALF_KINDS = frozenset(each.kind for each in _HALVES.values())


def simulate(source: Graph) -> Graph:
    """Return the graph with Casts to the half type and back after each node that makes it.

    Inputs and outputs keep their names and types, and so do half tensors between, which hold the
    rounded values. Nodes with bodies (If, Loop, Scan) stay as they are. ONNX Runtime 1.20 and newer
    keep these pairs of casts at every level of optimisation; run it at ORT_DISABLE_ALL all the
    same, since a fused node rounds less often. `source` is left as it is, and returned where it
    has no half tensor.
    """
    types = source.element_types
    if _HALF_KINDS.isdisjoint(types.values()):
        return source
    editor = Editor(source)
    nodes: list[onnx.NodeProto] = []
    twins: dict[str, str] = {}  # a half tensor -> its twin in float32, which all nodes read

    def twin(name: str) -> str:
        if types.get(name) not in _HALF_KINDS:
            return name
        if name not in twins and name in editor.constants:
            twins[name] = editor.store(f"{name}_float32", editor.array(name).astype(np.float32))
        elif name not in twins:
            twins[name] = editor.fresh(f"{name}_float32")
            nodes.append(editor.node("Cast", [name], twins[name], to=_FLOAT))
        return twins[name]

    for node in editor.graph.node:
        casts = []
        if not any(subgraphs(node)):
            node.input[:] = [twin(name) for name in node.input]
            for place, name in enumerate(node.output):
                if types.get(name) in _HALF_KINDS:
                    node.output[place] = editor.fresh(f"{name}_unrounded")
                    casts.append(editor.node("Cast", [node.output[place]], name, to=types[name]))
            for attribute in node.attribute:
                _widen(attribute)
        nodes += [node, *casts]
    return editor.finish(nodes)


def _widen(attribute: onnx.AttributeProto) -> None:
    """Replace half types in attributes: Cast's `to`, `dtype`, the value of a Constant."""
    if attribute.name in _NAMES_A_TYPE and attribute.i in _HALF_KINDS:
        attribute.i = _FLOAT
    elif attribute.HasField("t") and attribute.t.data_type in _HALF_KINDS:
        values = numpy_helper.to_array(attribute.t).astype(np.float32)
        attribute.t.CopyFrom(numpy_helper.from_array(values, attribute.t.name))


def runs_graphs(runtime: str) -> bool:
    """Return whether `runtime` opens ONNX files on this machine's CPU."""
    found = RUNTIMES[runtime]
    return "onnx" in found.opens and all(map(installed, found.modules))


def open_graph(runtime: str, graph: Graph, folder: Path) -> Engine:
    """Open a graph in its own runtime if that opens graphs here, else as `open_rounded` does."""
    if not runs_graphs(runtime):
        return open_rounded(graph, folder)
    open_engine: OpenEngine = resolve_name(RUNTIMES[runtime].engine)
    return open_engine(Artefact(graph.path), "cpu", None, False)


def open_rounded(graph: Graph, folder: Path) -> Engine:
    """Open a graph in ONNX Runtime, its half tensors rounded to their type as on a GPU."""
    from deploykit.engines.onnxruntime.engine import open_as_written

    rounded = simulate(graph)
    if rounded is graph:
        return load(graph.path, "cpu")
    return open_as_written(rounded.save(folder / "rounded.onnx", temporary=True).path)
