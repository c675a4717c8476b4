"""Check an ONNX file before a native library opens it; each error names the culprit.

`onnx.checker` does not suffice: it accepts tensors whose data are too short. ONNX Runtime reads
data files that are hard links to files outside the model's folder.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, defs

from deploykit.core.artefact import sniff, wrong_format
from deploykit.core.errors import BadInput
from deploykit.core.files import check_data_file
from deploykit.graph import storage
from deploykit.graph.parse import SMALL_BYTES, Parts, duplicate, parse_model
from deploykit.graph.skeleton import stored_bytes
from deploykit.graph.storage import MAX_BYTES

STANDARD_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
# ONNX Runtime writes these in the graphs that it optimised; other readers have no schema for them.
RUNTIME_DOMAINS = ("com.microsoft", "com.ms.")
# Those that it writes in the standard domain at any opset: source, its contrib_defs.cc.
RUNTIME_OPERATORS = ("LayerNormalization", "SimplifiedLayerNormalization")


def read_model(path: Path) -> onnx.ModelProto:
    """Read and check the model at `path`; weights above 1 KiB are references into its files.

    Raises NotFound or BadInput.
    """
    kind = sniff(path)
    if kind != "onnx":
        raise wrong_format(path, kind, "an ONNX file")
    if path.stat().st_size > MAX_BYTES:
        raise BadInput(f"{path}: is larger than 2 GiB, which no ONNX file without external data is")
    model: onnx.ModelProto
    model, spots = parse_model(path)
    parts = Parts(model, path)
    _check_versions(model, path)
    _check_operators(model, parts, path)
    _check_names(parts, path)
    _check_types(model, parts, path)
    stored = list(model.graph.initializer)
    for tensor in (*stored, *parts.inner):
        _check_tensor(tensor, path)
    for tensor in (*(each for each in stored if stored_bytes(each) <= SMALL_BYTES), *parts.inner):
        storage.load_data(tensor, path.parent)
    for place, (offset, length) in spots.items():
        tensor = stored[place]
        _check_length(tensor, length, f"{path}: tensor '{tensor.name}'")
        storage.refer(tensor, path.name, offset, length)
    return model


def _check_versions(model: onnx.ModelProto, path: Path) -> None:
    newest = defs.onnx_opset_version()
    hint = f"the newest that the installed onnx {onnx.__version__} knows is "
    if model.ir_version > onnx.IR_VERSION:
        raise BadInput(
            f"{path}: has IR version {model.ir_version}", hint=f"{hint}{onnx.IR_VERSION}"
        )
    for entry in model.opset_import:
        limit = newest if entry.domain in ("", "ai.onnx") else (1 << 31) - 1
        if not 1 <= entry.version <= limit:
            raise BadInput(f"{path}: has opset {entry.version}", hint=f"{hint}{limit}")


def _check_operators(model: onnx.ModelProto, parts: Parts, path: Path) -> None:
    versions = {entry.domain: entry.version for entry in model.opset_import}
    local = {(function.domain, function.name) for function in model.functions}
    for number, node in enumerate(parts.nodes):
        where = f"{path}: node '{node.name or f'#{number}'}'"
        strings = (node.op_type, node.domain, *node.input, *node.output)
        if not all(isinstance(each, str) for each in strings):
            raise BadInput(f"{where}: has a name that is not UTF-8")
        if (node.domain, node.op_type) in local or node.domain.startswith(RUNTIME_DOMAINS):
            continue
        if node.domain not in STANDARD_DOMAINS:
            raise BadInput(f"{where}: operator {node.op_type} of unknown domain '{node.domain}'")
        domain = "" if node.domain == "ai.onnx" else node.domain
        version = versions.get(domain, versions.get("ai.onnx", 0) if domain == "" else 0)
        if not version:
            raise BadInput(f"{where}: the file names no opset for domain '{domain or 'ai.onnx'}'")
        try:
            schema = defs.get_schema(node.op_type, version, domain)
        except defs.SchemaError as exc:
            if domain == "" and node.op_type in RUNTIME_OPERATORS:
                continue
            raise BadInput(
                f"{where}: unknown operator {node.op_type} (opset {version})",
                hint="export it again, or ask for the operator's domain to be supported",
            ) from exc
        if schema.deprecated:
            raise BadInput(f"{where}: operator {node.op_type} was removed in opset {version}")


def for_checker(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Return `model`, or a copy with RUNTIME_OPERATORS in a domain that onnx does not check."""
    own = RUNTIME_DOMAINS[0]
    version = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)

    def foreign(model: onnx.ModelProto) -> list[onnx.NodeProto]:
        found = [each for each in Parts(model, path).nodes if each.op_type in RUNTIME_OPERATORS]
        return [each for each in found if not defs.has(each.op_type, version, each.domain)]

    if not foreign(model):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in foreign(copy):
        node.domain = own
    if own not in {each.domain for each in copy.opset_import}:
        copy.opset_import.add(domain=own, version=1)
    return copy


