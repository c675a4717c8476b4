"""Take the fields out of a multipart/form-data body (RFC 7578), strictly and within limits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from deploykit.core.errors import BadInput, TooLarge, quote
from deploykit.core.tensors import Bytes

_BOUNDARY = re.compile(rb';\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))\s*(?:;|$)', re.I)
_NAME = re.compile(rb';\s*name=(?:"([^"\r\n]*)"|([^\s;"]+))', re.I)
_HEAD_BYTES = 8 << 10  # of one part
_WINDOW_BYTES = 1 << 20  # searched at once: one search of it all would keep other threads waiting


class FormField(NamedTuple):
    """One field."""

    name: str
    content: Bytes


def find_boundary(content_type: bytes) -> bytes:
    """Raises BadInput."""
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise BadInput("the Content-Type multipart/form-data has no boundary")
    return match[1] or match[2]


def split_parts(body: Bytes, boundary: bytes, most: int) -> list[FormField]:
    """The fields in their order. Raises BadInput, TooLarge above `most` of them."""
    delimiter = b"\r\n--" + boundary
    if bytes(body[: len(delimiter) - 2]) != delimiter[2:]:
        raise BadInput("the body does not begin with the boundary of its Content-Type")
    found: list[FormField] = []
    start = len(delimiter) - 2
    for stop in _places(body, delimiter):
        if not _ends_line(body, stop + len(delimiter)):
            continue  # it only begins like the boundary
        if len(found) == most:
            raise TooLarge(f"the form has more than {most} fields")
        found.append(_part(body, start, stop))
        start = stop + len(delimiter)
    if bytes(body[start : start + 2]) != b"--":
        raise BadInput("the form ends before its last boundary")
    return found


def _ends_line(body: Bytes, at: int) -> bool:
    return bytes(body[at : at + 2]) in (b"\r\n", b"--")


def _part(body: Bytes, start: int, stop: int) -> FormField:
    """The field between two boundaries."""
    head = bytes(body[start : min(stop + 4, start + _HEAD_BYTES)])  # with the CR LF before a stop
    end = head.find(b"\r\n\r\n")
    if end < 0 or start + end + 4 > stop + 4:
        raise BadInput(f"a field of the form has no end of its headers within {_HEAD_BYTES} bytes")
    lines = head[:end].split(b"\r\n")
    fields = {line.partition(b":")[0].strip().lower(): line.partition(b":")[2] for line in lines}
    match = _NAME.search(fields.get(b"content-disposition", b""))
    if match is None:
        raise BadInput("a field of the form has no name")
    if fields.get(b"content-transfer-encoding", b"binary").strip().lower() not in (
        b"binary",
        b"8bit",
        b"7bit",
    ):
        raise BadInput("a field of the form is not binary", hint="send its bytes as they are")
    name = (match[1] if match[1] is not None else match[2]).decode("utf-8", "replace")
    return FormField(name, body[start + end + 4 : stop])


def _places(body: Bytes, delimiter: bytes) -> Iterator[int]:
    overlap = len(delimiter) - 1
    for at in range(0, len(body), _WINDOW_BYTES):
        window = bytes(body[at : at + _WINDOW_BYTES + overlap])
        place = window.find(delimiter)
        while place >= 0:
            yield at + place
            place = window.find(delimiter, place + len(delimiter))


def check_form(parts: list[FormField], known: tuple[str, ...]) -> None:
    """Raise BadInput for a field of another name."""
    for part in parts:
        if part.name.removesuffix("[]") not in known:
            raise BadInput(
                f"the form has a field {quote(part.name)}", hint=f"possible: {', '.join(known)}"
            )
