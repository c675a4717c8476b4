"""POST /v2/models/M/predict: images or text as clients have them, answers as JSON.

The body is an image (image/jpeg, image/png, image/webp), a text (text/plain), a form with files
(multipart/form-data), or JSON: {"text": "..."}, {"image": "BASE64"}, a list of several in place of
the string, or such a list alone. Several items have a list of answers.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from deploykit.core.errors import BadInput, UnknownEncoding, quote
from deploykit.core.tensors import Bytes
from deploykit.runtimes.tasks.answers import PNG, RLE
from deploykit.runtimes.tasks.engine import Item
from deploykit.serving.http.multipart import check_form, find_boundary, split_parts
from deploykit.serving.models.inference import ModelRoute
from deploykit.serving.models.task_call import MOST_ITEMS, Items, TaskCall, too_many
from deploykit.serving.oip.json import parse_document
from deploykit.serving.transport import compression
from deploykit.serving.transport.call import JSON, Call, reply_exception

IMAGES = (b"image/jpeg", b"image/png", b"image/webp")
_IMAGE, _TEXT = ("image", "images"), ("text", "texts")
_UNNAMED = (b"", b"application/octet-stream", b"application/x-www-form-urlencoded")  # as curl's
_NUMBER = 20  # digits
_SMALL_BYTES = 64 << 10  # taken apart on the event loop's thread
_LARGE_BYTES = 256 << 10  # taken apart with other large bodies
_LONG_BYTES = 1 << 20  # of JSON: taken apart in another process


class PredictRoute(ModelRoute):
    """The route of one model."""

    def __call__(self, call: Call) -> None:
        """Raises BadInput for a wrong request, Unsupported for a model without a task."""
        head, body = call.head, call.body
        trace = None if head.trace is None else head.trace.decode("latin-1")
        prediction = HttpTaskCall(self, call, trace)
        _read_query(head.target, prediction)
        text = prediction.steps.task.image is None
        content_type = head.content_type or b""
        if not len(body):
            raise BadInput("the body is empty", hint=_hint(text))
        split = self._splitter(content_type, bytes(body[:1]), text)
        call.body = b""
        if head.encoding is None and len(body) <= _SMALL_BYTES:
            prediction.start(split(body))
        elif head.encoding is None and split is _alone:
            prediction.start(_alone(body))
        else:
            work = partial(self._unpack, head.encoding, split)
            large = head.encoding is not None or len(body) > _LARGE_BYTES
            prediction.split(body, work, large=large)

    def _splitter(self, content_type: bytes, first: bytes, text: bool) -> Callable[[Bytes], Items]:
        """What takes the items out of a body. Raises UnknownEncoding for another type."""
        kind = content_type.partition(b";")[0].strip().lower()
        if kind == b"multipart/form-data":
            return partial(_split_form, find_boundary(content_type), text)
        if kind == b"application/json" or (kind in _UNNAMED and first in (b"{", b"[")):
            return partial(self._split_json, text)
        if kind in _UNNAMED or kind in ((b"text/plain",) if text else IMAGES):
            return _alone
        raise UnknownEncoding(
            f"the Content-Type {quote(kind.decode('latin-1'))} is not offered", hint=_hint(text)
        )

    def _unpack(
        self, encoding: bytes | None, split: Callable[[Bytes], Items], body: Bytes
    ) -> Items:
        if encoding is not None:
            body = compression.decompress(body, encoding, self.max_body_bytes)
        return split(body)

    def _split_json(self, text: bool, body: Bytes) -> Items:
        if self.worker is None or len(body) <= _LONG_BYTES:
            return split_json(body, text)
        array = np.frombuffer(body, np.uint8)  # is sent without a copy
        return self.worker.run(self.limit_us / 1e6, split_json, array, text)


class HttpTaskCall(TaskCall):
    """One call."""

    client: Call

    def reply(self, answers: Sequence[bytes]) -> None:
        body = b"[" + b",".join(answers) + b"]" if self.several else answers[0]
        self.client.reply(200, JSON, [body])

    def refuse(self, error: Exception) -> None:
        reply_exception(self.client, error)


def split_json(body: Bytes | np.ndarray, text: bool) -> Items:
    """The items of a JSON document; `text`: strings, else base64. Raises BadInput."""
    document = parse_document(bytes(body))
    kind = "text" if text else "image"
    if type(document) is dict:
        known = _TEXT if text else _IMAGE
        names = [name for name in known if name in document]
        if len(names) != 1 or len(document) > 1:
            raise BadInput(f"the JSON needs '{kind}' and nothing else", hint=_hint(text))
        document = document[names[0]]
    several = type(document) is list
    values = document if several else [document]
    if len(values) > MOST_ITEMS:
        raise too_many(len(values))
    found: list[Item] = []
    for number, value in enumerate(values, 1):
        if type(value) is not str:
            raise BadInput(f"{kind} {number} must be a string, got {quote(value)}")
        found.append(value if text else _from_base64(value, number))
    return Items(found, several)


def _from_base64(value: str, number: int) -> bytes:
    if value.startswith("data:"):
        value = value.partition(",")[2]
    try:
        return base64.b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError):  # not even ASCII
        raise BadInput(f"image {number} is not base64") from None


def _split_form(boundary: bytes, text: bool, body: Bytes) -> Items:
    parts = split_parts(body, boundary, MOST_ITEMS)
    check_form(parts, (*_TEXT, "file") if text else (*_IMAGE, "file"))
    return Items([part.content for part in parts], several=len(parts) > 1)


def _alone(body: Bytes) -> Items:
    return Items([body], several=False)


def _read_query(target: str, call: TaskCall) -> None:
    """`mask`, `threshold` and `top_k`, the last of each. Raises BadInput."""
    asked = {name: values[-1] for name, values in parse_qs(target.partition("?")[2]).items()}
    call.mask = asked.get("mask", RLE)
    if call.mask not in (RLE, PNG):
        raise BadInput(f"`mask` {quote(call.mask)}: is neither {RLE} nor {PNG}")
    values: dict[str, Any] = {}
    for name, kind in (("threshold", float), ("top_k", int)):
        if name in asked:
            try:
                values[name] = kind(asked[name][:_NUMBER])
            except ValueError:
                raise BadInput(f"`{name}` {quote(asked[name])}: is not a number") from None
    call.task = replace(call.task, **values)


def _hint(text: bool) -> str:
    return (
        'send text/plain, a form with the field text, or JSON: {"text": ["...", ...]}'
        if text
        else "send image/jpeg, image/png or image/webp, a form with files in the field image, "
        'or JSON with base64: {"image": ["...", ...]}'
    )
