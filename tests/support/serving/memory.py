"""Raw requests, whole and unfinished, and the bytes that a server holds of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from deploykit.core.tensors import Bytes
from deploykit.serving.transport.connection import Call, Head, MemoryBudget
from tests.support.serving.running import Raw, Running, request


def in_binary(data: bytes, shape: list[int], datatype: str = "FP32") -> tuple[bytes, str]:
    """A body with one input in binary, and the size of its JSON part."""
    item = {"name": "x", "datatype": datatype, "shape": shape}
    inputs = [{**item, "parameters": {"binary_data_size": len(data)}}]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return head + data, str(len(head))


def raw_infer(values: np.ndarray, **headers: str) -> bytes:
    """A request with one row in binary, whatever its headers say of it."""
    body, size = in_binary(values.tobytes(), [1, values.size])
    headers = {"Inference-Header-Content-Length": size, **headers}
    return request("POST", "/v2/models/m/infer", body, **headers)


def held_bytes(server: Running) -> int:
    return server.server._listener.memory.bytes


def send_without_end(raw: Raw, data: bytes, size: int) -> None:
    """Send a request without its last `size` bytes."""
    raw.send(data[:-size])


def chunked(body: bytes, path: str = "/v2/models/m/infer") -> bytes:
    """A request whose body is one chunk, without the final chunk."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head.encode() + b"%x\r\n" % len(body) + body


class Seen(Call):
    """A call that remembers its reply."""

    def __init__(self, head: Head, body: Bytes) -> None:
        super().__init__(head, MemoryBudget(1 << 60, 1), body)
        self.status = 0

    def reply(self, status: int, headers: bytes, parts: Sequence[Bytes]) -> None:  # noqa: ARG002
        self.status = status
