"""POST /v2/models/M/predict: images or text in the client's own format, answers as JSON.

The body is an image, text (text/plain), a form (multipart/form-data or urlencoded), or JSON:
{"text": "..."}, {"image": "BASE64"}, a list of several in place of the string, or such a list
alone. Several items have a list of answers.
"""

from __future__ import annotations

import base64
import binascii
import re
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from deploykit.core.errors import BadInput, TooLarge, UnknownEncoding, did_you_mean, quote
from deploykit.core.json_value import check_json_size
from deploykit.core.task import CLASSIFY, DETECT, SEGMENT, TEXT_CLASSIFY
from deploykit.core.tensors import Bytes
from deploykit.engines.tasks import PNG, RLE, Item
from deploykit.serving.models.inference import MOST_ITEMS, Items, ModelRoute, TaskCall, too_many
from deploykit.serving.models.pipelines import NOT_JSON, Sent, ServedPipeline
from deploykit.serving.oip.json import parse_document
from deploykit.serving.transport.connection import JSON, Call, Head, reply_exception, reply_with
from deploykit.serving.transport.encodings import check_charset, decompress, other_charset

_BOUNDARY = re.compile(rb';\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))\s*(?:;|$)', re.I)
_NAME = re.compile(rb';\s*name=(?:"([^"\r\n]*)"|([^\s;"]+))', re.I)
_HEAD_BYTES = 8 << 10  # the largest head of one part
_PADDING_BYTES = 64  # of blanks after a boundary
_WINDOW_BYTES = 1 << 20  # searched at once: a search of all of it would keep other threads waiting
_IMAGE, _TEXT = ("image", "images", "file"), ("text", "texts", "file")  # names of fields
_FORM, _URL_FORM = b"multipart/form-data", b"application/x-www-form-urlencoded"
_UNNAMED = (b"", b"application/octet-stream", b"binary/octet-stream", _URL_FORM)  # _URL_FORM: curl
_URLENCODED = re.compile(rb"[A-Za-z_][\w.\[\]-]*=[!-~]*", re.ASCII)
_MOST_URL_BYTES = 4 << 20  # decoding holds up other threads for some milliseconds
_URL_SAFE, _BLANKS = bytes.maketrans(b"-_", b"+/"), string.whitespace.encode()
_SMALL_BYTES = 64 << 10  # bodies up to this size are split on the event loop's thread
_LARGE_BYTES = 256 << 10  # bodies from this size on are split together with other large ones
_TEXT_HINT = 'send text/plain, a form with the field text, or JSON: {"text": ["...", ...]}'
_IMAGE_HINT = (
    "send a JPEG, PNG or WebP image, a form with files in the field image, "
    'or JSON with base64: {"image": ["...", ...]}'
)

Field = tuple[str, Bytes]  # name and content


def split_form(kind: bytes, content_type: bytes, body: Bytes) -> list[Field] | None:
    """Split a form (RFC 7578, or urlencoded) into fields; None for a body of another `kind`.

    Raises BadInput, and TooLarge above MOST_ITEMS fields.
    """
    if kind == _URL_FORM and _URLENCODED.fullmatch(bytes(body[:_HEAD_BYTES])):
        return _split_urlencoded(bytes(body))
    if kind != _FORM:
        return None
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise BadInput("the Content-Type multipart/form-data has no boundary")
    boundary = b"--" + (match[1] or match[2])
    found: list[Field] = []
    start = 0  # of a field, after its boundary
    for at in _places(body, boundary):
        end = at + len(boundary)
        last = bytes(body[end : end + 2]) == b"--"
        rest = bytes(body[end : end + _PADDING_BYTES]).lstrip(b" \t")
        if (at and bytes(body[at - 2 : at]) != b"\r\n") or not (last or rest[:2] == b"\r\n"):
            continue  # it only looks like the boundary
        if len(found) == MOST_ITEMS:
            raise TooLarge(f"the form has more than {MOST_ITEMS} fields")
        if start:
            found.append(_field(body, start, at - 2))
        if last:
            return [field for field in found if field[0] != "_charset_"]
        start = end
    raise BadInput("the form does not end with the boundary of its Content-Type")


def _split_urlencoded(body: bytes) -> list[Field] | None:
    """Split the form of `curl -d` or a browser; None for other bytes under that type."""
    if not body.isascii():
        return None
    if len(body) > _MOST_URL_BYTES:
        text = f"the urlencoded form is above {_MOST_URL_BYTES} bytes"
        raise TooLarge(text, hint="send multipart/form-data")
    try:
        pairs = parse_qsl(body.decode("ascii"), True, max_num_fields=MOST_ITEMS)
    except ValueError as exc:
        raise TooLarge(f"the form has more than {MOST_ITEMS} fields") from exc
    return [(name, value.encode()) for name, value in pairs if name != "_charset_"]


