"""ModelInferRequest bytes to a `Request`, an engine's results to ModelInferResponse bytes.

In: a message as it came, whole. Out: what `request.py` makes of it, so that gRPC and HTTP refuse
the same things in the same words. Tensors are not copied by protobuf: what precedes the raw
contents is parsed, and kept, since most clients send the same again and again; the raw contents are
read where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from deploykit.core.errors import BadInput, quote
from deploykit.serving.oip.protobuf import MESSAGES, DecodeError, Message
from deploykit.serving.oip.request import Binary, Given, Plan, Signature, checked, plan, region_of
from deploykit.serving.oip.response import Result
from deploykit.serving.oip.tensors import typed

_RAW_INPUT, _RAW_OUTPUT, _INFER_RESPONSE = 0x3A, b"\x32", b"\x12"  # fields 7, 6 and 2, with length
_CACHED_BYTES = 2048
_IGNORED = "triton_enable_empty_final_response"  # every answer of ours is the final one

Span = tuple[int, int]  # offset from the first raw contents, bytes


def parse(name: str, data: bytes) -> Any:
    """A message of ours. Raises BadInput."""
    try:
        return MESSAGES[name].FromString(data)
    except DecodeError as exc:
        raise BadInput(f"the message is not a valid {name}") from exc


def split(data: bytes, at: int) -> tuple[bytes, int, tuple[Span, ...]]:
    """The part of a request before its raw contents, where these begin, and each one's span.

    Fields may lie in any order; in an unusual one nothing is split off, which is slower.
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


def header(head: bytes) -> Any:
    """The request but for its raw contents. Not to be changed: it may be kept. Raises BadInput."""
    return (_header_again if len(head) <= _CACHED_BYTES else _header)(head)


def planned(head: bytes, spans: tuple[Span, ...], model: Signature) -> Plan:
    """What to read, for `request.fill`. Raises what `request.plan` raises."""
    return (_plan_again if len(head) <= _CACHED_BYTES else _plan)(head, spans, model)


def _header(head: bytes) -> Any:
    return parse("ModelInferRequest", head)


_header_again = lru_cache(maxsize=256)(_header)


def _plan(head: bytes, spans: tuple[Span, ...], model: Signature) -> Plan:
    message = header(head)
    raw = [Binary(None, at, size) for at, size in spans]
    raw = raw or [Binary(each, 0, len(each)) for each in message.raw_input_contents]
    rest = iter(raw)
    inputs = [_given(item, rest, bool(raw)) for item in message.inputs]
    if not inputs:
        raise BadInput("'inputs' must be a list of at least one input")
    left = sum(1 for _ in rest)
    if left:
        text = f"raw_input_contents has {len(raw)} entries, {len(raw) - left} inputs need one"
        raise BadInput(text)
    outputs = [(item.name, _parameters(item)) for item in message.outputs]
    parameters = checked(_parameters(message), "the request")
    return plan(inputs, outputs, parameters, message.id or None, model, binary=True)


_plan_again = lru_cache(maxsize=256)(_plan)


def _given(item: Any, raw: Iterator[Binary], all_raw: bool) -> Given:
    where = f"input {quote(item.name)}"
    region = region_of(checked(_parameters(item), where), where)
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
        data = typed(item.name, item.datatype, contents)
    return Given(item.name, item.datatype, list(item.shape), data)


def _parameters(of: Any) -> dict[str, Any]:
    values = {}
    for key, value in of.parameters.items():
        chosen = value.WhichOneof("parameter_choice")
        if chosen is not None and key != _IGNORED:
            values[key] = getattr(value, chosen)
    return values


def encode(name: str, version: str, request_id: str | None, found: Sequence[Result]) -> list[bytes]:
    """A ModelInferResponse in parts. Outputs in shared memory get empty raw contents."""
    head = _opening(
        name,
        version,
        tuple(
            (r.name, r.datatype, r.shape, r.wanted.region if r.array is None else None)
            for r in found
        ),
    )
    parts = [head]
    if request_id is not None:
        text = request_id.encode()
        parts.append(b"\x1a" + _varint(len(text)) + text)
    for result in found:
        payload = result.payload()
        parts += (_RAW_OUTPUT + _varint(len(payload)), payload)
    return parts


def streamed(parts: list[bytes]) -> list[bytes]:
    """A ModelStreamInferResponse around a response."""
    return [_INFER_RESPONSE + _varint(sum(map(len, parts))), *parts]


@lru_cache(maxsize=256)
def _opening(name: str, version: str, outputs: tuple[tuple[Any, ...], ...]) -> bytes:
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


def failed(text: str) -> list[bytes]:
    """A ModelStreamInferResponse that says what was wrong."""
    message: Message = MESSAGES["ModelStreamInferResponse"](error_message=text)
    return [message.SerializeToString()]
