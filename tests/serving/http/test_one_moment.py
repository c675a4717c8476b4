"""What many clients do at one moment is done in many turns of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from deploykit.serving.http.connection import PIECE_BYTES, HttpConnection
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from deploykit.serving.transport.turns import BUSY_BYTES, TURN_S, Turns
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
        busy_s = CLIENTS * BUSY_BYTES[False] / BYTES_PER_S
        longest_s = max([await turn() for _ in range(6 * CLIENTS)])
        assert longest_s < TURN_S + 2 * PIECE_BYTES / BYTES_PER_S + busy_s
        assert min(received) > SIZE - 3 * PIECE_BYTES  # each had its turns

    wires = [Socket() for _ in range(CLIENTS)]
    connections = [HttpConnection(listener) for _ in wires]
    asyncio.run(main())
    for connection in connections:
        connection.connection_lost(None)
    assert listener.memory.bytes == 0


def test_connections_that_reach_a_limit_together_are_closed_in_many_turns(server: Server) -> None:
    """4,096 half heads, all of one moment, stopped the loop when their time was over."""
    now_s, listener = [0.0], server._listener
    listener.turns.clock_s = lambda: now_s[0]
    step_s = TURN_S / 10

    class Slow(Socket):
        def write(self, data: object) -> None:
            now_s[0] += step_s
            super().write(data)

    async def main() -> None:
        for wire in wires:
            connection = HttpConnection(listener)
            connection.connection_made(wire)
            connection.get_buffer(-1)[:7] = b"GET /v2"
            connection.buffer_updated(7)
        await asyncio.sleep(0)
        before_s, turns_s = now_s[0], []
        listener.tick(listener.now_s + listener.limits.header_s + 1)
        while not all(wire.out for wire in wires):
            listener.tick(listener.now_s + 1)  # the last round is still running
            turns_s.append(now_s[0] - before_s)
            before_s = now_s[0]
            await asyncio.sleep(0)
        turns_s.append(now_s[0] - before_s)
        assert max(turns_s) < TURN_S + 2 * step_s
        assert now_s[0] == pytest.approx(CLIENTS * step_s)

    wires = [Slow() for _ in range(CLIENTS)]
    asyncio.run(main())
    assert all(b" 408 " in wire.out for wire in wires)


@pytest.mark.parametrize("tls", [False, True])
def test_little_is_received_in_a_busy_turn(server: Server, tls: bool) -> None:
    """64 TLS clients with records of one byte stopped the loop for 283 ms, all in decryption."""
    now_s, listener = [0.0], server._listener
    listener.turns.clock_s = lambda: now_s[0]
    connection, wire = HttpConnection(listener), Socket()

    async def main() -> None:
        connection._tls = tls
        assert len(connection.get_buffer(-1)) > 4096
        now_s[0] += 2 * TURN_S
        if not tls:  # what the system has received for others is counted when it is processed
            listener.turns.busy = True
        assert len(connection.get_buffer(-1)) == BUSY_BYTES[tls]
        await asyncio.sleep(0)

    connection.connection_made(wire)
    asyncio.run(main())
