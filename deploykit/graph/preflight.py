"""List what a target's TensorRT will refuse in a graph, before anybody waits for a build.

Only the graph is read, no weights. The tables are of the parser's own documents:

- operators: https://github.com/onnx/onnx-tensorrt/blob/main/docs/operators.md (10.15; 9.2 before)
- in which version an operator came: docs/Changelog.md in the same repository
- opsets: 9 to 24 in 10.15; 25 in 11.x by
  https://docs.nvidia.com/deeplearning/tensorrt/latest/reference/onnx-opset-guide.html

and were compared, operator by operator, with what the parser of TensorRT 11.4 says of itself.
For ONNX Runtime, operators of unknown domains are named: it has kernels for all the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
from onnx import numpy_helper

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Problem
from deploykit.core.profile import Profile
from deploykit.core.runtime import RUNTIMES, Runtime
from deploykit.graph.graph import Graph, dtype_name, opset
from deploykit.graph.skeleton import all_nodes
from deploykit.graph.validate import RUNTIME_DOMAINS

Version = tuple[int, ...]

_STANDARD = ("", "ai.onnx")
_NEWEST = (99,)
_LAST_OPSETS: tuple[tuple[Version, int], ...] = (((11,), 25), ((10, 8), 24), ((0,), 20))

# Standard operators that no version imports.
_NEVER = frozenset(
    word
    for line in (
        "AffineGrid Bernoulli BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor",
        "CenterCropPad Col2Im Compress ConvInteger CumProd DFT Det DynamicQuantizeLinear",
        "ImageDecoder MatMulInteger MaxRoiPool MaxUnpool MelWeightMatrix Multinomial",
        "NegativeLogLikelihoodLoss Optional OptionalGetElement OptionalHasElement QLinearConv",
        "QLinearMatMul RegexFullMatch SoftmaxCrossEntropyLoss StringConcat StringNormalizer",
        "StringSplit SwiGLU TfIdfVectorizer Unique",
        "ConcatFromSequence SequenceAt SequenceConstruct SequenceEmpty SequenceErase",
        "SequenceInsert SequenceLength SequenceMap SplitToSequence",
    )
    for word in line.split()
)
# The first version that is known to import an operator, where it is not the first of all.
_SINCE: Mapping[str, Version] = {
    "BlackmanWindow": (10, 4),
    "HammingWindow": (10, 4),
    "HannWindow": (10, 4),
    "STFT": (10, 5),
    "Attention": (10, 14),
    "Gelu": (10, 15),
    "Mish": (10, 15),
    "RMSNormalization": (10, 15),
    "RotaryEmbedding": (10, 15),
    "TensorScatter": (10, 15),
    "Swish": (11, 4),
    "LinearAttention": (11, 4),
    "CausalConvWithState": (11, 4),
}
# Types that no layer computes in; uint8 and the quantized types have rules of their own.
_NO_LAYERS = frozenset(("string", "int16", "uint16", "uint32", "uint64", "complex64", "complex128"))
_LOW, _HIGH = "QuantizeLinear", "DequantizeLinear"
_INTEGERS = frozenset(
    ("ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul")
)


def unsupported(source: Graph, profile: Profile) -> tuple[Problem, ...]:
    """What `profile`'s runtime will not take, in the graph's order.

    Empty means that nothing is known against the model, not that a build is sure to succeed.
    """
    model = source.model
    own = {(function.domain, function.name) for function in model.functions}
    if profile.runtime != "tensorrt":
        return tuple(_foreign_to_onnxruntime(model, own))
    version = _version(profile)
    found = list(_opset(model, version))
    types = {name: dtype_name(kind) for name, kind in source.element_types.items()}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in all_nodes(model.graph):
        why = _operator(node, version, own) or _type(node, types) or _pair(node, types, weights)
        if why:
            found.append(Problem(node.name, node.op_type, why))
    for node in (node for function in model.functions for node in function.node):
        if why := _operator(node, version, own):
            found.append(Problem(node.name, node.op_type, why))
    return tuple(found)


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
    model = graph.model
    own = {(function.domain, function.name) for function in model.functions}
    types = {name: dtype_name(kind) for name, kind in graph.element_types.items()}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in all_nodes(model.graph):
        foreign = node.domain.startswith(RUNTIME_DOMAINS) and (node.domain, node.op_type) not in own
        why = "only ONNX Runtime has this operator" if foreign else _pair(node, types, weights)
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


def _version(profile: Profile) -> Version:
    """The oldest TensorRT that the target may run; the newest where nothing binds it."""
    oldest = profile.tensorrt_min or profile.tensorrt_max
    return tuple(int(part) for part in oldest.split(".")) if oldest else _NEWEST


def _name(version: Version) -> str:
    return "TensorRT" if version == _NEWEST else "TensorRT " + ".".join(map(str, version))


def _foreign_to_onnxruntime(model: onnx.ModelProto, own: set[tuple[str, str]]) -> Iterator[Problem]:
    for node in all_nodes(model.graph):
        known = node.domain in (*_STANDARD, "ai.onnx.ml") or node.domain.startswith(RUNTIME_DOMAINS)
        if not known and (node.domain, node.op_type) not in own:
            why = f"ONNX Runtime has no operators of the domain '{node.domain}' of its own"
            yield Problem(node.name, node.op_type, why)


def _opset(model: onnx.ModelProto, version: Version) -> Iterator[Problem]:
    last = next(number for since, number in _LAST_OPSETS if version >= since)
    if opset(model) > last:
        why = f"the model has opset {opset(model)}, {_name(version)} is sure to take up to {last}"
        yield Problem("", "opset", why)


def _operator(node: onnx.NodeProto, version: Version, own: set[tuple[str, str]]) -> str:
    name = node.op_type
    if (node.domain, name) in own:
        return ""  # a function of the model's: its nodes are taken in its place
    if node.domain not in _STANDARD:
        return f"has the domain '{node.domain}': TensorRT needs a plugin for it"
    if name in _NEVER:
        return "no version of TensorRT imports this operator"
    since = _SINCE.get(name)
    if since and version < since:
        return f"came with {_name(since)}, the target has {_name(version)}"
    return ""


def _type(node: onnx.NodeProto, types: Mapping[str, str]) -> str:
    """Types that TensorRT has no layers for; see the notes above the parser's table."""
    read = [types.get(name, "") for name in node.input if name]
    written = [types.get(name, "") for name in node.output if name]
    for kind in (*read, *written):
        if kind in _NO_LAYERS:
            return f"TensorRT has no tensors of {kind}"
    if node.op_type not in ("Cast", "CastLike", _LOW, _HIGH) and "uint8" in (*read, *written):
        return "uint8 is for the model's inputs and outputs only: cast it first"
    if "float64" in written and node.op_type != "Constant":
        return "computes in float64, which TensorRT turns into float32"
    return ""


def _pair(
    node: onnx.NodeProto, types: Mapping[str, str], weights: Mapping[str, onnx.TensorProto]
) -> str:
    """What QuantizeLinear and DequantizeLinear must not do."""
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