def _field(body: Bytes, start: int, stop: int) -> Field:
    """Return the field between two boundaries."""
    head = bytes(body[start : min(stop + 4, start + _HEAD_BYTES)])  # with the CR LF before `stop`
    end = head.find(b"\r\n\r\n")
    if end < 0 or start + end > stop:
        raise BadInput(f"a field of the form has no end of its headers within {_HEAD_BYTES} bytes")
    lines = [line.partition(b":") for line in head[:end].split(b"\r\n")]
    headers = {name.strip().lower(): value for name, _, value in lines}
    match = _NAME.search(headers.get(b"content-disposition", b""))
    if match is None:
        raise BadInput("a field of the form has no name")
    encoding = headers.get(b"content-transfer-encoding", b"binary").strip().lower()
    if encoding not in (b"binary", b"8bit", b"7bit"):
        raise BadInput("a field of the form is not binary", hint="send its bytes as they are")
    name = (match[1] if match[1] is not None else match[2]).decode("utf-8", "replace")
    content: Bytes = body[start + end + 4 : stop]
    kind = b";charset=" + content[:40] if name == "_charset_" else headers.get(b"content-type")
    check_charset(other_charset(kind), content)
    return name, content


def _places(body: Bytes, text: bytes) -> Iterator[int]:
    overlap = len(text) - 1
    for at in range(0, len(body), _WINDOW_BYTES):
        window = bytes(body[at : at + _WINDOW_BYTES + overlap])
        place = window.find(text)
        while place >= 0:
            yield at + place
            place = window.find(text, place + len(text))


class PredictRoute(ModelRoute):
    """Answers the predict requests of one model."""

    def __call__(self, call: Call) -> None:
        """Answer a request. Raises BadInput, and Unsupported for a model without a task."""
        head, body = call.head, call.body
        prediction = HttpTaskCall(self, call, head.trace)
        _read_query(head.target, prediction)
        text = prediction.steps.task.image is None
        content_type = head.content_type or b""
        if not len(body):
            raise BadInput("the body is empty", hint=_TEXT_HINT if text else _IMAGE_HINT)
        call.body = b""

        def unpack(body: Bytes) -> Items:
            body = decompress(body, head.encoding, self.max_body_bytes)
            return split_items(content_type, text, body)

        if head.encoding is None and (len(body) <= _SMALL_BYTES or _is_item(content_type, body)):
            prediction.start(unpack(body))
        else:
            large = head.encoding is not None or len(body) > _LARGE_BYTES
            prediction.split(body, unpack, large=large)


def _kind(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].strip().lower()


def _is_item(content_type: bytes, body: Bytes) -> bool:
    """Return whether the body is an image itself, of any size."""
    kind = _kind(content_type)
    return kind.startswith(b"image/") or (kind in _UNNAMED and not bytes(body[:1]).isascii())


def split_items(content_type: bytes, text: bool, body: Bytes) -> Items:
    """Split a body into strings if `text`, else images. Raises BadInput, UnknownEncoding."""
    kind, hint = _kind(content_type), _TEXT_HINT if text else _IMAGE_HINT
    is_json = kind == b"application/json" or kind.endswith(b"+json")
    if is_json or (kind in _UNNAMED and bytes(body[:1]) in (b"{", b"[")):
        return _split_json(text, parse_document(bytes(body), hint), hint)
    fields = split_form(kind, content_type, body)
    if fields is None:
        own = kind == b"text/plain" if text else kind.startswith(b"image/")
        if not own and kind not in _UNNAMED:
            raise UnknownEncoding(f"the Content-Type {quote(kind)} is not offered", hint=hint)
        return Items([body], several=False)  # the bytes of an image say what it is
    known = _TEXT if text else _IMAGE
    for name, _ in fields:
        if name.removesuffix("[]") not in known:
            hint = f"possible: {', '.join(known)}"
            raise BadInput(f"the form has a field {quote(name)}", hint=hint)
    found: list[Item] = [content for _, content in fields]
    if kind == _URL_FORM and not text:  # `curl -d image=$(base64 FILE)` leaves its plus signs
        strings = [bytes(content).decode().replace(" ", "+") for _, content in fields]
        found = [from_base64(each, number) for number, each in enumerate(strings, 1)]
    return Items(found, several=len(found) > 1)


class HttpTaskCall(TaskCall):
    client: Call

    def reply(self, answers: Sequence[bytes]) -> None:
        body = b"[" + b",".join(answers) + b"]" if self.several else answers[0]
        self.client.reply(200, JSON, [body])

    def refuse(self, error: Exception) -> None:
        reply_exception(self.client, error)


