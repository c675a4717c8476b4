"""Decode ModelInferRequest messages and encode ModelInferResponse messages.

protobuf parses only the part before the raw contents, and that part is cached, as most clients
repeat it; the raw contents are read in place, without a copy. `request.py` does
the checks, so that gRPC and HTTP reject the same requests with the same messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from deploykit.core.errors import BadInput, quote
from deploykit.serving.oip.protobuf import MESSAGES, DecodeError, Message
from deploykit.serving.oip.request import (
    Binary,
    InputData,
    Plan,
    Signature,
    check_parameters,
    find_region,
    plan,
)
from deploykit.serving.oip.response import Result
from deploykit.serving.oip.tensors import typed_values

_RAW_INPUT, _RAW_OUTPUT, _INFER_RESPONSE = 0x3A, b"\x32", b"\x12"  # fields 7, 6 and 2, with length
_CACHED_BYTES = 2048
_IGNORED = "triton_enable_empty_final_response"  # each of our responses is final

Span = tuple[int, int]  # offset from the first raw contents, bytes


def parse(name: str, data: bytes) -> Any:
    """Parse a message of grpc_service.proto. Raises BadInput."""
    try:
        return MESSAGES[name].FromString(data)
    except DecodeError as exc:
        raise BadInput(f"the message is not a valid {name}") from exc


def split_request(data: bytes, at: int) -> tuple[bytes, int, tuple[Span, ...]]:
    """The part of a request before its raw contents, their start, and the span of each.

    Fields may come in any order; in an unusual one nothing is split off, which is slower.
    Raises BadInput.
    """
    size, first, begun = len(data), at, at
    spans: list[Span] = []
    while at < size:
        tag = data[at]
        if (tag != _RAW_INPUT and spans) or tag & 0x87 != 2:
            return data[begun:], size, ()
        at += 1
        length = shift = 0
        while True:
            if at >= size or shift > 28:
                raise BadInput("the message is not a valid ModelInferRequest")
            byte = data[at]
            at += 1
            length |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        if length > size - at:
            raise BadInput("the message is not a valid ModelInferRequest")
        if tag == _RAW_INPUT:
            spans.append((at - first, length))
            at += length
        else:
            first = at = at + length
    return data[begun:first], first, tuple(spans)


def parse_header(head: bytes) -> Any:
    """The request without its raw contents, read-only: it may be cached. Raises BadInput."""
    return (_parse_header_cached if len(head) <= _CACHED_BYTES else _parse_header)(head)


def plan_request(head: bytes, spans: tuple[Span, ...], model: Signature) -> Plan:
    """The plan for `request.fill`. Raises what `request.plan` raises."""
    return (_plan_cached if len(head) <= _CACHED_BYTES else _plan)(head, spans, model)


def _parse_header(head: bytes) -> Any:
    return parse("ModelInferRequest", head)


_parse_header_cached = lru_cache(maxsize=256)(_parse_header)


def _plan(head: bytes, spans: tuple[Span, ...], model: Signature) -> Plan:
    message = parse_header(head)
    raw = [Binary(None, at, size) for at, size in spans]
    raw = raw or [Binary(each, 0, len(each)) for each in message.raw_input_contents]
    unused = iter(raw)
    inputs = [_input_data(item, unused, bool(raw)) for item in message.inputs]
    if not inputs:
        raise BadInput("'inputs' must be a list of at least one input")
    left = sum(1 for _ in unused)
    if left:
        text = f"raw_input_contents has {len(raw)} entries, {len(raw) - left} inputs need one"
        raise BadInput(text)
    outputs = [(item.name, _parameters(item)) for item in message.outputs]
    parameters = check_parameters(_parameters(message), "the request")
    return plan(inputs, outputs, parameters, message.id or None, model, binary=True)


_plan_cached = lru_cache(maxsize=256)(_plan)


def _input_data(item: Any, raw: Iterator[Binary], all_raw: bool) -> InputData:
    where = f"input {quote(item.name)}"
    region = find_region(check_parameters(_parameters(item), where), where)
    contents = {field.name: values for field, values in item.contents.ListFields()}
    if contents and (all_raw or region is not None):
        instead = "raw_input_contents" if all_raw else "shared_memory_region"
        raise BadInput(f"{where} has both 'contents' and {instead}")
    data: object
    if region is not None:
        data = region
    elif all_raw:
        data = next(raw, None)
        if data is None:
            raise BadInput("raw_input_contents has fewer entries than there are inputs")
    else:
        data = typed_values(item.name, item.datatype, contents)
    return InputData(item.name, item.datatype, list(item.shape), data)


def _parameters(message: Any) -> dict[str, Any]:
    values = {}
    for key, value in message.parameters.items():
        chosen = value.WhichOneof("parameter_choice")
        if chosen is not None and key != _IGNORED:
            values[key] = getattr(value, chosen)
    return values


def encode(
    name: str, version: str, request_id: str | None, results: Sequence[Result]
) -> list[bytes]:
    """A ModelInferResponse in parts. Outputs in shared memory get empty raw contents."""
    outputs = [
        (
            each.name,
            each.datatype,
            each.shape,
            each.requested.region if each.array is None else None,
        )
        for each in results
    ]
    parts = [_response_head(name, version, tuple(outputs))]
    if request_id is not None:
        text = request_id.encode()
        parts.append(b"\x1a" + _varint(len(text)) + text)
    for result in results:
        contents = result.raw_contents()
        parts += (_RAW_OUTPUT + _varint(len(contents)), contents)
    return parts


def wrap_in_stream(parts: list[bytes]) -> list[bytes]:
    """A ModelStreamInferResponse around a response."""
    return [_INFER_RESPONSE + _varint(sum(map(len, parts))), *parts]


@lru_cache(maxsize=256)
def _response_head(name: str, version: str, outputs: tuple[tuple[Any, ...], ...]) -> bytes:
    response = MESSAGES["ModelInferResponse"](model_name=name, model_version=version)
    for output, datatype, shape, region in outputs:
        made = response.outputs.add(name=output, datatype=datatype, shape=shape)
        if region is not None:
            made.parameters["shared_memory_region"].string_param = region.name
            made.parameters["shared_memory_offset"].int64_param = region.offset
            made.parameters["shared_memory_byte_size"].int64_param = region.byte_size
    data: bytes = response.SerializeToString()
    return data


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def stream_error(text: str) -> list[bytes]:
    """A ModelStreamInferResponse with an error message."""
    message: Message = MESSAGES["ModelStreamInferResponse"](error_message=text)
    return [message.SerializeToString()]
