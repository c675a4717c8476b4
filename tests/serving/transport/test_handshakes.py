"""TLS handshakes of many clients share the turns of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import pytest

from deploykit.serving.transport import listener
from deploykit.serving.transport.call import MemoryBudget
from deploykit.serving.transport.listener import Acceptor, Port
from tests.support.serving.running import WAIT_S


class Nobody(Port):
    """A port without connections."""

    def __init__(self, handshake_s: float) -> None:
        super().__init__(100, handshake_s, MemoryBudget(1, 1))

    def connect(self) -> asyncio.Protocol:
        return asyncio.Protocol()


def test_few_tls_handshakes_begin_in_one_turn_of_the_loop() -> None:
    """1,000 clients that sent a recorded first message at once stopped the loop for 1.3 s."""
    begun, turns = list[int](), list[int]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        acceptor = Acceptor(loop, socket.socket(), Nobody(9.0), tls)

        async def handshake(client: socket.socket) -> None:
            await acceptor._hello(client)
            begun.append(1)

        with contextlib.ExitStack() as stack:
            pairs = [socket.socketpair() for _ in range(30)]
            for end in (end for pair in pairs for end in pair):
                stack.callback(end.close)
            tasks = [asyncio.create_task(handshake(server)) for server, _ in pairs]
            await asyncio.sleep(0)
            assert not begun
            for _, client in pairs:
                client.send(b"hello")
            while len(begun) < len(pairs):
                before = len(begun)
                await asyncio.sleep(0)
                turns.append(len(begun) - before)
            await asyncio.gather(*tasks)
            acceptor._socket.close()

    asyncio.run(main())
    assert max(turns) == listener._HANDSHAKES


@pytest.mark.parametrize("leaves", [False, True])
def test_a_tls_client_that_says_nothing_is_disconnected(leaves: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        acceptor = Acceptor(loop, socket.socket(), Nobody(0.05), tls)
        server, client = socket.socketpair()
        server.setblocking(False)
        if leaves:
            client.close()
        await asyncio.wait_for(acceptor._handshake(server), WAIT_S)
        assert server.fileno() == -1
        client.close()
        acceptor._socket.close()

    asyncio.run(main())
