"""The Open Inference Protocol v2 over HTTP: request bytes to arrays, arrays to response bytes.

Pure functions; `request.py` checks what a request means. Errors name the field.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import orjson

from deploykit.core.errors import BadInput, quote
from deploykit.core.json_value import ONE_JSON, check_json_size
from deploykit.core.tensors import Bytes
from deploykit.serving.oip.request import (
    LARGE_BYTES,
    LENGTH_BYTES,
    Binary,
    Plan,
    Request,
    RequestedOutput,
    Result,
    Signature,
    collect_results,
    fill,
    number_bytes,
    plan,
    to_bytes,
    to_json,
)
from deploykit.serving.options import VERSION
from deploykit.serving.shared_memory import SharedMemory

MAX_NESTING = 100
_PART = 1 << 16  # values written at once, which takes about 2 ms
_CACHED_HEAD_BYTES = 2048  # most clients repeat the same JSON part


def decode(
    body: Bytes, json_bytes: int | None, model: Signature, memory: SharedMemory | None = None
) -> Request:
    """Decode a request. `json_bytes`: size of the JSON part, None for all of `body`, 0 for none.

    `memory`: shared memory that the request may use, None if disabled. Raises BadInput for a
    request that does not fit the protocol or the model, TooLarge above `model.max_bytes`.
    """
    size = len(body)
    if json_bytes is None:
        json_bytes = size
    elif json_bytes == 0:
        return _raw(body, model)
    elif not 0 < json_bytes <= size:
        raise BadInput(f"Inference-Header-Content-Length must be a number from 0 to {size}")
    head = bytes(body[:json_bytes])
    planned = (_read_cached if json_bytes <= _CACHED_HEAD_BYTES else _read)(head, model)
    if size != json_bytes + planned.binary_bytes:
        raise BadInput(
            f"the inputs' binary_data_size add up to {planned.binary_bytes} bytes, "
            f"but {size - json_bytes} follow the JSON part"
        )
    return fill(planned, body, json_bytes, memory)


def _read(head: bytes, model: Signature) -> Plan:
    return plan(parse_json(head), model)


_read_cached = lru_cache(maxsize=256)(_read)


def parse_json(text: bytes) -> dict[str, Any]:
    """Parse the JSON object of a request, as `parse_document` does."""
    document = parse_document(text, "send the tensors as 'binary_data_size', or over gRPC")
    if type(document) is not dict:
        raise BadInput("the request must be a JSON object")
    return document


def parse_document(text: bytes, hint: str) -> Any:
    """Parse a JSON value strictly: UTF-8, no NaN, no trailing data, nested at most 100 deep.

    Large ones are parsed one at a time, on another thread than the event loop's. Raises TooLarge
    with the `hint` for one of too many values.
    """
    large = len(text) > LARGE_BYTES
    if large:  # fewer bytes cannot be too many values
        check_json_size(text, hint)
    try:
        with ONE_JSON if large else contextlib.nullcontext():
            document = orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        raise BadInput(f"the request is not valid JSON: {quote(exc.msg)}") from exc
    if type(document) in (list, dict) and text.count(b"[") + text.count(b"{") > MAX_NESTING:
        _check_nesting(document)
    return document


def _check_nesting(document: object) -> None:
    level = [document]
    for _ in range(MAX_NESTING):
        values = (v if type(v) is list else v.values() for v in level)  # type: ignore[attr-defined]
        level = [v for v in itertools.chain.from_iterable(values) if type(v) in (list, dict)]
        if not level:
            return
    raise BadInput(f"the request's JSON is nested more than {MAX_NESTING} deep")


def _raw(body: Bytes, model: Signature) -> Request:
    """Decode a request of raw tensor bytes only: batch 1, all outputs binary.

    One variable axis is inferred from the number of bytes; BYTES have one element.
    """
    why = "a raw binary request (Inference-Header-Content-Length: 0)"
    if len(model.inputs) != 1:
        raise BadInput(f"{why} needs a model with one input, this one has {len(model.inputs)}")
    if not body:
        raise BadInput(f"{why} has no bytes")
    (slot,) = model.inputs.values()
    axes: list[Any] = list(slot.spec.shape)
    if model.max_batch:
        axes[0] = 1
    free = [place for place, axis in enumerate(axes) if isinstance(axis, str)]
    if not slot.item_bytes:
        if any(axis != 1 for axis in axes if isinstance(axis, int)):
            raise BadInput(f"{why} holds one string, the input is {slot.spec}")
        axes = [1] * len(axes)
        body = len(body).to_bytes(LENGTH_BYTES, "little") + body
    elif len(free) > 1:
        raise BadInput(f"{why} needs an input with one variable axis at most, it is {slot.spec}")
    elif free:
        fixed_bytes = math.prod(axes[: free[0]] + axes[free[0] + 1 :]) * slot.item_bytes
        axes[free[0]] = len(body) // fixed_bytes if fixed_bytes else 0
    data = Binary(0, len(body))
    tensor = {"name": slot.spec.name, "datatype": slot.datatype, "shape": axes, "data": data}
    return fill(plan({"inputs": [tensor]}, model, binary=True), body)


def encode(
    name: str,
    request: Request,
    outputs: Mapping[str, np.ndarray],
    model: Signature,
    memory: SharedMemory | None = None,
) -> tuple[list[Bytes], int | None]:
    """Return the JSON part and the binary tails, and the JSON part's length if binary data follow.

    `memory`: as for `decode`. Raises the errors of its `write`, and BadInput for an output that
    JSON cannot represent.
    """
    if request.id is None:
        requested = request.outputs
        arrays = [outputs[wanted.name] for wanted in requested]
        head = _cached_head(name, requested, tuple([array.shape for array in arrays]), model)
        if head is not None:
            return [head, *map(number_bytes, arrays)], len(head)
    return encode_results(name, request.id, collect_results(request, outputs, model, memory))


def encode_results(
    name: str, request_id: str | None, results: Sequence[Result]
) -> tuple[list[Bytes], int | None]:
    """Return a response as `encode` does; many values are written in steps, between threads."""
    parts: list[Bytes] = [_start(name, request_id)]
    tails: list[Bytes] = []
    comma = b""
    for output, datatype, shape, array, requested in results:
        item: dict[str, Any] = {"name": output, "datatype": datatype, "shape": shape}
        values: Sequence[str] | np.ndarray | None = None
        if array is None:
            pass  # in shared memory; no 'parameters': with them the C++ client expects a tail
        elif requested.binary:
            tails.append(to_bytes(array, datatype))
            item["parameters"] = {"binary_data_size": len(tails[-1])}
        else:
            values = to_json(array, datatype, output)
            if len(values) <= _PART:
                item["data"], values = values, None
        text, comma = comma + orjson.dumps(item, option=orjson.OPT_SERIALIZE_NUMPY), b","
        if values is None:
            parts.append(text)
            continue
        parts.append(text[:-1] + b',"data":[')
        for at in range(0, len(values), _PART):
            text = orjson.dumps(values[at : at + _PART], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
            parts.append(b"," + text if at else text)
        parts.append(b"]}")
    parts.append(b"]}")
    return [*parts, *tails], sum(map(len, parts)) if any(tails) else None


def _start(name: str, request_id: str | None) -> bytes:
    document: dict[str, Any] = {"model_name": name, "model_version": VERSION}
    if request_id is not None:
        document["id"] = request_id
    return orjson.dumps(document)[:-1] + b',"outputs":['


@lru_cache(maxsize=256)
def _cached_head(
    name: str,
    requested: tuple[RequestedOutput, ...],
    shapes: tuple[tuple[int, ...], ...],
    model: Signature,
) -> bytes | None:
    """Return the JSON part if all outputs are plain binary numbers, else None."""
    items = []
    for each, shape in zip(requested, shapes, strict=True):
        slot = model.outputs[each.name]
        size = math.prod(shape) * slot.item_bytes
        if not (each.binary and size) or each.classes or each.region or slot.datatype == "BF16":
            return None
        item = {"name": each.name, "datatype": slot.datatype, "shape": shape}
        items.append({**item, "parameters": {"binary_data_size": size}})
    return _start(name, None) + orjson.dumps(items)[1:] + b"}"
