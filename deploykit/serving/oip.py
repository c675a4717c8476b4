"""Open Inference Protocol v2 over HTTP: request bytes to arrays, arrays to response bytes.

Pure functions. In: a body, the length of its JSON part, and the model's `Signature`. Out: a
`Request` whose arrays fit the model, or BadInput that names the field. No value changes its type in
silence, sizes are Python integers, and nothing is allocated before a length was checked against
what is there.
Byte order is little-endian, that of every platform deploykit runs on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import orjson

from deploykit.core.errors import BadInput
from deploykit.core.tensors import PROTOCOL_NAMES, TensorSpec
from deploykit.serving.payload import BINARY_ONLY, Slot, from_bytes, from_json, show
from deploykit.serving.policy import Key

MAX_NESTING = 100
MAX_ID_BYTES = 1024


@dataclass(frozen=True, eq=False)
class Signature:
    """What a model takes and gives. `max_batch` is in rows, 0 where axis 0 is no batch."""

    inputs: Mapping[str, Slot]
    outputs: Mapping[str, Slot]
    max_batch: int
    max_bytes: int  # of one decoded request


@dataclass(frozen=True)
class Request:
    """A decoded inference request. `outputs`: those to send, in the order asked; True is binary."""

    feeds: dict[str, np.ndarray]  # in model order, not to be written to
    rows: int
    key: Key
    outputs: tuple[tuple[str, bool], ...]
    id: str | None
    timeout_us: int | None


def signature(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], max_batch: int, max_bytes: int
) -> Signature:
    """Raises BadInput for a tensor that cannot be sent: bfloat16, which numpy does not have."""
    return Signature(_slots(inputs), _slots(outputs), max_batch, max_bytes)


def _slots(specs: Sequence[TensorSpec]) -> dict[str, Slot]:
    for spec in specs:
        if spec.dtype == "bfloat16":
            raise BadInput(
                f"tensor '{spec.name}' is bfloat16, which cannot be served yet",
                hint="export the model with float32 inputs and outputs",
            )
    return {
        spec.name: Slot(spec, PROTOCOL_NAMES[spec.dtype], np.dtype(spec.dtype)) for spec in specs
    }


def header_length(text: bytes | None) -> int | None:
    """The value of Inference-Header-Content-Length; None when it was not sent. Raises BadInput."""
    if text is None:
        return None
    if not text.isdigit() or len(text) > 18:
        raise BadInput(f"Inference-Header-Content-Length is {show(text)}, not a number of bytes")
    return int(text)


def decode(body: bytes, json_bytes: int | None, model: Signature) -> Request:
    """Read one request. `json_bytes`: how much of `body` is JSON, None for all of it.

    Raises BadInput for whatever does not fit the protocol or the model, TooLarge for a tensor above
    `model.max_bytes`.
    """
    size = len(body)
    if json_bytes is None:
        json_bytes = size
    elif json_bytes == 0:
        raise BadInput(
            "raw binary requests (Inference-Header-Content-Length: 0) are not offered",
            hint="send the JSON part, with 'binary_data_size' in each input's parameters",
        )
    elif json_bytes > size:
        raise BadInput(
            f"Inference-Header-Content-Length is {json_bytes}, but the body has {size} bytes"
        )
    head = body[:json_bytes]
    layout = (_layout_again if json_bytes <= _CACHED_HEAD_BYTES else _layout)(head, model)
    if size != json_bytes + layout.binary_bytes:
        raise BadInput(
            f"the inputs' binary_data_size add up to {layout.binary_bytes} bytes, "
            f"but {size - json_bytes} follow the JSON part"
        )
    feeds = {}
    for name, part in layout.parts:
        if part.value is None:
            feeds[name] = from_bytes(body, json_bytes + part.at, part.count, part.shape, part.slot)
        else:
            feeds[name] = part.value
    return Request(feeds, layout.rows, layout.key, layout.outputs, layout.id, layout.timeout_us)


@dataclass(frozen=True)
class _Part:
    """One input: an array that came as JSON, or where its bytes begin after the JSON part."""

    slot: Slot
    shape: tuple[int, ...]
    count: int
    at: int
    value: np.ndarray | None


@dataclass(frozen=True)
class _Layout:
    """What the JSON part says; kept, since most clients send the same one again and again."""

    parts: tuple[tuple[str, _Part], ...]  # in model order
    binary_bytes: int
    rows: int
    key: Key
    outputs: tuple[tuple[str, bool], ...]
    id: str | None
    timeout_us: int | None


_CACHED_HEAD_BYTES = 2048


def _layout(head: bytes, model: Signature) -> _Layout:
    document = parse_json(head)
    name = document.get("id")
    if name is not None and (type(name) is not str or len(name.encode()) > MAX_ID_BYTES):
        raise BadInput(f"'id' must be a string of at most {MAX_ID_BYTES} bytes")
    parameters = _parameters(document, "the request")
    wanted = _outputs(document.get("outputs"), parameters, model)
    parts, binary_bytes = _inputs(document.get("inputs"), model)
    key = tuple((name, part.slot.datatype, part.shape[1:]) for name, part in parts)
    rows = _rows(parts, model)
    return _Layout(parts, binary_bytes, rows, key, wanted, name, _timeout_us(parameters))


_layout_again = lru_cache(maxsize=256)(_layout)


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no NaN, nothing after it, nested at most 100 deep."""
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        raise BadInput(f"the request is not valid JSON: {show(exc.msg)}") from exc
    if type(document) is not dict:
        raise BadInput("the request must be a JSON object")
    if text.count(b"[") + text.count(b"{") > MAX_NESTING:
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


