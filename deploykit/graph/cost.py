"""Count what each node of a graph computes and moves; `node_time` says how long that takes.

The shape and type of every tensor are inferred first, with dynamic axes at given sizes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from deploykit.core.errors import BadInput
from deploykit.core.json_value import Record
from deploykit.core.precision import FLOATS, of_dtype
from deploykit.core.tensors import axis_name
from deploykit.graph.edit import evaluate_node
from deploykit.graph.graph import CONVERTS, DESCRIBES, GENERATES, VIEWS, Graph, NodePrecision
from deploykit.graph.parse import SMALL_BYTES, dtype_name, subgraphs
from deploykit.graph.storage import (
    STANDARD_DOMAINS,
    infer_shapes,
    reads,
    stored_bytes,
    stored_elements,
)

# Nodes of one kind cost the same per operation, or per byte, in every model, so that a few
# measurements suffice. These kinds are limited by their operations:
CONVOLUTION, POINTWISE, DEPTHWISE, STEM = "convolution", "convolution 1x1", "depthwise", "stem"
PRODUCT, ATTENTION, RECURRENT = "matrix product", "product of activations", "recurrent"
# and these by their bytes:
SIMPLE, FUNCTION, NORMALISATION = "elementwise", "function", "normalisation"
POOLING, MOVEMENT, OTHER = "pooling", "movement", "other"

ARITHMETIC = (CONVOLUTION, POINTWISE, DEPTHWISE, STEM, PRODUCT, ATTENTION, RECURRENT)
KINDS = (*ARITHMETIC, SIMPLE, FUNCTION, NORMALISATION, POOLING, MOVEMENT, OTHER)

# A multiply-add counts 2; a bias, where the sums begin, costs nothing. A convolution does 2 *
# outputs * (input channels / groups) * kernel of them, a matrix product 2 * M * N * K. So
# ResNet-18 on 224x224 has 3.6e9, where torchvision states 1.81e9 multiply-adds.


def _convolution_flops(node: onnx.NodeProto, known: TensorShapes) -> int:
    weight = known.shapes[node.input[3 if node.op_type.startswith("QLinear") else 1]]
    transposed = node.op_type == "ConvTranspose"  # it multiplies each input, not each output
    places = known.elements(node.input[0] if transposed else node.output[0])
    return 2 * places * math.prod(weight[1:])


def _product_flops(node: onnx.NodeProto, known: TensorShapes) -> int:
    transposed = any(a.name == "transA" and a.i for a in node.attribute)
    inner = known.shapes[node.input[0]][-2 if transposed else -1]
    return 2 * known.elements(node.output[0]) * inner


def _recurrent_flops(node: onnx.NodeProto, known: TensorShapes) -> int:
    """Count both matrices of every gate, direction and step; pointwise work is small."""
    x, w, r = (known.shapes[name] for name in node.input[:3])
    return 2 * x[0] * x[1] * (math.prod(w) + math.prod(r))


def _pooling_flops(node: onnx.NodeProto, known: TensorShapes) -> int:
    kernel = next((a.ints for a in node.attribute if a.name == "kernel_shape"), ())
    return known.elements(node.output[0]) * math.prod(kernel)


GATHERS = frozenset(("Gather", "GatherElements", "GatherND"))
# Kind, its operations, operators. The operations are those of one output element, by definition
# (softmax takes the largest, subtracts, exponentiates, adds up and divides), or a formula; None:
# not known.
_ROWS: tuple[tuple[str, int | Callable[..., int] | None, str], ...] = (
    (CONVOLUTION, _convolution_flops, "Conv ConvInteger ConvTranspose FusedConv QLinearConv"),
    (PRODUCT, _product_flops, "Gemm MatMul MatMulInteger QLinearMatMul QGemm FusedGemm"),
    (RECURRENT, _recurrent_flops, "LSTM DynamicQuantizeLSTM GRU RNN"),
    (
        FUNCTION,
        1,
        """Acos Acosh Asin Asinh Atan Atanh Celu Cos Cosh Elu Erf Exp Gelu HardSwish Log Mish Pow
        Selu Sigmoid Sin Sinh Softplus Softsign Tan Tanh""",
    ),
    (
        SIMPLE,
        1,
        """Abs Add And BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Clip Div Dropout
        Equal Floor Greater GreaterOrEqual HardSigmoid IsInf IsNaN LeakyRelu Less LessOrEqual Max
        Mean Min Mod Mul Neg Not Or PRelu Reciprocal Relu Round Sign Sqrt Sub Sum ThresholdedRelu
        Where Xor""",
    ),
    (SIMPLE, 0, "Cast QuantizeLinear DequantizeLinear"),
    (NORMALISATION, 5, "Softmax LogSoftmax"),
    (NORMALISATION, 2, "BatchNormalization"),
    (NORMALISATION, 7, "InstanceNormalization LayerNormalization GroupNormalization LRN"),
    (NORMALISATION, 3, "LpNormalization"),
    (NORMALISATION, None, "SimplifiedLayerNormalization SkipLayerNormalization"),
    (POOLING, _pooling_flops, "MaxPool AveragePool LpPool"),
    (POOLING, 8, "Resize Upsample"),  # a bilinear mean of four
    (
        POOLING,
        lambda node, known: known.elements(node.input[0]),
        """ReduceMax ReduceMean ReduceMin ReduceSum ReduceProd ReduceL1 ReduceL2 ReduceSumSquare
        CumSum ReduceLogSum ReduceLogSumExp ArgMax ArgMin GlobalAveragePool GlobalMaxPool
        GlobalLpPool""",
    ),
    (
        MOVEMENT,
        0,
        """Transpose Concat Slice Split Pad Expand Tile DepthToSpace SpaceToDepth ScatterElements
        ScatterND EyeLike Trilu OneHot ReverseSequence Compress Gather GatherElements GatherND""",
    ),
    (OTHER, 0, " ".join(VIEWS | DESCRIBES | GENERATES | {"DynamicQuantizeLinear"})),
    (OTHER, 8, "GridSample"),
)
_OPERATORS = {name: (kind, count) for kind, count, names in _ROWS for name in names.split()}
_STEM_CHANNELS = 4  # an image's channels are too few to fill a vector


def flops(node: onnx.NodeProto, known: TensorShapes) -> int | None:
    """Return the operations of one call; None for an operator without a known formula."""
    if any(subgraphs(node)):
        return None  # the data decide how often bodies of If, Loop and Scan run
    _, count = _OPERATORS.get(node.op_type, (OTHER, None))
    try:
        if callable(count):
            return count(node, known)
        if count is None or node.domain not in STANDARD_DOMAINS:
            return None
        return count * known.elements(node.output[0]) if count else 0
    except LookupError:  # a shape is not known
        return None


def kind_of(node: onnx.NodeProto, known: TensorShapes, constants: Collection[str]) -> str:
    """Return one of KINDS. `constants`: names of tensors that depend on constants only."""
    kind, _ = _OPERATORS.get(node.op_type, (OTHER, None))
    if kind == PRODUCT:
        matrices = [name for name in node.input if len(known.shapes.get(name, ())) >= 2]
        return PRODUCT if any(name in constants for name in matrices) else ATTENTION
    if kind != CONVOLUTION:
        return kind
    weight = known.shapes.get(node.input[3 if node.op_type.startswith("QLinear") else 1])
    groups = next((a.i for a in node.attribute if a.name == "group"), 1)
    if weight is None or len(weight) < 2:
        return CONVOLUTION
    if groups > 1 and weight[1] == 1:
        return DEPTHWISE
    if weight[1] <= _STEM_CHANNELS:
        return STEM
    return POINTWISE if math.prod(weight[2:]) == 1 else CONVOLUTION


_THROUGH = VIEWS | {"DequantizeLinear"}  # a kernel reads through these


# These run inside the kernel of the node that makes their input: TensorRT fuses any chain of
# elementwise nodes, ONNX Runtime on a CPU few of them, and only with the operators of `_TAKE_IN`
_POINTWISE = {name for name, (kind, _) in _OPERATORS.items() if kind in (SIMPLE, FUNCTION)}
_FUSED = frozenset(_POINTWISE - {"DequantizeLinear"} | {"BatchNormalization"})
_AFTER = "Relu Clip LeakyRelu Sigmoid Tanh HardSigmoid Add BatchNormalization QuantizeLinear"
_FUSED_ON_CPU, _TAKE_IN = frozenset(_AFTER.split()), ("Conv", "Gemm")


@dataclass(frozen=True)
class NodeCost(Record):
    """The cost of a node in one call; None: its shapes or its operator are not known.

    `precision`: the type it computes in, None for one that computes nothing in floating point or
    INT8. `read_bytes`, `write_bytes`: activations that go through memory. An elementwise node is
    assumed to run inside the node before it if nothing else reads the tensor between; the first
    node then has the traffic of both.
    `weight_bytes`: constants as they are stored, scales left out; `weights`: their elements.
    `kind`: one of `KINDS`. `steps`: how often it runs one after the other, for a recurrent node.
    """

    name: str
    operator: str
    precision: str | None
    flops: int | None
    read_bytes: int | None
    weight_bytes: int
    write_bytes: int | None
    weights: int = 0
    kind: str = OTHER
    steps: int = 1

    @property
    def traffic_bytes(self) -> int:
        """All bytes read and written; a table lookup counts only the rows that are read."""
        written = self.write_bytes or 0
        weights = min(self.weight_bytes, written if self.operator in GATHERS else math.inf)
        return (self.read_bytes or 0) + int(weights) + written


def node_costs(graph: Graph, sizes: Mapping[str, int]) -> tuple[NodeCost, ...]:
    """Return the cost of each node of the main graph, in order; functions are inlined first.

    `sizes`: sizes of dynamic axes by name, {"N": 8}; other axes are 1. `name_nodes` names the nodes
    that have no name. A node that reads only constants costs nothing, as builders fold it.
    Raises BadInput for a size below 1.
    """
    return costs_of(fixed_shapes(graph, sizes))


def costs_of(known: TensorShapes, *, on_cpu: bool = False) -> tuple[NodeCost, ...]:
    """Return the `node_costs` of a graph whose shapes are already inferred.

    `on_cpu`: nodes are fused as ONNX Runtime does on a CPU, else as TensorRT does.
    """
    return _Costing(known, on_cpu=on_cpu).costs()


def mix(graph: Graph, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the main graph's "nodes", "flops", "weights" (elements) and "weight_bytes".

    Each by precision: nodes and operations under the type that they compute in, weights, of which
    a shared one counts once, under the type stored. "shares": of the whole. "unknown": the nodes
    whose operations are not known and therefore not counted. `sizes`: as in `node_costs`.
    """
    costing = _Costing(fixed_shapes(graph, sizes))
    costs = costing.costs()
    figures = {key: Counter[str]() for key in ("nodes", "flops", "weights", "weight_bytes")}
    for cost in costs:
        if cost.precision is not None:
            figures["nodes"][cost.precision] += 1
            figures["flops"][cost.precision] += cost.flops or 0
    for name in {name for node in costing.nodes for name in costing.weights(node)}:
        tensor = costing.known.constants[name]
        kind = dtype_name(tensor.data_type)
        figures["weights"][kind] += elements_of(tensor)
        figures["weight_bytes"][kind] += stored_bytes(tensor)
    shares = {
        key: {name: part / count.total() for name, part in count.items() if count.total()}
        for key, count in figures.items()
    }
    lost = [cost.name for cost in costs if cost.flops is None]
    return {
        **{k: dict(sorted(v.items())) for k, v in figures.items()},
        "shares": shares,
        "unknown": lost,
    }