def _split_json(text: bool, document: Any, hint: str) -> Items:
    kind = "text" if text else "image"
    if type(document) is dict:
        if len(document) != 1 or not document.keys() & {kind, f"{kind}s"}:
            raise BadInput(f"the JSON needs '{kind}' and nothing else", hint=hint)
        (document,) = document.values()
    several = type(document) is list
    values = document if several else [document]
    if len(values) > MOST_ITEMS:
        raise too_many(len(values))
    found: list[Item] = []
    for number, value in enumerate(values, 1):
        if type(value) is not str:
            raise BadInput(f"{kind} {number} must be a string, got {quote(value)}")
        found.append(value if text else from_base64(value, number))
    return Items(found, several)


def from_base64(value: str, number: int) -> bytes:
    """Decode an image, which may be a data: URL. Raises BadInput."""
    if value.startswith("data:"):
        value = value.partition(",")[2]
    windows = range(0, len(value), _WINDOW_BYTES)  # all at once would hold up other threads
    try:
        text = value.encode("ascii")
        parts = [text[at : at + _WINDOW_BYTES].translate(_URL_SAFE, _BLANKS) for at in windows]
        plain = b"".join(parts).rstrip(b"=")
        if b"=" in plain:
            raise binascii.Error
        plain += b"=" * (-len(plain) % 4)
        decode = partial(base64.b64decode, validate=True)
        return b"".join(decode(plain[at : at + _WINDOW_BYTES]) for at in windows)
    except ValueError:  # binascii.Error, or the string is not even ASCII
        raise BadInput(f"image {number} is not base64") from None


def check_query(target: str, known: Collection[str]) -> dict[str, str]:
    """Return the parameters of a query; the last of each counts. Raises BadInput for others."""
    asked = dict(parse_qsl(target.partition("?")[2], keep_blank_values=True))
    for name in asked:
        if name not in known:
            possible = f"possible: {', '.join(known)}" if known else "it takes no parameters"
            hint = did_you_mean(name, known, possible)
            raise BadInput(f"the query has {quote(name)}, which is not known here", hint=hint)
    return asked


_TOP_K: Mapping[str, Callable[[str], Any]] = {"top_k": int}
_PARAMETERS: Mapping[str, Mapping[str, Callable[[str], Any]]] = {
    DETECT: {"threshold": float},
    SEGMENT: {"mask": str},
    CLASSIFY: _TOP_K,
    TEXT_CLASSIFY: _TOP_K,
}


def _read_query(target: str, call: TaskCall) -> None:
    """Read `mask`, `threshold` and `top_k`, as the task has them. Raises BadInput."""
    if "?" not in target:
        return
    kinds = _PARAMETERS.get(call.task.kind, {})
    for name, value in check_query(target, kinds).items():
        if name == "mask":
            if value not in (RLE, PNG):
                raise BadInput(f"`mask` {quote(value)}: is neither {RLE} nor {PNG}")
            call.mask = value
            continue
        try:
            call.task = replace(call.task, **{name: kinds[name](value[:20])})
        except ValueError:
            raise BadInput(f"`{name}` {quote(value)}: is not a number") from None


_BYTES = b"Content-Type: application/octet-stream\r\n"


class PipelineRoute:
    """Answers the predict requests of one pipeline: the body is its input, its answer the reply."""

    def __init__(self, pipeline: ServedPipeline) -> None:
        self._pipeline = pipeline

    def __call__(self, call: Call) -> None:
        """Start the pipeline. Raises Overloaded during the shutdown."""
        head, body = call.head, call.body
        call.body = b""
        read = partial(self._read, head, body)
        call.cancel = self._pipeline.start(read, partial(_reply, call), call, head.trace)

    def _read(self, head: Head, body: Bytes) -> Sent:
        """Return the input's bytes or string. Raises BadInput, TooLarge, UnknownEncoding."""
        check_query(head.target, ())
        content_type, name = head.content_type or b"", self._pipeline.input
        kind, takes = _kind(content_type), self._pipeline.takes
        body = decompress(body, head.encoding, self._pipeline.options.max_body_bytes)
        fields = split_form(kind, content_type, body)
        if fields is not None:
            chosen = [field for field in fields if field[0] == name] or fields * (kind == _FORM)
            if len(chosen) != 1:
                raise BadInput(f"the form has {len(fields)} fields, one '{name}' is needed")
            body = chosen[0][1]
        if not len(body):
            raise BadInput(f"the body is empty; '{name}' is needed")
        data = bytes(body)
        if takes == "json":
            check_json_size(data, NOT_JSON)
        if takes != "text" or kind != b"application/json":
            return Sent(data)
        value = parse_document(data, NOT_JSON)
        found = value.get(name) if isinstance(value, dict) else value
        if not isinstance(found, str):
            raise BadInput(f"'{name}' must be a JSON string, or an object with it")
        return Sent(found)


def _reply(call: Call, answer: bytes | Exception, is_json: bool) -> None:
    call.cancel = None
    if isinstance(answer, Exception):
        reply_exception(call, answer)
    else:
        reply_with(call, lambda: answer, JSON if is_json else _BYTES)