def _parameters(of: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The `parameters` object, empty when absent; what we do not offer is refused, not ignored."""
    parameters = of.get("parameters")
    if parameters is None:
        return {}
    if type(parameters) is not dict:
        raise BadInput(f"'parameters' of {where} must be an object")
    for key in parameters:
        if key.startswith("shared_memory_"):
            raise BadInput(f"{where}: shared memory is not offered", hint="send binary data")
        if key == "classification":
            raise BadInput(f"{where}: the classification extension is not offered")
        if key.startswith("triton_"):
            raise BadInput(f"{where}: parameter {show(key)} is reserved")
    if parameters.get("sequence_id") not in (None, 0, ""):
        raise BadInput(f"{where}: 'sequence_id' is for stateful models, and this is none")
    return parameters


def _flag(parameters: Mapping[str, Any], key: str, default: bool) -> bool:
    value = parameters.get(key, default)
    if type(value) is not bool:
        raise BadInput(f"parameter '{key}' must be true or false, got {show(value)}")
    return value


def _timeout_us(parameters: Mapping[str, Any]) -> int | None:
    """How long the request may wait, microseconds; None and 0 leave it to the server."""
    value = parameters.get("timeout")
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise BadInput(f"'timeout' must be a whole number of microseconds, got {show(value)}")
    return value or None


def _outputs(
    wanted: object, parameters: Mapping[str, Any], model: Signature
) -> tuple[tuple[str, bool], ...]:
    """Names and binary flags in the order asked; all outputs in model order when none is named."""
    by_default = _flag(parameters, "binary_data_output", False)
    if wanted is None or wanted == []:
        chosen = tuple((name, by_default) for name in model.outputs)
    else:
        if type(wanted) is not list:
            raise BadInput("'outputs' must be a list")
        if len(wanted) > len(model.outputs):
            raise BadInput(f"{len(wanted)} outputs asked for, the model has {len(model.outputs)}")
        chosen = tuple(_output(item, by_default, model) for item in wanted)
        if len({name for name, _ in chosen}) != len(chosen):
            raise BadInput("the same output is asked for twice")
    for name, binary in chosen:
        if not binary and model.outputs[name].datatype in BINARY_ONLY:
            raise BadInput(
                f"output '{name}' is {model.outputs[name].datatype}, which has no JSON form",
                hint="ask for it with 'binary_data': true",
            )
    return chosen


def _output(item: object, by_default: bool, model: Signature) -> tuple[str, bool]:
    if type(item) is not dict:
        raise BadInput("each of 'outputs' must be an object with a 'name'")
    name = item.get("name")
    if type(name) is not str or name not in model.outputs:
        names = ", ".join(model.outputs)
        raise BadInput(f"unknown output {show(name)}", hint=f"the outputs are: {names}")
    if "parameters" not in item:
        return name, by_default
    return name, _flag(_parameters(item, f"output '{name}'"), "binary_data", by_default)


def _inputs(items: object, model: Signature) -> tuple[tuple[tuple[str, _Part], ...], int]:
    """The inputs in model order, and how many bytes they take after the JSON part."""
    if type(items) is not list or not items:
        raise BadInput("'inputs' must be a list of at least one input")
    got: dict[str, _Part] = {}
    at = 0
    for item in items:
        if type(item) is not dict:
            raise BadInput("each of 'inputs' must be an object")
        name = item.get("name")
        slot = model.inputs.get(name) if type(name) is str else None
        if type(name) is not str or slot is None:
            names = ", ".join(str(slot.spec) for slot in model.inputs.values())
            raise BadInput(f"unknown input {show(name)}", hint=f"the inputs are: {names}")
        if name in got:
            raise BadInput(f"input '{name}' is given twice")
        part = got[name] = _input(item, slot, at, model)
        if part.value is None:
            at += part.count * slot.dtype.itemsize
    if len(got) < len(model.inputs):
        missing = next(name for name in model.inputs if name not in got)
        raise BadInput(f"missing input '{missing}'", hint=f"it is {model.inputs[missing].spec}")
    return tuple((name, got[name]) for name in model.inputs), at


def _input(item: Mapping[str, Any], slot: Slot, at: int, model: Signature) -> _Part:
    name, datatype = slot.spec.name, item.get("datatype")
    if datatype != slot.datatype:
        raise BadInput(f"input '{name}' is {slot.datatype}, got datatype {show(datatype)}")
    shape = _shape(item.get("shape"), slot, model)
    parameters = _parameters(item, f"input '{name}'")
    binary_bytes = parameters.get("binary_data_size")
    if ("data" in item) == (binary_bytes is not None):
        raise BadInput(f"input '{name}' needs either 'data' or 'binary_data_size', and not both")
    count = math.prod(shape)  # Python integers: this cannot overflow
    size = count * slot.dtype.itemsize
    if binary_bytes is None:
        value = from_json(item["data"], count, size, shape, slot, model.max_bytes)
        value.flags.writeable = False
        return _Part(slot, shape, count, at, value)
    if type(binary_bytes) is not int or binary_bytes != size:
        raise BadInput(
            f"input '{name}': shape {list(shape)} of {datatype} is {size} bytes, "
            f"but binary_data_size is {show(binary_bytes)}"
        )
    return _Part(slot, shape, count, at, None)


def _shape(shape: object, slot: Slot, model: Signature) -> tuple[int, ...]:
    spec = slot.spec
    if type(shape) is not list or not all(type(n) is int and n >= 0 for n in shape):
        raise BadInput(
            f"input '{spec.name}': 'shape' must be a list of whole numbers, got {show(shape)}"
        )
    fits = len(shape) == len(spec.shape) and all(
        want == got or isinstance(want, str) for want, got in zip(spec.shape, shape, strict=True)
    )
    if not fits:
        raise BadInput(f"input '{spec.name}' is {spec}, got shape {show(shape)}")
    if model.max_batch and shape[0] > model.max_batch:
        raise BadInput(
            f"input '{spec.name}': batch {show(shape[0])} is above {model.max_batch}",
            hint="send smaller requests, or start the server with a larger --max-batch",
        )
    return tuple(shape)


def _rows(parts: Sequence[tuple[str, _Part]], model: Signature) -> int:
    """The batch size, 1 for a model that is not batched. Raises BadInput when axes disagree."""
    sizes: dict[str, int] = {}
    for _, part in parts:
        for axis, size in zip(part.slot.spec.shape, part.shape, strict=True):
            if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                raise BadInput(f"axis {axis} is {sizes[axis]} and {size} in the same request")
    return parts[0][1].shape[0] if model.max_batch else 1


def encode(
    name: str, version: str, request: Request, outputs: Mapping[str, np.ndarray], model: Signature
) -> tuple[list[bytes], int | None]:
    """The JSON part and the binary tails, and the JSON part's length when anything follows it.

    Raises BadInput when an output asked for as JSON holds NaN or infinity.
    """
    items: list[dict[str, Any]] = []
    tails: list[bytes] = []
    for wanted, binary in request.outputs:
        array = outputs[wanted]
        item: dict[str, Any] = {
            "name": wanted,
            "datatype": model.outputs[wanted].datatype,
            "shape": array.shape,
        }
        if binary:
            item["parameters"] = {"binary_data_size": array.nbytes}
            tails.append(array.tobytes())
        else:
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise BadInput(
                    f"output '{wanted}' holds NaN or infinity, which JSON cannot carry",
                    hint="ask for it with 'binary_data': true",
                )
            item["data"] = np.ascontiguousarray(array).reshape(-1)
        items.append(item)
    document: dict[str, Any] = {"model_name": name, "model_version": version}
    if request.id is not None:
        document["id"] = request.id
    document["outputs"] = items
    head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return [head, *tails], len(head) if any(tails) else None
