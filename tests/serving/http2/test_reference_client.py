"""The `h2` package as a client: it raises an error if the server breaks HTTP/2."""

from __future__ import annotations

import random

import pytest

from deploykit.serving.http2 import CLOSED
from tests.support.campaign import rounds
from tests.support.serving.wired import Wired

pytest.importorskip("h2", reason="h2 is not installed")
import h2.config
import h2.connection
import h2.events
from h2.settings import SettingCodes

HEADERS = [(":method", "POST"), (":scheme", "http"), (":authority", "a")]
GRPC = [("te", "trailers"), ("content-type", "application/grpc")]


class Client:
    """Calls whose answers must be their messages, whatever the client does between them."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.wired = chance, Wired()
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self.h2.initiate_connection()
        self.unsent: dict[int, bytes] = {}
        self.expected: dict[int, bytes] = {}
        self.got: dict[int, bytes] = {}
        self.unread: dict[int, int] = {}

    def exchange(self) -> None:
        """Pass all bytes in both directions."""
        while True:
            out = self.h2.data_to_send()
            if out:
                self.wired.feed(out)
            back = self.wired.wire.take()
            if not (out or back):
                return
            while back:  # h2 takes its own new frame size for the next bytes that it is given
                size = 9 + int.from_bytes(back[:3], "big")
                for event in self.h2.receive_data(back[:size]):
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

    def call(self) -> None:
        number, path = (
            self.h2.get_next_available_stream_id(),
            self.chance.choice(("echo", "stream")),
        )
        more = ("x-more", self.chance.randbytes(self.chance.randrange(30)).hex())
        self.h2.send_headers(number, [*HEADERS, (":path", f"/{path}"), *GRPC, more])
        size = self.chance.choice((0, 1, 100, 16_379, 16_384, 65_530, 200_000))
        whole = b"\0" + size.to_bytes(4, "big") + self.chance.randbytes(size)
        self.unsent[number], self.got[number] = whole, b""
        self.expected[number] = whole * (2 if path == "stream" else 1)

    def send(self) -> None:
        for number in self.chance.sample([*self.unsent], len(self.unsent)):
            pad = self.chance.choice((None, None, 1, 255))
            window = min(self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size)
            take = min(self.chance.choice((1, 9, 5000, 16_384)), window - (pad or -1) - 1)
            if take > 0:
                piece, rest = self.unsent[number][:take], self.unsent.pop(number)[take:]
                if rest:
                    self.unsent[number] = rest
                self.h2.send_data(number, piece, end_stream=not rest, pad_length=pad)
                self.exchange()

    def cancel(self) -> None:
        if self.expected and self.chance.random() < 0.3:
            number = self.chance.choice([*self.expected])
            self.h2.reset_stream(number, 8)
            for of in (self.unsent, self.expected, self.got, self.unread):
                of.pop(number, None)

    def read(self) -> None:
        for number in [*self.unread]:
            self.h2.acknowledge_received_data(self.unread.pop(number), number)

    def change_windows(self) -> None:
        first, size = (
            self.chance.choice((0, 1, 10, 65_535, 1 << 20)),
            self.chance.choice((14, 15, 20)),
        )
        codes = {SettingCodes.INITIAL_WINDOW_SIZE: first, SettingCodes.MAX_FRAME_SIZE: 1 << size}
        self.h2.update_settings(codes)
        if self.h2.inbound_flow_control_window < 1 << 28:
            self.h2.increment_flow_control_window(self.chance.choice((1, 1000, 1 << 20)))
        self.h2.ping(b"12345678")
        self.wired.tick()


@pytest.mark.parametrize("seed", range(rounds(15, 1000)))
def test_answers_are_whole_in_any_order_of_calls_data_and_windows(seed: int) -> None:
    client = Client(random.Random(seed))
    actions = (client.call, client.send, client.send, client.cancel, client.read)
    for _ in range(rounds(40, 200)):
        client.chance.choice((*actions, client.change_windows))()
        client.exchange()
        connection = client.wired.connection
        assert connection.phase is not CLOSED
        assert client.wired.shared.open_streams == len(connection.streams)
        unread = [stream.unread_bytes for stream in connection.streams.values()]
        assert connection.answer_bytes == sum(unread)
    client.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
    client.h2.increment_flow_control_window(1 << 28)
    for _ in range(100_000):
        client.exchange()
        client.send()
        client.read()
        if not client.expected:
            break
    assert not client.expected
    client.wired.close()
    assert (client.wired.memory.bytes, client.wired.shared.open_streams) == (0, 0)
