"""The input of a pipeline from bytes, and its answer as JSON values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, get_origin

import numpy as np

from deploykit.core.errors import BadInput, first_line
from deploykit.core.json_value import ONE_JSON, json_value
from deploykit.pipelines.annotations import conforms, describe_value, shown
from deploykit.pipelines.failures import StageFailed

_JSON_TYPES = (dict, list, int, float, bool)
_VALUE_BYTES = 80  # of memory, for each comma, colon and opening bracket of JSON


def input_kind(takes: Any, where: str) -> str:
    """What a request is by the annotation of its input: image, text, json or bytes.

    Raises BadInput for an annotation that nothing is read as.
    """
    kind = get_origin(takes) or takes
    found = {bytes: "bytes", str: "text", np.ndarray: "image"}.get(kind)
    if found is not None:
        return found
    if kind in _JSON_TYPES or takes is Any:
        return "json"
    raise BadInput(
        f"{where}: the request's input is {shown(takes)}",
        hint="bytes, str, numpy.ndarray (an image), dict, list, int, float or bool",
    )


def reader(kind: str, takes: Any) -> Callable[[bytes], Any]:
    """How bytes become the input; it raises BadInput for bytes that are no such thing.

    bytes: as they are; text: UTF-8; image: uint8 (height, width, 3); json: checked with `takes`.
    """
    if kind == "image":
        from deploykit.pipelines.pixels import read_pixels  # Pillow, which others do not need

        return read_pixels
    if kind == "json":
        return lambda data: _from_json(data, takes)
    return _text if kind == "text" else bytes


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise BadInput(f"the text is not UTF-8: {exc.reason} at byte {exc.start}") from exc


def _from_json(data: bytes, takes: Any) -> Any:
    try:
        with ONE_JSON:
            value = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise BadInput(f"the input is not JSON: {first_line(exc)}") from exc
    if not conforms(value, takes):
        raise BadInput(f"the input is a JSON {describe_value(value)}, {shown(takes)} is needed")
    return value


def input_bytes(value: Any, data: bytes | None) -> int:
    """Return an upper bound of the memory of an input; `data`: the JSON that it was read from."""
    if data is not None:
        structure = sum(map(data.count, (b",", b":", b"[", b"{")))
        return 4 * len(data) + _VALUE_BYTES * structure  # a character may take 4 bytes
    return value.nbytes if isinstance(value, np.ndarray) else len(value)


def answer_json(stage: str, value: Any) -> Any:
    """The answer as JSON values: arrays become lists, NaN and infinity null. Raises StageFailed."""
    try:
        return _json(value)
    except RecursionError:
        raise StageFailed(f"stage '{stage}': its answer is too deep for JSON") from None
    except TypeError as exc:
        raise StageFailed(f"stage '{stage}': {first_line(exc)}") from None


def _json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            finite, value = np.isfinite(value), value.astype(object)
            value[~finite] = None
        return _json(value.tolist()) if value.dtype == object else value.tolist()
    if isinstance(value, np.generic):
        return _json(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_asdict"):
        return [_json(each) for each in value]
    if hasattr(value, "__dataclass_fields__") and not hasattr(value, "to_dict"):
        return {name: _json(getattr(value, name)) for name in value.__dataclass_fields__}
    return json_value(value)
