"""Find the first node at which two graphs differ.

Pairs of tensors are compared in the order in which they are computed, in chunks: the activations of
a whole model need not fit into memory. Errors are defined as in `parity`.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
from onnx import TensorProto, helper

from deploykit.core.json_value import Record
from deploykit.engines.engine import Arrays
from deploykit.engines.onnxruntime.engine import open_as_written
from deploykit.evaluation.parity import Tally
from deploykit.graph.graph import Graph
from deploykit.graph.parse import dtype_name
from deploykit.graph.storage import RUNTIME_DOMAINS

# The writers of deploykit keep the name of a tensor, or add a suffix to it. Two graphs from
# different exporters share no names: no pair is found.

_TWIN = re.compile(r"(?<=.)_(?:float16|bfloat16|dequantized)_*$")
# Types that numpy lacks are returned as float32, which holds each of their values.
_SHOWN_AS_FLOAT = frozenset(("bfloat16", "float8e4m3fn", "float8e5m2"))
# INT8 is left out: one step more or less is expected, and its dequantized twin shows its size.
_COMPARED = _SHOWN_AS_FLOAT | {"bool", "int32", "int64", "float16", "float32", "float64"}
# Nodes that give a tensor another type, and nodes into which others are merged.
_CONVERTS = frozenset(("Cast", "QuantizeLinear", "DequantizeLinear", "Identity"))
_MERGED = frozenset(("Conv", "ConvTranspose", "Gemm"))


def expose(graph: Graph, names: Sequence[str]) -> tuple[Graph, list[str]]:
    """Return a copy that also has these tensors as outputs, and their names there, in order.

    Their types must be among those that `shared` compares; one that numpy lacks is shown as
    float32.
    """
    types, shown = graph.element_types, list[str]()
    there = {value.name for value in graph.model.graph.output}
    probed = onnx.ModelProto()
    probed.CopyFrom(graph.model)
    for name in names:
        output, kind = name, types[name]
        as_float = dtype_name(kind) in _SHOWN_AS_FLOAT
        if as_float:
            output, kind = f"{name}/deploykit.shown", TensorProto.FLOAT
        shown.append(output)
        if output not in there:
            there.add(output)
            probed.graph.output.append(helper.make_tensor_value_info(output, kind, None))
            if as_float:
                cast = helper.make_node("Cast", [name], [output], name=output, to=kind)
                probed.graph.node.append(cast)
    return Graph(probed, graph.path), shown


def shared(a: Graph, b: Graph) -> dict[str, tuple[str, onnx.NodeProto]]:
    """Return for each tensor of `a` that both main graphs compute its twin in `b`, and its node.

    They are in the order of `a`, and have one name, or names that differ by what a transform adds:
    NAME_float16, NAME_bfloat16, NAME_dequantized. A name that another operator computes in `b` is a
    coincidence and left out. The result is empty where the graphs share no names, as after two
    exports.
    """
    twins, pairs = _makers(b), {}
    # the first of a graph counts: a node computes it, a Cast copies it
    by_stem = {_TWIN.sub("", name): name for name in reversed(twins)}
    for name, node in _makers(a).items():
        other = name if name in twins else by_stem.get(_TWIN.sub("", name))
        if other is not None and _same_work(node, twins[other]):
            pairs[name] = other, node
    return pairs


def _makers(graph: Graph) -> dict[str, onnx.NodeProto]:
    """Return the node that computes each comparable tensor, in graph order, without constants."""
    types = graph.element_types
    return {
        name: node
        for node in graph.model.graph.node
        for name in node.output
        if node.op_type != "Constant" and dtype_name(types.get(name, 0)) in _COMPARED
    }


def _same_work(a: onnx.NodeProto, b: onnx.NodeProto) -> bool:
    kinds = {a.op_type, b.op_type}
    fused = a.domain.startswith(RUNTIME_DOMAINS) or b.domain.startswith(RUNTIME_DOMAINS)
    named = bool(a.name) and a.name == b.name
    return len(kinds) == 1 or named or fused or bool(kinds & (_CONVERTS | _MERGED))


CHUNK = 64  # tensors of each graph that are in memory at once
# float16 cannot hold the -3.4e38 of an attention mask; the value that replaces it masks as well.
_MASK, _HALF_MASK = -1e30, -65504.0


@dataclass(frozen=True)
class Divergence(Record):
    """The first tensor whose error is above the bound, and the node that makes it.

    `error`: infinite where there is a `problem`. `before`: the error of the tensor compared just
    before it; 0 for the first. `batch`: the size at which it was seen.
    """

    node: str
    operator: str
    tensor: str
    error: float
    before: float
    batch: int
    problem: str
    max_error: float

    shown: ClassVar[tuple[str, ...]] = ("text",)

    @property
    def text(self) -> str:
        """Return the divergence as one sentence."""
        name = f"'{self.node}' ({self.operator})"
        name = name if self.node else f"the {self.operator} of '{self.tensor}'"
        what = self.problem or f"error {self.error:.3g} is above {self.max_error:g}"
        before = f"; {self.before:.3g} just before it" if self.before > 0 else ""
        return f"the first node that differs is {name}: {what} in '{self.tensor}'{before}"


def first_divergence(
    a: Graph, b: Graph, feeds: Arrays, max_error: float, chunk: int = CHUNK
) -> Divergence | None:
    """Find the first tensor whose error exceeds `max_error`.

    `a` is the reference. A pair of tensors whose shapes differ is left out. Returns None where
    nothing differs, or the graphs share no names. Stops at the chunk with the answer.
    """
    pairs, before = shared(a, b), 0.0
    names = list(pairs)
    for first in range(0, len(names), chunk):
        part = names[first : first + chunk]
        left, right = _values(a, part, feeds), _values(b, [pairs[n][0] for n in part], feeds)
        for name, x, y in zip(part, left, right, strict=True):
            if x.shape != y.shape:
                continue
            error, problem = tensor_error(x, y)
            if error > max_error:
                array, node = next(iter(feeds.values()), None), pairs[name][1]
                batch = int(array.shape[0]) if array is not None and array.ndim else 1
                made = (node.name, node.op_type, name)
                return Divergence(*made, error, before, batch, problem, max_error)
            before = error
    return None


def _values(graph: Graph, names: Sequence[str], feeds: Arrays) -> list[np.ndarray]:
    """Run a graph unoptimised, and return these tensors."""
    tapped, shown = expose(graph, names)
    with tempfile.TemporaryDirectory() as folder:
        path = tapped.save(Path(folder) / "tapped.onnx").path
        with open_as_written(path) as engine:
            values = engine(feeds)
            return [values[name] for name in shown]


def tensor_error(a: np.ndarray, b: np.ndarray) -> tuple[float, str]:
    """Return the error as `ParityRow.error` defines it, and "", or infinity and the reason.

    It is max |a-b| / max |a| over the finite values, for arrays of one shape. Values below -1e30
    are masks: any value that masks in float16 equals them.
    """
    if a.dtype.kind not in "biuO" or b.dtype.kind not in "biuO":
        a, b = a.astype(np.float64), b.astype(np.float64)
        masked = (a <= _MASK) & (b <= _HALF_MASK)
        a, b = a[~masked], b[~masked]
    tally = Tally(a)
    tally.add(a, b)
    broken = tally.differing or not tally.places_match
    return (math.inf, tally.problem) if broken else (tally.error, "")
