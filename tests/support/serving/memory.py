"""Requests that a server is holding, and how many bytes of them."""

from __future__ import annotations

import numpy as np

from tests.support.serving.running import Raw, Running, request


def raw_infer(values: np.ndarray, **headers: str) -> bytes:
    """A request that is nothing but its tensor."""
    headers = {"Inference-Header-Content-Length": "0", **headers}
    return request("POST", "/v2/models/m/infer", values.tobytes(), **headers)


def held(server: Running) -> int:
    return server.server._listener.memory.bytes


def part(raw: Raw, data: bytes, size: int) -> None:
    """All of a request but the last `size` bytes."""
    raw.send(data[:-size])
