"""Check that an answer of status 200 holds a result, and the right one if that is known.

An answer may carry an error under status 200, be empty, or come from another service. Answers that
begin like a checked one are not parsed again, so that the check costs little.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deploykit.core.tensors import DTYPE_BYTES, PROTOCOL_NAMES, carrier

DTYPES = {name: dtype for dtype, name in PROTOCOL_NAMES.items()}
LENGTH_BYTES = 4  # length prefix of a BYTES element


class Output(NamedTuple):
    """One output of an answer as the server sent it. `value`: bytes, or a list from JSON."""

    name: str
    datatype: Any
    shape: Any
    value: Any


Outputs = Sequence[Output]
# returns the outputs of a message and its size before the tensors, or raises WrongAnswerError
ReadMessage = Callable[[bytes], tuple[Outputs, int]]


class WrongAnswerError(Exception):
    """An answer of status 200 has no result or a wrong one."""


class AnswerCheck:
    """Checks tensors. `outputs`: names that each answer must have; if empty, any output will do.

    `expected`: the right outputs, if known, by request and name. `max_error`: max |a-b| / max |a|,
    as in `compare`.
    """

    def __init__(
        self,
        outputs: Iterable[str],
        expected: Sequence[Mapping[str, np.ndarray]] = (),
        max_error: float = 0.0,
    ) -> None:
        self.outputs, self.expected, self.max_error = frozenset(outputs), expected, max_error
        # the beginning and the size in bytes of the last right answer over HTTP with its head
        self.usual: tuple[bytes, int] = (b"", -1)
        # and of the last right one without, by request
        self._right: dict[int, tuple[bytes, int]] = {}

    def problem(self, message: bytes, request: int, read: ReadMessage) -> str | None:
        """Return what is wrong with an answer of status 200; None if it is right."""
        head, size = self._right.get(request, (b"", -1))
        if len(message) == size and message.startswith(head):
            return None
        try:
            head_bytes = self.check(message, request, read)
        except WrongAnswerError as exc:
            return str(exc)
        self._right[request] = message[:head_bytes], len(message)
        return None

    def check(self, message: bytes, request: int, read: ReadMessage) -> int:
        """Return how many bytes make an answer of this length right. Raises WrongAnswerError."""
        outputs, head_bytes = read(message)
        if missing := sorted(self.outputs - {output.name for output in outputs}):
            raise WrongAnswerError(f"200 without the output {', '.join(missing)}")
        if not outputs:
            raise WrongAnswerError("200 without outputs")
        for name, datatype, shape, value in outputs:
            is_raw = isinstance(value, bytes)
            expected = _size_of(datatype, shape, in_bytes=is_raw)
            if expected not in (None, got := len(value) if is_raw else _count(value)):
                unit = "bytes" if is_raw else "values"
                raise WrongAnswerError(f"200 with {got} {unit} of {name}, a {datatype}{shape}")
        if not self.expected:
            return head_bytes
        _compare(self.expected[request], outputs, self.max_error)
        return len(message)


class BodyCheck(AnswerCheck):
    """Checks other answers, in one BYTES of a message if `grpc`.

    `is_json`: they are JSON. `answers`: the right ones, if known.
    """

    def __init__(
        self, is_json: bool, answers: Sequence[Any], max_error: float, *, grpc: bool = False
    ) -> None:
        super().__init__((), (), max_error)
        self._is_json, self._answers, self._grpc = is_json, answers, grpc

    def check(self, message: bytes, request: int, read: ReadMessage) -> int:
        body = message
        if self._grpc:
            outputs, _ = read(message)
            if len(outputs) != 1 or outputs[0].datatype != "BYTES":
                raise WrongAnswerError("an answer that is not one of BYTES")
            body = outputs[0].value[LENGTH_BYTES:]
        if not body:
            raise WrongAnswerError("200 with an empty body")
        if self._is_json:
            try:
                value = json.loads(body)
            except (ValueError, RecursionError):
                raise WrongAnswerError("200 with a body that is not JSON") from None
            if self._answers and not _same(self._answers[request], value, self.max_error):
                bound = short_bound(self.max_error)
                raise WrongAnswerError(f"a wrong answer: it differs by more than {bound}")
        return len(message)


def _same(right: Any, got: Any, max_error: float) -> bool:
    """Compare JSON values; numbers may differ by `max_error` times the right one, or times 1."""
    if isinstance(right, dict) and isinstance(got, dict):
        keys = right.keys()
        return keys == got.keys() and all(_same(right[k], got[k], max_error) for k in keys)
    if isinstance(right, list) and isinstance(got, list):
        pairs = zip(right, got, strict=False)
        return len(right) == len(got) and all(_same(*pair, max_error) for pair in pairs)
    numbers = isinstance(right, (int, float)) and isinstance(got, (int, float))
    if numbers and bool not in (type(right), type(got)):
        return bool(abs(right - got) <= max_error * max(1.0, abs(right)))
    return type(right) is type(got) and bool(right == got)


def read_body(body: bytes, json_bytes: int | None) -> tuple[Outputs, int]:
    """Return the outputs in an answer over HTTP, and the size of its JSON. Raises WrongAnswerError.

    `json_bytes`: None if all of it is JSON.
    """
    json_bytes = len(body) if json_bytes is None else json_bytes
    if not body:
        raise WrongAnswerError("200 with an empty body")
    try:
        document = json.loads(body[:json_bytes])
    except (ValueError, RecursionError):
        raise WrongAnswerError("200 with a body that is not JSON") from None
    if not isinstance(document, dict) or not isinstance(document.get("outputs"), list):
        error = document.get("error") if isinstance(document, dict) else None
        why = "without outputs" if error is None else one_line(f"with an error: {error}")
        raise WrongAnswerError(f"200 {why}")
    outputs, at = [], json_bytes
    for item in document["outputs"]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise WrongAnswerError("200 with an output that has no name")
        parameters = item.get("parameters")
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if isinstance(size, int):
            value: Any = body[at : at + size]
            at += size
        else:
            value = item.get("data")
            if value is None:
                raise WrongAnswerError(f"200 without the values of {item['name']}")
        outputs.append(Output(item["name"], item.get("datatype"), item.get("shape"), value))
    if at != len(body):
        got = len(body) - json_bytes
        raise WrongAnswerError(f"200 with {got} bytes of tensors, not {at - json_bytes}")
    return outputs, json_bytes


def _count(value: Any) -> int:
    return sum(map(_count, value)) if isinstance(value, list) else 1


def _size_of(datatype: Any, shape: Any, *, in_bytes: bool) -> int | None:
    """Return a tensor's size in bytes or values; None if none is fixed or known."""
    size = DTYPE_BYTES.get(DTYPES.get(str(datatype), "")) if in_bytes else 1
    try:
        return None if size is None else size * math.prod(shape)
    except TypeError:
        return None


