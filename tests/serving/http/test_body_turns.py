"""Large bodies of many clients share the turns of the event loop, also those that are dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from deploykit.serving.http.connection import HttpConnection
from deploykit.serving.http.listener import BUSY_BYTES, PIECE_BYTES
from deploykit.serving.server import ServeOptions, Server
from deploykit.serving.transport.turns import TURN_S, Turns
from tests.support.fake_engine import FakeEngine
from tests.support.serving.running import request
from tests.support.serving.wired import Wire

CLIENTS = 60
BYTES_PER_S = (1 << 20) / 1e-3  # that the system copies into new memory
SIZE = 40 << 20


class Socket(Wire):
    """Has more data than the server takes."""

    reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def write_eof(self) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    """A server whose loop does not run."""
    found = Server({"m": FakeEngine()}, ServeOptions(http_port=0, max_held_bytes=1 << 40))
    yield found
    found.repository.close(drain=False)
    found._offload.close()
    found._release()


@pytest.mark.parametrize("size", [SIZE, SIZE << 10], ids=["body", "dropped"])
def test_receiving_from_many_clients_takes_many_turns(server: Server, size: int) -> None:
    """100 clients that sent 30 MB each, to routes that take none, stopped the loop for 762 ms."""
    now_s, listener = [0.0], server._listener
    listener.turns = Turns(lambda: now_s[0])
    head = request("POST", "/v2/repository/index", Content_Length=str(size))
    received = [0] * CLIENTS

    def read(number: int) -> int:
        """What libuv does for a socket that can be read."""
        count = len(connections[number].get_buffer(-1))
        now_s[0] += count / BYTES_PER_S
        received[number] += count
        connections[number].buffer_updated(count)
        return count

    async def turn() -> float:
        begun_s = now_s[0]
        await asyncio.sleep(0)
        for number, wire in enumerate(wires):
            for _ in range(32):
                if not wire.reading or received[number] > SIZE - 2 * PIECE_BYTES:
                    break
                read(number)
        return now_s[0] - begun_s

    async def main() -> None:
        for connection, wire in zip(connections, wires, strict=True):
            connection.connection_made(wire)
            connection.get_buffer(-1)[: len(head)] = head
            connection.buffer_updated(len(head))
        busy_s = CLIENTS * BUSY_BYTES / BYTES_PER_S
        longest_s = max([await turn() for _ in range(6 * CLIENTS)])
        assert longest_s < TURN_S + 2 * PIECE_BYTES / BYTES_PER_S + busy_s
        assert min(received) > SIZE - 3 * PIECE_BYTES  # each had its turns

    wires = [Socket() for _ in range(CLIENTS)]
    connections = [HttpConnection(listener) for _ in wires]
    asyncio.run(main())
    for connection in connections:
        connection.connection_lost(None)
    assert listener.memory.bytes == 0


def test_what_a_client_sends_in_a_busy_turn_is_kept_in_small_pieces(server: Server) -> None:
    connection, wire = HttpConnection(server._listener), Socket()
    connection.connection_made(wire)
    assert len(connection.get_buffer(-1)) > BUSY_BYTES
    server._listener.turns.busy = True
    assert len(connection.get_buffer(-1)) == BUSY_BYTES
