"""Make unary gRPC calls on an HTTP/2 connection of the load generator, one at a time.

We offer no dynamic table, so header compression is stateless and decoded header blocks can be
cached. RFC 9113 (HTTP/2), RFC 7541 (HPACK), "gRPC over HTTP2" of the gRPC project.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.engines.oip import CONTENTS, MESSAGES, DecodeError, Message
from deploykit.loadtest.wire import (
    MOST_BYTES,
    MOST_HEAD,
    NO_ANSWER,
    TOO_LONG,
    WRONG,
    AnswerCheck,
    NotHttpError,
    Output,
    Outputs,
    Tensor,
    Wire,
    WrongAnswerError,
    as_bytes,
    one_line,
    raw_bytes,
)

hpack = require("hpack")

SERVICE = "/inference.GRPCInferenceService/"
# gRPC code -> HTTP status; others are a 500
_STATUSES = {4: 504, 5: 404, 7: 403, 8: 429, 14: 503, 16: 401}
_STATUSES |= dict.fromkeys((3, 9, 11, 12), 400)
_DATA, _HEADERS = 0, 1
_RST, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = range(3, 10)
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 1, 1, 4, 8, 32
_WINDOW_BYTES, _FRAME_BYTES = 65535, 16384  # defaults before the server's settings
_MOST_FRAME_BYTES = (1 << 24) - 1
_MOST = (1 << 31) - 1  # largest window
_MOST_BLOCKS = 1024  # cached header blocks
_REFUSED_STREAM = 7


def _frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    size = len(payload)
    return struct.pack(">BHBBI", size >> 16, size & 0xFFFF, kind, flags, stream) + payload


_GREETING = b"".join(
    (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        # no table, no pushes, the largest windows and frames
        _frame(4, 0, 0, struct.pack(">HIHIHIHI", 1, 0, 2, 0, 4, _MOST, 5, _MOST_FRAME_BYTES)),
        _frame(8, 0, 0, struct.pack(">I", _MOST - _WINDOW_BYTES)),
    )
)


def header_block(method: str, more: Mapping[str, str], token: str | None = None) -> bytes:
    """Return the uncompressed header block of a call; `more`: the scheme and the authority."""
    fields = {
        ":method": "POST",
        ":path": SERVICE + method,
        **more,
        "content-type": "application/grpc",
        "te": "trailers",
        **({} if token is None else {"authorization": f"Bearer {token}"}),
    }
    # never indexed, so that no table is used
    never_indexed = [(name, value, True) for name, value in fields.items()]
    block: bytes = hpack.Encoder().encode(never_indexed, huffman=False)
    return block


def call_of(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


class Grpc(Wire):
    """An HTTP/2 connection. `block`: the header block of each call."""

    greeting = _GREETING

    def __init__(self, calls: Sequence[bytes], check: AnswerCheck | None, block: bytes) -> None:
        super().__init__(calls, check)
        self._block = block
        self._stream = -1
        self._window, self._first_window, self._stream_window = (_WINDOW_BYTES,) * 3
        self._frame_bytes = _FRAME_BYTES
        self._left: memoryview = memoryview(b"")  # unsent part of the call
        self._headers, self._data, self._fields = bytearray(), bytearray(), dict[str, str]()
        self._ends = False  # the server has ended the call
        self._answered = False  # what follows, such as a reset, changes nothing
        self._taken = 0  # bytes the server used of the connection's window

    def request(self, number: int) -> bytes:
        """Return the bytes of that call that fit into the server's windows."""
        self._request = number
        self._stream += 2
        self._stream_window = self._first_window
        self._left = memoryview(self._requests[number])
        self._fields, self._data = {}, bytearray()
        self._ends = self._answered = self.unread = False
        return _frame(_HEADERS, _END_HEADERS, self._stream, self._block) + self._release()

    def _release(self) -> bytes:
        frames = []
        while self._left and (room := min(self._window, self._stream_window)) > 0:
            part = self._left[: min(room, self._frame_bytes)]
            self._left = self._left[len(part) :]
            self._window -= len(part)
            self._stream_window -= len(part)
            frames.append(_frame(_DATA, 0 if self._left else _END_STREAM, self._stream, part))
        return b"".join(frames)

    def feed(self, data: bytes) -> int | None:
        self.buffer += data
        done, at = None, 0
        while len(self.buffer) >= at + 9:
            high, low, kind, flags, stream = struct.unpack_from(">BHBBI", self.buffer, at)
            end = at + 9 + (high << 16 | low)
            if kind > _CONTINUATION and at == 0 and self.buffer.startswith(b"HTTP/1"):
                raise NotHttpError("is HTTP/1.1")
            if len(self.buffer) < end:
                break
            payload = bytes(self.buffer[at + 9 : end])
            at = end
            try:
                status = self._on_frame(kind, flags, stream & _MOST, payload)
            except (struct.error, IndexError, hpack.HPACKError) as exc:
                raise NotHttpError("has a damaged HTTP/2 frame") from exc
            done = status if status is not None else done
        del self.buffer[:at]
        return done

    def _on_frame(  # noqa: C901 - a branch for each kind of frame
        self, kind: int, flags: int, stream: int, payload: bytes
    ) -> int | None:
        if kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == 4:
                    self._stream_window += value - self._first_window
                    self._first_window = value
                elif name == 5:
                    self._frame_bytes = min(max(value, _FRAME_BYTES), _MOST_FRAME_BYTES)
            self.control += _frame(_SETTINGS, _ACK, 0) + self._release()
        elif kind == _PING and not flags & _ACK:
            self.control += _frame(_PING, _ACK, 0, payload)
        elif kind == _WINDOW:
            (more,) = struct.unpack(">I", payload)
            if stream == 0:
                self._window += more
            elif stream == self._stream:
                self._stream_window += more
            self.control += self._release()
        elif kind == _GOAWAY:
            self.keep = False
            if struct.unpack_from(">I", payload)[0] < self._stream:
                self.unread = True
                return self._fail(503, "the server is closing its connections")
        elif kind == _RST and stream == self._stream and not self._answered:
            code = struct.unpack(">I", payload)[0]
            self.unread = code == _REFUSED_STREAM
            refused = 503 if self.unread else NO_ANSWER
            return self._fail(refused, f"the server reset the call: HTTP/2 code {code}")
        elif kind in (_DATA, _HEADERS, _CONTINUATION):
            return self._on_part(kind, flags, stream, payload)
        return None

    def _on_part(self, kind: int, flags: int, stream: int, payload: bytes) -> int | None:
        if kind == _DATA:
            self._taken += len(payload)
            if self._taken > _MOST // 2:
                self.control += _frame(_WINDOW, 0, 0, struct.pack(">I", self._taken))
                self._taken = 0
        padded = flags & _PADDED and kind != _CONTINUATION
        start = (1 if padded else 0) + (5 if kind == _HEADERS and flags & _PRIORITY else 0)
        payload = payload[start : len(payload) - (payload[0] if padded else 0)]
        if kind == _DATA:
            if stream == self._stream:
                self._data += payload
        else:
            self._headers += payload
        if len(self._data) > MOST_BYTES or len(self._headers) > MOST_HEAD:
            raise NotHttpError(TOO_LONG)
        if flags & _END_HEADERS and kind != _DATA:
            block, self._headers = bytes(self._headers), bytearray()
            if stream == self._stream:
                self._fields |= _decode(block)
        if stream != self._stream:
            return None
        if kind != _CONTINUATION and flags & _END_STREAM:
            self._ends = True
        whole = kind == _DATA or flags & _END_HEADERS
        return self._complete() if self._ends and whole else None

    def _complete(self) -> int:
        """Return the status of a complete answer, which its trailers decide."""
        self._answered = True
        code = self._fields.get("grpc-status", "")
        if code != "0":
            if not re.fullmatch("[0-9]{1,3}", code):
                http = self._fields.get(":status", "none")
                return self._fail(WRONG, f"an answer without a gRPC status (HTTP status {http})")
            message = unquote(self._fields.get("grpc-message", ""))
            return self._fail(_STATUSES.get(int(code), 500), one_line(f"gRPC {code}: {message}"))
        data = self._data
        if len(data) < 5 or data[0] or len(data) != 5 + int.from_bytes(data[1:5], "big"):
            return self._fail(WRONG, "OK without one message that is not compressed")
        self.body = bytes(memoryview(data)[5:])
        self.keep = self.keep and not self._left
        self.error = None
        if self._check is not None:
            self.error = self._check.problem(self.body, self._request, read_message)
        return 200 if self.error is None else WRONG

    def _fail(self, status: int, error: str) -> int:
        self.error = error
        if self._left:  # a call that is not fully sent makes the connection unusable
            self.keep = False
        return status