class _Costing:
    """The nodes that write and read each tensor; views and DequantizeLinear are skipped."""

    def __init__(self, known: TensorShapes, *, on_cpu: bool = False) -> None:
        self.known, self.on_cpu = known, on_cpu
        self.nodes = known.nodes
        self.makers = {name: node for node in self.nodes for name in node.output if name}
        types = {name: dtype_name(kind) for name, kind in known.types.items()}
        self.kinds = NodePrecision(self.nodes, types, known.constants, on_cpu=on_cpu)
        # each tensor that depends on constants only -> these constants
        self.roots: dict[str, tuple[str, ...]] = {name: (name,) for name in known.constants}
        self.alone: set[str] = set()  # results of DequantizeLinear nodes that run by themselves
        for node in self.nodes:
            names = [name for name in node.input if name]
            if names and all(name in self.roots for name in names) and not any(subgraphs(node)):
                values = names[:1] if node.op_type in CONVERTS else names  # a scale is not a weight
                roots = tuple(dict.fromkeys(root for name in values for root in self.roots[name]))
                self.roots |= {name: roots for name in node.output if name}
            if on_cpu and self.kinds.precision(node) in FLOATS:
                made = {name: self.makers[name].op_type for name in names if name in self.makers}
                self.alone |= {name for name in made if made[name] == "DequantizeLinear"}
        self.inside: set[str] = set()  # these tensors never reach memory
        self.firsts: dict[int, int] = {}  # a fused node -> the first node of its kernel
        self.sources = [self._sources(node) for node in self.nodes]
        self._fuse()

    def costs(self) -> tuple[NodeCost, ...]:
        traffic = [self._traffic(*each) for each in zip(self.nodes, self.sources, strict=True)]
        for number, first in self.firsts.items():
            moved = [_total(parts) for parts in zip(traffic[first], traffic[number], strict=True)]
            if None not in moved:
                traffic[first], traffic[number] = (moved[0], moved[1]), (0, 0)
        found = []
        for node, (read, written) in zip(self.nodes, traffic, strict=True):
            weights = [self.known.constants[name] for name in self.weights(node)]
            kind = kind_of(node, self.known, self.roots)
            x = self.known.shapes.get(node.input[0]) if kind == RECURRENT else None
            cost = NodeCost(
                name=node.name,
                operator=node.op_type,
                precision=self.kinds.precision(node),
                flops=0 if self._folded(node) else flops(node, self.known),
                read_bytes=read,
                weight_bytes=sum(map(stored_bytes, weights)),
                write_bytes=written,
                weights=sum(map(elements_of, weights)),
                kind=kind,
                steps=max(1, x[0]) if x else 1,
            )
            found.append(cost)
        return tuple(found)

    def weights(self, node: onnx.NodeProto) -> list[str]:
        """Return the constants behind a node's inputs; none if it only folds or converts them."""
        if self._folded(node) or node.op_type in CONVERTS:
            return []
        names = {root for name in node.input for root in self.roots.get(name, ())}
        return [name for name in names if elements_of(self.known.constants[name])]

    def _folded(self, node: onnx.NodeProto) -> bool:
        return all(name in self.roots for name in node.output if name)

    def _source(self, name: str) -> str:
        """Return the tensor that `name` is a view, or the dequantized form, of."""
        while name not in self.alone:
            maker = self.makers.get(name)
            if maker is None or maker.op_type not in _THROUGH:
                break
            name = maker.input[0]
        return name

    def _sources(self, node: onnx.NodeProto) -> set[str]:
        """Return the tensors that a kernel for `node` reads."""
        if node.op_type in _THROUGH | DESCRIBES:
            return set()
        return {self._source(name) for name in reads(node)}

    def _fuse(self) -> None:
        """Fuse elementwise nodes with the node that makes their input, if nothing else reads it."""
        made = {name: number for number, node in enumerate(self.nodes) for name in node.output}
        readers = Counter(name for names in self.sources for name in names)
        kept = {self._source(name) for name in self.known.outputs} | self.roots.keys()
        fused = _FUSED_ON_CPU if self.on_cpu else _FUSED
        for number, node in enumerate(self.nodes):
            names = self.sources[number] - kept if node.op_type in fused else set[str]()
            alone = [(made[name], name) for name in names if readers[name] == 1 and name in made]
            if not alone:
                continue
            maker, name = max(alone)  # the input computed last: others are in memory
            place = self.firsts.get(maker, maker)
            first = self.nodes[place]
            if self.on_cpu:
                rounds = node.op_type == "QuantizeLinear" and self.kinds.precision(first) in FLOATS
                if first.op_type not in _TAKE_IN or rounds:
                    continue
            self.inside.add(name)
            self.firsts[number] = place

    def _traffic(self, node: onnx.NodeProto, sources: set[str]) -> tuple[int | None, int | None]:
        if not self.alone.isdisjoint(node.output):
            return self.known.bytes(node.input[0]), self.known.bytes(node.output[0])
        if self._folded(node) or node.op_type in _THROUGH | DESCRIBES:
            return 0, 0
        names = [name for name in sources - self.inside if name not in self.roots]
        read = [self.known.bytes(name) for name in names]
        made = [name for name in node.output if name and name not in self.inside]
        return _total(read), _total([self.known.bytes(name) for name in made])


