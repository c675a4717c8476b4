"""Check an inference request of the Open Inference Protocol, convert its tensors and its outputs.

`plan` checks everything except the tensors' bytes; `fill` reads those, without a copy. A request is
the protocol's JSON object; `messages.py` makes the same of a gRPC message, so that both reject the
same requests with the same messages. Sizes are Python integers, and memory is allocated only after
a length was checked against the received bytes. Raises BadInput where numpy would silently change a
value: 1.5 to an integer, "1" to a number, 300 to int8, 1e300 to inf. Byte order is little-endian,
strings are arrays of `str`, bfloat16 is float32: see `core.tensors.carrier`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from deploykit.core.errors import BadInput, TooLarge, quote
from deploykit.core.tensors import (
    DTYPE_BYTES,
    MOST_STRINGS,
    PROTOCOL_NAMES,
    Bytes,
    InputKey,
    TensorSpec,
    carrier,
    fits_shape,
    without_batch,
)
from deploykit.serving.shared_memory import Region, SharedMemory

LARGE_BYTES = 256 << 10  # from this size on values are read and written on another thread
_MAX_ID_BYTES = 1024
MAX_CLASSES = 10_000
_COUNTED_BYTES = 64 << 10  # copied inputs below this size are not counted in the memory budget
BINARY_ONLY = ("FP16", "BF16")  # the protocol has no JSON form of them
STRING_BYTES = 64  # memory of a short Python string and its reference
LENGTH_BYTES = 4  # the length in front of every element of BYTES
_COPIED_BYTES = 64 << 10  # below this size a copy costs less than a view
_BLOCK = 16 << 10  # strings converted at once


@dataclass(frozen=True)
class Slot:
    """One input or output as the protocol names it."""

    spec: TensorSpec
    datatype: str
    dtype: np.dtype[Any]  # the dtype of the arrays that hold it
    item_bytes: int  # size of one element on the wire; 0 for BYTES, whose elements vary
    plain: bool  # whether the bytes on the wire equal the array's
    raw: bool = False  # BYTES stay bytes, such as an image's; else they are decoded as UTF-8


def make_slot(spec: TensorSpec) -> Slot:
    datatype, item_bytes = PROTOCOL_NAMES[spec.dtype], DTYPE_BYTES.get(spec.dtype, 0)
    plain = datatype not in ("BYTES", "BF16", "BOOL")
    return Slot(spec, datatype, np.dtype(carrier(spec.dtype)), item_bytes, plain)


@dataclass(frozen=True, eq=False)
class Signature:
    """A model's inputs and outputs. `max_batch` is in rows, 0 if axis 0 is not the batch."""

    inputs: Mapping[str, Slot]
    outputs: Mapping[str, Slot]
    max_batch: int
    max_bytes: int  # the most bytes of one decoded request


def signature(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch: int,
    max_bytes: int,
) -> Signature:
    takes, gives = ({spec.name: make_slot(spec) for spec in specs} for specs in (inputs, outputs))
    return Signature(takes, gives, max_batch, max_bytes)


@final
class Binary(NamedTuple):
    """The location of `size` bytes in the body passed to `fill`, from `at` on."""

    at: int
    size: Any  # an integer, once it is checked


class RequestedOutput(NamedTuple):
    """One output to send: binary or JSON, whole or its `classes` highest values, or in `region`."""

    name: str
    binary: bool
    classes: int = 0  # 0 for the tensor itself
    region: Region | None = None


class Request(NamedTuple):
    """A decoded inference request."""

    feeds: dict[str, np.ndarray]  # in model order, read-only
    rows: int
    key: InputKey
    outputs: tuple[RequestedOutput, ...]  # in the order of the request
    id: str | None = None
    timeout_us: int | None = None  # how long the request may wait; None: the server's default
    priority: int = 0  # 1 is the highest; 0: the server's default
    copied_bytes: int = 0  # about the bytes of its inputs that are not in the received message


