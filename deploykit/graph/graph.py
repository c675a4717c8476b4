"""Open and check an ONNX graph once; every other file works on this handle.

No code of the file runs, and external data must be in the model's own folder.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
from onnx import TensorProto, numpy_helper

from deploykit.core.errors import BadInput, Unsupported, first_line
from deploykit.core.json_value import Record
from deploykit.core.precision import FLOATS
from deploykit.core.tensors import PROTOCOL_NAMES, TensorSpec, name_axes
from deploykit.graph import storage
from deploykit.graph.parse import dtype_name, read_value
from deploykit.graph.storage import (
    RUNTIME_DOMAINS,
    all_nodes,
    for_checker,
    infer_shapes,
    make_skeleton,
    read_model,
    stored_bytes,
    stored_elements,
    unused_name,
)

# The output of these operators is another name for the input's memory.
VIEWS = frozenset(("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"))
DESCRIBES = frozenset(("Constant", "Shape", "Size"))
CONVERTS = frozenset(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Cast"))
GENERATES = frozenset(("ConstantOfShape", "Range", "CastLike"))
_FUSED = frozenset(("QGemm", "QAttention", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"))
_SILENT = CONVERTS | DESCRIBES | GENERATES | VIEWS
_FLOATS = FLOATS | {"float64"}


class NodePrecision:
    """Tells the precision that each node computes in.

    `types`: tensor name to dtype name; `constants`: initializers. `on_cpu`: apply the rules of ONNX
    Runtime's CPU, which runs few nodes in integers if their results have no scale.
    """

    def __init__(
        self,
        nodes: Sequence[onnx.NodeProto],
        types: Mapping[str, str],
        constants: Mapping[str, onnx.TensorProto],
        *,
        on_cpu: bool = False,
    ) -> None:
        self._types = types
        self._constants = constants
        self._on_cpu = on_cpu
        self._makers = {name: node for node in nodes for name in node.output if name}
        self._readers: defaultdict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in nodes:
            for name in node.input:
                self._readers[name].append(node)
        # ONNX Runtime has already replaced the nodes that run in integers: other pairs are float
        self._final = any(
            node.domain.startswith(RUNTIME_DOMAINS) and node.op_type not in CONVERTS
            for node in nodes
        )

    def precision(self, node: onnx.NodeProto) -> str | None:
        """Return 'float32', 'float16', 'bfloat16', 'float64', 'int8' or 'float8'.

        Return None for a node that computes in none of these: it moves, converts or describes data.
        """
        if node.op_type in _SILENT:
            return None
        name = node.op_type  # these compute in integers by definition
        fused = node.domain.startswith(RUNTIME_DOMAINS) and name in _FUSED
        if fused or name.startswith("QLinear") or "Integer" in name:
            return "int8"
        names = [*node.output, *node.input]  # use the inputs if ONNX has no schema for it
        kinds = (self._types[name] for name in names if self._types.get(name) in _FLOATS)
        return (None if self._final else self._fed(node)) or next(kinds, None)

    def _fed(self, node: onnx.NodeProto) -> str | None:
        """Return 'int8' or 'float8' if all its inputs but constants (a float bias) are dequantized.

        Return None for quantized weights with float activations: such a node computes in float.
        """
        stored = set()
        for name in node.input:
            maker = self._makers.get(name)
            if not name or (name in self._constants and maker is None):
                continue
            if maker is None or maker.op_type != "DequantizeLinear":
                return None
            if maker.input[0] not in self._constants:
                stored.add(self._types.get(maker.input[0], "int8"))
        kind = min(stored, default=None)
        if kind is None or (self._on_cpu and not self._has_kernel(node)):
            return None
        return "float8" if kind.startswith("float8") else kind.removeprefix("u")

    def _has_kernel(self, node: onnx.NodeProto) -> bool:
        """Return whether ONNX Runtime's CPU runs a node with dequantized inputs in integers.

        It does if the result is quantized next, directly or after a ReLU that the zero point
        implies; Gemm and MatMul without ReLU and float bias may keep a float result (1.32.0).
        """
        after = self._readers[node.output[0]]
        cut = len(after) == 1 and after[0].op_type in ("Relu", "Clip")
        if cut:
            after = self._readers[after[0].output[0]]
        if len(after) == 1 and after[0].op_type == "QuantizeLinear":
            # after a ReLU its zero point must be the lowest value of its type, by default of uint8
            point = self._constants.get("".join(after[0].input[2:]))
            if point is None or not cut:
                return not cut or len(after[0].input) < 3
            values = numpy_helper.to_array(point)
            return values.dtype.kind in "iu" and bool((values == np.iinfo(values.dtype).min).all())
        pairs = all(name not in self._constants for name in node.input)
        return node.op_type in ("Gemm", "MatMul") and pairs and not cut


_LIKE_WEIGHTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_NO_WEIGHTS = frozenset(("string", "bool", "int64", "int32"))  # shapes, indices, biases


@dataclass(frozen=True)
class Summary(Record):
    """The content of a graph. `nodes` and `operators` count the bodies of If, Loop and Scan too.

    `precision`: nodes by the type they compute in; nodes that only move or convert data are not
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


