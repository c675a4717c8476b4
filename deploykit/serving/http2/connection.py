"""One HTTP/2 connection: reads frames and passes their content to the streams.

`benchmarks/grpc_stacks.py` holds the measurement that chose this over grpcio's servers.
"""

from __future__ import annotations

import logging

from hpack import HPACKError

from deploykit.serving.http2.flow import FRAME_BYTES, Flow, Shared
from deploykit.serving.http2.frames import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_SIZE_ERROR,
    HEADERS,
    INTERNAL_ERROR,
    LARGEST_WINDOW,
    PADDED,
    PING,
    PRIORITIZED,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    ConnectionFault,
    frame,
)
from deploykit.serving.http2.headers import HeaderReader

log = logging.getLogger(__name__)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Connection(Flow):
    """One client."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._heads = HeaderReader(shared.parse, shared.limits.header_bytes)
        self._left = b""  # an incomplete frame
        self._block: list[bytes] = []  # an incomplete header block
        self._block_of = (0, 0)
        self._has_preface = False

    # -- frames in -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.closed_for_reading:
            return
        if self._left:
            data = self._left + data
        try:
            self._left = data[self._frames(data) :]
        except ConnectionFault as exc:
            self.end(exc.code, str(exc))
        except HPACKError:
            self.end(COMPRESSION_ERROR, "the headers are not valid HPACK, or too large")
        except Exception:
            log.exception("an HTTP/2 connection failed")
            self.end(INTERNAL_ERROR, "an error inside the server; its log says more")

    def _frames(self, data: bytes) -> int:
        """Process every complete frame; returns the index after them."""
        at, size = 0, len(data)
        if not self._has_preface:
            if not data.startswith(PREFACE[:size]):
                raise ConnectionFault(PROTOCOL_ERROR, "this port speaks HTTP/2 with gRPC only")
            if size < len(PREFACE):
                return 0
            self._has_preface = True
            at = len(PREFACE)
        while size - at >= 9 and not self.closed_for_reading:
            high, low, kind, flags, number = FRAME.unpack_from(data, at)
            length = high << 16 | low
            if length > FRAME_BYTES:
                raise ConnectionFault(FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            end = at + 9 + length
            if end > size:
                break
            if self.in_header_block and kind != CONTINUATION:
                raise ConnectionFault(PROTOCOL_ERROR, "a frame inside a header block")
            if kind == DATA:
                self._data(data, at + 9, end, flags, number)
            elif kind == HEADERS:
                self._headers(data[at + 9 : end], flags, number)
            else:
                self._other(kind, flags, number, data[at + 9 : end])
            at = end
        return size if self.closed_for_reading else at

    def _data(self, data: bytes, at: int, end: int, flags: int, number: int) -> None:
        length = end - at
        stream = self.streams.get(number)
        if stream is None and (number > self.last or not number & 1):
            raise ConnectionFault(PROTOCOL_ERROR, "DATA on an idle stream")
        self.received(length)
        if flags & PADDED:
            if not length or data[at] >= length:
                raise ConnectionFault(PROTOCOL_ERROR, "more padding than the frame has")
            end -= data[at]
            at += 1
        if stream is None:
            return  # the stream has ended
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise ConnectionFault(FLOW_CONTROL_ERROR, "more data than the window allows")
        ended = bool(flags & END_STREAM)
        if at == end and not ended:
            self._count_empty()
        if stream.ended:
            raise ConnectionFault(STREAM_CLOSED, "data after the end of the stream")
        stream.received(data[at:end], ended)

    def _headers(self, payload: bytes, flags: int, number: int) -> None:
        start, end = 0, len(payload)
        if flags & PADDED:
            start = 1
            end -= payload[0] if payload else 0
        if flags & PRIORITIZED:
            start += 5
        if start > end:
            raise ConnectionFault(PROTOCOL_ERROR, "more padding than the frame has")
        block = payload[start:end]
        if not flags & END_HEADERS:
            self._block, self._block_of = [block], (flags, number)
            self.in_header_block = True
            self.since_s = self.shared.now_s
        else:
            self._open(block, flags, number)

    def _continued(self, payload: bytes, flags: int, number: int) -> None:
        block, (first, expected) = self._block, self._block_of
        if not self.in_header_block or number != expected:
            raise ConnectionFault(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        block.append(payload)
        if not payload:
            self._count_empty()
        if sum(map(len, block)) > self.shared.limits.header_bytes:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "the headers are too large")
        if flags & END_HEADERS:
            self.in_header_block = False
            self._open(b"".join(block), first, number)

    def _open(self, block: bytes, flags: int, number: int) -> None:
        head = self._heads.read(block)
        ended = bool(flags & END_STREAM)
        if number <= self.last:
            stream = self.streams.get(number)
            if stream is not None and ended and not stream.ended:
                stream.received(b"", True)  # trailers
            return
        if not number & 1:
            raise ConnectionFault(PROTOCOL_ERROR, "a client's stream number must be odd")
        self.last = number
        if len(self.streams) >= self.shared.limits.streams:
            self._count_empty()
            self.write(frame(RST_STREAM, 0, number, REFUSED_STREAM.to_bytes(4, "big")))
            return
        stream = self.streams[number] = self.shared.open(self, number, head)
        stream.begin(ended=ended)

    def _other(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == CONTINUATION:
            self._continued(payload, flags, number)
        elif kind == RST_STREAM:
            self._count_empty()
            if len(payload) != 4 or not number or number > self.last:
                raise ConnectionFault(PROTOCOL_ERROR, "RST_STREAM for an idle stream")
            stream = self.streams.get(number)
            if stream is not None:
                stream.cancelled()
        elif kind == SETTINGS:
            self._count_empty()
            self._settings(flags, number, payload)
        elif kind == PING:
            self._count_empty()
            if len(payload) != 8 or number:
                raise ConnectionFault(FRAME_SIZE_ERROR, "PING must have 8 bytes and stream 0")
            if not flags & ACK:
                self.write(frame(PING, ACK, 0, payload))
        elif kind == PUSH_PROMISE:
            raise ConnectionFault(PROTOCOL_ERROR, "a client does not push")
        elif kind == PRIORITY or kind > CONTINUATION:
            self._count_empty()  # ignored, as RFC 9113 requires

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionFault(FRAME_SIZE_ERROR, "malformed SETTINGS")
        self.has_settings = True
        if flags & ACK:
            return
        for at in range(0, len(payload), 6):
            name = int.from_bytes(payload[at : at + 2], "big")
            value = int.from_bytes(payload[at + 2 : at + 6], "big")
            if name == 4:
                if value > LARGEST_WINDOW:
                    raise ConnectionFault(FLOW_CONTROL_ERROR, "a window above 2^31-1")
                for stream in self.streams.values():
                    stream.send_window += value - self.first_window
                self.first_window = value
            elif name == 5:
                if not 1 << 14 <= value < 1 << 24:
                    raise ConnectionFault(PROTOCOL_ERROR, "a frame size out of range")
                self.frame_bytes = min(value, 1 << 20)
        self.write(frame(SETTINGS, ACK, 0))
        self.push()

    def _window_update(self, number: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & LARGEST_WINDOW
        if len(payload) != 4 or not more or number > self.last:
            raise ConnectionFault(PROTOCOL_ERROR, "malformed WINDOW_UPDATE")
        if number == 0:
            self.send_window += more
            if self.send_window > LARGEST_WINDOW:
                raise ConnectionFault(FLOW_CONTROL_ERROR, "a window above 2^31-1")
            self.push()
            return
        stream = self.streams.get(number)
        if stream is not None:
            stream.send_window += more
            if stream.send_window > LARGEST_WINDOW:
                raise ConnectionFault(FLOW_CONTROL_ERROR, "a window above 2^31-1")
            stream.push()

    def _count_empty(self) -> None:
        self.empty_frames += 1
        if self.empty_frames > self.shared.limits.empty_frames:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "too many frames without content")
