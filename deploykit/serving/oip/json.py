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
    Binary,
    InputData,
    Plan,
    Request,
    RequestedOutput,
    Result,
    Signature,
    check_parameters,
    collect_results,
    fill,
    find_region,
    number_bytes,
    plan,
    to_bytes,
    to_json,
)
from deploykit.serving.options import VERSION
from deploykit.serving.shared_memory import SharedMemory

MAX_NESTING = 100
_PART = 1 << 16  # values converted at once, which takes about 2 ms
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
    read = _read_cached if json_bytes <= _CACHED_HEAD_BYTES else _read
    planned, binary_bytes = read(head, model)
    if size != json_bytes + binary_bytes:
        raise BadInput(
            f"the inputs' binary_data_size add up to {binary_bytes} bytes, "
            f"but {size - json_bytes} follow the JSON part"
        )
    return fill(planned, body, json_bytes, memory)


def _read(head: bytes, model: Signature) -> tuple[Plan, int]:
    """Return the plan from the JSON part, and how many bytes must follow it."""
    document = parse_json(head)
    parameters = check_parameters(document.get("parameters"), "the request")
    items, requested = document.get("inputs"), document.get("outputs")
    if type(items) is not list or not items:
        raise BadInput("'inputs' must be a list of at least one input")
    at = 0
    inputs = []
    for item in items:
        if type(item) is not dict:
            raise BadInput("each of 'inputs' must be an object")
        where = f"input {quote(item.get('name'))}"
        more = check_parameters(item.get("parameters"), where)
        data: object = find_region(more, where)
        size = more.get("binary_data_size")
        if ("data" in item) + (size is not None) + (data is not None) != 1:
            sources = "'data', 'binary_data_size' and 'shared_memory_region'"
            raise BadInput(f"{where} needs exactly one of {sources}")
        if size is not None:
            data = Binary(at, size)
            at += size if type(size) is int else 0
        elif data is None:
            data = item["data"]
        inputs.append(InputData(item.get("name"), item.get("datatype"), item.get("shape"), data))
    if requested is not None and type(requested) is not list:
        raise BadInput("'outputs' must be a list")
    for item in requested or ():
        if type(item) is not dict:
            raise BadInput("each of 'outputs' must be an object with a 'name'")
    outputs = [(item.get("name"), item.get("parameters")) for item in requested or ()]
    return plan(inputs, outputs, parameters, document.get("id"), model), at


_read_cached = lru_cache(maxsize=256)(_read)


def parse_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object of limited size, as strictly as `parse_document`."""
    check_json_size(text, "send the tensors as binary data: 'binary_data_size', or over gRPC")
    document = parse_document(text)
    if type(document) is not dict:
        raise BadInput("the request must be a JSON object")
    return document


def parse_document(text: bytes) -> Any:
    """Parse a JSON value strictly: UTF-8, no NaN, no trailing data, nested at most 100 deep.

    Large ones are parsed one at a time, on another thread than the event loop's.
    """
    try:
        with ONE_JSON if len(text) > LARGE_BYTES else contextlib.nullcontext():
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
    slot = next(iter(model.inputs.values()))
    strings = not slot.item_bytes
    axes = [1 if strings and isinstance(axis, str) else axis for axis in slot.spec.shape]
    if model.max_batch:
        axes[0] = 1
    free = [place for place, axis in enumerate(axes) if isinstance(axis, str)]
    if len(free) > 1:
        raise BadInput(f"{why} needs an input with one variable axis at most, it is {slot.spec}")
    sizes = [axis for axis in axes if isinstance(axis, int)]
    fixed_bytes = math.prod(sizes) * slot.item_bytes
    for place in free:
        axes[place] = len(body) // fixed_bytes if fixed_bytes else 0
    if strings:
        if math.prod(sizes) != 1:
            raise BadInput(f"{why} holds one string, the input is {slot.spec}")
        body = len(body).to_bytes(4, "little") + body
    tensor = InputData(slot.spec.name, slot.datatype, axes, Binary(0, len(body)))
    return fill(plan([tensor], None, {}, None, model, binary=True), body)


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
        shapes = tuple([array.shape for array in arrays])
        head = _cached_head(name, requested, shapes, model)
        if head is not None:
            return [head, *map(number_bytes, arrays)], len(head)
    results = collect_results(request, outputs, model, memory)
    return encode_results(name, request.id, results)


def encode_results(
    name: str, request_id: str | None, results: Sequence[Result]
) -> tuple[list[Bytes], int | None]:
    """Return a response as `encode` does."""
    items: list[dict[str, Any]] = []
    tails = []
    for output, datatype, shape, array, requested in results:
        item: dict[str, Any] = {"name": output, "datatype": datatype, "shape": shape}
        if array is None:
            pass  # in shared memory; no 'parameters': with them the C++ client expects a tail
        elif requested.binary:
            tail = to_bytes(array, datatype)
            item["parameters"] = {"binary_data_size": len(tail)}
            tails.append(tail)
        else:
            item["data"] = to_json(array, datatype, output)
        items.append(item)
    parts = _json_parts(name, request_id, items)
    return [*parts, *tails], sum(map(len, parts)) if any(tails) else None


def _json_parts(name: str, request_id: str | None, items: list[dict[str, Any]]) -> list[Bytes]:
    """Return the JSON part; many values are written in steps, between other threads."""
    if all(len(item.get("data", ())) <= _PART for item in items):
        return [_head(name, request_id, items)]
    parts: list[Bytes] = [_head(name, request_id, [])[:-2]]  # without its "]}"
    for number, item in enumerate(items):
        values = item.pop("data", None)
        about = orjson.dumps(item)
        if values is not None:
            about = about[:-1] + b',"data":['
        parts.append(b"," + about if number else about)
        for at in range(0, 0 if values is None else len(values), _PART):
            text = orjson.dumps(values[at : at + _PART], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
            parts.append(b"," + text if at else text)
        if values is not None:
            parts.append(b"]}")
    return [*parts, b"]}"]


def _head(name: str, request_id: str | None, items: list[dict[str, Any]]) -> bytes:
    document: dict[str, Any] = {"model_name": name, "model_version": VERSION}
    if request_id is not None:
        document["id"] = request_id
    document["outputs"] = items
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


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
        if not (each.binary and slot.item_bytes and size) or slot.datatype == "BF16":
            return None
        if each.classes or each.region is not None:
            return None
        item = {"name": each.name, "datatype": slot.datatype, "shape": shape}
        items.append({**item, "parameters": {"binary_data_size": size}})
    return _head(name, None, items)
