"""Speak gRPC on one HTTP/2 connection of the load generator: unary calls, one at a time.

Header compression keeps no state, as no table is offered, so that a header block that was decoded
once is known. RFC 9113 (HTTP/2), RFC 7541 (HPACK), "gRPC over HTTP2" of the gRPC project.
"""

from __future__ import annotations

import re
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import unquote

from deploykit.core.errors import BadInput, NotFound, os_reason
from deploykit.core.extras import require
from deploykit.loadtest.check import AnswerCheck, message_fields, one_line, varints
from deploykit.loadtest.http import MOST_BYTES, MOST_HEAD, TOO_LONG, NotHttpError
from deploykit.loadtest.questions import TIMEOUT_S, Stage, stages_of
from deploykit.loadtest.result import NO_ANSWER, WRONG

hpack = require("hpack")


SERVICE = "/inference.GRPCInferenceService/"
OK, UNIMPLEMENTED = 0, 12
CALLER = {3, 5, 7, 9, 11, 12, 16}  # codes that blame the request
_STATUSES: Mapping[int, int] = {4: 504, 8: 429, 14: 503}  # as HTTP calls them
_DATA, _HEADERS, _RST, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = (
    *range(2),
    *range(3, 10),
)
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 1, 1, 4, 8, 32
_WINDOW_BYTES, _FRAME_BYTES = 65535, 16384  # before the server's settings
_MOST_FRAME_BYTES = (1 << 24) - 1
_MOST = (1 << 31) - 1  # of a window
_MOST_BLOCKS = 1024  # that are remembered
_REFUSED_STREAM = 7


def _frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    size = len(payload)
    return struct.pack(">BHBBI", size >> 16, size & 0xFFFF, kind, flags, stream) + payload


_GREETING = b"".join(
    (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        # no table, no pushes, windows and frames as large as they may be
        _frame(4, 0, 0, struct.pack(">HIHIHIHI", 1, 0, 2, 0, 4, _MOST, 5, _MOST_FRAME_BYTES)),
        _frame(8, 0, 0, struct.pack(">I", _MOST - _WINDOW_BYTES)),
    )
)


def header_block(host: str, method: str) -> bytes:
    """The header block of a call to `method` of the service, without compression."""
    named = ((4, SERVICE + method), (1, host), (31, "application/grpc"))
    block = b"\x83\x86"  # POST, http
    for index, value in named:
        block += (bytes((index,)) if index < 15 else bytes((15, index - 15))) + _string(value)
    return block + b"\x00" + _string("te") + _string("trailers")


