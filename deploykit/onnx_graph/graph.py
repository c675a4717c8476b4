"""Open, save and describe an ONNX graph: the one place that knows opset details.

In: a path. Out: a checked `ModelProto` with its weights in memory, the `TensorSpec` of its inputs
and outputs, and a `Summary` for manifests and for `inspect`. No code of the file runs, and external
data are followed only into the model's own folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, external_data_helper

from deploykit.core.errors import BadInput, Unsupported, first_line
from deploykit.core.tensors import BATCH, DTYPE_BYTES, TensorSpec
from deploykit.onnx_graph.node_precision import Kinds
from deploykit.onnx_graph.skeleton import light_model
from deploykit.onnx_graph.storage import write_model
from deploykit.onnx_graph.validate import MAX_BYTES, all_nodes, parse, stored_bytes, stored_elements

_NO_WEIGHTS = frozenset(("string", "bool", "int64", "int32"))  # shapes, indices and int32 biases


@dataclass(frozen=True)
class Summary:
    """What a graph holds. `nodes` and `operators` count the bodies of If, Loop and Scan too.

    `precision`: nodes by the type they compute in; those that only move or convert data are not
    counted, so that it may sum to less than `nodes`. `parameters`: elements of weight tensors.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    nodes: int
    operators: Mapping[str, int]
    precision: Mapping[str, int]
    parameters: int
    weight_bytes: int
    opset: Mapping[str, int]
    ir_version: int
    producer: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "inputs": [spec.to_dict() for spec in self.inputs],
            "outputs": [spec.to_dict() for spec in self.outputs],
            "nodes": self.nodes,
            "operators": dict(self.operators),
            "precision": dict(self.precision),
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "opset": dict(self.opset),
            "ir_version": self.ir_version,
            "producer": self.producer,
        }


def load_graph(path: Path) -> onnx.ModelProto:
    """Read and check `path`; external data are loaded into memory.

    Raises NotFound or BadInput naming the file, and the node or tensor at fault: damaged files,
    other formats, unknown operators, an opset or IR version newer than the installed onnx, weights
    whose data are missing, too short, or outside the model's folder.
    """
    model = parse(path)
    try:
        external_data_helper.load_external_data_for_model(model, str(path.parent))
        onnx.checker.check_model(light_model(model))  # would copy the weights twice
        for tensor in model.graph.initializer:
            if not tensor.HasField("raw_data"):  # bytes were counted by `parse`, numbers were not
                onnx.checker.check_tensor(tensor)
    except (onnx.checker.ValidationError, ValueError, OSError) as exc:
        raise BadInput(f"{path}: is not a valid ONNX graph: {first_line(exc)}") from exc
    return model


def save_graph(model: onnx.ModelProto, out: Path, *, limit_bytes: int = MAX_BYTES) -> None:
    """Write `model` whole or not at all; the same model gives the same bytes.

    Above `limit_bytes`, which one file cannot exceed, the weights go to OUT.data beside it: move
    the two together. Raises BadInput if `out` is not writable.
    """
    write_model(model, out, limit_bytes)


def name_nodes(model: onnx.ModelProto) -> None:
    """Give each node of the main graph that has no name of its own one, in place.

    The same graph gets the same names, so reports and options can go by them.
    """
    taken = {node.name for node in model.graph.node}
    seen: set[str] = set()
    for number, node in enumerate(model.graph.node):
        if not node.name or node.name in seen:
            name = f"{node.op_type}_{number}"
            while name in taken:
                name += "_"
            node.name = name
            taken.add(name)
        seen.add(node.name)


def specs(model: onnx.ModelProto) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs that a caller must feed (initializers left out), and outputs.

    A dynamic axis without a name is `N` at place 0, else `NAME_PLACE`, as the runtimes name it.
    Raises Unsupported for a tensor type that has no numpy dtype, such as text or a sequence.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(_spec(value) for value in model.graph.input if value.name not in weights)
    return inputs, tuple(_spec(value) for value in model.graph.output)


def summarise(model: onnx.ModelProto) -> Summary:
    """Count what `model` holds. Raises Unsupported as `specs` does."""
    inputs, outputs = specs(model)
    nodes = list(all_nodes(model.graph))
    scales = {name for node in nodes if _quantizes(node) for name in node.input[1:]}
    stored = [tensor for tensor in model.graph.initializer if tensor.name not in scales]
    stored += [
        attribute.t
        for node in nodes
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
    ]
    weights = [tensor for tensor in stored if dtype_name(tensor.data_type) not in _NO_WEIGHTS]
    return Summary(
        inputs=inputs,
        outputs=outputs,
        nodes=len(nodes),
        operators=dict(sorted(Counter(node.op_type for node in nodes).items())),
        precision=_precision(model),
        parameters=sum(stored_elements(tensor) for tensor in weights),
        weight_bytes=sum(stored_bytes(tensor) for tensor in weights),
        opset={entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        ir_version=model.ir_version,
        producer=f"{model.producer_name} {model.producer_version}".strip(),
    )


def opset(model: onnx.ModelProto) -> int:
    """The version of the standard operators; 0 if the model uses none."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)


def dtype_name(data_type: int) -> str:
    """Numpy's name of an ONNX element type: 'float32' of FLOAT; in lower case what numpy lacks."""
    name = str(TensorProto.DataType.Name(data_type)).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Element type by tensor name, for the tensors of the main graph whose type is known."""
    graph = model.graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    known = [*graph.input, *graph.output, *graph.value_info]
    names = {value.name for value in known} | set(types)
    if any(name and name not in names for node in graph.node for name in node.output):
        inferred = onnx.shape_inference.infer_shapes(light_model(model)).graph
        known += [*inferred.value_info, *inferred.output]
    for value in known:
        if value.type.tensor_type.elem_type:
            types.setdefault(value.name, value.type.tensor_type.elem_type)
    return types


def _precision(model: onnx.ModelProto) -> dict[str, int]:
    """Nodes of the main graph by the type they compute in; see `Summary.precision`."""
    nodes = model.graph.node
    types = {name: dtype_name(kind) for name, kind in element_types(model).items()}
    kinds = Kinds(nodes, types, {tensor.name for tensor in model.graph.initializer})
    counts = Counter(kind for kind in map(kinds.precision, nodes) if kind is not None)
    return dict(sorted(counts.items()))


def _quantizes(node: onnx.NodeProto) -> bool:
    return node.op_type in ("QuantizeLinear", "DequantizeLinear")


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    dtype = dtype_name(tensor.elem_type) if tensor.elem_type else "no tensor"
    if dtype not in DTYPE_BYTES:
        raise Unsupported(f"tensor '{value.name}' is of type {dtype}, which is not offered")
    shape: list[int | str] = []
    for number, axis in enumerate(tensor.shape.dim):
        if axis.HasField("dim_value") and axis.dim_value >= 0:
            shape.append(axis.dim_value)
        else:
            shape.append(axis.dim_param or (BATCH if number == 0 else f"{value.name}_{number}"))
    return TensorSpec(value.name, dtype, tuple(shape))