def _total(parts: Sequence[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


# The roofline is from Williams, Waterman and Patterson, CACM 52(4), 2009. `quantize --to auto`
# ranks candidates by it, `plan` predicts latencies, and a report compares a model with it.

COMPUTE, MEMORY, LAUNCH = "compute", "memory", "launch"


@dataclass(frozen=True)
class Curve(Record):
    """Measured seconds of one node at a few amounts of work, in rising order.

    The curve is a straight line in logarithms between points, and proportional outside of them.
    """

    work: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, work: float) -> float:
        inside = min(max(work, self.work[0]), self.work[-1])
        logarithm = np.interp(math.log(inside), np.log(self.work), np.log(self.seconds))
        return math.exp(logarithm) * work / inside


@dataclass(frozen=True)
class Ceilings(Record):
    """A target's peaks: operations/s by "fp32", "fp16", "bf16", "int8", "fp8"; bytes/s.

    A precision without a peak is assumed to run at "fp32". `launch_s`: seconds to start a kernel.
    `curves`: measured nodes by precision and kind, "fp32 convolution"; they replace peak and
    launch, and only the weights' traffic is then added. Raises BadInput without a peak of fp32 or
    of the memory.
    """

    ops_per_s: Mapping[str, float]
    bytes_per_s: float
    launch_s: float = 0.0
    curves: Mapping[str, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.ops_per_s.get("fp32", 0.0) > 0 and self.bytes_per_s > 0):
            raise BadInput(
                "a predicted time needs the peaks of fp32 and of the memory bandwidth, above 0",
                hint="a profile has both: peak_ops_per_s and bandwidth_bytes_per_s",
            )

    def peak(self, dtype: str | None) -> float:
        """Return the operations/s of a graph's `dtype`."""
        return self.ops_per_s.get(_precision(dtype)) or self.ops_per_s["fp32"]

    def curve(self, cost: NodeCost) -> Curve | None:
        names = (f"{_precision(cost.precision)} {cost.kind}", f"fp32 {cost.kind}", f"fp32 {OTHER}")
        return next((self.curves[name] for name in names if name in self.curves), None)


@dataclass(frozen=True)
class NodeTime(Record):
    """Seconds of a node: for its arithmetic, for its traffic, and to start it."""

    compute_s: float
    memory_s: float
    launch_s: float

    @property
    def seconds(self) -> float:
        return self.launch_s + max(self.compute_s, self.memory_s)


def node_time(cost: NodeCost, ceilings: Ceilings) -> NodeTime:
    """Predict a node's time. A node inside another's kernel moves no bytes of its own.

    Without curves, each step of a recurrent node takes a launch, as it waits for the one before.
    PyTorch ran 2 bidirectional layers of 128 steps in 0.70 ms on an H200: 0.28 ms are predicted.
    """
    flops, traffic = cost.flops or 0, cost.traffic_bytes
    launch_s = ceilings.launch_s if traffic else 0.0
    curve = ceilings.curve(cost)
    if curve is None:
        compute_s = flops / ceilings.peak(cost.precision)
        return NodeTime(compute_s, traffic / ceilings.bytes_per_s, cost.steps * launch_s)
    if not traffic:
        return NodeTime(0.0, 0.0, 0.0)
    weights_s = cost.weight_bytes / ceilings.bytes_per_s
    if cost.kind in ARITHMETIC:
        measured_s = cost.steps * curve.at(flops / cost.steps)
        return NodeTime(max(0.0, measured_s - launch_s), weights_s, launch_s)
    measured_s = curve.at(traffic)
    return NodeTime(0.0, max(0.0, measured_s - launch_s), launch_s)


def predicted_s(costs: Iterable[NodeCost], ceilings: Ceilings) -> float:
    """Predict the seconds of one call: each node at the roofline, one after the other.

    With peaks alone this is a lower bound, for comparisons: it leaves out the start of kernels,
    partly filled tiles, caches, conversions between layouts and nodes whose cost is not known.
    """
    return math.fsum(node_time(cost, ceilings).seconds for cost in costs)


def savings_s(
    before: Iterable[NodeCost], after: Iterable[NodeCost], ceilings: Ceilings
) -> dict[str, float]:
    """Return the seconds that each node of `after` saves over its namesake in `before`."""
    old = {cost.name: node_time(cost, ceilings).seconds for cost in before}
    new = {cost.name: node_time(cost, ceilings).seconds for cost in after}
    return {name: old[name] - new[name] for name in new if name in old}


def _precision(dtype: str | None) -> str:
    known = of_dtype(dtype or "float32")
    return known.name if known else "fp32"


def peak_bytes(known: TensorShapes, scale: Callable[[str], float] = lambda _name: 1.0) -> int:
    """Return the peak bytes of activations if the nodes run in the order of the file.

    A tensor lives from its maker to its last reader; inputs and outputs live through the whole
    call, views share their source's memory. `scale(name)`: the factor by which another type changes
    a tensor's size. Tensors of unknown size, and those inside If and Loop, are not counted.
    """
    source: dict[str, str] = {}  # a view -> the tensor whose memory it shares
    first, last = dict[str, int](), dict[str, int]()  # the nodes that make and read a tensor
    for number, node in enumerate(known.nodes):
        last |= {source.get(name, name): number for name in reads(node)}
        for name in node.output:
            if node.op_type in VIEWS and node.input and node.input[0] not in known.constants:
                source[name] = source.get(node.input[0], node.input[0])
            elif name:
                first[name] = number
    end = len(known.nodes)
    last |= {source.get(name, name): end for name in known.outputs}
    change = [0] * (end + 2)  # of the bytes that are alive, before each node
    for name in (first.keys() | last.keys()) - known.constants.keys():
        size, begin = int((known.bytes(name) or 0) * scale(name)), first.get(name, 0)
        change[begin] += size
        change[(last.get(name, begin) if name in first else end) + 1] -= size
    return max(accumulate(change))


_ROUNDS = 64  # inference needs one for each shape that depends on an inferred one
_ARITHMETIC = """
    Add And Cast Ceil Concat Div Equal Flatten Floor Gather Greater Identity Less Max Min Mod Mul
    Neg Not Or Pow ReduceProd Reshape ScatterND Slice Sqrt Squeeze Sub Transpose Unsqueeze Where"""
_ON_SHAPES = frozenset(_ARITHMETIC.split())
_GENERATORS = frozenset(("ConstantOfShape", "Expand", "Range"))
_LARGEST_SHAPE = 4096  # elements: paddings and indices are evaluated as shapes are


@dataclass(frozen=True)
class TensorShapes:
    """The named nodes of the main graph, functions inlined, with the known shapes and types.

    `shapes` holds only completely known shapes. `constants`: initializers and Constant nodes, for
    their `dims` and type; the data of large ones stay in the source model.
    """

    nodes: Sequence[onnx.NodeProto]
    outputs: Sequence[str]
    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, int]
    constants: Mapping[str, onnx.TensorProto]

    def elements(self, name: str) -> int:
        """Raises KeyError if the shape is not known."""
        return math.prod(self.shapes[name])

    def bytes(self, name: str) -> int | None:
        """Return the size in memory, packed; None if the shape or the type is not known."""
        shape, kind = self.shapes.get(name), self.types.get(name)
        if shape is None or kind is None:
            return None
        return stored_bytes(onnx.TensorProto(data_type=kind, dims=shape))