def _string(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes((len(data),)) + data
    return b"\x7f" + encode_varint(len(data) - 127) + data


def encode_varint(value: int) -> bytes:
    """As protobuf and HPACK write integers; a negative one in 64 bits."""
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def field(number: int, data: bytes) -> bytes:
    """A field of a protobuf message that holds bytes."""
    return encode_varint(number << 3 | 2) + encode_varint(len(data)) + data


def call_of(message: bytes) -> bytes:
    """A message as gRPC frames it."""
    return struct.pack(">BI", 0, len(message)) + message


class Grpc:
    """One connection. After an answer: `error` says what is wrong with it, `keep` if it goes on."""

    greeting = _GREETING
    _blocks: ClassVar[dict[bytes, dict[str, str]]] = {}

    def __init__(self, block: bytes, calls: Sequence[bytes], check: AnswerCheck | None) -> None:
        self._block, self._calls, self._check = block, calls, check
        self.control = b""  # to send besides requests
        self.error: str | None = None
        self.keep = True
        self.code: int | None = None  # of the last answer
        self.message = b""
        self._stream, self._request, self._prefix = -1, 0, 0
        self._window, self._first_window, self._stream_window = (_WINDOW_BYTES,) * 3
        self._frame_bytes = _FRAME_BYTES
        self._left: memoryview = memoryview(b"")  # of the call, behind what windows let through
        self.buffer = bytearray()
        self._headers, self._body, self._fields = bytearray(), bytearray(), dict[str, str]()
        self._ends = False  # the server's side of the call
        self._taken = 0  # bytes of the connection's window that the server used

    def request(self, number: int) -> bytes:
        """The bytes of that call, as far as the server's windows let them through."""
        self._request = number
        self._stream += 2
        self._stream_window = self._first_window
        self._left = memoryview(self._calls[number])
        self._fields, self._body, self._ends = {}, bytearray(), False
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

    def end(self) -> int | None:
        """The end of the connection completes no answer."""
        return None

    def feed(self, data: bytes) -> int | None:
        """The status of the answer that `data` completes, in HTTP's numbers; None: more must come.

        Raises NotHttpError.
        """
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

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> int | None:
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
                return self._fail(503, "the server is closing its connections")
        elif kind == _RST and stream == self._stream:
            code = struct.unpack(">I", payload)[0]
            refused = 503 if code == _REFUSED_STREAM else NO_ANSWER
            return self._fail(refused, f"the server reset the call: HTTP/2 code {code}")
        elif kind in (_DATA, _HEADERS, _CONTINUATION):
            return self._on_part(kind, flags, stream, payload)
        return None

    def _on_part(self, kind: int, flags: int, stream: int, payload: bytes) -> int | None:
        """A part of an answer. What belongs to an earlier call is left out."""
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
                self._body += payload
        else:
            self._headers += payload
        if len(self._body) > MOST_BYTES or len(self._headers) > MOST_HEAD:
            raise NotHttpError(TOO_LONG)
        if flags & _END_HEADERS and kind != _DATA:
            block, self._headers = bytes(self._headers), bytearray()
            if stream == self._stream:
                self._fields |= self._decode(block)
        if stream != self._stream:
            return None
        if kind != _CONTINUATION and flags & _END_STREAM:
            self._ends = True
        whole = kind == _DATA or flags & _END_HEADERS
        return self._complete() if self._ends and whole else None

    @classmethod
    def _decode(cls, block: bytes) -> dict[str, str]:
        found = cls._blocks.get(block)
        if found is None:
            decoder = hpack.Decoder()
            decoder.max_allowed_table_size = 0
            decoder.header_table_size = 0
            found = {str(name): str(value) for name, value in decoder.decode(block)}
            if len(cls._blocks) >= _MOST_BLOCKS:
                cls._blocks.clear()
            cls._blocks[block] = found
        return found

    def _complete(self) -> int:
        """The answer is whole: the status in its trailers decides."""
        code = self._fields.get("grpc-status", "")
        if not re.fullmatch("[0-9]{1,3}", code):
            status = self._fields.get(":status", "none")
            return self._fail(WRONG, f"an answer without a gRPC status (HTTP status {status})")
        self.code = int(code)
        if self.code != OK:
            message = unquote(self._fields.get("grpc-message", ""))
            return self._fail(_STATUSES.get(self.code, 500), one_line(f"gRPC {code}: {message}"))
        if (
            len(self._body) < 5
            or self._body[0]
            or len(self._body) != 5 + int.from_bytes(self._body[1:5], "big")
        ):
            return self._fail(WRONG, "OK without one message that is not compressed")
        self.message = bytes(self._body[5:])
        self.keep = self.keep and not self._left
        self.error = None
        if self._check is not None:
            self.error, self._prefix = self._check.message_problem(
                self.message, self._prefix, self._request
            )
        return 200 if self.error is None else WRONG

    def _fail(self, status: int, error: str) -> int:
        self.error = error
        if self._left:  # the rest of the call is never sent: the connection cannot be used again
            self.keep = False
        return status


def infer_request(model: str, tensors: Iterable[tuple[str, str, Sequence[int], bytes]]) -> bytes:
    """A `ModelInferRequest`; `tensors`: name, datatype, shape, values."""
    inputs, raw = [], []
    for name, datatype, shape, values in tensors:
        sizes = b"".join(map(encode_varint, shape))
        inputs.append(field(1, name.encode()) + field(2, datatype.encode()) + field(3, sizes))
        raw.append(field(7, values))
    return field(1, model.encode()) + b"".join([*(field(5, each) for each in inputs), *raw])


# Find a model on a server over gRPC: one call on a connection of its own for each question.

_NOT_FOUND, _OK = 5, 0
_DURATIONS = {"queue": 3, "compute_input": 4, "compute_infer": 5, "compute_output": 6}
_KINDS = ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL")


class GrpcQuestions:
    """What a server says over gRPC."""

    def __init__(self, url: str, host: str, address: str, port: int) -> None:
        self.url, self.host, self.address, self.port = url, host, address, port

    def model_names(self) -> list[str] | None:
        code, message, error = self.call("RepositoryIndex", b"")
        if code != _OK:
            if "name" not in self.about():
                raise self._not_oip(error)
            return None
        items = [_values(item) for number, item, _ in message_fields(message) if number == 1]
        ready = [item for item in items if item.get(3, b"READY") in (b"READY", b"")]
        return list(dict.fromkeys(_string_grpc_target(item.get(1)) for item in ready))

    def metadata(self, model: str) -> dict[str, Any]:
        code, message, error = self.call("ModelMetadata", field(1, model.encode()))
        if code == _NOT_FOUND:
            raise NotFound(f"{self.url}: no model '{model}': {error}")
        if code != _OK:
            raise self._not_oip(error)
        found = list(message_fields(message))
        tensors = {
            name: [_tensor(item) for number, item, _ in found if number == key]
            for name, key in (("inputs", 4), ("outputs", 5))
        }
        return {"platform": _string_grpc_target(_values(message).get(3)), **tensors}

    def about(self) -> dict[str, Any]:
        code, message, _ = self.call("ServerMetadata", b"")
        values = _values(message) if code == _OK else {}
        return (
            {
                "name": _string_grpc_target(values.get(1)),
                "version": _string_grpc_target(values.get(2)),
            }
            if values
            else {}
        )

    def config(self, model: str) -> dict[str, Any]:
        code, message, _ = self.call("ModelConfig", field(1, model.encode()))
        config = _values(message).get(1) if code == _OK else None
        if not isinstance(config, bytes):
            return {}
        values = _values(config)
        entries = [_values(item) for number, item, _ in message_fields(config) if number == 14]
        batching = values.get(11)
        found: dict[str, Any] = {
            "backend": _string_grpc_target(values.get(17)),
            "max_batch_size": values.get(4, 0),
            "instance_group": [
                {
                    "name": _string_grpc_target(each.get(1)),
                    "count": each.get(2, 0),
                    "kind": _kind(each.get(4)),
                }
                for each in (
                    _values(item) for number, item, _ in message_fields(config) if number == 7
                )
            ],
            "parameters": {
                _string_grpc_target(each.get(1)): {
                    "string_value": _string_grpc_target(_values(each.get(2, b"")).get(1))
                }
                for each in entries
            },
        }
        if isinstance(batching, bytes):
            parts = [part for number, part, _ in message_fields(batching) if number == 1]
            found["dynamic_batching"] = {
                "preferred_batch_size": [size for part in parts for size in varints(part)],
                "max_queue_delay_microseconds": _values(batching).get(2, 0),
            }
        return found

    def stages(self, model: str) -> dict[str, Stage]:
        code, message, _ = self.call("ModelStatistics", field(1, model.encode()))
        stats = _values(message).get(1) if code == _OK else None
        inferences = _values(stats).get(6) if isinstance(stats, bytes) else None
        if not isinstance(stats, bytes) or not isinstance(inferences, bytes):
            return {}
        values = _values(inferences)
        entries = [_values(item) for number, item, _ in message_fields(stats) if number == 9]
        responses = {
            _string_grpc_target(each.get(1)): {
                "compute_infer": _duration(_values(each.get(2, b"")).get(1))
            }
            for each in entries
        }
        durations = {name: _duration(values.get(at, b"")) for name, at in _DURATIONS.items()}
        return stages_of(durations, responses)

    def call(self, method: str, message: bytes) -> tuple[int | None, bytes, str]:
        """GRPC's status, the answer, and what is wrong. Raises BadInput where there is none."""
        try:
            return self.exchange(method, call_of(message))
        except TimeoutError as exc:
            raise BadInput(f"{self.url}: {method}: no answer within {TIMEOUT_S:g} s") from exc
        except OSError as exc:
            raise self._not_oip(f"{method}: {os_reason(exc)}") from exc
        except NotHttpError as exc:
            raise self._not_oip(f"{method}: it {exc}") from exc

    def exchange(self, method: str, call: bytes) -> tuple[int | None, bytes, str]:
        """The same. Raises OSError, TimeoutError in time, and NotHttpError."""
        wire = Grpc(header_block(self.host, method), [call], None)
        until_s = time.monotonic() + TIMEOUT_S
        with socket.create_connection((self.address, self.port), TIMEOUT_S) as connection:
            connection.sendall(wire.greeting + wire.request(0))
            while True:
                data = connection.recv(1 << 16)
                if not data:
                    raise NotHttpError("closed the connection")
                status = wire.feed(data)
                control, wire.control = wire.control, b""
                if control:
                    connection.sendall(control)
                if status is not None:
                    return wire.code, wire.message, wire.error or ""
                if time.monotonic() > until_s:
                    raise TimeoutError

    def _not_oip(self, why: str) -> BadInput:
        return BadInput(
            f"{self.url}: is not an Open Inference Protocol server over gRPC ({why})",
            hint="grpc:// takes the port of its gRPC interface, 8001 by default",
        )


def probe_call(server: GrpcQuestions, model: str, call: bytes) -> None:
    """Send one call before the run. Raises BadInput when the server blames the request."""
    try:
        code, _, error = server.exchange("ModelInfer", call)
    except TimeoutError as exc:
        why = f"no answer to an inference within {TIMEOUT_S:g} s"
        raise BadInput(f"{server.url}: {model}: {why}") from exc
    except (OSError, NotHttpError):
        return  # the run counts it as a failure, with its message
    if code in CALLER:
        raise BadInput(f"{server.url}: {model}: answered {error}")


def _values(message: bytes) -> dict[int, Any]:
    """The last value of each field."""
    return {number: value for number, value, _ in message_fields(message)}


def _tensor(message: bytes) -> dict[str, Any]:
    values = _values(message)
    parts = [part for number, part, _ in message_fields(message) if number == 3]
    shape = [size for part in parts for size in varints(part)]
    return {
        "name": _string_grpc_target(values.get(1)),
        "datatype": _string_grpc_target(values.get(2)),
        "shape": shape,
    }


def _string_grpc_target(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _duration(message: object) -> dict[str, int]:
    values = _values(message) if isinstance(message, bytes) else {}
    return {"count": values.get(1, 0), "ns": values.get(2, 0)}


def _kind(number: object) -> str:
    known = isinstance(number, int) and number < len(_KINDS)
    return _KINDS[number] if known and isinstance(number, int) else str(number or _KINDS[0])
