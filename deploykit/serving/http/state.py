"""The states of an HTTP/1.1 connection."""

from __future__ import annotations

import asyncio
from enum import IntEnum
from socket import SO_ERROR, SOL_SOCKET


class State(IntEnum):
    """What a connection does with received bytes. Below LAST it reads requests."""

    IDLE = 0  # waiting for a request
    HEAD = 1  # part of a head received
    BODY = 2  # a head and part of its body received
    LAST = 3  # reads no more; closes after the last reply
    REFUSED = 4  # reads no more; the error reply is still to be sent
    LINGERING = 5  # the client gets time to read the error reply
    CLOSED = 6
    SPARE = 7  # above the limit of connections: only health checks are answered


def is_reset(transport: asyncio.BaseTransport) -> bool:
    """Whether the client has refused what was sent; not seen otherwise once it has ended."""
    error: int = transport.get_extra_info("socket").getsockopt(SOL_SOCKET, SO_ERROR)
    return error != 0