def fixed_shapes(graph: Graph, sizes: Mapping[str, int]) -> TensorShapes:
    """Infer shapes with each dynamic axis at its size; an axis that `sizes` lacks is 1.

    An axis without a name has the name that `specs` gives: `N` at place 0, else `INPUT_PLACE`.
    Raises BadInput for a size below 1.
    """
    for axis, size in sizes.items():
        if size < 1:
            raise BadInput(f"axis {axis} cannot be of size {size}: 1 or more is needed")
    fixed = onnx.ModelProto()
    fixed.CopyFrom(graph.skeleton)
    _fix(fixed.graph, sizes)
    inferred = infer_shapes(fixed, data_prop=True).graph
    nodes = list(inferred.node)
    constants = dict(graph.initializers)
    for node in nodes:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.HasField("t"):
                constants[node.output[0]] = attribute.t
    shapes = {name: tuple(tensor.dims) for name, tensor in constants.items()}
    types = {name: tensor.data_type for name, tensor in constants.items()}
    made = {name for node in nodes for name in node.output if name}
    for _ in range(_ROUNDS):
        _read(inferred, shapes, types)
        if made <= shapes.keys() or not _compute_shapes(fixed, shapes):
            break
        inferred = infer_shapes(fixed, data_prop=True).graph
    return TensorShapes(
        nodes, [value.name for value in fixed.graph.output], shapes, types, constants
    )


