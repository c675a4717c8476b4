"""HTTP/2 for gRPC on one connection: frames in, calls to their methods, with limits on everything.

In: bytes. Out: `Call`s for the table of methods.
`benchmarks/grpc_stacks.py` holds the measurement that chose this over grpcio's servers.
"""

from __future__ import annotations

import logging

from hpack import HPACKError

from deploykit.serving.http2.flow import ENHANCE_YOUR_CALM, FRAME_BYTES, Flow, Shared
from deploykit.serving.http2.headers import Heads
from deploykit.serving.http2.stream import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    HEADERS,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Call,
    frame,
)

log = logging.getLogger(__name__)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LARGEST_WINDOW = (1 << 31) - 1
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 1, 3, 5, 6
INTERNAL_ERROR, REFUSED_STREAM, COMPRESSION_ERROR = 2, 7, 9
_PADDED, _PRIORITY, _ACK = 8, 32, 1


class Fault(Exception):  # noqa: N818 - HTTP/2's "connection error"
    """The connection cannot go on; `code` is HTTP/2's."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Connection(Flow):
    """One client."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._heads = Heads(shared.methods, shared.allows, shared.limits)
        self._left = b""  # a frame's beginning
        self._block: list[bytes] = []  # headers that go on in the next frame
        self._block_of = (0, 0)
        self._greeted = False

    # -- frames in -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.deaf:
            return
        if self._left:
            data = self._left + data
        try:
            self._left = data[self._frames(data) :]
        except Fault as exc:
            self.end(exc.code, str(exc))
        except HPACKError:
            self.end(COMPRESSION_ERROR, "the headers are not valid HPACK, or too large")
        except Exception:
            log.exception("a gRPC connection failed")
            self.end(INTERNAL_ERROR, "an error inside the server; its log says more")

    def _frames(self, data: bytes) -> int:
        """Take every whole frame; returns where the rest begins."""
        at, size = 0, len(data)
        if not self._greeted:
            if not data.startswith(PREFACE[:size]):
                raise Fault(PROTOCOL_ERROR, "this port speaks gRPC only")
            if size < len(PREFACE):
                return 0
            self._greeted = True
            at = len(PREFACE)
        while size - at >= 9 and not self.deaf:
            high, low, kind, flags, number = FRAME.unpack_from(data, at)
            length = high << 16 | low
            if length > FRAME_BYTES:
                raise Fault(FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            end = at + 9 + length
            if end > size:
                break
            if self.amid_headers and kind != CONTINUATION:
                raise Fault(PROTOCOL_ERROR, "a header block was not ended")
            if kind == DATA:
                self._data(data, at + 9, end, flags, number)
            elif kind == HEADERS:
                self._headers(data[at + 9 : end], flags, number)
            else:
                self._other(kind, flags, number, data[at + 9 : end])
            at = end
        return size if self.deaf else at

    def _data(self, data: bytes, at: int, end: int, flags: int, number: int) -> None:
        length = end - at
        call = self.calls.get(number)
        if call is None and (number > self.last or not number & 1):
            raise Fault(PROTOCOL_ERROR, "data on a stream that was never opened")
        self.received(length)
        if flags & _PADDED:
            if not length or data[at] >= length:
                raise Fault(PROTOCOL_ERROR, "more padding than frame")
            end -= data[at]
            at += 1
        if call is None:
            return  # it was answered already
        call.room -= length
        if call.room < 0:
            raise Fault(FLOW_CONTROL_ERROR, "more data than the window allows")
        ended = bool(flags & END_STREAM)
        if at == end and not ended:
            self._nuisance()
        if call.ended:
            raise Fault(STREAM_CLOSED, "data after the end of the call")
        call.received(data[at:end], ended)

    def _headers(self, payload: bytes, flags: int, number: int) -> None:
        start, end = 0, len(payload)
        if flags & _PADDED:
            start = 1
            end -= payload[0] if payload else 0
        if flags & _PRIORITY:
            start += 5
        if start > end:
            raise Fault(PROTOCOL_ERROR, "more padding than frame")
        block = payload[start:end]
        if not flags & END_HEADERS:
            self._block, self._block_of = [block], (flags, number)
            self.amid_headers = True
            self.since_s = self.shared.now_s
        else:
            self._open(block, flags, number)

    def _continued(self, payload: bytes, flags: int, number: int) -> None:
        block, (first, expected) = self._block, self._block_of
        if not self.amid_headers or number != expected:
            raise Fault(PROTOCOL_ERROR, "headers go on that had not begun")
        block.append(payload)
        if not payload:
            self._nuisance()
        if sum(map(len, block)) > self.shared.limits.header_bytes:
            raise Fault(ENHANCE_YOUR_CALM, "the headers are too large")
        if flags & END_HEADERS:
            self.amid_headers = False
            self._open(b"".join(block), first, number)

    def _open(self, block: bytes, flags: int, number: int) -> None:
        head = self._heads.read(block)
        ended = bool(flags & END_STREAM)
        if number <= self.last:
            call = self.calls.get(number)
            if call is not None and ended and not call.ended:
                call.received(b"", True)  # trailers, which gRPC's clients do not send
            return
        if not number & 1:
            raise Fault(PROTOCOL_ERROR, "a stream number that is not the client's")
        self.last = number
        if len(self.calls) >= self.shared.limits.calls:
            self._nuisance()
            self.write(frame(RST_STREAM, 0, number, REFUSED_STREAM.to_bytes(4, "big")))
            return
        call = self.calls[number] = Call(self, number, head, self.first_window)
        if head.refusal is not None:
            call.ended = ended
            call.fail(*head.refusal)
        elif ended:
            call.received(b"", True)

    def _other(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE:
            self._opened(number, payload)
        elif kind == CONTINUATION:
            self._continued(payload, flags, number)
        elif kind == RST_STREAM:
            self._nuisance()
            if len(payload) != 4 or not number or number > self.last:
                raise Fault(PROTOCOL_ERROR, "a reset of no stream")
            call = self.calls.get(number)
            if call is not None:
                call.gone()
        elif kind == SETTINGS:
            self._nuisance()
            self._settings(flags, number, payload)
        elif kind == PING:
            self._nuisance()
            if len(payload) != 8 or number:
                raise Fault(FRAME_SIZE_ERROR, "a ping has 8 bytes and no stream")
            if not flags & _ACK:
                self.write(frame(PING, _ACK, 0, payload))
        elif kind == PUSH_PROMISE:
            raise Fault(PROTOCOL_ERROR, "a client does not push")
        elif kind == PRIORITY or kind > CONTINUATION:
            self._nuisance()  # RFC 9113: to be ignored

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) % 6 or (flags & _ACK and payload):
            raise Fault(FRAME_SIZE_ERROR, "settings of a wrong form")
        self.settled = True
        if flags & _ACK:
            return
        for at in range(0, len(payload), 6):
            name = int.from_bytes(payload[at : at + 2], "big")
            value = int.from_bytes(payload[at + 2 : at + 6], "big")
            if name == 4:
                if value > LARGEST_WINDOW:
                    raise Fault(FLOW_CONTROL_ERROR, "a window above 2^31-1")
                for call in self.calls.values():
                    call.window += value - self.first_window
                self.first_window = value
            elif name == 5:
                if not 1 << 14 <= value < 1 << 24:
                    raise Fault(PROTOCOL_ERROR, "a frame size out of range")
                self.frame_bytes = min(value, 1 << 20)
        self.write(frame(SETTINGS, _ACK, 0))
        self.push()

    def _opened(self, number: int, payload: bytes) -> None:
        """The client takes more."""
        more = int.from_bytes(payload, "big") & LARGEST_WINDOW
        if len(payload) != 4 or not more or number > self.last:
            raise Fault(PROTOCOL_ERROR, "a window update of a wrong form")
        if number == 0:
            self.window += more
            if self.window > LARGEST_WINDOW:
                raise Fault(FLOW_CONTROL_ERROR, "a window above 2^31-1")
            self.push()
            return
        call = self.calls.get(number)
        if call is not None:
            call.window += more
            if call.window > LARGEST_WINDOW:
                raise Fault(FLOW_CONTROL_ERROR, "a window above 2^31-1")
            call.push()

    def _nuisance(self) -> None:
        self.nuisances += 1
        if self.nuisances > self.shared.limits.nuisances:
            raise Fault(ENHANCE_YOUR_CALM, "too many frames that carry nothing")
