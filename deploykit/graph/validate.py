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
    _check_nodes(model, parts, path)
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


def _check_nodes(model: onnx.ModelProto, parts: Parts, path: Path) -> None:
    """Raise BadInput for what onnx's checker lets pass."""
    newest = defs.onnx_opset_version()
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and entry.version > newest:
            raise BadInput(
                f"{path}: has opset {entry.version}",
                hint=f"the newest that the installed onnx {onnx.__version__} knows is {newest}",
            )
    if twice := duplicate(value.name for value in model.graph.output):
        raise BadInput(f"{path}: two outputs have the name '{twice}'", hint="rename one")
    local = {(function.domain, function.name) for function in model.functions}
    for number, node in enumerate(parts.nodes):
        where = f"{path}: node '{node.name or f'#{number}'}'"
        strings = (node.op_type, node.domain, *node.input, *node.output)
        if not all(isinstance(each, str) for each in strings):
            raise BadInput(f"{where}: has a name that is not UTF-8")
        known = node.domain in STANDARD_DOMAINS or node.domain.startswith(RUNTIME_DOMAINS)
        if not known and (node.domain, node.op_type) not in local:
            raise BadInput(f"{where}: operator {node.op_type} of unknown domain '{node.domain}'")


def for_checker(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Return a copy with RUNTIME_OPERATORS in a domain that onnx does not check."""
    version = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in Parts(copy, path).nodes:
        known = node.op_type not in RUNTIME_OPERATORS or defs.has(node.op_type, version)
        node.domain = node.domain if known else RUNTIME_DOMAINS[0]
    if RUNTIME_DOMAINS[0] not in {each.domain for each in copy.opset_import}:
        copy.opset_import.add(domain=RUNTIME_DOMAINS[0], version=1)
    return copy


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