class Graph:
    """An ONNX model whose weights above 1 KiB stay in its files until they are read.

    `model` refers to such weights as ONNX refers to external data, in the folder of `path`. It is
    never changed: `Editor` makes a new Graph.
    """

    def __init__(self, model: onnx.ModelProto, path: Path = Path("model")) -> None:
        self.model, self.path = model, path

    @classmethod
    def open(cls, path: Path) -> Graph:
        """Read and check `path`.

        Raises NotFound or BadInput naming the file, and the node or tensor at fault: damaged files,
        other formats, unknown operators, an opset or IR version newer than the installed onnx,
        weights whose data are missing, too short, or outside the model's folder.
        """
        graph = cls(read_model(path), path)
        try:
            if graph.model.functions:  # the skeleton inlines them
                onnx.checker.check_model(for_checker(make_skeleton(graph.model), path))
            onnx.checker.check_model(for_checker(graph.skeleton, path))
            for tensor in graph.model.graph.initializer:
                # reading counted the bytes of raw data, but not the numbers in lists
                here = tensor.data_location != TensorProto.EXTERNAL
                if here and not tensor.HasField("raw_data"):
                    onnx.checker.check_tensor(tensor)
        except (onnx.checker.ValidationError, ValueError, OSError, RuntimeError) as exc:
            context = re.search(r"==> Context: (.*)", str(exc))  # it names the node
            where = f" ({context[1].strip()})" if context else ""
            raise BadInput(f"{path}: is not a valid ONNX graph: {first_line(exc)}{where}") from exc
        return graph

    def save(
        self, out: Path, *, limit_bytes: int = storage.MAX_BYTES, temporary: bool = False
    ) -> Graph:
        """Write the model whole or not at all; the same model gives the same bytes.

        Above `limit_bytes`, which one file cannot exceed, the weights go to OUT.data next to it:
        move the two together. `temporary`: only this process reads the file. Returns a handle of
        the written file. Raises BadInput if `out` is not writable.
        """
        folder = self.path.parent
        return Graph(storage.write(self.model, folder, out, limit_bytes, temporary=temporary), out)

    def array(self, name: str) -> np.ndarray:
        """Return the values of an initializer; read only."""
        return storage.tensor_array(self.initializers[name], self.path.parent)

    @cached_property
    def initializers(self) -> Mapping[str, onnx.TensorProto]:
        return {tensor.name: tensor for tensor in self.model.graph.initializer}

    @cached_property
    def skeleton(self) -> onnx.ModelProto:
        """Return a copy with large weights as inputs, functions inlined and every node named."""
        skeleton = make_skeleton(self.model)
        if skeleton.functions:
            skeleton = onnx.inliner.inline_local_functions(skeleton)
        name_nodes(skeleton)
        return skeleton

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs that a caller must feed; initializers are left out.

        A dynamic axis without a name is `N` at place 0, else `NAME_PLACE`, as the runtimes name it.
        Raises Unsupported for a tensor type that has no numpy dtype, such as a sequence.
        """
        return tuple(_spec(value, self.path) for value in self._fed)

    @property
    def _fed(self) -> list[onnx.ValueInfoProto]:
        return [each for each in self.model.graph.input if each.name not in self.initializers]

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The graph's outputs. Raises as `inputs` does."""
        return tuple(_spec(value, self.path) for value in self.model.graph.output)

    @cached_property
    def element_types(self) -> dict[str, int]:
        """Element type by tensor name, for the tensors of the main graph whose type is known."""
        graph = self.skeleton.graph
        types = {name: tensor.data_type for name, tensor in self.initializers.items()}
        known = [*graph.input, *graph.output, *graph.value_info]
        names = {value.name for value in known} | set(types)
        if any(name and name not in names for node in graph.node for name in node.output):
            inferred = infer_shapes(self.skeleton).graph
            known += [*inferred.value_info, *inferred.output]
        for value in known:
            if value.type.tensor_type.elem_type:
                types.setdefault(value.name, value.type.tensor_type.elem_type)
        for node in graph.node:  # a type that inference does not know is the weights' type
            if node.op_type == "QuantizeLinear" and types.get("".join(node.input[2:])):
                types.setdefault(node.output[0], types[node.input[2]])  # ONNX Runtime's operator
            if node.op_type in _LIKE_WEIGHTS and node.input[1] in self.initializers:
                kind = types[node.input[1]]
                types.update(dict.fromkeys((node.input[0], node.output[0]), kind) | types)
        return types

    @cached_property
    def precision(self) -> dict[str, int]:
        """Nodes of the main graph by the type they compute in; see `Summary.precision`."""
        nodes = self.model.graph.node
        types = {name: dtype_name(kind) for name, kind in self.element_types.items()}
        kinds = NodePrecision(nodes, types, self.initializers)
        counts = Counter(kind for kind in map(kinds.precision, nodes) if kind is not None)
        return dict(sorted(counts.items()))

    @cached_property
    def summary(self) -> Summary:
        """Count the graph's content, which may be more than the runtimes offer."""
        model, nodes = self.model, list(all_nodes(self.model.graph))
        pairs = [node for node in nodes if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
        scales = {name for node in pairs for name in node.input[1:]}
        stored = [tensor for tensor in model.graph.initializer if tensor.name not in scales]
        constants = [node for node in nodes if node.op_type == "Constant"]
        stored += [a.t for node in constants for a in node.attribute if a.name == "value"]
        weights = [tensor for tensor in stored if dtype_name(tensor.data_type) not in _NO_WEIGHTS]
        return Summary(
            inputs=tuple(_spec(value, self.path, described=True) for value in self._fed),
            outputs=tuple(_spec(value, self.path, described=True) for value in model.graph.output),
            nodes=len(nodes),
            operators=dict(sorted(Counter(node.op_type for node in nodes).items())),
            precision=self.precision,
            parameters=sum(stored_elements(tensor) for tensor in weights),
            weight_bytes=sum(stored_bytes(tensor) for tensor in weights),
            opset={entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
            ir_version=model.ir_version,
            producer=f"{model.producer_name} {model.producer_version}".strip(),
        )


def name_nodes(model: onnx.ModelProto) -> None:
    """Name the nodes of the main graph that lack a name of their own, in place.

    The same graph gets the same names, so that reports and options can refer to them.
    """
    taken = {node.name for node in model.graph.node}
    seen: set[str] = set()
    for number, node in enumerate(model.graph.node):
        if not node.name or node.name in seen:
            node.name = unused_name(f"{node.op_type}_{number}", taken)
        seen.add(node.name)


def opset(model: onnx.ModelProto) -> int:
    """Return the version of the standard operators; 0 if the model uses none."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)


def _type_name(kind: onnx.TypeProto) -> str:
    """Return the dtype of a tensor, or what else it is: "seq(map(int64, float32))"."""
    found = kind.WhichOneof("value")
    if found == "sequence_type":
        return f"seq({_type_name(kind.sequence_type.elem_type)})"
    if found == "optional_type":
        return f"optional({_type_name(kind.optional_type.elem_type)})"
    if found == "map_type":
        return f"map({dtype_name(kind.map_type.key_type)}, {_type_name(kind.map_type.value_type)})"
    number = kind.tensor_type.elem_type
    return dtype_name(number) if number else "value of unknown type"


def _spec(value: onnx.ValueInfoProto, path: Path, *, described: bool = False) -> TensorSpec:
    """Return the spec of an input or output. `described`: also one that no runtime here offers."""
    dtype = _type_name(value.type)
    if dtype not in PROTOCOL_NAMES and not described:
        cure = "leave it out of the graph, whose inputs and outputs must be tensors"
        if "map(" in dtype:  # scikit-learn's converter adds ZipMap to classifiers
            cure += ": to_onnx(model, X, options={'zipmap': False})"
        raise Unsupported(f"{path}: '{value.name}' is a {dtype}, which is not supported", hint=cure)
    return TensorSpec(value.name, dtype, name_axes(value.name, read_value(value).shape or ()))
