"""The `h2` package as a client, in every order that hypothesis finds; and any bytes at all."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deploykit.serving.http2.connection import CLOSED
from tests.support.campaign import rounds
from tests.support.serving.wired import Wired

pytest.importorskip("h2", reason="h2 is not installed")
import h2.config
import h2.connection
import h2.events
import h2.settings

HEADERS = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), ("te", "trailers")]
TYPE = ("content-type", "application/grpc")
SIZES = st.sampled_from([0, 1, 100, 16_379, 16_384, 65_530, 200_000])


class ReferenceClient(RuleBasedStateMachine):
    """Calls whose answers must be their messages, whatever the client does between them.

    h2 raises an error if the server breaks HTTP/2: a wrong frame, state or window.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wired = Wired()
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self.client.initiate_connection()
        self.unsent: dict[int, bytes] = {}
        self.expected: dict[int, bytes] = {}
        self.got: dict[int, bytes] = {}
        self.unread: dict[int, int] = {}
        self.exchange()

    def exchange(self) -> None:
        """Pass all bytes in both directions."""
        while True:
            out = self.client.data_to_send()
            if out:
                self.wired.feed(out)
            back = self.wired.wire.take()
            if not (out or back):
                return
            while back:  # h2 takes its own new frame size for the next bytes that it is given
                size = 9 + int.from_bytes(back[:3], "big")
                for event in self.client.receive_data(back[:size]):
                    self.see(event)
                back = back[size:]

    def see(self, event: h2.events.Event) -> None:
        number = getattr(event, "stream_id", 0)
        assert not isinstance(event, h2.events.ConnectionTerminated), event
        if isinstance(event, h2.events.DataReceived):
            self.got[number] += event.data
            self.unread[number] = self.unread.get(number, 0) + event.flow_controlled_length
        elif isinstance(event, h2.events.TrailersReceived):
            assert dict(event.headers)[b"grpc-status"] == b"0"
        elif isinstance(event, h2.events.StreamEnded):
            assert self.got.pop(number) == self.expected.pop(number)
            self.unsent.pop(number, None)

    @rule(path=st.sampled_from(["/echo", "/stream"]), size=SIZES, more=st.binary(max_size=30))
    def call(self, path: str, size: int, more: bytes) -> None:
        if self.client.open_outbound_streams >= 100:
            return
        number = self.client.get_next_available_stream_id()
        fields = [*HEADERS, (":path", path), TYPE, ("x-more", more.hex())]
        fields.sort(key=lambda field: not field[0].startswith(":"))
        self.client.send_headers(number, fields)
        message = random.Random(number).randbytes(size)
        whole = b"\0" + size.to_bytes(4, "big") + message
        self.unsent[number] = whole
        self.expected[number] = whole * (2 if path == "/stream" else 1)
        self.got[number] = b""
        self.exchange()

    def send(self, number: int, most: int, pad: int | None) -> bool:
        padding = 0 if pad is None else pad + 1
        window = self.client.local_flow_control_window(number)
        take = min(most, min(window, self.client.max_outbound_frame_size) - padding)
        if take <= 0 and self.unsent[number]:
            return False
        piece, rest = self.unsent[number][:take], self.unsent[number][take:]
        self.unsent[number] = rest
        if not rest:
            del self.unsent[number]
        self.client.send_data(number, piece, end_stream=not rest, pad_length=pad)
        self.exchange()
        return True

    @precondition(lambda self: self.unsent)
    @rule(data=st.data(), most=st.sampled_from([1, 9, 16_384]), pad=st.none() | st.integers(1, 255))
    def send_some(self, data: st.DataObject, most: int, pad: int | None) -> None:
        self.send(data.draw(st.sampled_from(sorted(self.unsent))), most, pad)

    @precondition(lambda self: self.unsent)
    @rule()
    def send_all(self) -> None:
        for number in list(self.unsent):
            while number in self.unsent and self.send(number, 16_384, None):
                pass

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.expected)))
        self.client.reset_stream(number, 8)
        for of in (self.unsent, self.expected, self.got, self.unread):
            of.pop(number, None)
        self.exchange()

    @precondition(lambda self: self.unread)
    @rule(data=st.data())
    def read_answer(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.unread)))
        self.client.acknowledge_received_data(self.unread.pop(number), number)
        self.exchange()

    @rule(window=st.sampled_from([0, 1, 10, 65_535, 1 << 20]), frame=st.sampled_from([14, 15, 20]))
    def change_settings(self, window: int, frame: int) -> None:
        codes = h2.settings.SettingCodes
        self.client.update_settings(
            {codes.INITIAL_WINDOW_SIZE: window, codes.MAX_FRAME_SIZE: 1 << frame}
        )
        self.exchange()

    @rule(more=st.sampled_from([1, 1000, 1 << 20]))
    def open_window(self, more: int) -> None:
        if self.client.inbound_flow_control_window < 1 << 28:
            self.client.increment_flow_control_window(more)
        self.client.ping(b"12345678")
        self.wired.tick()
        self.exchange()

    @invariant()
    def the_server_counts_right(self) -> None:
        connection = self.wired.connection
        assert connection.phase is not CLOSED
        assert self.wired.shared.open_streams == len(connection.streams)
        assert connection.answer_bytes == sum(
            stream._answer_bytes for stream in connection.streams.values()
        )

    def teardown(self) -> None:
        self.wired.close()
        assert self.wired.memory.bytes == 0
        assert self.wired.shared.open_streams == 0


ReferenceClient.TestCase.settings = settings(
    max_examples=rounds(15, 1000),
    stateful_step_count=rounds(25, 60),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestReferenceClient = ReferenceClient.TestCase