def _read(
    graph: onnx.GraphProto, shapes: dict[str, tuple[int, ...]], types: dict[str, int]
) -> None:
    """Add the results of inference to `shapes` and `types`."""
    for tensor in graph.initializer:
        shapes[tensor.name], types[tensor.name] = tuple(tensor.dims), tensor.data_type
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        if kind.elem_type:
            types[value.name] = kind.elem_type
        axes = kind.shape.dim
        sizes = tuple(axis.dim_value if axis.HasField("dim_value") else -1 for axis in axes)
        if kind.HasField("shape") and min(sizes, default=0) >= 0:  # inferred: also below 0
            shapes[value.name] = sizes


def _compute_shapes(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Replace arithmetic on shapes by its result, in place; return whether there was any."""
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    kept = []
    for node in graph.node:
        try:
            with np.errstate(all="ignore"):
                values = _evaluate(node, model, constants, shapes)
        except Exception:  # noqa: BLE001 - the evaluator raises anything
            values = None  # the shapes of a damaged graph stay unknown
        if values is None or values.size > _LARGEST_SHAPE:
            kept.append(node)
            continue
        constants[node.output[0]] = numpy_helper.from_array(values, node.output[0])
        graph.initializer.append(constants[node.output[0]])
    found = len(kept) < len(graph.node)
    del graph.node[:]
    graph.node.extend(kept)
    return found


def _evaluate(
    node: onnx.NodeProto,
    model: onnx.ModelProto,
    constants: Mapping[str, onnx.TensorProto],
    shapes: Mapping[str, tuple[int, ...]],
) -> np.ndarray | None:
    """Return a node's output for constants, or a tensor's shape; None if that is not known."""
    names = [name for name in node.input if name]
    if node.op_type == "Shape" and names[0] in shapes:
        feeds = {names[0]: np.broadcast_to(np.float32(0), shapes[names[0]])}
    elif all(name in constants for name in names) and _small(node, constants):
        feeds = {name: numpy_helper.to_array(constants[name]) for name in names}
    else:
        return None
    return evaluate_node(node, model, feeds)


def _fix(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> None:
    """Fix the dynamic axes of all inputs, in place."""
    known: dict[str, int] = {}
    for value in graph.input:
        for place, axis in enumerate(value.type.tensor_type.shape.dim):
            if axis.dim_value < 0 or not axis.HasField("dim_value"):
                name = axis_name(value.name, place, axis.dim_param)
                axis.dim_value = known[name] = sizes.get(name, 1)
    for value in (*graph.output, *graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param in known:
                axis.dim_value = known[axis.dim_param]
            elif axis.dim_value < 0 or not axis.HasField("dim_value"):
                axis.Clear()  # inference finds the value of an expression such as N*49


def _small(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Return whether a node is arithmetic whose result cannot be large."""
    if node.op_type == "Constant":
        return all(stored_bytes(a.t) <= SMALL_BYTES for a in node.attribute if a.HasField("t"))
    if node.op_type not in _GENERATORS:
        return node.op_type in _ON_SHAPES
    values = numpy_helper.to_array(constants[node.input[-1 if node.op_type == "Expand" else 0]])
    if node.op_type == "Range":
        limit, step = (numpy_helper.to_array(constants[name]).item() for name in node.input[1:3])
        return bool(step) and abs(limit - values.item()) <= abs(step) * _LARGEST_SHAPE
    return math.prod(int(size) for size in values.flat) <= _LARGEST_SHAPE


def elements_of(tensor: onnx.TensorProto) -> int:
    """Return the elements that count as weights: 0 for strings, booleans and integers of shapes."""
    integers = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.STRING)
    return 0 if tensor.data_type in integers else stored_elements(tensor)
