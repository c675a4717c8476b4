"""Name the tensors and axes of an exported graph as the specs do, clean it, and save it.

Notes on where a node came from are removed: they hold paths of the machine, and the same model is
to give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.tensors import TensorSpec
from deploykit.exporters.attention import simplify_attention

onnxscript: ModuleType = require("onnxscript")
common: ModuleType = require("onnxscript.ir.passes.common")

_ONNX_NAMES = {"float32": "FLOAT", "float64": "DOUBLE"}
_BY_DATA = ("NonMaxSuppression", "NonZero", "Unique", "Compress")  # the data give the size
_WRAPPER = "module."  # attribute of a wrapper that gives the user's module the signature we need


def finish(
    model: Any,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    parameters: Sequence[str],
    sizes: Mapping[str, int],
) -> None:
    """Name and clean `model` in place. Raises BadInput where it is not what the specs say.

    `parameters`: names of the exported module's parameters; `sizes`: what the dynamic axes were
    exported at.
    """
    _infer_doubtful(model, sizes)
    simplify_attention(model)
    graph = model.graph
    _add_unread(graph.inputs, inputs)
    _fit("inputs", graph.inputs, inputs)
    nodes = list(graph.all_nodes())
    _fit("outputs", graph.outputs, outputs, any(node.op_type in _BY_DATA for node in nodes))
    made = (value for node in nodes for value in node.outputs)
    given = (*graph.inputs, *graph.initializers.values())
    for part in (model, *_graphs(graph), *nodes, *made, *given):
        part.metadata_props.clear()
        part.doc_string = None
    _unwrap(graph, parameters)
    used = {node.domain for node in graph.all_nodes()} | {""}
    for domain in set(model.opset_imports) - used:
        del model.opset_imports[domain]


def save(model: Any, out: Path, max_bytes: int) -> None:
    """Write `model`; past `max_bytes` its weights go to OUT.data, in the same folder."""
    values = [value for part in _graphs(model.graph) for value in part.initializers.values()]
    stored = sum(value.const_value.nbytes for value in values if value.const_value is not None)
    data = f"{out.name}.data" if stored > max_bytes else None
    onnxscript.ir.save(model, out, external_data=data)


def _infer_doubtful(model: Any, sizes: Mapping[str, int]) -> None:
    """Work the shapes out anew that hold the size of an example.

    torch writes the example's length into the shape of an LSTM's output, which takes any length.
    """
    doubtful = [
        value
        for node in model.graph.all_nodes()
        for value in node.outputs
        if value.shape is not None and any(dim in sizes.values() for dim in value.shape)
    ]
    for value in doubtful:
        value.shape = None
    if doubtful:
        common.ShapeInferencePass()(model)


def _add_unread(values: Any, specs: Sequence[TensorSpec]) -> None:
    """Put back the inputs that the model does not read: the older exporter leaves them out."""
    names = [value.name for value in values]
    if len(names) < len(specs) and set(names) <= {spec.name for spec in specs}:
        for at, spec in enumerate(specs):
            if spec.name not in names:
                kind = onnxscript.ir.DataType[_ONNX_NAMES.get(spec.dtype, spec.dtype.upper())]
                value = onnxscript.ir.Value(name=spec.name, type=onnxscript.ir.TensorType(kind))
                values.insert(at, value)


def _fit(
    what: str, values: Sequence[Any], specs: Sequence[TensorSpec], sized_by_data: bool = False
) -> None:
    """Give the graph's inputs or outputs the names and axes of `specs`.

    `sized_by_data`: an axis whose size torch does not know is free, though the trials had one size.
    """
    if len(values) != len(specs):
        raise BadInput(
            f"torch exported {len(values)} {what}, the model has {len(specs)}: "
            + ", ".join(spec.name for spec in specs)
        )
    for value, spec in zip(values, specs, strict=True):
        value.name = spec.name
        known = value.shape if value.shape is not None else ()  # torch may not have inferred it
        shape = list(spec.shape)
        for at, (dim, axis) in enumerate(zip(known, spec.shape, strict=False)):
            if isinstance(axis, str) and isinstance(dim, int):
                raise BadInput(
                    f"the exporter fixed axis {at} ({axis}) of {what[:-1]} '{spec.name}' at {dim}: "
                    "something in the model reads that size as a constant",
                    hint="export with a fixed size for that axis, or change the model",
                )
            if sized_by_data and isinstance(axis, int) and not isinstance(dim, int):
                shape[at] = f"{spec.name}_{at}"
        value.shape = onnxscript.ir.Shape(shape)


def _unwrap(graph: Any, parameters: Sequence[str]) -> None:
    """Take a wrapper's attribute off the weights' names: 'module.fc.weight' -> 'fc.weight'."""
    names = list(parameters)
    while names and all(name.startswith(_WRAPPER) for name in names):
        names = [name.removeprefix(_WRAPPER) for name in names]
        for old in [name for name in graph.initializers if name.startswith(_WRAPPER)]:
            new = old.removeprefix(_WRAPPER)
            if new not in graph.initializers:
                value = graph.initializers.pop(old)
                value.name = new
                graph.initializers[new] = value


def _graphs(graph: Any) -> Iterator[Any]:
    yield graph
    yield from graph.subgraphs()
