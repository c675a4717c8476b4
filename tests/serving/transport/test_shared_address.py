"""The address that several workers share, and no other server."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from deploykit.core.errors import BadInput
from deploykit.serving.transport.listener import bind, reserve, share_address

HERE = "127.0.0.1"


@pytest.mark.parametrize("start", [reserve, bind])
def test_a_port_is_in_use_before_its_workers_listen(
    start: Callable[[str, int, str], socket.socket],
) -> None:
    """Two servers that opened their models at the same time shared one, and both were ready."""
    with ExitStack() as stack:
        first = stack.enter_context(reserve(HERE, 0, "`http_port`"))
        port = first.getsockname()[1]
        with pytest.raises(BadInput, match=f"`http_port` {port}: already in use on {HERE}"):
            start(HERE, port, "`http_port`")
        for _ in range(2):
            stack.enter_context(share_address(first)).listen()


def test_a_port_whose_last_connections_are_closing_is_free() -> None:
    """Those that a server alone has closed: they are in TIME_WAIT for a minute."""
    with bind(HERE, 0) as alone:
        address = alone.getsockname()
        with socket.create_connection(address) as client:
            alone.setblocking(True)
            alone.accept()[0].close()
            assert client.recv(1) == b""
    with reserve(*address, "`http_port`") as found, share_address(found) as worker:
        worker.listen()
