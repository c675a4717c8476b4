"""Find what a target's runtime cannot run in a graph, before a long build fails.

`deploykit build --check` asks TensorRT's parser, which decides. The checks here need no TensorRT:
operators that no version of it has, types without layers, and Q/DQ pairs that are placed for
another runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Problem
from deploykit.core.profile import Profile
from deploykit.core.runtime import RUNTIMES, Runtime
from deploykit.graph.graph import Graph
from deploykit.graph.parse import dtype_name
from deploykit.graph.storage import RUNTIME_DOMAINS, all_nodes

_STANDARD = ("", "ai.onnx")
# Source: https://github.com/onnx/onnx-tensorrt/blob/main/docs/operators.md
_ABSENT = (
    "AffineGrid Bernoulli BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Col2Im Compress "
    "CumProd DFT Det MaxUnpool Multinomial Optional SequenceAt SequenceConstruct SequenceEmpty "
    "SequenceInsert SequenceMap SimplifiedLayerNormalization SplitToSequence StringNormalizer "
    "TfIdfVectorizer Unique"
)
_NO_OPERATORS = dict.fromkeys(_ABSENT.split(), "no version of TensorRT imports this operator")
_INTEGERS = "ConvInteger DynamicQuantizeLinear MatMulInteger QLinearConv QLinearMatMul"
_NO_OPERATORS |= dict.fromkeys(
    _INTEGERS.split(), "TensorRT computes in INT8 only between Q/DQ pairs"
)
# Its parser takes these in float32 and float16, and refuses bfloat16: asked, for each operator that
# has a bfloat16 in ONNX, of TensorRT for RTX 1.7.1. The page above lists HardSwish with BF16.
NO_BFLOAT16 = frozenset(
    ("Celu", "GRU", "GlobalLpPool", "HardSwish", "LpNormalization", "LpPool", "Mish")
) | {"RandomNormalLike", "RandomUniformLike"}
# No layer computes in these types; uint8 and the quantized types have rules of their own.
_NO_LAYERS = frozenset(("string", "int16", "uint16", "uint32", "uint64", "complex64", "complex128"))


def unsupported(source: Graph, profile: Profile) -> tuple[Problem, ...]:
    """Return the nodes that TensorRT refuses, in the graph's order, if `profile` runs that.

    Empty means that nothing is known against the model, not that a build is sure to succeed.
    """
    if profile.runtime != "tensorrt":
        return ()
    found = _refused(source, by_type=True)
    return tuple(Problem(node.name, node.op_type, why) for node, why in found)


def find_mismatch(source: Artefact, graph: Graph, target: Profile) -> BadInput | None:
    """Return the error if `target` runs TensorRT and only another runtime takes `source`.

    `graph` is that of `source`. The error names the file to give in its place; None if `target`
    does not run TensorRT or nothing is known against the file.
    """
    why = why_not_tensorrt(source, graph) if target.runtime == "tensorrt" else ""
    if not why:
        return None
    before = source.manifest.built_on.get("model") if source.manifest else None
    hint = f"give {before or 'the model as it was exported'}"
    if "int8" in graph.precision and "int8" in target.precisions:
        hint += (
            "; for INT8 on this target: "
            f"deploykit quantize {before or 'MODEL'} --to int8 --calib DATA --profile {target.name}"
        )
    return BadInput(f"{source}: {why}; profile '{target.name}' runs TensorRT", hint=hint)


def why_not_tensorrt(source: Artefact, graph: Graph) -> str:
    """Return why only another runtime than TensorRT takes `source`; empty if nothing is known.

    Its manifest says what it was built or quantized for. A graph of another tool shows it by its
    nodes; an operator of a domain of its own may be a plugin.
    """
    if source.manifest and source.manifest.built_on:
        return "was built for ONNX Runtime on a CPU"  # `build` writes no other .onnx file
    runtime = placed_for(source, graph)
    if runtime and runtime.scales_outputs:
        return f"its INT8 pairs are placed for {runtime.title}"
    for node, why in _refused(graph):
        if node.domain in _STANDARD or node.domain.startswith(RUNTIME_DOMAINS):
            return f"node '{node.name or node.output[0]}' ({node.op_type}): {why}"
    return ""


def placed_for(source: Artefact, graph: Graph) -> Runtime | None:
    """The runtime that the INT8 pairs of `source` are placed for, if its manifest says so."""
    record = source.manifest.evidence.quantize if source.manifest else None
    pairs = any(node.op_type == "QuantizeLinear" for node in all_nodes(graph.model.graph))
    int8 = pairs and "int8" in graph.precision
    return RUNTIMES.get(record.runtime) if record and int8 else None


def _refused(source: Graph, by_type: bool = False) -> Iterator[tuple[onnx.NodeProto, str]]:
    """Yield each node that TensorRT refuses, with the reason; also those in the own functions.

    `by_type`: also nodes whose types it has no layers for, or computes in float32.
    """
    functions, stored = source.model.functions, source.initializers
    types = {name: dtype_name(kind) for name, kind in source.element_types.items()}
    own = {(function.domain, function.name) for function in functions}
    nodes = [(node, types) for node in all_nodes(source.model.graph)]
    nodes += [(node, {}) for function in functions for node in function.node]
    for node, kinds in nodes:
        if (node.domain, node.op_type) in own:
            continue
        why = _NO_OPERATORS.get(node.op_type, "")
        if node.domain.startswith(RUNTIME_DOMAINS):
            why = f"only ONNX Runtime has this operator of {node.domain}, or a plugin"
        elif node.domain not in _STANDARD:
            why = f"has the domain '{node.domain}': TensorRT needs a plugin for it"
        elif node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            low, zero = kinds.get(node.input[0]), "".join(node.input[2:])
            if low == "int32":
                why = "dequantizes int32: leave biases in float32"
            elif low == "uint8" and node.input[0] in stored:
                why = "its weights are uint8: TensorRT takes int8, int4 and float8"
            elif zero in stored and source.array(zero).astype("float32").any():
                why = "its zero point is not 0: TensorRT quantizes symmetrically"
        why = why or (_type(node, kinds) if by_type else "")
        if why:
            yield node, why


def _type(node: onnx.NodeProto, types: Mapping[str, str]) -> str:
    """Return why TensorRT has no layers for the node's types; empty if it has."""
    written = {types.get(name, "") for name in node.output}
    both = written | {types.get(name, "") for name in node.input}
    for kind in sorted(both & _NO_LAYERS):
        return f"TensorRT has no tensors of {kind}"
    casts = ("Cast", "CastLike", "QuantizeLinear", "DequantizeLinear")
    if "uint8" in both and node.op_type not in casts:
        return "uint8 is for the model's inputs and outputs only: cast it first"
    if "bfloat16" in both and node.op_type in NO_BFLOAT16:
        return "TensorRT has it in float32 and float16, not in bfloat16"
    if "float64" in written and node.op_type != "Constant":
        return "computes in float64, which TensorRT turns into float32"
    return ""