def _compare(expected: Mapping[str, np.ndarray], outputs: Outputs, max_error: float) -> None:
    by_name = {output.name: output for output in outputs}
    for name, right in expected.items():
        if name not in by_name:
            raise WrongAnswerError(f"200 without the output {name}")
        _, datatype, shape, value = by_name[name]
        dtype = DTYPES.get(str(datatype), "")
        if dtype not in DTYPE_BYTES or dtype == "bfloat16":
            raise WrongAnswerError(f"an answer whose {name}, a {datatype}, cannot be compared")
        if not isinstance(shape, list) or tuple(shape) != right.shape:
            sizes = list(right.shape)
            raise WrongAnswerError(f"an answer whose {name} has the shape {shape}, not {sizes}")
        try:
            got = (
                np.frombuffer(value, np.dtype(carrier(dtype)).newbyteorder("<"))
                if isinstance(value, bytes)
                else np.array(value, carrier(dtype))
            ).reshape(right.shape)
        except (ValueError, TypeError, OverflowError):
            raise WrongAnswerError(f"an answer whose {name} is not {datatype}{shape}") from None
        a, b = right.astype(np.float64), got.astype(np.float64)
        largest = float(np.abs(a).max(initial=0.0)) or 1.0
        error = float(np.abs(a - b).max(initial=0.0)) / largest
        if not (math.isfinite(error) and error <= max_error):
            bound = short_bound(max_error)
            raise WrongAnswerError(f"a wrong answer: {name} differs by more than {bound}")


def short_bound(bound: float) -> str:
    """Write a number as 0.001, never as 1e-3."""
    return f"{bound:f}".rstrip("0").rstrip(".") or "0"


def error_text(body: bytes) -> str:
    """Return the message of an error answer, its `error` member or its start, as one line."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    text = document.get("error") if isinstance(document, dict) else None
    text = text if isinstance(text, str) else body[:200].decode("utf-8", "replace")
    return one_line(text) or "no message"


def one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text[:300]).split())
