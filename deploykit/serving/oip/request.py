"""The Open Inference Protocol's inference request, apart from how HTTP or gRPC carry it.

In: what a transport found (`Given` inputs, names and parameters of outputs, the request's own
parameters) and the model's `Signature`. Out: a `Request` whose arrays fit the model, or BadInput
that names the field. No value changes its type in silence, sizes are Python integers, and nothing
is allocated before a length was checked against what is there. Pure, but for the shared memory
that a transport may pass in.
Byte order is little-endian, that of every platform deploykit runs on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from deploykit.core.errors import BadInput, TooLarge, quote
from deploykit.core.tensors import Bytes, InputKey, TensorSpec
from deploykit.serving.oip.tensors import (
    BINARY_ONLY,
    LENGTH_BYTES,
    TEXT_BYTES,
    Slot,
    flatten,
    from_bytes,
    from_list,
    shape_of,
    slot_for,
)

MAX_ID_BYTES = 1024
MAX_CLASSES = 10_000
_MAX_NAME_BYTES = 256  # of a shared-memory region


@dataclass(frozen=True, eq=False)
class Signature:
    """What a model takes and gives. `max_batch` is in rows, 0 where axis 0 is no batch."""

    inputs: Mapping[str, Slot]
    outputs: Mapping[str, Slot]
    max_batch: int
    max_bytes: int  # of one decoded request
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of an output's classes


def signature(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch: int,
    max_bytes: int,
    labels: Mapping[str, Sequence[str]] | None = None,
) -> Signature:
    takes, gives = ({spec.name: slot_for(spec) for spec in specs} for specs in (inputs, outputs))
    return Signature(takes, gives, max_batch, max_bytes, labels or {})


@dataclass(frozen=True)
class Region:
    """Bytes of a shared-memory region that the client has registered."""

    name: str
    offset: int
    byte_size: int


class Memory(Protocol):
    """The registered regions. `read` copies: what was checked cannot be changed by the client.

    Both raise BadInput for a region that is not there, and for data that do not fit into it.
    """

    def read(self, region: Region) -> memoryview: ...
    def write(self, region: Region, data: Bytes) -> None: ...


class Binary(NamedTuple):
    """`size` bytes of `body` from `at` on. Without a body they are in the one `fill` is given."""

    body: Bytes | None
    at: int
    size: object


class Given(NamedTuple):
    """One input as the transport found it; nothing of it but `data`'s kind is checked.

    `data`: a list, flat or nested, of JSON's or gRPC's typed values; or `Binary`, or `Region`.
    """

    name: object
    datatype: object
    shape: object
    data: object


class Wanted(NamedTuple):
    """One output to send: as binary data or as JSON, as its `classes` highest, or to `region`."""

    name: str
    binary: bool
    classes: int = 0  # 0 for the tensor itself
    region: Region | None = None


class Request(NamedTuple):
    """A decoded inference request."""

    feeds: dict[str, np.ndarray]  # in model order, not to be written to
    rows: int
    key: InputKey
    outputs: tuple[Wanted, ...]  # in the order asked
    id: str | None = None
    timeout_us: int | None = None  # how long it may wait; None leaves it to the server
    priority: int = 0  # 1 is the highest, 0 leaves it to the server


class Part(NamedTuple):
    """One input of a `Plan`: an array, or where its bytes are."""

    name: str
    slot: Slot
    shape: tuple[int, ...]
    elements: int
    at: int
    size: int
    body: Bytes | None
    region: Region | None
    value: np.ndarray | None


class Plan(NamedTuple):
    """A request whose bytes are still to be read; it may be filled again and again."""

    parts: tuple[Part, ...]  # in model order
    rest: tuple[Any, ...]  # the fields of Request after `feeds`
    regions: bool  # whether any shared memory is referred to


def build(
    inputs: Sequence[Given],
    outputs: Sequence[tuple[object, object]] | None,
    parameters: Mapping[str, Any],
    name: object,
    model: Signature,
    memory: Memory | None = None,
    *,
    binary: bool = False,
) -> Request:
    """One request. `name` is its id; for the rest see `plan` and `fill`."""
    return fill(plan(inputs, outputs, parameters, name, model, binary=binary), memory=memory)


def plan(
    inputs: Sequence[Given],
    outputs: Sequence[tuple[object, object]] | None,
    parameters: Mapping[str, Any],
    name: object,
    model: Signature,
    *,
    binary: bool = False,
) -> Plan:
    """Everything about a request that can be known without its bytes.

    `outputs`: names and parameters as they were asked for, None or empty for all. `parameters` have
    been through `checked`. `binary`: all outputs are sent binary, whatever is asked. Raises
    BadInput for whatever does not fit the protocol or the model, TooLarge for tensors above
    `model.max_bytes`.
    """
    if name is not None and (type(name) is not str or len(name.encode()) > MAX_ID_BYTES):
        raise BadInput(f"'id' must be a string of at most {MAX_ID_BYTES} bytes")
    wanted = _outputs(outputs, parameters, model, binary)
    parts = _inputs(inputs, model)
    key = tuple((part.name, part.slot.datatype, part.shape[1:]) for part in parts)
    regions = any(part.region for part in parts) or any(item.region for item in wanted)
    timeout_us = _whole(parameters, "timeout", "number of microseconds") or None
    priority = _whole(parameters, "priority", "number")
    rest = (_rows(parts, model), key, wanted, name, timeout_us, priority)
    return Plan(parts, rest, regions)


def fill(plan: Plan, body: Bytes = b"", start: int = 0, memory: Memory | None = None) -> Request:
    """Read the bytes: those of parts without a body of their own lie in `body` from `start` on.

    That they are there has been checked by who cut them out. Raises BadInput.
    """
    if plan.regions and memory is None:
        raise BadInput("shared memory is not offered", hint="send binary data")
    feeds = {}
    for name, slot, shape, count, at, size, own, region, value in plan.parts:
        if value is not None:
            feeds[name] = value
        elif region is None:
            if own is None:
                feeds[name] = from_bytes(body, start + at, size, count, shape, slot)
            else:
                feeds[name] = from_bytes(own, at, size, count, shape, slot)
        elif memory is not None:
            feeds[name] = from_bytes(memory.read(region), 0, size, count, shape, slot)
    return Request(feeds, *plan.rest)


def checked(parameters: object, where: str) -> Mapping[str, Any]:
    """A `parameters` object, empty when absent; what we do not offer is refused, not ignored."""
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise BadInput(f"'parameters' of {where} must be an object")
    for key in parameters:
        if key.startswith("triton_"):
            raise BadInput(f"{where}: parameter {quote(key)} is reserved")
    sequence = parameters.get("sequence_id")
    if sequence is not None and (sequence or type(sequence) not in (int, str)):
        raise BadInput(f"{where}: 'sequence_id' is for stateful models, and this is none")
    return parameters


def region_of(parameters: Mapping[str, Any], where: str) -> Region | None:
    """The shared memory that `parameters` refer to, if any. Raises BadInput."""
    name = parameters.get("shared_memory_region")
    if name is None:
        if any(key.startswith("shared_memory_") for key in parameters):
            raise BadInput(f"{where}: 'shared_memory_region' is missing")
        return None
    if type(name) is not str or not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
        raise BadInput(
            f"{where}: 'shared_memory_region' must be a name of at most {_MAX_NAME_BYTES} bytes"
        )
    if "shared_memory_byte_size" not in parameters:
        raise BadInput(f"{where}: 'shared_memory_byte_size' is missing")
    offset, size = (
        _whole(parameters, f"shared_memory_{what}", "number of bytes")
        for what in ("offset", "byte_size")
    )
    return Region(name, offset, size)


def _whole(parameters: Mapping[str, Any], key: str, what: str) -> int:
    """A parameter that is a whole number, 0 when absent. Raises BadInput."""
    value = parameters.get(key)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise BadInput(f"'{key}' must be a whole {what}, got {quote(value)}")
    return value


def _flag(parameters: Mapping[str, Any], key: str, default: bool) -> bool:
    value = parameters.get(key, default)
    if type(value) is not bool:
        raise BadInput(f"parameter '{key}' must be true or false, got {quote(value)}")
    return value


def _outputs(
    asked: Sequence[tuple[object, object]] | None,
    parameters: Mapping[str, Any],
    model: Signature,
    binary: bool,
) -> tuple[Wanted, ...]:
    """The outputs in the order asked; all of them in model order when none is named."""
    by_default = _flag(parameters, "binary_data_output", False)
    if not asked:
        asked = [(name, None) for name in model.outputs]
    if len(asked) > len(model.outputs):
        raise BadInput(f"{len(asked)} outputs asked for, the model has {len(model.outputs)}")
    chosen = tuple(_output(name, more, by_default, model, binary) for name, more in asked)
    if len({wanted.name for wanted in chosen}) != len(chosen):
        raise BadInput("the same output is asked for twice")
    return chosen


def _output(name: object, more: object, by_default: bool, model: Signature, binary: bool) -> Wanted:
    if type(name) is not str or name not in model.outputs:
        names = ", ".join(model.outputs)
        raise BadInput(f"unknown output {quote(name)}", hint=f"the outputs are: {names}")
    where, datatype = f"output '{name}'", model.outputs[name].datatype
    parameters = checked(more, where)
    region = region_of(parameters, where)
    binary = _flag(parameters, "binary_data", by_default) or binary or region is not None
    classes = parameters.get("classification")
    if classes is not None:
        if type(classes) is not int or not 0 < classes <= MAX_CLASSES:
            raise BadInput(
                f"{where}: 'classification' must be a whole number from 1 to {MAX_CLASSES}, "
                f"got {quote(classes)}"
            )
        if datatype == "BYTES":
            raise BadInput(f"{where} is BYTES, which cannot be classified")
    elif not binary and datatype in BINARY_ONLY:
        raise BadInput(
            f"{where} is {datatype}, which has no JSON form",
            hint="ask for it with 'binary_data': true",
        )
    return Wanted(name, binary, classes or 0, region)


def _inputs(inputs: Sequence[Given], model: Signature) -> tuple[Part, ...]:
    """The inputs in model order."""
    got: dict[str, Part] = {}
    room = model.max_bytes
    for given in inputs:
        slot = model.inputs.get(given.name) if type(given.name) is str else None
        if slot is None:
            names = ", ".join(str(slot.spec) for slot in model.inputs.values())
            raise BadInput(f"unknown input {quote(given.name)}", hint=f"the inputs are: {names}")
        name = slot.spec.name
        if name in got:
            raise BadInput(f"input '{name}' is given twice")
        got[name], taken = _input(given, slot, model, room)
        room -= taken
    if len(got) < len(model.inputs):
        missing = next(name for name in model.inputs if name not in got)
        raise BadInput(f"missing input '{missing}'", hint=f"it is {model.inputs[missing].spec}")
    return tuple(got[name] for name in model.inputs)


def _input(given: Given, slot: Slot, model: Signature, room: int) -> tuple[Part, int]:
    """One input, and how many bytes have to be allocated for it: at most `room`."""
    name, datatype, data = slot.spec.name, slot.datatype, given.data
    if given.datatype != datatype:
        raise BadInput(f"input '{name}' is {datatype}, got datatype {quote(given.datatype)}")
    shape = shape_of(given.shape, slot, model.max_batch)
    count = math.prod(shape)  # Python integers: this cannot overflow
    if isinstance(data, (Binary, Region)):
        size = _size(data.size if isinstance(data, Binary) else data.byte_size, count, shape, slot)
        lies_there = isinstance(data, Binary) and slot.item_bytes and datatype != "BF16"
        taken = 0 if lies_there else _decoded_bytes(count, size, slot)
        _check_room(taken, room, model, name)
        if isinstance(data, Region):
            return Part(name, slot, shape, count, 0, size, None, data, None), taken
        return Part(name, slot, shape, count, data.at, size, data.body, None, None), taken
    flat = flatten(data, count, shape, slot)
    size = 0 if slot.item_bytes else sum(len(x) for x in flat if type(x) in (str, bytes))
    taken = _decoded_bytes(count, size, slot)
    _check_room(taken, room, model, name)
    value = from_list(flat, shape, slot)
    value.flags.writeable = False
    return Part(name, slot, shape, count, 0, 0, None, None, value), taken


def _size(size: object, count: int, shape: tuple[int, ...], slot: Slot) -> int:
    """The bytes of a tensor, which must be what its shape needs; BYTES need 4 for each element."""
    need = count * (slot.item_bytes or LENGTH_BYTES)
    if type(size) is int and (size == need or (size > need and not slot.item_bytes)):
        return size
    raise BadInput(
        f"input '{slot.spec.name}': shape {quote(list(shape))} of {slot.datatype} is "
        f"{'' if slot.item_bytes else 'at least '}{quote(need)} bytes, "
        f"got {quote(size)}"
    )


def _decoded_bytes(count: int, size: int, slot: Slot) -> int:
    return count * slot.dtype.itemsize if slot.item_bytes else count * TEXT_BYTES + size


def _check_room(taken: int, room: int, model: Signature, name: str) -> None:
    if taken > room:
        raise TooLarge(
            f"with input '{name}' the request is {model.max_bytes - room + taken} bytes, "
            f"above the limit of {model.max_bytes}",
            hint="send smaller requests, or start the server with a larger --max-body-bytes",
        )


def _rows(parts: Sequence[Part], model: Signature) -> int:
    """The batch size, 1 for a model that is not batched. Raises BadInput when axes disagree."""
    sizes: dict[str, int] = {}
    for part in parts:
        for axis, size in zip(part.slot.spec.shape, part.shape, strict=True):
            if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                raise BadInput(f"axis {axis} is {sizes[axis]} and {size} in the same request")
    return parts[0].shape[0] if model.max_batch else 1
