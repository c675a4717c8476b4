"""The memory that activations take in one call: the most that is alive at one time."""

from __future__ import annotations

from collections.abc import Callable

from deploykit.onnx_graph.node_precision import VIEWS
from deploykit.onnx_graph.shapes import TensorShapes
from deploykit.onnx_graph.skeleton import reads


def peak_bytes(known: TensorShapes, scale: Callable[[str], float] = lambda _name: 1.0) -> int:
    """Bytes of activations, nodes running in the order of the file.

    A tensor lives from its maker to its last reader; inputs and outputs live through the whole
    call, views share their source's memory. `scale(name)`: the factor that another type of a tensor
    means. Tensors of unknown size count as nothing, what is inside bodies of If and Loop too.
    """
    source = _sources(known)
    last: dict[str, int] = {}
    for number, node in enumerate(known.nodes):
        for name in reads(node):
            last[source.get(name, name)] = number
    end = len(known.nodes)
    last |= {source.get(name, name): end for name in known.outputs}
    made = {name for node in known.nodes for name in node.output}
    inputs = [n for n in last if n not in made and n not in known.constants]
    size = {name: int((known.bytes(name) or 0) * scale(name)) for name in [*last, *made]}
    alive = peak = sum(size[name] for name in inputs)
    ends: dict[int, list[str]] = {}
    for name, number in last.items():
        if name in made:
            ends.setdefault(number, []).append(name)
    for number, node in enumerate(known.nodes):
        new = [n for n in node.output if n and n not in known.constants and n not in source]
        alive += sum(size[name] for name in new)
        peak = max(peak, alive)
        unread = [name for name in new if name not in last]
        ended = [name for name in ends.get(number, ()) if name not in known.constants]
        alive -= sum(size[name] for name in (*ended, *unread))
    return peak


def _sources(known: TensorShapes) -> dict[str, str]:
    """The tensor whose memory a view shows, by the view's name."""
    found: dict[str, str] = {}
    for node in known.nodes:
        if node.op_type in VIEWS and node.input and node.input[0] not in known.constants:
            found[node.output[0]] = found.get(node.input[0], node.input[0])
    return found
