"""Find the first node at which two graphs differ.

Pairs of tensors are compared in the order in which they are computed, in chunks: the activations of
a whole model need not fit into memory. Errors are defined as in `parity`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.json_value import Record
from deploykit.measure.evaluate.parity import check_bound, exact_noun, relative
from deploykit.onnx_graph import probes
from deploykit.onnx_graph.graph import Graph
from deploykit.runtimes.engine import Arrays
from deploykit.runtimes.onnxruntime.engine import open_as_written

CHUNK = 64
# An attention mask: float16 cannot hold -3.4e38, and what replaces it masks as well.
_MASK, _HALF_MASK = -1e30, -65504.0

Run = Callable[[Arrays], Sequence[np.ndarray]]  # feeds -> the tensors that were asked for, in order
Tap = Callable[[Sequence[str]], Run]  # names of tensors -> a way to run the graph that returns them


@dataclass(frozen=True)
class Rise(Record):
    """The error before a node, and after it."""

    node: str
    operator: str
    tensor: str
    before: float
    error: float


@dataclass(frozen=True)
class Divergence(Record):
    """The first tensor whose error is above the bound, and the node that makes it.

    `error`: infinite where there is a `problem`. `before`: of the tensor compared just before it; 0
    for the first. `steepest`: where the error rose most, up to and with this node: another node
    where an error built up little by little. `batch`: size at which it was seen. `compared`:
    tensors compared up to this one.
    """

    node: str
    operator: str
    tensor: str
    error: float
    before: float
    batch: int
    problem: str
    steepest: Rise
    compared: int
    max_error: float

    shown: ClassVar[tuple[str, ...]] = ("text",)

    @property
    def text(self) -> str:
        """One sentence."""
        what = self.problem or f"error {self.error:.3g} is above {self.max_error:g}"
        parts = [f"the first node that differs is {_name_of(self)}: {what} in '{self.tensor}'"]
        if self.before > 0:
            parts.append(f"{self.before:.3g} just before it")
        if self.steepest.tensor != self.tensor:
            rise = self.steepest
            parts.append(
                f"the largest rise was at {_name_of(rise)}, {rise.before:.3g} to {rise.error:.3g}"
            )
        return "; ".join(parts)


def first_divergence(
    a: Tap,
    b: Tap,
    pairs: Sequence[probes.Pair],
    feeds_list: Sequence[Arrays],
    *,
    max_error: float,
    chunk: int = CHUNK,
) -> Divergence | None:
    """The first of `pairs` whose error exceeds `max_error` on any of the feeds; None if none does.

    `a` is the reference. Its tensors may be of another float type than those of `b`; a pair whose
    shapes differ is left out. Stops at the chunk with the answer. Raises BadInput without feeds,
    for a bound that is negative or not finite, and where no pair can be compared.
    """
    check_bound(max_error)
    if not feeds_list:
        raise BadInput("no inputs to compare on")
    compared = 0
    before = highest = 0.0
    steepest: Rise | None = None
    for first in range(0, len(pairs), chunk):
        part = pairs[first : first + chunk]
        for pair, found in zip(part, _errors(a, b, part, feeds_list), strict=True):
            if found is None:
                continue
            error, batch, problem = found
            compared += 1
            rise = Rise(pair.node, pair.operator, pair.a_name, highest, error)
            if steepest is None or error - highest > steepest.error - steepest.before:
                steepest = rise
            if error > max_error:
                return Divergence(
                    pair.node,
                    pair.operator,
                    pair.a_name,
                    error,
                    before,
                    batch,
                    problem,
                    steepest,
                    compared,
                    max_error,
                )
            before, highest = error, max(highest, error)
    if not compared:
        raise BadInput(
            "no tensor inside the two graphs can be compared: they share no names",
            hint="compare a model with one that was made from it, not with another export",
        )
    return None


def diverging_node(
    a: Path, b: Path, feeds: Sequence[Arrays], max_error: float, chunk: int = CHUNK
) -> Divergence | None:
    """The first node whose tensor differs; None where the graphs share no names to go by.

    `chunk`: tensors of each graph that are in memory at once.
    """
    graphs = Graph.open(a), Graph.open(b)
    pairs = probes.shared(*graphs)
    with tempfile.TemporaryDirectory() as folder:
        left, right = (_tap(graph, Path(folder) / f"{n}.onnx") for n, graph in enumerate(graphs))
        try:
            return first_divergence(left, right, pairs, feeds[:1], max_error=max_error, chunk=chunk)
        except BadInput:
            return None


def _tap(graph: Graph, path: Path) -> Tap:
    """Run a graph as it is written and give the tensors asked for, however they are shown."""

    def tap(names: Sequence[str]) -> Run:
        tapped, shown = probes.expose(graph, names)
        tapped.save(path)
        engine = open_as_written(path)

        def run(feeds: Arrays) -> list[np.ndarray]:
            values = engine(feeds)
            return [values[name] for name in shown]

        return run

    return tap


def tensor_error(a: np.ndarray, b: np.ndarray) -> tuple[float, str]:
    """The error as `ParityRow.error` defines it, and "", or infinity and the reason.

    Max |a-b| / max |a| over the finite places, for arrays of one shape. Values below -1e30
    are masks: any value that masks in float16 equals them.
    """
    if a.dtype.kind in "biuO" and b.dtype.kind in "biuO":
        differing = int(np.count_nonzero(a != b))
        if differing:
            return math.inf, f"{differing} of {a.size} {exact_noun(a)} differ"
        return 0.0, ""
    x, y = a.astype(np.float64), b.astype(np.float64)
    masked = (x <= _MASK) & (y <= _HALF_MASK)
    x, y = x[~masked], y[~masked]
    both = np.isfinite(x) & np.isfinite(y)
    if not np.array_equal(x[~both], y[~both], equal_nan=True):
        return math.inf, "NaN or infinity in one of the two and not in the other"
    x, y = x[both], y[both]
    if not x.size:
        return 0.0, ""
    with np.errstate(over="ignore"):  # float64 near its end: an infinite error is right
        scale = float(np.abs(x).max() or np.abs(y).max())
        return relative(float(np.abs(x - y).max()), scale), ""


def _errors(
    a: Tap, b: Tap, pairs: Sequence[probes.Pair], feeds_list: Sequence[Arrays]
) -> Iterator[tuple[float, int, str] | None]:
    """Each pair's largest error, its batch and the problem; None where the shapes differ."""
    run_a, run_b = a([pair.a_name for pair in pairs]), b([pair.b_name for pair in pairs])
    found: list[tuple[float, int, str] | None] = [None] * len(pairs)
    for feeds in feeds_list:
        batch = _batch(feeds)
        for place, (x, y) in enumerate(zip(run_a(feeds), run_b(feeds), strict=True)):
            if x.shape != y.shape:
                continue
            error, problem = tensor_error(x, y)
            worst = found[place]
            if worst is None or error > worst[0]:
                found[place] = error, batch, problem
    return iter(found)


def _batch(feeds: Arrays) -> int:
    array = next(iter(feeds.values()), None)
    return int(array.shape[0]) if array is not None and array.ndim else 1


def _name_of(at: Divergence | Rise) -> str:
    return f"'{at.node}' ({at.operator})" if at.node else f"the {at.operator} of '{at.tensor}'"
