"""Sockets that do not wait, with the kernel's own time of what arrived (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import time

READ_BYTES = 1 << 16  # larger ones would be mapped and unmapped for each answer
USUAL_BYTES = 1 << 12  # enough for most answers, and sooner allocated
_TIMESTAMPNS = getattr(socket, "SO_TIMESTAMPNS", 35)  # Linux, asm-generic/socket.h
_SHORTEST_SPIN_S, _LONGEST_SPIN_S = 50e-6, 200e-6
_TIMER_SLACK = 29  # prctl(2), PR_SET_TIMERSLACK: by default a wait ends up to 50 us late


def open_socket(address: str) -> socket.socket:
    """A TCP socket for an IP address, not yet connected. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setblocking(False)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        found.setsockopt(socket.SOL_SOCKET, _TIMESTAMPNS, 1)
    return found


def read_with_lag(sock: socket.socket) -> tuple[bytes, float]:
    """What came, and for how many seconds it had been there, by the kernel's own clock."""
    data, extra, *_ = sock.recvmsg(READ_BYTES, 64)
    if not extra:  # a kernel, or an end of the connection, without a time
        return data, 0.0
    seconds, nanoseconds = struct.unpack("qq", extra[0][2][:16])
    return data, max(0.0, (time.time_ns() - seconds * 1_000_000_000 - nanoseconds) * 1e-9)


def spin_s(requests: int, seconds: float) -> float:
    """How long before a request is due to stay awake: asleep until then, a thread wakes late.

    A tenth of the time between two requests, 50 to 200 us.
    """
    return min(max(_SHORTEST_SPIN_S, seconds / max(1, requests) / 10), _LONGEST_SPIN_S)


def wake_on_time() -> None:
    """Let waits of this thread end when they are due."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)