@lru_cache(_MOST_BLOCKS)
def _decode(block: bytes) -> dict[str, str]:
    decoder = hpack.Decoder()
    decoder.max_allowed_table_size = 0
    decoder.header_table_size = 0
    return {str(name): str(value) for name, value in decoder.decode(block)}


def infer_request(model: str, tensors: Sequence[Tensor], *, raw: bool = True) -> bytes:
    """Return the framed call, its values `raw` bytes or typed. Raises BadInput where none fit."""
    request = MESSAGES["ModelInferRequest"](model_name=model)
    for name, datatype, array in tensors:
        item = request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        if raw:
            request.raw_input_contents.append(raw_bytes(datatype, array))
        elif datatype in CONTENTS:
            values = map(as_bytes, array.flat) if datatype == "BYTES" else array.ravel().tolist()
            getattr(item.contents, CONTENTS[datatype]).extend(values)
        else:
            raise BadInput(f"{name}: a {datatype} has no typed contents in the protocol")
    return call_of(request.SerializeToString())


def read_message(message: bytes) -> tuple[Outputs, int]:
    """Return a response's outputs and its size before the tensors. Raises WrongAnswerError."""
    try:
        response = MESSAGES["ModelInferResponse"].FromString(message)
    except DecodeError:
        raise WrongAnswerError("an answer that is not a ModelInferResponse") from None
    raw = list(response.raw_output_contents)
    if raw and len(raw) != len(response.outputs):
        count = len(response.outputs)
        raise WrongAnswerError(f"an answer with {count} outputs and {len(raw)} tensors")
    outputs = [
        Output(
            each.name,
            each.datatype,
            list(each.shape),
            raw[number] if raw else [*getattr(each.contents, CONTENTS.get(each.datatype, ""), ())],
        )
        for number, each in enumerate(response.outputs)
    ]
    if not raw:  # the values are between the heads of the outputs
        return outputs, len(message)
    response.ClearField("raw_output_contents")
    head = response.SerializeToString()
    return outputs, len(head) if message.startswith(head) else len(message)


def question(method: str, model: str) -> bytes:
    request = MESSAGES[f"{method}Request"](**({"name": model} if model else {}))
    return call_of(request.SerializeToString())


def answer_value(method: str, message: bytes) -> Any:
    """Return the answer to a question as JSON value of the HTTP API; None if it is damaged."""
    try:
        values = to_dict(MESSAGES[f"{method}Response"].FromString(message))
    except DecodeError:
        return None
    member = {"RepositoryIndex": "models", "ModelConfig": "config"}.get(method, "")
    return values.get(member, values)


def to_dict(message: Message) -> dict[str, Any]:
    """Return a message as a JSON object, including fields with default values."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Message):
            if message.HasField(field.name):
                found[field.name] = to_dict(value)
        elif hasattr(value, "items"):
            found[field.name] = {key: to_dict(each) for key, each in value.items()}
        elif field.enum_type and isinstance(value, int):
            known = field.enum_type.values_by_number.get(value)
            found[field.name] = known.name if known else value
        elif isinstance(value, (str, int)):
            found[field.name] = value
        else:
            found[field.name] = [to_dict(v) if isinstance(v, Message) else v for v in value]
    return found