class Part(NamedTuple):
    """One input of a `Plan`: an array, or the place of its `size` bytes."""

    name: str
    slot: Slot
    shape: tuple[int, ...]
    elements: int
    size: int
    data: Binary | Region | np.ndarray


class Plan(NamedTuple):
    """A checked request without its tensors; reusable."""

    parts: tuple[Part, ...]  # in model order
    fields: tuple[Any, ...]  # the fields of Request after `feeds`
    regions: bool  # whether it uses shared memory
    binary_bytes: int  # of its `Binary` parts


def plan(document: Mapping[str, Any], model: Signature, *, binary: bool = False) -> Plan:
    """Check everything about a request except its tensors' bytes.

    `document`: the JSON object of the protocol, in which the `data` of an input may be `Binary` as
    well. `binary`: send all outputs as binary data. Raises BadInput for a request that does not fit
    the protocol or the model, TooLarge above `model.max_bytes`.
    """
    name, (parameters, _) = document.get("id"), _parameters(document, "the request")
    if name is not None and (type(name) is not str or len(name.encode()) > _MAX_ID_BYTES):
        raise BadInput(f"'id' must be a string of at most {_MAX_ID_BYTES} bytes")
    outputs = _outputs(document, parameters, model, binary)
    parts, copied_bytes = _inputs(document, model)
    sizes: dict[str, int] = {}
    for part in parts:
        for axis, size in zip(part.slot.spec.shape, part.shape, strict=True):
            if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                raise BadInput(f"axis {axis} is {sizes[axis]} and {size} in the same request")
    fields = (
        parts[0].shape[0] if model.max_batch else 1,
        tuple([(part.name, part.slot.datatype, part.shape[1:]) for part in parts]),
        outputs,
        name,
        _integer(parameters, "timeout", "microseconds") or None,
        _integer(parameters, "priority"),
        copied_bytes if copied_bytes >= _COUNTED_BYTES else 0,
    )
    places = [each.region for each in outputs] + [part.data for part in parts]
    regions = any(isinstance(place, Region) for place in places)
    binary_bytes = sum([place.size for place in places if isinstance(place, Binary)])
    return Plan(parts, fields, regions, binary_bytes)


def fill(plan: Plan, body: Bytes, start: int = 0, memory: SharedMemory | None = None) -> Request:
    """Read the tensors, which are in `body` from `start` on.

    The caller has checked that `body` is long enough. Raises BadInput.
    """
    parts, fields, regions, _ = plan  # this and `type` are faster than attributes and isinstance
    if regions and memory is None:
        raise BadInput("shared memory is not enabled", hint="send binary data")
    feeds: dict[str, Any] = {}
    for part in parts:
        data = part.data
        if type(data) is Binary:
            data = from_bytes(part, body, start + data.at)
        elif isinstance(data, Region) and memory is not None:
            data = from_bytes(part, memory.read(data), 0)
        feeds[part.name] = data
    return Request(feeds, *fields)


