"""POST /v2/models/NAME/predict of a pipeline: the body becomes its input, its answer the reply."""

from __future__ import annotations

from functools import partial

from deploykit.core.errors import BadInput, TooLarge
from deploykit.core.json_value import ONE_JSON
from deploykit.core.tensors import Bytes
from deploykit.serving.http.multipart import find_boundary, split_parts
from deploykit.serving.models.pipelines import MOST_JSON_BYTES, ServedPipeline, json_too_large
from deploykit.serving.oip.json import parse_document
from deploykit.serving.transport import compression
from deploykit.serving.transport.call import JSON, Call, Head, reply_exception

MOST_FIELDS = 64  # of a form
_BYTES = b"Content-Type: application/octet-stream\r\n"


class PipelineRoute:
    """The route of one pipeline."""

    def __init__(self, pipeline: ServedPipeline, max_body_bytes: int) -> None:
        self._pipeline = pipeline
        self._max_body_bytes = max_body_bytes

    def __call__(self, call: Call) -> None:
        """Raises Overloaded during the shutdown."""
        head, body = call.head, call.body
        call.body = b""
        trace = None if head.trace is None else head.trace.decode("latin-1")
        read = partial(self._read, head, body)
        call.cancel = self._pipeline.start(read, partial(_reply, call), trace, call.reserve)

    def _read(self, head: Head, body: Bytes) -> bytes | str:
        """What the input is made of, on a thread. Raises BadInput, TooLarge, UnknownEncoding."""
        kind, name = (head.content_type or b"").lower(), self._pipeline.input
        takes = self._pipeline.takes
        json_text = takes == "text" and kind.startswith(b"application/json")
        most = MOST_JSON_BYTES if json_text or takes == "json" else self._max_body_bytes
        if head.encoding is not None:
            body = self._decompress(body, head.encoding, most)
        if kind.startswith(b"multipart/form-data"):
            fields = split_parts(body, find_boundary(head.content_type or b""), MOST_FIELDS)
            chosen = [each for each in fields if each.name == name] or fields
            if len(chosen) != 1:
                raise BadInput(f"the form has {len(fields)} fields, one '{name}' is needed")
            body = chosen[0].content
        if not len(body):
            raise BadInput(f"the body is empty; '{name}' is needed")
        if len(body) > most:
            raise json_too_large()
        data = bytes(body)
        return _text(data, name) if json_text else data

    def _decompress(self, body: Bytes, encoding: bytes, most: int) -> Bytes:
        """`body` decompressed; JSON, and a form that holds it, up to the limit for JSON."""
        try:
            return compression.decompress(body, encoding, min(most, self._max_body_bytes))
        except TooLarge:
            if most < self._max_body_bytes:
                raise json_too_large() from None
            raise


def _text(data: bytes, name: str) -> str:
    """A text from JSON: an object that holds it, or the string alone."""
    with ONE_JSON:
        value = parse_document(data)
    found = value.get(name) if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise BadInput(f"'{name}' must be a JSON string, or an object with it")
    return found


def _reply(call: Call, answer: bytes | Exception, is_json: bool) -> None:
    call.cancel = None
    if isinstance(answer, Exception):
        reply_exception(call, answer)
        return
    try:
        call.reply(200, JSON if is_json else _BYTES, [answer])
    except Exception as exc:  # noqa: BLE001 - every error is a reply
        reply_exception(call, exc)