def _check_names(parts: Parts, path: Path) -> None:
    """Raise BadInput unless each graph's inputs, outputs and stored tensors have unique names."""
    for graph in parts.graphs:
        sparse = [each.values.name for each in graph.sparse_initializer]
        for kind, names in (
            ("initializers", [*(each.name for each in graph.initializer), *sparse]),
            ("inputs", [each.name for each in graph.input]),
            ("outputs", [each.name for each in graph.output]),
        ):
            if twice := duplicate(names):
                raise BadInput(
                    f"{path}: two {kind} have the name '{twice}'",
                    hint="which of them counts is not defined: rename one, or export it again",
                )


def _check_types(model: onnx.ModelProto, parts: Parts, path: Path) -> None:
    """Raise BadInput unless each input, output and typed value has a known element type or none."""
    known = set(TensorProto.DataType.values())
    for graph in (*parts.graphs, *model.functions):
        values = [*graph.value_info]
        if isinstance(graph, onnx.GraphProto):
            values += [*graph.input, *graph.output]
        for value in values:
            kind = value.type.tensor_type.elem_type
            if kind not in known or not isinstance(value.name, str):
                raise BadInput(f"{path}: tensor '{value.name}' has an unknown element type {kind}")


def _check_tensor(tensor: onnx.TensorProto, path: Path) -> None:
    where = f"{path}: tensor '{tensor.name}'"
    if tensor.data_type not in TensorProto.DataType.values() or not tensor.data_type:
        raise BadInput(f"{where}: has an unknown element type {tensor.data_type}")
    if tensor.HasField("segment"):
        raise BadInput(f"{where}: is in segments, which no runtime reads")
    if any(size < 0 for size in tensor.dims):
        raise BadInput(f"{where}: has the shape {list(tensor.dims)}")
    if tensor.data_location == TensorProto.EXTERNAL:
        # its data must be in a regular file below the model's folder that is long enough
        values = {entry.key: entry.value for entry in tensor.external_data}
        location = values.get("location", "")
        info = check_data_file(path, location, where)
        try:
            offset = int(values.get("offset", "0"))
            length = int(values.get("length", str(stored_bytes(tensor))))
        except ValueError:
            raise BadInput(f"{where}: its offset or length is not a number") from None
        if length != stored_bytes(tensor) or offset < 0 or offset + length > info.st_size:
            raise BadInput(
                f"{where}: needs {stored_bytes(tensor)} bytes; the file says offset {offset}, "
                f"length {length} in {location} of {info.st_size} bytes"
            )
    elif tensor.HasField("raw_data"):
        _check_length(tensor, len(tensor.raw_data), where)


def _check_length(tensor: onnx.TensorProto, length: int, where: str) -> None:
    if length != stored_bytes(tensor):
        raise BadInput(
            f"{where}: shape {list(tensor.dims)} needs {stored_bytes(tensor)} bytes, "
            f"the file holds {length}"
        )