def _objects(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the objects in a list of the request, none where it is absent. Raises BadInput."""
    items = document.get(key)
    if items is None:
        return []
    if type(items) is not list:
        raise BadInput(f"'{key}' must be a list")
    for item in items:
        if type(item) is not dict:
            raise BadInput(f"each of '{key}' must be an object with a 'name'")
    return items


def _parameters(item: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], Region | None]:
    """Return the parameters of a request, an input or an output, and the shared memory they name.

    Raises BadInput if they are not supported.
    """
    parameters = item.get("parameters")
    if parameters is None:
        return {}, None
    if type(parameters) is not dict:
        raise BadInput(f"'parameters' of {where} must be an object")
    shared = False
    for key in parameters:
        if key.startswith("triton_"):
            raise BadInput(f"{where}: parameter {quote(key)} is reserved")
        shared = shared or key.startswith("shared_memory_")
    sequence = parameters.get("sequence_id")
    if sequence is not None and (sequence or type(sequence) not in (int, str)):
        raise BadInput(f"{where}: 'sequence_id' is for stateful models, this one is stateless")
    if not shared:
        return parameters, None
    name = parameters.get("shared_memory_region")
    if type(name) is not str:
        raise BadInput(f"{where}: 'shared_memory_region' must be a name")
    offset = _integer(parameters, "shared_memory_offset", "bytes")
    size = _integer(parameters, "shared_memory_byte_size", "bytes")
    return parameters, Region(name, offset, size)


def _integer(parameters: Mapping[str, Any], key: str, unit: str = "") -> int:
    """Return an integer parameter, 0 when absent. Raises BadInput."""
    value = parameters.get(key)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value < 1 << 64:
        unit = f" ({unit})" if unit else ""
        raise BadInput(f"'{key}' must be an integer >= 0{unit}, got {quote(value)}")
    return value


def _flag(parameters: Mapping[str, Any], key: str, default: bool) -> bool:
    value = parameters.get(key, default)
    if type(value) is not bool:
        raise BadInput(f"parameter '{key}' must be true or false, got {quote(value)}")
    return value


def _outputs(
    document: Mapping[str, Any], parameters: Mapping[str, Any], model: Signature, binary: bool
) -> tuple[RequestedOutput, ...]:
    """Return the outputs in the order of the request; all in model order when none is named."""
    by_default = _flag(parameters, "binary_data_output", False)
    requested = _objects(document, "outputs") or [{"name": name} for name in model.outputs]
    chosen: dict[str, RequestedOutput] = {}
    for item in requested:
        name = item.get("name")
        if type(name) is not str or name not in model.outputs:
            names = ", ".join(model.outputs)
            raise BadInput(f"unknown output {quote(name)}", hint=f"the outputs are: {names}")
        where, datatype = f"output '{name}'", model.outputs[name].datatype
        if name in chosen:
            raise BadInput(f"{where} is requested twice")
        own, region = _parameters(item, where)
        classes = own.get("classification")
        as_bytes = _flag(own, "binary_data", by_default) or binary or region is not None
        if classes is None:
            if not as_bytes and datatype in BINARY_ONLY:
                hint = "request it with 'binary_data': true"
                raise BadInput(f"{where} is {datatype}, which has no JSON form", hint=hint)
        elif type(classes) is not int or not 0 < classes <= MAX_CLASSES:
            wanted = f"an integer from 1 to {MAX_CLASSES}"
            raise BadInput(f"{where}: 'classification' must be {wanted}, got {quote(classes)}")
        elif datatype == "BYTES":
            raise BadInput(f"{where} is BYTES, which cannot be classified")
        chosen[name] = RequestedOutput(name, as_bytes, classes or 0, region)
    return tuple(chosen.values())


def _inputs(document: Mapping[str, Any], model: Signature) -> tuple[tuple[Part, ...], int]:
    """Return the inputs in model order, and the bytes of those that are not read in place."""
    got: dict[str, Part] = {}
    at, budget = 0, model.max_bytes
    for item in _objects(document, "inputs"):
        name = item.get("name")
        slot = model.inputs.get(name) if type(name) is str else None
        if slot is None:
            names = ", ".join(str(slot.spec) for slot in model.inputs.values())
            raise BadInput(f"unknown input {quote(name)}", hint=f"the inputs are: {names}")
        name = slot.spec.name
        if name in got:
            raise BadInput(f"input '{name}' appears twice")
        parameters, region = _parameters(item, f"input '{name}'")
        size = parameters.get("binary_data_size")
        if ("data" in item) + (size is not None) + (region is not None) != 1:
            sources = "'data', 'binary_data_size' and 'shared_memory_region'"
            raise BadInput(f"input '{name}' needs exactly one of {sources}")
        data = region or (item["data"] if size is None else Binary(at, size))
        got[name], needed = _input(item, data, slot, model, budget)
        budget -= needed
        at += size or 0
    if len(got) < len(model.inputs):
        missing = next(name for name in model.inputs if name not in got)
        raise BadInput(f"missing input '{missing}'", hint=f"it is {model.inputs[missing].spec}")
    return tuple([got[name] for name in model.inputs]), model.max_bytes - budget


def _input(
    item: Mapping[str, Any], data: Any, slot: Slot, model: Signature, budget: int
) -> tuple[Part, int]:
    """Check one input; also return how many bytes it has to allocate: at most `budget`."""
    name, datatype = slot.spec.name, slot.datatype
    if item.get("datatype") != datatype:
        got = quote(item.get("datatype"))
        raise BadInput(f"input '{name}' is {datatype}, got datatype {got}")
    shape = _shape(item.get("shape"), slot, model.max_batch)
    count = math.prod(shape)  # Python integers: this cannot overflow
    if count > MOST_STRINGS and not slot.item_bytes:
        raise TooLarge(f"input '{name}' has more than {MOST_STRINGS} strings")
    if not count and math.prod(filter(None, shape)) * slot.dtype.itemsize > 1 << 62:
        raise BadInput(f"input '{name}': shape {quote(item['shape'])} is too large for numpy")
    listed = not isinstance(data, (Binary, Region))
    if listed:
        data = flatten(data, count, shape, slot)
        size = 0 if slot.item_bytes else sum(len(x) for x in data if type(x) in (str, bytes))
    else:
        size = data.size if isinstance(data, Binary) else data.byte_size
        need = count * (slot.item_bytes or LENGTH_BYTES)  # each string has its length in front
        if type(size) is not int or size < need or (size > need and slot.item_bytes):
            raise BadInput(
                f"input '{name}': shape {quote(list(shape))} of {datatype} is "
                f"{'' if slot.item_bytes else 'at least '}{quote(need)} bytes, got {quote(size)}"
            )
    needed = count * slot.dtype.itemsize if slot.item_bytes else count * STRING_BYTES + size
    if isinstance(data, Binary) and slot.item_bytes and datatype != "BF16":
        needed = 0  # it is read in place
    if needed > budget:
        raise TooLarge(
            f"with input '{name}' the request is {model.max_bytes - budget + needed} bytes, "
            f"above the limit of {model.max_bytes}",
            hint="send smaller requests, or start the server with a larger `max_body_bytes`",
        )
    if listed:
        data = from_list(data, shape, slot)
    return Part(name, slot, shape, count, size, data), needed


def _shape(shape: object, slot: Slot, max_batch: int) -> tuple[int, ...]:
    """Return a shape that fits the model; `max_batch` 0: axis 0 is not a batch. Raises BadInput."""
    spec = slot.spec
    if type(shape) is not list or not all(type(n) is int and n >= 0 for n in shape):
        raise BadInput(
            f"input '{spec.name}': 'shape' must be a list of integers >= 0, got {quote(shape)}"
        )
    if not fits_shape(spec.shape, shape):
        lacks = without_batch(spec, shape)
        raise BadInput(f"input '{spec.name}' is {spec}, got shape {quote(shape)}{lacks}")
    if max_batch and shape[0] > max_batch:
        raise BadInput(
            f"input '{spec.name}': batch {quote(shape[0])} is above {max_batch}",
            hint="send smaller requests, or start the server with a larger `max_batch`",
        )
    return tuple(shape)


def classify(array: np.ndarray, classes: int, *, batched: bool) -> np.ndarray:
    """Return the `classes` highest values of each row as `value:index`, highest first.

    All axes but the batch axis are flattened. Among equal values the lower index comes first;
    NaN comes last. Floats have six decimals, as in other servers of the protocol.
    """
    rows = len(array) if batched else 1
    values = array.reshape(rows, math.prod(array.shape[1 if batched else 0 :]))
    floats = values.dtype.kind == "f"
    descending = -values if floats else ~values  # which cannot overflow
    order = np.argsort(descending, axis=1, kind="stable")[:, :classes]
    strings = np.empty(order.shape, object)
    for place, index in np.ndenumerate(order):
        value = values[place[0], index]
        strings[place] = f"{value:.6f}:{index}" if floats else f"{int(value)}:{index}"
    return strings if batched else strings[0]


class Result(NamedTuple):
    """One output to send. `array` is None if its elements were written to shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    array: np.ndarray | None
    requested: RequestedOutput


def collect_results(
    request: Request,
    outputs: Mapping[str, np.ndarray],
    model: Signature,
    memory: SharedMemory | None = None,
) -> list[Result]:
    """Return the requested outputs in the order of the request.

    `memory`: the same as for decoding the request. Raises the errors of its `write`.
    """
    found = []
    for requested in request.outputs:
        array, datatype = outputs[requested.name], model.outputs[requested.name].datatype
        if requested.classes:
            array = classify(array, requested.classes, batched=model.max_batch > 0)
            datatype = "BYTES"
        inline: np.ndarray | None = array
        if memory is not None and requested.region is not None:
            memory.write(requested.region, to_bytes(array, datatype))
            inline = None
        found.append(Result(requested.name, datatype, array.shape, inline, requested))
    return found


# -- one tensor ----------------------------------------------------------------------------------


def from_bytes(part: Part, body: Bytes, at: int) -> np.ndarray:
    """Read the tensor of a part from `body` at `at`; numbers are not copied."""
    name, slot, shape, count, size, _ = part
    if slot.plain and count:
        array: np.ndarray = np.ndarray(shape, slot.dtype, body, at)
        return array
    if not slot.item_bytes:
        return _string_array(_elements(body, at, size, count, name), shape, slot)
    if count == 0:
        return np.empty(shape, slot.dtype)
    if slot.datatype == "BF16":
        upper = np.frombuffer(body, np.uint16, count, at)
        return (upper.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if np.frombuffer(body, np.uint8, count, at).max() > 1:
        raise BadInput(f"input '{name}': a BOOL byte is neither 0 nor 1")
    flags: np.ndarray = np.ndarray(shape, slot.dtype, body, at)
    return flags


def _elements(body: Bytes, at: int, size: int, count: int, name: str) -> list[bytes]:
    """Split BYTES into elements, each of which follows its length in 4 bytes."""
    end, elements = at + size, []
    for _ in range(count):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(body[at:start], "little")
        elements.append(bytes(body[start:at]))
    if at != end:
        each = "each after its length in 4 bytes"
        raise BadInput(f"input '{name}': its {size} bytes are not {count} strings, {each}")
    return elements


def _string_array(elements: Sequence[object], shape: tuple[int, ...], slot: Slot) -> np.ndarray:
    """Return an array of `str`, as engines take it; bytes among the elements must be UTF-8."""
    name = slot.spec.name
    array = np.empty(shape, object)
    flat = array.reshape(-1)
    for number, element in enumerate(elements):
        if type(element) is bytes and not slot.raw:
            try:
                element = element.decode()
            except UnicodeDecodeError:
                message = f"input '{name}': element {number} is not UTF-8, which this model needs"
                raise BadInput(message) from None
        elif type(element) is str and slot.raw:  # JSON has no bytes
            element = element.encode()
        elif type(element) is not (bytes if slot.raw else str):
            raise BadInput(f"input '{name}' is BYTES, 'data' holds {quote(element)}")
        flat[number] = element
    return array


def flatten(data: object, count: int, shape: tuple[int, ...], slot: Slot) -> list[Any]:
    """Return the `count` elements of a list that is flat or nested like `shape`."""
    name = slot.spec.name
    if type(data) is not list:
        raise BadInput(f"input '{name}': 'data' must be a list")
    if slot.datatype in BINARY_ONLY:
        raise BadInput(f"input '{name}' is {slot.datatype}, which must be sent as binary data")
    flat: list[Any] = data
    if len(shape) > 1 and data and type(data[0]) is list:
        flat = [data]
        for length in shape:
            if set(map(type, flat)) - {list} or set(map(len, flat)) - {length}:
                raise BadInput(f"input '{name}': 'data' is not nested like {list(shape)}")
            flat = list(itertools.chain.from_iterable(flat))
    if len(flat) != count:
        sizes = f"shape {quote(list(shape))} has {quote(count)} elements"
        raise BadInput(f"input '{name}': {sizes}, 'data' has {len(flat)}")
    return flat


def from_list(flat: list[Any], shape: tuple[int, ...], slot: Slot) -> np.ndarray:
    """Convert a list of scalars to a read-only array; only floats may be rounded."""
    name, datatype, dtype = slot.spec.name, slot.datatype, slot.dtype
    if not slot.item_bytes:
        array = _string_array(flat, shape, slot)
    elif not flat:
        array = np.empty(shape, dtype)
    else:
        kinds: dict[str, set[type]] = {"b": {bool}, "f": {int, float}}
        wrong = set(map(type, flat)) - kinds.get(dtype.kind, {int})
        if wrong:
            bad = next(value for value in flat if type(value) in wrong)
            raise BadInput(f"input '{name}' is {datatype}, 'data' holds {quote(bad)}")
        if dtype.kind in "iu":
            bounds = np.iinfo(dtype)
            for value in (min(flat), max(flat)):
                if not bounds.min <= value <= bounds.max:
                    raise BadInput(f"input '{name}': {value} is out of range for {datatype}")
        with np.errstate(over="ignore"):
            array = np.array(flat, dtype)
        # gRPC may carry infinity, but nothing becomes it
        large = np.flatnonzero(~np.isfinite(array)) if dtype.kind == "f" else ()
        if any(math.isfinite(flat[place]) for place in large):
            raise BadInput(f"input '{name}': 'data' holds a number out of range for {datatype}")
        array = array.reshape(shape)
    array.flags.writeable = False
    return array


def to_bytes(array: np.ndarray, datatype: str) -> Bytes:
    """Encode an output as binary; bfloat16 is rounded to nearest, ties to even."""
    if datatype == "BYTES":
        return b"".join([b"".join(map(_to_element, block)) for block in string_blocks(array)])
    if datatype == "BF16":
        bits = np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint32)
        upper = (bits + (0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        nans = np.isnan(array.reshape(-1))  # rounding would turn some NaN into infinity
        upper[nans] = (bits[nans] >> 16) | 0x40
        return upper.tobytes()
    return number_bytes(array)


def number_bytes(array: np.ndarray) -> Bytes:
    """Return the bytes of numbers; of a large array that owns its memory without a copy."""
    if array.nbytes > _COPIED_BYTES and array.flags.owndata and array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8).data
    return array.tobytes()


def _to_element(element: object) -> bytes:
    data = element if type(element) is bytes else str(element).encode()
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def to_json(array: np.ndarray, datatype: str, name: str) -> list[str] | np.ndarray:
    """Return an output as orjson takes it, flat. Raises BadInput for what JSON cannot represent."""
    if datatype == "BYTES":
        with contextlib.suppress(UnicodeDecodeError):
            return [x.decode() if type(x) is bytes else str(x) for x in array.flat]
        what = "bytes that are not UTF-8"
    elif array.dtype.kind != "f" or np.isfinite(array).all():
        return np.ascontiguousarray(array).reshape(-1)
    else:
        what = "NaN or infinity"
    text = f"output '{name}' holds {what}, which JSON cannot represent"
    raise BadInput(text, hint="request it with 'binary_data': true")


def string_blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the strings in parts: one C call for a million would hold the GIL for 0.2 s."""
    flat = array.reshape(-1)
    return (flat[at : at + _BLOCK] for at in range(0, flat.size, _BLOCK))


def array_bytes(array: np.ndarray) -> int:
    """Return the bytes of memory of an array, including its strings."""
    if array.dtype.kind != "O":
        return array.nbytes
    return array.nbytes + sum([sum(map(sys.getsizeof, block)) for block in string_blocks(array)])
