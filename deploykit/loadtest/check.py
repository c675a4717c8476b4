"""Check that an answer of status 200 holds what was asked for: a result, and the right one.

An answer may carry an error under status 200, be empty, or be another service's. Answers that begin
as one that was checked before are not read again, so that the check costs little.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deploykit.core.tensors import DTYPE_BYTES, PROTOCOL_NAMES, carrier

if TYPE_CHECKING:
    import numpy as np

    Arrays = Mapping[str, np.ndarray]

_MOST_KNOWN = 4096  # beginnings of answers that are remembered
_DTYPES = {name: dtype for dtype, name in PROTOCOL_NAMES.items()}


@dataclass(frozen=True)
class Expected:
    """What the requests must be answered with: outputs by request and name."""

    answers: Sequence[Arrays]
    max_error: float  # max |a-b| / max |a|, as in `compare`


class AnswerCheck:
    """`outputs`: names that each answer must have; none: any one output is enough."""

    def __init__(self, outputs: Sequence[str], expected: Expected | None = None) -> None:
        self.outputs, self.expected = frozenset(outputs), expected
        # how an answer over HTTP begins that was right, with how many bytes it has
        self.usual: tuple[bytes, int] = (b"", -1)
        self._known: set[tuple[int, bytes, int]] = set()

    def json_problem(self, body: bytes, json_bytes: int | None, request: int) -> str | None:
        """Why an answer over HTTP is none; None if it is right.

        `json_bytes`: of its JSON part, None where there is no binary part.
        """
        at = len(body) if json_bytes is None or self.expected is not None else json_bytes
        key = (request if self.expected is not None else 0, body[:at], len(body))
        if key in self._known:
            return None
        split = len(body) if json_bytes is None else json_bytes
        problem = self._problem(request, *_read_json(body, split))
        if problem is None:
            self._remember(key)
        return problem

    def message_problem(self, message: bytes, prefix: int, request: int) -> tuple[str | None, int]:
        """The same for a `ModelInferResponse`, with how many bytes of it come before the tensors.

        `prefix`: that number as it was for the last answer.
        """
        at = len(message) if self.expected is not None else prefix
        key = (request if self.expected is not None else 0, message[:at], len(message))
        if at and key in self._known:
            return None, prefix
        why, found, prefix = read_message(message)
        problem = self._problem(request, why, found)
        if problem is None:
            at = len(message) if self.expected is not None else prefix
            self._remember((key[0], message[:at], len(message)))
        return problem, prefix

    def _remember(self, key: tuple[int, bytes, int]) -> None:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        if len(key[1]) <= 1 << 16:
            self._known.add(key)

    def _problem(self, request: int, why: str | None, found: Sequence[Any]) -> str | None:
        if why is not None:
            return why
        names = {name for name, *_ in found}
        if missing := sorted(self.outputs - names):
            return f"200 without the output {', '.join(missing)}"
        for name, datatype, shape, value in found:
            if isinstance(value, bytes) and _bytes_of(datatype, shape) not in (None, len(value)):
                return f"200 with {len(value)} bytes of {name}, a {datatype}{shape}"
        if not names:
            return "200 without outputs"
        if self.expected is not None:
            return _difference(self.expected, request, found)
        return None


def _read_json(body: bytes, json_bytes: int) -> tuple[str | None, list[Any]]:
    """What is wrong, and (name, datatype, shape, bytes or list) of each output."""
    if not body:
        return "200 with an empty body", []
    try:
        document = json.loads(body[:json_bytes])
    except (ValueError, RecursionError):
        return "200 with a body that is not JSON", []
    if not isinstance(document, dict) or not isinstance(document.get("outputs"), list):
        error = document.get("error") if isinstance(document, dict) else None
        why = "without outputs" if error is None else one_line(f"with an error: {error}")
        return f"200 {why}", []
    found, at = [], json_bytes
    for item in document["outputs"]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return "200 with an output that has no name", []
        parameters = item.get("parameters")
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if not isinstance(size, int):
            value: Any = item.get("data")
            if value is None:
                return f"200 without the values of {item['name']}", []
        else:
            value = body[at : at + size]
            at += size
        found.append((item["name"], item.get("datatype"), item.get("shape"), value))
    if at != len(body):
        return f"200 with {len(body) - json_bytes} bytes of tensors, not {at - json_bytes}", []
    return None, found


def read_message(message: bytes) -> tuple[str | None, list[Any], int]:
    """The same of a `ModelInferResponse`, and how many bytes come before its tensors."""
    found, raw, prefix = [], [], len(message)
    try:
        for number, value, at in message_fields(message):
            if number == 5:
                parts = [(key, part) for key, part, _ in message_fields(value)]
                names = [part.decode() for key, part in parts if key in (1, 2)]
                shape = [size for key, part in parts if key == 3 for size in varints(part)]
                found.append((*names, shape))
            elif number == 6:
                prefix = min(prefix, at)
                raw.append(value)
    except (IndexError, ValueError, TypeError, AttributeError):
        return "an answer that is not a ModelInferResponse", [], 0
    if len(raw) != len(found) or any(len(each) != 3 for each in found):
        return f"an answer with {len(found)} outputs and {len(raw)} tensors", [], 0
    return None, [(*each, value) for each, value in zip(found, raw, strict=True)], prefix


def message_fields(message: bytes) -> Iterator[tuple[int, Any, int]]:
    """Field numbers, values and where these begin; raises IndexError or ValueError on damage."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, end = _varint(message, at)
            yield number, value, at
            at = end
            continue
        size = {1: 8, 5: 4}.get(kind, 0)
        if kind == 2:
            size, at = _varint(message, at)
        elif not size:
            raise ValueError(f"wire type {kind}")
        if at + size > len(message):
            raise ValueError("a field is longer than its message")
        yield number, message[at : at + size], at
        at += size


