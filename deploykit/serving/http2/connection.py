"""One HTTP/2 connection: reads frames and passes their content to the streams.

`benchmarks/grpc_stacks.md` has the measurement that chose this over grpcio's servers.
"""

from __future__ import annotations

import logging

from hpack import HPACKError

from deploykit.serving.http2.flow import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_BYTES,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    INTERNAL_ERROR,
    LARGEST_STREAM,
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
    UPDATE_BYTES,
    WINDOW_UPDATE,
    ConnectionFault,
    Flow,
    Shared,
    frame,
)
from deploykit.serving.http2.headers import HeaderReader, MalformedHeaders, check_fields

log = logging.getLogger(__name__)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_TURN_COST = 1024  # frames that one connection may have processed in a turn of the loop
_BUSY_COST = 128  # and while frames of others wait for their turn
_CHECKED = 15  # the time is checked after so many frames, and after every 16 more
_MOST_SETTINGS = 64  # in one frame
_SETTINGS_COST = 10  # frames, as each may move the windows of all streams


class Http2Connection(Flow):
    """One client."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._heads = HeaderReader(shared.parse, shared.limits.header_bytes)
        self._left = b""  # an incomplete frame, and frames that wait for the next turn of the loop
        self._block: list[bytes] = []  # an incomplete header block
        self._block_bytes = 0
        self._block_of = (0, 0)
        self._opened = 0  # how many streams the client has opened
        self._has_preface = False

    # -- frames in -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.closed_for_reading:
            return
        if self._left:
            data = self._left + data
        if self.queued:
            self._left = data
            return
        turns = self.shared.turns
        if turns.busy:
            self._left = data
            self.wait_for_turn()
            return
        begun_s = turns.clock_s()
        try:
            self._left = data[self._frames(data) :]
        except ConnectionFault as exc:
            self.end(exc.code, str(exc))
        except HPACKError:
            self.end(COMPRESSION_ERROR, "the headers are not valid HPACK, or too large")
        except Exception:  # any bug: this connection ends with a reason, the server does not
            log.exception("an HTTP/2 connection failed")
            self.end(INTERNAL_ERROR, "an error inside the server; its log says more")
        turns.spend(begun_s)

    def _frames(self, data: bytes) -> int:
        """Process the complete frames that this turn of the loop allows; the index after them."""
        at, size = 0, len(data)
        if not self._has_preface:
            if not data.startswith(PREFACE[:size]):
                raise ConnectionFault(PROTOCOL_ERROR, "this port speaks HTTP/2 with gRPC only")
            if size < len(PREFACE):
                return 0
            self._has_preface = True
            at = len(PREFACE)
        turns, count = self.shared.turns, 0
        cost = _BUSY_COST if turns.waiting else _TURN_COST
        while size - at >= 9 and not self.closed_for_reading:
            high, low, kind, flags, number = FRAME.unpack_from(data, at)
            number &= LARGEST_STREAM  # the highest bit is reserved
            length = high << 16 | low
            if length > FRAME_BYTES:
                raise ConnectionFault(FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            end = at + 9 + length
            if end > size:
                break
            if cost <= 0 or (count & _CHECKED == _CHECKED and turns.late()):
                self.wait_for_turn()
                break
            cost -= 1
            count += 1
            if kind == CONTINUATION:
                self._receive_continuation(data[at + 9 : end], flags, number)
            elif self.in_header_block:
                raise ConnectionFault(PROTOCOL_ERROR, "a frame inside a header block")
            elif not self.has_settings and kind != SETTINGS:
                raise ConnectionFault(PROTOCOL_ERROR, "the first frame must be SETTINGS")
            elif kind == DATA:
                self._data(data, at + 9, end, flags, number)
            elif kind == HEADERS:
                cost -= length >> 3  # HPACK makes a header of a single byte
                self._headers(data[at + 9 : end], flags, number)
            else:
                self._other(kind, flags, number, data[at + 9 : end])
            at = end
        return size if self.closed_for_reading else at

    def _data(self, data: bytes, at: int, end: int, flags: int, number: int) -> None:
        length = end - at
        stream = self.streams.get(number)
        if stream is None:
            self._late(number, length, flags)
        self.received_bytes += length
        if self.received_bytes > UPDATE_BYTES:
            self.allow_more()
        if flags & PADDED:
            if not length or data[at] >= length:
                raise ConnectionFault(PROTOCOL_ERROR, "more padding than the frame has")
            end -= data[at]
            at += 1
        if stream is None:
            return
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise ConnectionFault(FLOW_CONTROL_ERROR, "more data than the window allows")
        ended = flags & END_STREAM != 0
        if at == end and not ended:
            self.count_frame()
        if stream.ended:
            raise ConnectionFault(STREAM_CLOSED, "data after the end of the stream")
        stream.receive(data[at:end], ended)

    def _late(self, number: int, size: int, flags: int) -> None:
        """Check a frame of a stream that has ended: the client may not know it yet."""
        if number > self.last or not number & 1:
            raise ConnectionFault(PROTOCOL_ERROR, "a frame on an idle stream")
        window = self.left_open.pop(number, None)
        if window is None:
            raise ConnectionFault(STREAM_CLOSED, "a frame after the end of the stream")
        if size > window:
            raise ConnectionFault(FLOW_CONTROL_ERROR, "more data than the window allows")
        if not flags & END_STREAM:
            self.left_open[number] = window - size

    def _headers(self, payload: bytes, flags: int, number: int) -> None:
        if not number & 1:
            raise ConnectionFault(PROTOCOL_ERROR, "a client's stream number must be odd")
        if flags & (PADDED | PRIORITIZED):
            payload = _strip_padding(payload, flags)
        if flags & END_HEADERS:
            self._open(payload, flags, number)
        else:
            self._block, self._block_of = [payload], (flags, number)
            self._block_bytes = len(payload)
            self.in_header_block = True
            self.since_s = self.shared.now_s

    def _receive_continuation(self, payload: bytes, flags: int, number: int) -> None:
        block, (first, expected) = self._block, self._block_of
        if not self.in_header_block or number != expected:
            raise ConnectionFault(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        block.append(payload)
        self._block_bytes += len(payload)
        limits = self.shared.limits
        if self._block_bytes > limits.header_bytes or len(block) > limits.header_frames:
            raise ConnectionFault(ENHANCE_YOUR_CALM, "the headers are too large")
        self.count_frame()
        if flags & END_HEADERS:
            self.in_header_block = False
            self._open(b"".join(block), first, number)

    def _open(self, block: bytes, flags: int, number: int) -> None:
        if number <= self.last:
            self._trailers(block, flags, number)
            return
        self.last = number
        self._opened += 1
        try:
            head = self._heads.read(block)
        except MalformedHeaders as exc:
            log.info("HTTP/2 headers are refused: %s", exc)
            self.refuse(number, PROTOCOL_ERROR, flags)
            return
        shared, streams = self.shared, self.streams
        limits = shared.limits
        if len(streams) >= limits.streams or shared.open_streams >= limits.all_streams:
            self.refuse(number, REFUSED_STREAM, flags)
            return
        shared.open_streams += 1
        stream = streams[number] = shared.open(self, number, head)
        stream.begin(flags & END_STREAM != 0)

    def _trailers(self, block: bytes, flags: int, number: int) -> None:
        """Headers on a stream that was opened before: they can only be its last frame."""
        pairs = self._heads.decode(block)
        stream = self.streams.get(number)
        if stream is None and number not in self.left_open and self._opened < (self.last + 1) // 2:
            raise ConnectionFault(PROTOCOL_ERROR, "stream numbers must rise")
        if stream is None:
            self._late(number, 0, flags)
            return
        if stream.ended:
            raise ConnectionFault(STREAM_CLOSED, "headers after the end of the stream")
        if not flags & END_STREAM:
            raise ConnectionFault(PROTOCOL_ERROR, "trailers must end the stream")
        try:
            check_fields(pairs)
        except MalformedHeaders as exc:
            raise ConnectionFault(PROTOCOL_ERROR, str(exc)) from exc
        stream.receive(b"", True)

    def _other(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        self.count_frame()
        if kind == WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == RST_STREAM:
            _check_size(kind, payload, 4)
            if number > self.last or not number & 1:
                raise ConnectionFault(PROTOCOL_ERROR, "RST_STREAM for an idle stream")
            self.left_open.pop(number, None)
            stream = self.streams.get(number)
            if stream is not None:
                stream.ended = True
                stream.finish()
        elif kind == SETTINGS:
            self._settings(flags, number, payload)
        elif kind == PING:
            _check_stream_0(kind, number)
            _check_size(kind, payload, 8)
            if not flags & ACK:
                self.write(frame(PING, ACK, 0, payload))
        elif kind == PUSH_PROMISE:
            raise ConnectionFault(PROTOCOL_ERROR, "a client does not push")
        elif kind == PRIORITY:
            if not number:
                raise ConnectionFault(PROTOCOL_ERROR, "PRIORITY on stream 0")
            _check_size(kind, payload, 5)
        elif kind == GOAWAY:
            _check_stream_0(kind, number)
            if len(payload) < 8:
                raise ConnectionFault(FRAME_SIZE_ERROR, "GOAWAY needs 8 bytes")

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        _check_stream_0(SETTINGS, number)
        if len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionFault(FRAME_SIZE_ERROR, "malformed SETTINGS")
        if len(payload) > 6 * _MOST_SETTINGS:
            raise ConnectionFault(ENHANCE_YOUR_CALM, f"more than {_MOST_SETTINGS} settings")
        if flags & ACK:
            return
        self.has_settings = True
        self.count_frame(_SETTINGS_COST)
        first_window = self.first_window
        for at in range(0, len(payload), 6):
            name = int.from_bytes(payload[at : at + 2], "big")
            value = int.from_bytes(payload[at + 2 : at + 6], "big")
            if name == 2 and value > 1:
                raise ConnectionFault(PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
            if name == 4:
                if value > LARGEST_WINDOW:
                    raise ConnectionFault(FLOW_CONTROL_ERROR, "a window above 2^31-1")
                first_window = value
            elif name == 5:
                if not 1 << 14 <= value < 1 << 24:
                    raise ConnectionFault(PROTOCOL_ERROR, "a frame size out of range")
                self.frame_bytes = min(value, 1 << 20)
        self._set_first_window(first_window)
        self.write(frame(SETTINGS, ACK, 0))

    def _set_first_window(self, value: int) -> None:
        more, self.first_window = value - self.first_window, value
        if more:
            for stream in self.streams.values():
                stream.send_window += more
                if stream.send_window > LARGEST_WINDOW:
                    raise ConnectionFault(FLOW_CONTROL_ERROR, "a window above 2^31-1")
            self.push_soon()

    def _window_update(self, number: int, payload: bytes) -> None:
        _check_size(WINDOW_UPDATE, payload, 4)
        more = int.from_bytes(payload, "big") & LARGEST_WINDOW
        if number and (number > self.last or not number & 1):
            raise ConnectionFault(PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
        if number == 0:
            self.send_window = _add_window(self.send_window, more)
            self.push_soon()
            return
        stream = self.streams.get(number)
        if stream is not None:
            stream.send_window = _add_window(stream.send_window, more)
            stream.push()


def _strip_padding(payload: bytes, flags: int) -> bytes:
    """The header block in a HEADERS frame with padding or a priority."""
    start, end = 0, len(payload)
    if flags & PADDED:
        start = 1
        end -= payload[0] if payload else 0
    if flags & PRIORITIZED:
        start += 5
    if start > end:
        raise ConnectionFault(PROTOCOL_ERROR, "more padding than the frame has")
    return payload[start:end]


def _add_window(window: int, more: int) -> int:
    if not more:
        raise ConnectionFault(PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
    if window + more > LARGEST_WINDOW:
        raise ConnectionFault(FLOW_CONTROL_ERROR, "a window above 2^31-1")
    return window + more


def _check_stream_0(kind: int, number: int) -> None:
    if number:
        raise ConnectionFault(PROTOCOL_ERROR, f"a frame of type {kind} belongs on stream 0")


def _check_size(kind: int, payload: bytes, size: int) -> None:
    if len(payload) != size:
        raise ConnectionFault(FRAME_SIZE_ERROR, f"a frame of type {kind} must have {size} bytes")
