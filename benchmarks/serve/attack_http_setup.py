"""What the attacks share: models to serve, and clients that send any bytes."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from socket import SocketIO

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.support.serving.faults import Process

LIMIT_BYTES = 400 << 20
WIDTH = 2 << 20  # numbers in an answer of `wide`
MARK = b"HTTP/1.1 "


def models(folder: Path) -> list[str]:
    """Write the models; NAME=FILE of each. `wide`: one number becomes 8 MiB."""
    write_scale(folder / "m.onnx", 2.0)
    one = np.ones((1, WIDTH), np.float32)
    node = helper.make_node("Mul", ["x", "w"], ["y"])
    _write(folder / "wide.onnx", [node], {"w": one}, ("N", 1), ("N", WIDTH))
    return [f"m={folder / 'm.onnx'}", f"wide={folder / 'wide.onnx'}"]


def write_scale(path: Path, factor: float, *, width: int = 4, padding: int = 0) -> None:
    """A model that multiplies by `factor`; `padding` bytes of weights that count nothing."""
    weights = {"w": np.full((1, width), factor, np.float32)}
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"])]
    if padding:
        weights["pad"] = np.zeros((1, padding // 4), np.float32)
        nodes = [
            helper.make_node("ReduceMax", ["pad"], ["zero"], keepdims=1),
            helper.make_node("Mul", ["x", "w"], ["z"]),
            helper.make_node("Add", ["z", "zero"], ["y"]),
        ]
    _write(path, nodes, weights, ("N", width), ("N", width))


def _write(
    path: Path,
    nodes: list[onnx.NodeProto],
    weights: dict[str, np.ndarray],
    taken: tuple[str, int],
    given: tuple[str, int],
) -> None:
    graph = helper.make_graph(
        nodes,
        "attacked",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, taken)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, given)],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)


def ask(method: str, target: str, body: bytes = b"", *headers: str) -> bytes:
    """The bytes of a request."""
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def infer(model: str, rows: list[list[float]], *headers: str, binary: bool = False) -> bytes:
    shape = [len(rows), len(rows[0])]
    data = [number for row in rows for number in row]
    item = {"name": "x", "datatype": "FP32", "shape": shape, "data": data}
    more = {"parameters": {"binary_data_output": True}} if binary else {}
    body = json.dumps({"inputs": [item], **more}).encode()
    return ask("POST", f"/v2/models/{model}/infer", body, *headers)


SMALL = infer("m", [[1.0, 2.0, 3.0, 4.0]])
LARGE = infer("wide", [[1.0]], binary=True)


@dataclass
class Attacked:
    """The server and its attackers. `more_files`: that may stay open."""

    server: Process
    folder: Path
    seconds: float
    more_files: int = 3  # the worker process' pipes, and a connection of its own
    accepts: bool = True  # new connections; else only those that are open count
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def connect(self, receive_buffer: int = 0, *, kept: bool = True) -> socket.socket:
        """A connection; until the attack has been seen to do no harm, if it is `kept`."""
        client = socket.socket()
        if kept:
            self.stack.enter_context(client)
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(60)
        client.connect(("127.0.0.1", self.server.port))
        return client

    def once(self, data: bytes) -> int:
        """The status of the answer on a connection of its own."""
        with self.connect(kept=False) as client:
            return answer(client, data)

    def infer(self) -> bool:
        return self.server.status("/v2/health/live") == 200 and self.once(SMALL) == 200

    def together(self, clients: int, work: Callable[[int], object]) -> Counter[str]:
        """Run `work(number)` in as many threads, again and again; counts what it returned."""
        found: Counter[str] = Counter()
        end_s = time.monotonic() + self.seconds

        def run(number: int) -> None:
            while time.monotonic() < end_s:
                try:
                    got = str(work(number))
                except (OSError, ValueError) as exc:
                    got = type(exc).__name__
                found[got] += 1

        threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def answer(client: socket.socket, data: bytes = b"") -> int:
    """Send `data`; the status of the next answer, which is read whole. 0: closed without one."""
    with contextlib.suppress(OSError):  # refused before it was read: the answer is there
        client.sendall(data)
    with client.makefile("rb", 0) as stream:  # it reads no further
        try:
            return _status(stream)
        except OSError:
            return 0


def _status(stream: SocketIO) -> int:
    line = stream.readline()
    while line.startswith(b"HTTP/1.1 100"):
        stream.readline()
        line = stream.readline()
    if not line:
        return 0
    size = 0
    while header := stream.readline().strip():
        name, _, value = header.partition(b":")
        if name.lower() == b"content-length":
            size = int(value)
    while size:
        piece = stream.read(min(size, 1 << 20))
        if not piece:
            return 0
        size -= len(piece)
    return int(line.split()[1])


def reset(client: socket.socket) -> None:
    """Close with RST."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def counted(found: Counter[str] | Iterable[int]) -> str:
    """As text, the most frequent first."""
    if not isinstance(found, Counter):
        found = Counter(map(str, found))
    return ", ".join(
        f"{count:,} × {'closed' if got == '0' else got}" for got, count in found.most_common(5)
    )


def send_all(clients: Iterable[socket.socket], data: bytes) -> None:
    for client in clients:
        with contextlib.suppress(OSError):
            client.sendall(data)
