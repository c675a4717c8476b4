"""Read the precision of each layer of a plan from TensorRT's engine inspector.

Source: NVIDIA's TensorRT guide, "Engine Inspector", JSON at detailed verbosity; "Migrating
IEngineInspector Usage from TensorRT 10.x to 11.x" for the newer field names. A layer of a plan is
often several fused nodes, and several layers can name one node.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deploykit.core.evidence import Layer
from deploykit.core.precision import ALL, BITS, FLOATS

# The inspector writes a bare type ("Half") or a sentence that contains one ("Channel major FP16
# format where channel % 8 == 0"), or without a context "N/A due to dynamic shapes".
_NAMES: Mapping[str, str] = {
    **{word: each.dtype for each in ALL for word in each.inspector_names},
    **{name: name for name in ("int32", "int64", "uint8", "bool")},
}
_TYPE_KEYS = ("Format/Datatype", "Datatype", "DataType")  # TensorRT 10; 11
_MOVES = frozenset(("reformat", "noop", "constant", "shuffle", "slice", "concatenation", "shape"))
_SEPARATOR = re.compile(r"[\x1e\x1f]|(?<=\])(?=\[ONNX Layer: )")  # TensorRT 8 to 10; 11
_ONNX_LAYER = re.compile(r"\[ONNX Layer: (.*)\]", re.DOTALL)


def computes(layer: Layer) -> bool:
    """Return False for a layer that only moves, converts or describes data."""
    return layer.kind.lower() not in _MOVES and layer.precision in BITS


def read_layers(text: str) -> tuple[Layer, ...]:
    """Return the layers in the inspector's JSON, in order. Raises ValueError for any other text."""
    document = json.loads(text, strict=False)  # names may contain the separator 0x1F
    if not isinstance(document, dict) or not isinstance(document.get("Layers"), list):
        raise ValueError("no list of layers")
    layers = []
    for item in document["Layers"]:
        if isinstance(item, str):  # the plan was built without detailed verbosity
            layers.append(Layer(_text(item), "", None, _nodes(_text(item), "")))
        else:
            name, kind = _text(item.get("Name", "")), _text(item.get("LayerType", ""))
            nodes = _nodes(name, _text(item.get("Metadata") or ""))
            tactic = _text(item.get("TacticName") or item.get("TacticValue") or "")
            layers.append(Layer(name, kind, _computed_in(item), nodes, tactic))
    return tuple(layers)


def mismatches(asked: Mapping[str, str], layers: Sequence[Layer]) -> dict[str, str]:
    """Map each node that runs in a higher precision than `asked` to a sentence that says so.

    `asked`: node of the graph -> precision. Layers that only move data are ignored, and so are
    nodes that no layer names because they were folded away: `unseen` lists those.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for layer in layers:
        if computes(layer) and layer.precision:
            for node in layer.onnx_nodes:
                found[node].add(layer.precision)
    problems = {}
    for node, precision in asked.items():
        seen = found.get(node)
        narrowest = min(seen, key=lambda name: (BITS[name], name)) if seen else None
        if narrowest and BITS[narrowest] > BITS.get(precision, 64):
            problems[node] = f"'{node}' was requested in {precision} and runs in {narrowest}"
    return problems


def unseen(asked: Iterable[str], layers: Sequence[Layer]) -> tuple[str, ...]:
    """Return the nodes of `asked` that no computing layer names: folded away or not reported."""
    named = {node for layer in layers if computes(layer) for node in layer.onnx_nodes}
    return tuple(node for node in asked if node not in named)


def shares(layers: Sequence[Layer], time_ms: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the share (0 to 1) of each precision in the computing layers, or in their time.

    `time_ms`: layer name -> milliseconds from a profiler, 0 by default; without it, layers count.
    """
    sums: dict[str, float] = defaultdict(float)
    for layer in layers:
        if computes(layer) and layer.precision:
            sums[layer.precision] += time_ms.get(layer.name, 0.0) if time_ms is not None else 1.0
    whole = sum(sums.values())
    return {name: part / whole for name, part in sorted(sums.items())} if whole else {}


def _text(value: object) -> str:
    """Return `value` as valid UTF-8: JSON may hold half a surrogate pair, a manifest may not."""
    return str(value).encode(errors="replace").decode()


def _nodes(name: str, metadata: str) -> tuple[str, ...]:
    """Return the ONNX nodes in a layer, by its metadata, else by its name ("Conv_0 + Relu_1")."""
    found = [_ONNX_LAYER.fullmatch(part.strip()) for part in _SEPARATOR.split(metadata)]
    named = [match[1] for match in found if match]
    if not named:
        named = [part.strip().removeprefix("PWN(").rstrip(")") for part in name.split(" + ")]
    return tuple(dict.fromkeys(named))


def _computed_in(item: Mapping[str, Any]) -> str | None:
    """Return the narrowest type of inputs and outputs that is not narrower than the weights.

    A fused Quantize lowers an output's precision and a fused Cast raises an input's: the layer
    computes in neither. Weight-only quantization computes in the type of the activations. If
    these have no type, the weights' type counts.
    """
    inputs, outputs = _types(item.get("Inputs")), _types(item.get("Outputs"))
    flowing = [name for name in inputs if name in BITS]
    flowing += [name for name in outputs if name in (FLOATS if inputs else BITS)]
    weights = item.get("Weights")
    stored = _type(str(weights.get("Type", ""))) if isinstance(weights, dict) else None
    if not flowing:
        return next(iter([*outputs, *inputs]), stored)
    narrowest = min(flowing, key=lambda name: BITS[name])
    return stored if stored and BITS.get(stored, 0) > BITS[narrowest] else narrowest


def _types(tensors: object) -> list[str]:
    found = []
    for each in tensors if isinstance(tensors, list) else ():
        if isinstance(each, dict):
            found.append(_type(next((str(each[key]) for key in _TYPE_KEYS if key in each), "")))
    return [kind for kind in found if kind is not None]


def _type(text: str) -> str | None:
    return next((_NAMES[word] for word in re.findall(r"\w+", text.lower()) if word in _NAMES), None)
