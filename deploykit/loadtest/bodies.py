"""Load /predict with what clients have: images, sentences or other files.

Each file, or sentence, is one request; over gRPC one BYTES element.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deploykit.core.errors import BadInput
from deploykit.loadtest.check import AnswerCheck, read_message, short_bound
from deploykit.loadtest.target import RemoteModel

_NAMED = 3  # bodies, in the report
_LENGTH = 4  # bytes before a BYTES element


class Body(NamedTuple):
    """One request. `name`: of its file, or a sentence's beginning."""

    name: str
    type: str
    data: bytes


@dataclass(frozen=True)
class Bodies:
    """What the requests hold in turn, and what they must be answered with, if that is known."""

    bodies: Sequence[Body]
    answers: Sequence[Any] = ()

    def describe(self) -> str:
        """For the report: types, sizes and names."""
        sizes = sorted(len(each.data) for each in self.bodies)
        span = f"{sizes[0]:,}" + (f" to {sizes[-1]:,}" if sizes[-1] > sizes[0] else "")
        names = [each.name for each in self.bodies]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        types = Counter(each.type for each in self.bodies)
        kinds = ", ".join(f"{count} {kind}" for kind, count in types.items())
        return f"{kinds}, {span} bytes: {', '.join(names[:_NAMED])}{more}"

    def requests(self, remote: RemoteModel) -> list[bytes]:
        """Whole requests."""
        return [_request(remote, each) for each in self.bodies]


def choose_bodies(
    remote: RemoteModel, read: Callable[[], Bodies] | None, data: Path | None
) -> Bodies | None:
    """What to send to /predict; None for a model that is to get tensors, perhaps those of `data`.

    Raises BadInput, and what `read` raises.
    """
    takes = "takes" in remote.about
    if read is not None and takes:
        return read()
    if remote.pipeline:
        why = f"{remote.model} is a pipeline: its requests are not made up"
        raise BadInput(f"{remote.url}: {why}", hint="`data` FILE or DIR, or `text`")
    if read is not None and data is None:
        raise BadInput(f"{remote.url}: {remote.model} has no task, so it takes only tensors")
    return None


def _request(remote: RemoteModel, body: Body) -> bytes:
    if remote.grpc:
        from deploykit.loadtest.grpc import call_of, infer_request

        name = remote.inputs[0].name if remote.pipeline else remote.about["takes"]
        value = len(body.data).to_bytes(_LENGTH, "little") + body.data
        return call_of(infer_request(remote.model, [(name, "BYTES", [1], value)]))
    lines = (
        f"POST {remote.path}/predict HTTP/1.1",
        f"Host: {remote.host}",
        f"Content-Type: {body.type}",
        f"Content-Length: {len(body.data)}",
    )
    return "\r\n".join([*lines, "", ""]).encode() + body.data


class BodyCheck(AnswerCheck):
    """`json`: whether answers are JSON. `answers`: the right ones by request, if they are known."""

    def __init__(self, json: bool, answers: Sequence[Any], max_error: float) -> None:
        super().__init__(())
        self._json, self._answers, self._max_error = json, answers, max_error
        self._right: dict[int, bytes] = {}  # the last right answer, which need not be read again

    def json_problem(self, body: bytes, json_bytes: int | None, request: int) -> str | None:  # noqa: ARG002 - of one part
        if self._right.get(request) == body:
            return None
        problem = self._why_wrong(body, request)
        if problem is None:
            self._right[request] = body
        return problem

    def message_problem(self, message: bytes, prefix: int, request: int) -> tuple[str | None, int]:
        why, found, _ = read_message(message)
        if why is None and (len(found) != 1 or found[0][1] != "BYTES"):
            why = "an answer that is not one of BYTES"
        return why or self.json_problem(found[0][3][_LENGTH:], None, request), prefix

    def _why_wrong(self, body: bytes, request: int) -> str | None:
        if not body:
            return "200 with an empty body"
        if not self._json:
            return None
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return "200 with a body that is not JSON"
        if not self._answers or _same(self._answers[request], value, self._max_error):
            return None
        return f"a wrong answer: it differs by more than {short_bound(self._max_error)}"


def _same(right: Any, got: Any, max_error: float) -> bool:
    """Equal, but for numbers that differ by up to `max_error` of the larger one, or of 1."""
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
