"""Count what each node of a graph computes and moves; `roofline` says how long that takes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from deploykit.core.precision import FLOATS
from deploykit.onnx_graph.flops import ELEMENTWISE, GATHERS, flops
from deploykit.onnx_graph.graph import Graph, dtype_name
from deploykit.onnx_graph.kinds import OTHER, kind_of, steps_of
from deploykit.onnx_graph.node_precision import CONVERTS, DESCRIBES, VIEWS, NodePrecision
from deploykit.onnx_graph.shapes import TensorShapes, elements_of, fixed_shapes
from deploykit.onnx_graph.skeleton import reads, stored_bytes, subgraphs

_FUSED = ELEMENTWISE | {"QuantizeLinear", "Cast", "BatchNormalization"}
_BEFORE = frozenset(("Conv", "Gemm"))
_AFTER = "Relu Clip LeakyRelu Sigmoid Tanh HardSigmoid Add BatchNormalization QuantizeLinear"
_THROUGH = VIEWS | {"DequantizeLinear"}  # the half of a Q/DQ pair that a kernel reads through


@dataclass(frozen=True)
class Fusion:
    """Which nodes run inside the kernel of the node that makes their input.

    `after`: operators that do. `before`: those of the kernels that take them in; None for any.
    """

    after: frozenset[str]
    before: frozenset[str] | None = None


COMPILED = Fusion(_FUSED)  # TensorRT: any chain of elementwise nodes
INTERPRETED = Fusion(frozenset(_AFTER.split()), _BEFORE)  # ONNX Runtime on a CPU


@dataclass(frozen=True)
class NodeCost:
    """What a node does in one call. None: not known, as its shapes or its operator are not.

    `precision`: the type it computes in, None for one that computes nothing in floating point or
    INT8. `read_bytes`, `write_bytes`: activations that go through memory. An elementwise node is
    taken to run inside the node before it where nothing else reads the tensor between: what both
    move counts at the first.
    `weight_bytes`: constants as they are stored, scales left out; `weights`: their elements.
    `kind`: of `kinds.KINDS`. `steps`: how often it runs one after the other, for a recurrent node.
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
    def known(self) -> bool:
        return None not in (self.flops, self.read_bytes, self.write_bytes)

    @property
    def traffic_bytes(self) -> int:
        """Everything read and written; of a table that is looked up, the rows only."""
        written = self.write_bytes or 0
        weights = min(self.weight_bytes, written if self.operator in GATHERS else math.inf)
        return (self.read_bytes or 0) + int(weights) + written

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Mix:
    """How a graph divides by precision: nodes, operations, weights (elements) and their bytes.

    Nodes and operations count under the type computed in, weights under the type stored. `unknown`
    names the nodes whose operations are not known and in no figure.
    """

    nodes: Mapping[str, int]
    flops: Mapping[str, int]
    weights: Mapping[str, int]
    weight_bytes: Mapping[str, int]
    unknown: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Each figure by precision, and its share of the whole under `shares`."""
        figures = {k: dict(sorted(v.items())) for k, v in vars(self).items() if k != "unknown"}
        shares = {k: _shares(v) for k, v in figures.items()}
        return {**figures, "shares": shares, "unknown": list(self.unknown)}


def node_costs(graph: Graph, sizes: Mapping[str, int]) -> tuple[NodeCost, ...]:
    """One for each node of the main graph, in order; functions are inlined first.

    `sizes`: of dynamic axes by name, {"N": 8}; an axis not named is 1. Nodes without a
    name get theirs from `name_nodes`. A node that reads constants only costs nothing, as builders
    fold it. Raises BadInput for a size below 1.
    """
    return costs_of(fixed_shapes(graph, sizes))


def costs_of(known: TensorShapes, fusion: Fusion = COMPILED) -> tuple[NodeCost, ...]:
    """`node_costs` of a graph whose shapes are inferred."""
    return _Costing(known, fusion).costs()


def unknown(costs: Iterable[NodeCost]) -> tuple[str, ...]:
    """Names of the nodes that a prediction leaves out, in part or as a whole."""
    return tuple(cost.name for cost in costs if not cost.known)


def mix(graph: Graph, sizes: Mapping[str, int]) -> Mix:
    """Nodes, operations and weights of the main graph by precision; for `sizes` see `node_costs`.

    A weight that several nodes share counts once. Raises BadInput for a size below 1.
    """
    costing = _Costing(fixed_shapes(graph, sizes))
    costs = costing.costs()
    nodes, operations = Counter[str](), Counter[str]()
    for cost in costs:
        if cost.precision is not None:
            nodes[cost.precision] += 1
            operations[cost.precision] += cost.flops or 0
    weights, weight_bytes = Counter[str](), Counter[str]()
    for name in {name for node in costing.nodes for name in costing.weights(node)}:
        tensor = costing.known.constants[name]
        kind = dtype_name(tensor.data_type)
        weights[kind] += elements_of(tensor)
        weight_bytes[kind] += stored_bytes(tensor)
    lost = tuple(cost.name for cost in costs if cost.flops is None)
    return Mix(nodes, operations, weights, weight_bytes, lost)


class _Costing:
    """The maker and the readers of each tensor, views and dequantized twins seen through."""

    def __init__(self, known: TensorShapes, fusion: Fusion = COMPILED) -> None:
        self.known = known
        self.fusion = fusion
        self.nodes = known.nodes
        types = {name: dtype_name(kind) for name, kind in known.types.items()}
        self.makers = {name: node for node in self.nodes for name in node.output if name}
        self.roots = self._roots()
        on_cpu = fusion is INTERPRETED
        self.kinds = NodePrecision(self.nodes, types, known.constants, on_cpu=on_cpu)
        self.alone = self._left_over() if on_cpu else set()
        self.inside: set[str] = set()  # tensors that never reach memory
        self.firsts: dict[int, int] = {}  # node inside another's kernel -> the first node of it
        self._fuse()

    def costs(self) -> tuple[NodeCost, ...]:
        traffic = [self._traffic(node) for node in self.nodes]
        for number, first in self.firsts.items():
            moved = [_total(parts) for parts in zip(traffic[first], traffic[number], strict=True)]
            if None not in moved:
                traffic[first], traffic[number] = (moved[0], moved[1]), (0, 0)
        parts = zip(self.nodes, traffic, strict=True)
        return tuple(self._cost(node, *moved) for node, moved in parts)

    def weights(self, node: onnx.NodeProto) -> list[str]:
        """The constants behind its inputs, if it is no link of the chain from them to a user."""
        if self._folded(node) or node.op_type in CONVERTS:
            return []
        names = {root for name in node.input for root in self.roots.get(name, ())}
        return [name for name in names if elements_of(self.known.constants[name])]

    def _left_over(self) -> set[str]:
        """What DequantizeLinear nodes make for nodes in floating point: they run in every call."""
        floats = (node for node in self.nodes if self.kinds.precision(node) in FLOATS)
        read = {name for node in floats for name in node.input if name in self.makers}
        return {name for name in read if self.makers[name].op_type == "DequantizeLinear"}

    def _roots(self) -> dict[str, tuple[str, ...]]:
        """The constants that a tensor is made of, for tensors that are made of nothing else."""
        roots: dict[str, tuple[str, ...]] = {name: (name,) for name in self.known.constants}
        for node in self.nodes:
            names = [name for name in node.input if name]
            if names and all(name in roots for name in names) and not any(subgraphs(node)):
                values = names[:1] if node.op_type in CONVERTS else names  # scales are no weights
                found = tuple(dict.fromkeys(root for name in values for root in roots[name]))
                roots |= {name: found for name in node.output if name}
        return roots

    def _folded(self, node: onnx.NodeProto) -> bool:
        return all(name in self.roots for name in node.output if name)

    def _source(self, name: str) -> str:
        while self._passes(name):
            name = self.makers[name].input[0]
        return name

    def _passes(self, name: str) -> bool:
        """Whether it is another name, or the dequantized twin, of what its maker reads."""
        maker = self.makers.get(name)
        return maker is not None and maker.op_type in _THROUGH and name not in self.alone

    def _fuse(self) -> None:
        """Let elementwise nodes run where their input is made, if nothing else reads it."""
        readers: defaultdict[str, list[int]] = defaultdict(list)
        for number, node in enumerate(self.nodes):
            if node.op_type not in _THROUGH | DESCRIBES:
                for name in {self._source(name) for name in reads(node)}:
                    readers[name].append(number)
        outputs = {self._source(name) for name in self.known.outputs}
        before: dict[int, tuple[str, int]] = {}  # its last computed input: others wait in memory
        for number, node in enumerate(self.nodes):
            for name in node.output:
                alone = name not in outputs and name not in self.roots and len(readers[name]) == 1
                if alone and self.nodes[readers[name][0]].op_type in self.fusion.after:
                    before[readers[name][0]] = name, number
        for number, (name, maker) in sorted(before.items()):
            first = self.firsts.get(maker, maker)
            if self._joins(self.nodes[first], self.nodes[number]):
                self.inside.add(name)
                self.firsts[number] = first

    def _joins(self, first: onnx.NodeProto, node: onnx.NodeProto) -> bool:
        if self.fusion.before is None:
            return True
        rounds = node.op_type == "QuantizeLinear" and self.kinds.precision(first) in FLOATS
        return first.op_type in self.fusion.before and not rounds

    def _cost(self, node: onnx.NodeProto, read: int | None, written: int | None) -> NodeCost:
        weights = self.weights(node)
        return NodeCost(
            name=node.name,
            operator=node.op_type,
            precision=self.kinds.precision(node),
            flops=0 if self._folded(node) else flops(node, self.known),
            read_bytes=read,
            weight_bytes=sum(stored_bytes(self.known.constants[name]) for name in weights),
            write_bytes=written,
            weights=sum(elements_of(self.known.constants[name]) for name in weights),
            kind=kind_of(node, self.known, self.roots),
            steps=steps_of(node, self.known),
        )

    def _traffic(self, node: onnx.NodeProto) -> tuple[int | None, int | None]:
        if not self.alone.isdisjoint(node.output):
            return self.known.bytes(node.input[0]), self.known.bytes(node.output[0])
        if self._folded(node) or node.op_type in _THROUGH | DESCRIBES:
            return 0, 0
        sources = {self._source(name) for name in reads(node) if name not in self.roots}
        read = [self.known.bytes(name) for name in sources if name not in self.inside]
        made = [name for name in node.output if name and name not in self.inside]
        return _total(read), _total([self.known.bytes(name) for name in made])


def _total(parts: Sequence[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _shares(parts: Mapping[str, int]) -> dict[str, float]:
    whole = sum(parts.values())
    return {name: part / whole for name, part in parts.items()} if whole else {}
