"""Find what a target's runtime cannot run in a graph, before a long build fails.

`deploykit build --check` asks TensorRT's parser, which decides. The checks here need no TensorRT:
operators that torch exports and no version of TensorRT imports, types without layers, and Q/DQ
pairs that are placed for another runtime.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import numpy_helper

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Problem
from deploykit.core.profile import Profile
from deploykit.core.runtime import RUNTIMES, Runtime
from deploykit.graph.graph import Graph
from deploykit.graph.parse import dtype_name
from deploykit.graph.skeleton import all_nodes
from deploykit.graph.validate import RUNTIME_DOMAINS, STANDARD_DOMAINS

_STANDARD = ("", "ai.onnx")
# Source: https://github.com/onnx/onnx-tensorrt/blob/main/docs/operators.md
_ABSENT = (
    "AffineGrid Bernoulli BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Col2Im Compress "
    "ConvInteger CumProd DFT Det DynamicQuantizeLinear MatMulInteger MaxUnpool Multinomial "
    "Optional QLinearConv QLinearMatMul SequenceAt SequenceConstruct SequenceEmpty SequenceInsert "
    "SequenceMap SimplifiedLayerNormalization SplitToSequence StringNormalizer TfIdfVectorizer "
    "Unique"
)
_NO_OPERATORS = frozenset(_ABSENT.split())
# Its parser takes these in float32 and float16, and refuses bfloat16: asked, for each operator that
# has a bfloat16 in ONNX, of TensorRT for RTX 1.7.1. The page above lists HardSwish with BF16.
NO_BFLOAT16 = frozenset(
    ("Celu", "GRU", "GlobalLpPool", "HardSwish", "LpNormalization", "LpPool", "Mish")
) | {"RandomNormalLike", "RandomUniformLike"}
# No layer computes in these types; uint8 and the quantized types have rules of their own.
_NO_LAYERS = frozenset(("string", "int16", "uint16", "uint32", "uint64", "complex64", "complex128"))
_LOW, _HIGH = "QuantizeLinear", "DequantizeLinear"
_INTEGERS = frozenset(
    ("ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul")
)


def unsupported(source: Graph, profile: Profile) -> tuple[Problem, ...]:
    """Return the nodes that `profile`'s runtime refuses, in the graph's order.

    Empty means that nothing is known against the model, not that a build is sure to succeed.
    """
    model = source.model
    own = {(function.domain, function.name) for function in model.functions}
    nodes = [node for node in all_nodes(model.graph) if (node.domain, node.op_type) not in own]
    if profile.runtime != "tensorrt":
        why = "ONNX Runtime has no operators of the domain '{}' of its own"
        return tuple(
            Problem(node.name, node.op_type, why.format(node.domain))
            for node in nodes
            if node.domain not in STANDARD_DOMAINS and not node.domain.startswith(RUNTIME_DOMAINS)
        )
    types = {name: dtype_name(kind) for name, kind in source.element_types.items()}
    weights = source.initializers
    whys = [(n, _operator(n) or _type(n, types) or _pair(n, types, weights)) for n in nodes]
    inside = [node for function in model.functions for node in function.node]
    whys += [(n, _operator(n)) for n in inside if (n.domain, n.op_type) not in own]
    return tuple(Problem(node.name, node.op_type, why) for node, why in whys if why)


def find_mismatch(source: Artefact, graph: Graph, target: Profile) -> BadInput | None:
    """Return the error if `source` was made for ONNX Runtime and `target` runs TensorRT.

    `graph` is that of `source`. The error names the file to give in its place; None if `target`
    does not run TensorRT or nothing is known against the file.
    """
    why = why_not_tensorrt(source, graph) if target.runtime == "tensorrt" else ""
    if not why:
        return None
    manifest = source.manifest
    built = bool(manifest and manifest.built_on)
    before = manifest.built_on.get("model") if manifest else None
    quantized = manifest.evidence.source_graph if manifest and built else "int8" in graph.precision
    hint = f"give {before or ('the file' if built else 'the model as it was exported')}"
    if built:
        hint += ", which `build` read" if before else " that `build` read"
    if quantized and "int8" in target.precisions:
        hint += (
            "; for INT8 on this target: "
            f"deploykit quantize {before or 'MODEL'} --to int8 --calib DATA --profile {target.name}"
        )
    return BadInput(f"{source}: {why}; profile '{target.name}' runs TensorRT", hint=hint)


def why_not_tensorrt(source: Artefact, graph: Graph) -> str:
    """Return why only another runtime than TensorRT takes `source`; empty if nothing is known.

    Its manifest says what it was built or quantized for. A graph of another tool shows it by its
    operators and pairs.
    """
    if source.manifest and source.manifest.built_on:
        return "was built for ONNX Runtime on a CPU"  # `build` writes no other .onnx file
    runtime = placed_for(source, graph)
    if runtime and runtime.scales_outputs:
        return f"its INT8 pairs are placed for {runtime.title}"
    own = {(function.domain, function.name) for function in graph.model.functions}
    types = {name: dtype_name(kind) for name, kind in graph.element_types.items()}
    for node in all_nodes(graph.model.graph):
        foreign = node.domain.startswith(RUNTIME_DOMAINS) and (node.domain, node.op_type) not in own
        why = "only ONNX Runtime has this operator"
        why = why if foreign else _pair(node, types, graph.initializers)
        if node.domain in _STANDARD and node.op_type in _INTEGERS:
            why = "TensorRT computes in INT8 only between Q/DQ pairs"
        if why:
            return f"node '{node.name or node.output[0]}' ({node.op_type}): {why}"
    return ""


def placed_for(source: Artefact, graph: Graph) -> Runtime | None:
    """The runtime that the INT8 pairs of `source` are placed for, if its manifest says so."""
    record = source.manifest.evidence.quantize if source.manifest else None
    pairs = any(node.op_type == _LOW for node in all_nodes(graph.model.graph))
    int8 = pairs and "int8" in graph.precision
    return RUNTIMES.get(record.runtime) if record and int8 else None


def _operator(node: onnx.NodeProto) -> str:
    if node.domain not in _STANDARD:
        return f"has the domain '{node.domain}': TensorRT needs a plugin for it"
    return "no version of TensorRT imports this operator" if node.op_type in _NO_OPERATORS else ""


def _type(node: onnx.NodeProto, types: Mapping[str, str]) -> str:
    """Return why TensorRT has no layers for the node's types; empty if it has."""
    read = [types.get(name, "") for name in node.input if name]
    written = [types.get(name, "") for name in node.output if name]
    for kind in (*read, *written):
        if kind in _NO_LAYERS:
            return f"TensorRT has no tensors of {kind}"
    if node.op_type not in ("Cast", "CastLike", _LOW, _HIGH) and "uint8" in (*read, *written):
        return "uint8 is for the model's inputs and outputs only: cast it first"
    if node.op_type in NO_BFLOAT16 and "bfloat16" in (*read, *written):
        return "TensorRT has it in float32 and float16, not in bfloat16"
    if "float64" in written and node.op_type != "Constant":
        return "computes in float64, which TensorRT turns into float32"
    return ""


def _pair(
    node: onnx.NodeProto, types: Mapping[str, str], weights: Mapping[str, onnx.TensorProto]
) -> str:
    """Return why TensorRT refuses a QuantizeLinear or DequantizeLinear; empty if it does not."""
    if node.op_type not in (_LOW, _HIGH):
        return ""
    if node.op_type == _HIGH and types.get(node.input[0]) == "int32":
        return "dequantizes int32: leave biases in float32"
    if node.op_type == _HIGH and node.input[0] in weights and types[node.input[0]] == "uint8":
        return "its weights are uint8: TensorRT takes int8, int4 and float8"
    zero = weights.get(node.input[2]) if len(node.input) > 2 else None
    if zero is None or zero.data_location == onnx.TensorProto.EXTERNAL:
        return ""
    shifted = numpy_helper.to_array(zero).astype("float32").any()
    return "its zero point is not 0: TensorRT quantizes symmetrically" if shifted else ""
