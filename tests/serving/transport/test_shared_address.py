"""The address that several workers share, and no other server."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import deploykit as dk
from deploykit.core.errors import BadInput, GateFailed
from deploykit.serving.health import connect, health
from deploykit.serving.transport.listener import bind, reserve, share_address
from tests.support.serving.reloading import model
from tests.support.serving.worker_processes import sockets

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


def test_workers_share_a_path_and_each_gets_clients(tmp_path: Path) -> None:
    host = f"unix:{tmp_path}/dk.sock"
    with ExitStack() as stack:
        file = model(tmp_path / "m.onnx", 1)
        others = {*children(os.getpid())}
        server = stack.enter_context(dk.serve(file, host=host, workers=2))
        assert health(server.url).ready
        (parent,) = {*children(os.getpid())} - others
        before = {pid: sockets(pid) for pid in children(parent)}
        for _ in range(40):  # each stays connected
            client = stack.enter_context(closing(connect(server.url, 60)[0]))
            client.request("GET", "/v2/health/live")
            assert client.getresponse().read() == b'{"live":true}'
        assert [sockets(pid) > count for pid, count in before.items()] == [True, True]
        with pytest.raises(BadInput, match="already in use"):
            bind(host, 0)
    assert list(tmp_path.glob("*.sock*")) == []
    with pytest.raises(GateFailed, match="No such file"):
        health(host)


def children(pid: int) -> list[int]:
    found = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(each) for each in " ".join(found).split()]