def varints(packed: bytes | int) -> list[int]:
    """A repeated int64: packed, or one of its elements alone."""
    found, at = [packed] if isinstance(packed, int) else [], 0
    while not isinstance(packed, int) and at < len(packed):
        value, at = _varint(packed, at)
        found.append(value)
    return [value - (1 << 64) if value >> 63 else value for value in found]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _bytes_of(datatype: Any, shape: Any) -> int | None:
    """Of a tensor; None where its elements have no fixed size, or that is not known."""
    size = DTYPE_BYTES.get(_DTYPES.get(datatype, "") if isinstance(datatype, str) else "")
    try:
        return None if size is None else size * math.prod(shape)
    except TypeError:
        return None


def _difference(expected: Expected, request: int, found: Sequence[Any]) -> str | None:
    """Why an answer is not the expected one."""
    import numpy as np  # late: a generator's process that compares nothing starts sooner

    by_name = {name: each for name, *each in found}
    for name, right in expected.answers[request].items():
        if name not in by_name:
            return f"200 without the output {name}"
        datatype, shape, value = by_name[name]
        dtype = _DTYPES.get(datatype, "")
        if dtype not in DTYPE_BYTES or dtype == "bfloat16":
            return f"an answer whose {name}, a {datatype}, cannot be compared"
        if not isinstance(shape, list) or tuple(shape) != right.shape:
            return f"an answer whose {name} has the shape {shape}, not {list(right.shape)}"
        try:
            got = (
                np.frombuffer(value, np.dtype(carrier(dtype)).newbyteorder("<"))
                if isinstance(value, bytes)
                else np.array(value, carrier(dtype))
            ).reshape(right.shape)
        except (ValueError, TypeError, OverflowError):
            return f"an answer whose {name} is not {datatype}{shape}"
        a, b = right.astype(np.float64), got.astype(np.float64)
        largest = float(np.abs(a).max(initial=0.0)) or 1.0
        error = float(np.abs(a - b).max(initial=0.0)) / largest
        if not (math.isfinite(error) and error <= expected.max_error):
            return f"a wrong answer: {name} differs by more than {short_bound(expected.max_error)}"
    return None


def short_bound(bound: float) -> str:
    """Such as 0.001, never 1e-3."""
    return f"{bound:f}".rstrip("0").rstrip(".") or "0"


def error_text(body: bytes) -> str:
    """The message of an error answer: its `error` member, else the start of its body; one line."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    text = found.get("error") if isinstance(found, dict) else None
    if not isinstance(text, str):
        text = body[:200].decode("utf-8", "replace")
    return one_line(text) or "no message"


def one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text[:300]).split())
