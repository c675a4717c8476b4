"""Read the facts about an `.onnx` file that opening it needs, once per version of the file.

Its weights are not read and the onnx package is not imported: a server needs neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.core.artefact import file_stamp
from deploykit.core.errors import DeploykitError
from deploykit.graph.parse import Parts, dtype_name, duplicate, parse_model, subgraphs

# The first computes the activations' scale in each call; the second holds all products of 8-bit
# integers, as in a built INT8 file.
SCALED_IN_EACH_CALL = frozenset(("ConvInteger", "MatMulInteger", "DynamicQuantizeMatMul"))
INTEGER_PRODUCTS = SCALED_IN_EACH_CALL | {
    *("QLinearConv", "QLinearMatMul", "QGemm", "QAttention"),
    *("MatMulIntegerToFloat", "DynamicQuantizeLSTM"),
}
_WHOLE_BYTES = 8 << 20  # up to here, reading the whole file is faster than skipping its weights
FLOAT16, FLOAT8 = 10, 17  # TensorProto.DataType; FLOAT8 is E4M3
_TYPE_NAMES = ("to", "dtype")  # attributes that hold an element type, in Cast and in generators
_SHAPES = ("Shape", "Size")
# Operator -> the inputs whose values decide how much it, or later nodes, compute.
_WORK: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Loop", "NonMaxSuppression", "MelWeightMatrix"), (0, 1)),
    **dict.fromkeys(("If", "BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"), (0,)),
    **dict.fromkeys(("NonZero", "Unique", "ImageDecoder", "ConstantOfShape"), (0,)),
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow"), (0,)),
    **dict.fromkeys(("AffineGrid", "CenterCropPad", "Compress", "DFT"), (1,)),
    **dict.fromkeys(("Expand", "OneHot", "Pad", "Upsample"), (1,)),
    **dict.fromkeys(("Col2Im", "Tile"), (1, 2)),
    "MaxUnpool": (2,),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
}


class ExternalData(NamedTuple):
    """The location of a tensor's data; `offset` and `length` as the file has them, or empty."""

    location: str
    offset: str
    length: str


class Value(NamedTuple):
    """An input or output. `shape`, or an axis of it, is None if the file does not state it."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class OnnxFacts:
    """The facts that a runtime needs before it opens a file.

    `operators`, `element_types` (of tensors, inputs, outputs and Casts), `external`: at any depth.
    `slowed_by_values`: the inputs' values, not their shapes alone, decide how much a run computes.
    `twice`: a name that two initializers of the graph have, or empty.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    operators: frozenset[str]
    element_types: frozenset[int]
    external: tuple[ExternalData, ...]
    slowed_by_values: bool
    twice: str


def read_facts(path: Path) -> OnnxFacts:
    """Read the facts of the file at `path`; a file with the same stamp is not read again.

    Raises NotFound, or BadInput for a file that no native library should open: one that is not an
    ONNX model, or that nests the bodies of If and Loop too deeply.
    """
    return _read(path, file_stamp(path))


@lru_cache(maxsize=32)
def _read(path: Path, _stamp: tuple[int, int, int] | None) -> OnnxFacts:
    model, _ = parse_model(path, whole_bytes=_WHOLE_BYTES)
    parts, graph = Parts(model, path), model.graph
    tensors = [*graph.initializer, *parts.inner]
    values = [v for g in parts.graphs for part in (g.input, g.output, g.value_info) for v in part]
    types = {tensor.data_type for tensor in tensors}
    types.update(value.type.tensor_type.elem_type for value in values)
    types.update(a.i for node in parts.nodes for a in node.attribute if a.name in _TYPE_NAMES)
    external = []
    for tensor in tensors:
        entries = {_text(item.key): _text(item.value) for item in tensor.external_data}
        if "location" in entries:
            offset, length = (entries.get(key, "") for key in ("offset", "length"))
            external.append(ExternalData(entries["location"], offset, length))
    operators = frozenset(node.op_type for node in parts.nodes)
    names = [tensor.name for tensor in graph.initializer]
    stored = set(names)
    return OnnxFacts(
        inputs=tuple(_value(each) for each in graph.input if each.name not in stored),
        outputs=tuple(_value(each) for each in graph.output),
        operators=operators,
        element_types=frozenset(types),
        external=tuple(external),
        slowed_by_values=(
            # inputs are not followed into functions
            not operators.isdisjoint(_WORK) if model.functions else _values_set_work(graph, stored)
        ),
        twice=duplicate(names),
    )


def onnx_files(path: Path) -> Iterator[Path]:
    """Yield the file, then its weights files; the file is read only for the latter."""
    yield path
    yield from (path.parent / location for location in external_files(path))


def external_files(path: Path) -> list[str]:
    """Return the locations, relative to the model's folder, that its tensors name for their data.

    Return none for a file that cannot be read: opening it raises the error.
    """
    with contextlib.suppress(DeploykitError):
        return sorted({each.location for each in read_facts(path).external})
    return []


def _value(value: Any) -> Value:
    kind = value.type.tensor_type
    shape = None
    if kind.HasField("shape"):
        shape = tuple(
            axis.dim_value if axis.HasField("dim_value") else axis.dim_param or None
            for axis in kind.shape.dim
        )
    return Value(_text(value.name), dtype_name(kind.elem_type), shape)


def _text(value: str | bytes) -> str:
    """Decode a string of the file, which protobuf returns as bytes if it is not UTF-8."""
    return value if isinstance(value, str) else value.decode(errors="replace")


def _values_set_work(graph: Any, stored: set[str]) -> bool:
    """Return whether the values of a graph's inputs reach an operator of _WORK."""
    from_values = {value.name for value in graph.input} - stored
    nodes = [(node.op_type, list(node.input), list(node.output)) for node in graph.node]
    if any(_in_bodies(node) for node in graph.node):
        return True
    known = 0
    while known < len(from_values):  # nodes may come before the ones that they depend on
        known = len(from_values)
        for kind, takes, gives in nodes:
            sized = [takes[n] for n in _WORK.get(kind, ()) if n < len(takes)]
            if kind == "Loop" or from_values.intersection(sized):
                return True
            if kind not in _SHAPES and from_values.intersection(takes):
                from_values.update(gives)
    return False


def _in_bodies(node: Any) -> bool:
    """Return whether a body of the node holds an operator of _WORK."""
    return any(
        each.op_type in _WORK or _in_bodies(each) for body in subgraphs(node) for each in body.node
    )
