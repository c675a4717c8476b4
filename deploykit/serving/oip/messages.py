"""Decode ModelInferRequest messages and encode ModelInferResponse messages.

protobuf parses only the part before the raw contents, and that part is cached, as most clients
repeat it; the raw contents are read in place, without a copy. `request.py` does the checks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from deploykit.core.errors import BadInput, TooLarge, quote
from deploykit.core.json_value import MOST_JSON_VALUES, ONE_JSON
from deploykit.core.tensors import Bytes
from deploykit.engines.oip import CONTENTS, MESSAGES, DecodeError
from deploykit.serving.oip.request import (
    LARGE_BYTES,
    Binary,
    Plan,
    Request,
    Result,
    Signature,
    fill,
    plan,
    to_bytes,
)
from deploykit.serving.options import VERSION
from deploykit.serving.shared_memory import SharedMemory

_RAW_INPUT = 7  # its field number in ModelInferRequest
_BYTES_INPUT = b"\x12\x05BYTES"  # the datatype of an input: field 2, with its length
_RAW_OUTPUT, _INFER_RESPONSE = b"\x32", b"\x12"  # keys of fields 6 and 2, with length
_CACHED_BYTES = 2048
_CACHED_SPANS = 16
_MAX_FIELDS = 1024  # inputs, outputs, parameters and raw contents of a request are one field each
_MAX_NESTED = 1 << 18  # fields in inputs and outputs; a string in bytes_contents is one
_MAX_HEAD_BYTES = 16 << 20  # bytes of a request without its raw contents
_MAX_AXES = 64  # as many as NumPy has
_MAX_NAME_BYTES = 1024  # bytes of the name or the version of a model
_EXTRA_INPUTS = 16  # inputs above the model's that are parsed, to name the unknown one
_INSTEAD = "send the tensors as raw_input_contents"
_NESTED: Mapping[int, Any] = {  # number of a field -> its fields that have fields
    4: {2: {}},
    5: {4: {2: {}}, 5: {}},
    6: {2: {2: {}}},
}
_IGNORED = "triton_enable_empty_final_response"  # each of our responses says that it is final

Span = tuple[int, int]  # raw contents: offset from the request's first byte, size in bytes


class Split(NamedTuple):
    """A request without its raw contents, the span of each of those, the model and its version."""

    head: bytes
    spans: tuple[Span, ...]
    model: str
    version: str


# For each size, the last request: its result of `split_request`, and the bytes around the raw
# contents with their offsets. Most clients repeat those bytes, which leaves nothing to parse.
_layouts: dict[int, tuple[Split, list[tuple[int, bytes]]]] = {}
_MOST_LAYOUTS = 256


def parse(name: str, data: bytes) -> Any:
    """Parse a message of grpc_service.proto. Raises BadInput."""
    try:
        return MESSAGES[name].FromString(data)
    except DecodeError as exc:
        raise BadInput(f"the message is not a valid {name}") from exc


def split_request(data: bytes, at: int) -> Split:
    """Split the request `data[at:]`, whose fields come in any order. Raises BadInput, TooLarge."""
    size = len(data) - at
    known = _layouts.get(size)
    if known is not None:
        split, rest = known
        for offset, part in rest:
            if not data.startswith(part, at + offset):
                break
        else:
            return split
    split = _split(data, at)
    if len(split.head) <= _CACHED_BYTES and len(split.spans) <= _CACHED_SPANS:
        rest, end = [], 0
        for offset, length in (*split.spans, (size, 0)):
            if end < offset:
                rest.append((end, data[at + end : at + offset]))
            end = offset + length
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        _layouts[size] = split, rest
    return split


def _split(data: bytes, at: int) -> Split:
    parts, spans, begin, end = [], [], at, at
    names = {1: b"", 2: b""}
    for number, kind, start, stop in _fields(data, at, len(data), _MAX_FIELDS):
        if number == _RAW_INPUT and kind == 2:
            spans.append((start - at, stop - start))
            parts.append((begin, end))
            begin = stop
        elif number in names and kind == 2:
            if stop - start > _MAX_NAME_BYTES:
                raise BadInput(f"a model's name or version has {stop - start} bytes")
            names[number] = data[start:stop]
        end = stop
    parts.append((begin, end))
    size = sum([end - begin for begin, end in parts])
    if size > _MAX_HEAD_BYTES:  # it would be copied on the event loop's thread
        text = f"the message has {size} bytes without raw_input_contents, above {_MAX_HEAD_BYTES}"
        raise TooLarge(text, hint=_INSTEAD)
    try:
        name, version = names[1].decode(), names[2].decode()
    except UnicodeDecodeError as exc:
        raise _invalid() from exc
    head = b"".join([data[begin:end] for begin, end in parts])
    return Split(head, tuple(spans), name, version)


def _fields(data: bytes, at: int, size: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, wire type, start and end of each field in `data[at:size]`. Raises BadInput."""
    while at < size:
        most -= 1
        if most < 0:
            raise _too_many(_MAX_FIELDS)
        tag = data[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = _read_varint(data, at, size)
        kind = tag & 7
        if kind == 2:
            length, at = _read_varint(data, at, size)
        elif kind == 0:
            length = _read_varint(data, at, size)[1] - at
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:  # groups, which this protocol does not use
            raise _invalid()
        if length > size - at:
            raise _invalid()
        yield tag >> 3, kind, at, at + length
        at += length


def _read_varint(data: bytes, at: int, size: int) -> tuple[int, int]:
    value = shift = 0
    while at < size and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _invalid()


def sends_bytes(head: bytes) -> bool:
    """Return whether a request has an input of BYTES; it is not parsed."""
    return _BYTES_INPUT in head


def names_regions(head: bytes) -> bool:
    """Return whether a request may use shared memory; it is not parsed."""
    return b"shared_memory_region" in head


def _count_fields(data: bytes) -> None:
    """Raise BadInput for more fields than protobuf may parse: each costs time and memory."""
    left = _MAX_NESTED
    parts: list[tuple[int, int, Mapping[int, Any]]] = [(0, len(data), _NESTED)]
    while parts:
        begin, end, nested = parts.pop()
        for number, kind, start, stop in _fields(data, begin, end, left + 1):
            left -= 1
            if left < 0:
                raise _too_many(_MAX_NESTED)
            if kind == 2 and number in nested:
                parts.append((start, stop, nested[number]))


def _invalid() -> BadInput:
    return BadInput("the message is not a valid ModelInferRequest")


def _too_many(most: int) -> BadInput:
    return BadInput(f"the message has more than {most} fields", hint=_INSTEAD)


def decode(
    split: Split, data: bytes, at: int, model: Signature, memory: SharedMemory | None = None
) -> Request:
    """Decode the request `data[at:]`, which `split_request` has split.

    `memory`: shared memory that it may use, None if disabled. Raises the errors of `request.plan`.
    """
    size = len(split.head)
    if size <= _CACHED_BYTES:
        return fill(_plan_cached(split.head, split.spans, model), data, at, memory)
    with ONE_JSON if size > LARGE_BYTES else contextlib.nullcontext():
        planned = _plan(split.head, split.spans, model)
    return fill(planned, data, at, memory)


def _plan(head: bytes, spans: tuple[Span, ...], model: Signature) -> Plan:
    if len(head) > _CACHED_BYTES:
        _count_fields(head)
    message = parse("ModelInferRequest", head)
    if len(message.inputs) > len(model.inputs) + _EXTRA_INPUTS:
        raise BadInput(f"{len(message.inputs)} inputs, the model has {len(model.inputs)}")
    raw = [Binary(*span) for span in spans]
    document = {
        "id": message.id or None,
        "parameters": _parameters(message),
        "inputs": [_input(item, raw if spans else None) for item in message.inputs],
        "outputs": [
            {"name": item.name, "parameters": _parameters(item)} for item in message.outputs
        ],
    }
    if raw:
        needed = len(spans) - len(raw)
        raise BadInput(f"raw_input_contents has {len(spans)} entries, {needed} inputs need one")
    return plan(document, model, binary=True)


_plan_cached = lru_cache(maxsize=256)(_plan)


def _input(item: Any, raw: list[Binary] | None) -> dict[str, Any]:
    """Return one input as in JSON; takes its contents from the front of `raw`, if that is used."""
    where, parameters = f"input {quote(item.name)}", _parameters(item)
    parameters.pop("binary_data_size", None)  # of HTTP
    contents = {field.name: values for field, values in item.contents.ListFields()}
    if len(item.shape) > _MAX_AXES:
        raise BadInput(f"{where} has {len(item.shape)} axes")
    if any(len(values) > MOST_JSON_VALUES for values in contents.values()):
        text = f"{where} has more than {MOST_JSON_VALUES} elements in its contents"
        raise TooLarge(text, hint=_INSTEAD)
    shared = any(key.startswith("shared_memory_") for key in parameters)
    if contents and (raw is not None or shared):
        instead = "shared_memory_region" if raw is None else "raw_input_contents"
        raise BadInput(f"{where} has both 'contents' and {instead}")
    found = {"name": item.name, "datatype": item.datatype, "shape": list(item.shape)}
    found["parameters"] = parameters
    if shared:
        return found
    if raw is not None:
        if not raw:
            raise BadInput("raw_input_contents has fewer entries than there are inputs")
        return {**found, "data": raw.pop(0)}
    right = CONTENTS.get(item.datatype, "")
    for key in contents.keys() - {right}:
        of = f"belongs in {right}" if right else "has no typed contents, use raw contents"
        raise BadInput(f"{where}: {quote(item.datatype)} {of}, got {key}")
    return {**found, "data": list(contents.get(right, ()))}


def _parameters(message: Any) -> dict[str, Any]:
    values = {}
    for key, value in message.parameters.items():
        chosen = value.WhichOneof("parameter_choice")
        if chosen is not None and key != _IGNORED:
            values[key] = getattr(value, chosen)
    return values


def encode(name: str, request_id: str | None, results: Sequence[Result]) -> list[Bytes]:
    """Encode a ModelInferResponse in parts. Outputs in shared memory get empty raw contents."""
    outputs = []
    contents: list[Bytes] = []
    for output, datatype, shape, array, requested in results:
        outputs.append((output, datatype, shape, requested.region if array is None else None))
        raw = b"" if array is None else to_bytes(array, datatype)
        contents += (_RAW_OUTPUT + _varint(len(raw)), raw)
    head = _response_head(name, tuple(outputs))
    if request_id is None:
        return [head, *contents]
    text = request_id.encode()
    return [head, b"\x1a" + _varint(len(text)) + text, *contents]


# each request of a stream has one answer, which is its last
_FINAL = MESSAGES["ModelInferResponse"]()
_FINAL.parameters["triton_final_response"].bool_param = True
_FINAL_BYTES = _FINAL.SerializeToString()


def wrap_in_stream(parts: list[Bytes]) -> list[Bytes]:
    """Wrap a response in a ModelStreamInferResponse, marked as its request's last."""
    size = len(_FINAL_BYTES) + sum(map(len, parts))
    return [_INFER_RESPONSE + _varint(size), *parts, _FINAL_BYTES]


@lru_cache(maxsize=256)
def _response_head(name: str, outputs: tuple[tuple[Any, ...], ...]) -> bytes:
    response = MESSAGES["ModelInferResponse"](model_name=name, model_version=VERSION)
    for output, datatype, shape, region in outputs:
        made = response.outputs.add(name=output, datatype=datatype, shape=shape)
        if region is not None:
            made.parameters["shared_memory_region"].string_param = region.name
            made.parameters["shared_memory_offset"].int64_param = region.offset
            made.parameters["shared_memory_byte_size"].int64_param = region.byte_size
    data: bytes = response.SerializeToString()
    return data


@lru_cache(maxsize=256)
def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def stream_error(text: str) -> list[Bytes]:
    """Encode a ModelStreamInferResponse with an error message."""
    message = MESSAGES["ModelStreamInferResponse"](error_message=text, infer_response=_FINAL)
    return [message.SerializeToString()]
