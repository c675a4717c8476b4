"""A server that gets SIGTERM in the middle of load, over HTTP and gRPC."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

from tests.support.serving.faults import until
from tests.support.serving.running import WAIT_S, Raw, infer_json, request

HTTP_CLIENTS, GRPC_CLIENTS = 5, 2


INFER = request("POST", "/v2/models/m/infer", infer_json([1, 2, 3, 4], [1, 4]))


@dataclass
class Asked:
    """How one request ended: a status, or None for no answer."""

    status: int | None


class Client(threading.Thread):
    """Asks again and again until it is refused, or its connection ends."""

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.asked: list[Asked] = []
        self._ask = ask

    def run(self) -> None:
        while True:
            asked = self._ask()
            self.asked.append(asked)
            if asked.status != 200:
                return


def over_http(port: int) -> Any:
    raw = Raw(port)

    def ask() -> Asked:
        try:
            reply = raw.ask(INFER)
        except OSError:
            reply = None
        if reply is None or reply.status != 200 or "connection" in reply.headers:
            raw.close()
        if reply is None:
            return Asked(None)
        if reply.status == 200:
            assert reply.json["outputs"][0]["data"] == [3, 5, 7, 9]
        return Asked(reply.status)

    return ask


def over_grpc(port: int) -> Any:
    client = grpc.InferenceServerClient(f"127.0.0.1:{port}")
    tensor = grpc.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.array([[1, 2, 3, 4]], np.float32))

    def ask() -> Asked:
        try:
            answer = client.infer("m", [tensor])
        except grpc.InferenceServerException as exc:
            client.close()
            return Asked(503 if "UNAVAILABLE" in str(exc.status()) else None)
        assert answer.as_numpy("y").tolist() == [[3, 5, 7, 9]]
        return Asked(200)

    return ask


def one_round(seed: int) -> int:
    """Signal a loaded server at a moment that `seed` chooses; how many requests it answered."""
    script = Path(__file__).with_name("serve_busily.py")
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        http_port, grpc_port = map(int, process.stdout.readline().split())
        asks = [over_http(http_port) for _ in range(HTTP_CLIENTS)]
        asks += [over_grpc(grpc_port) for _ in range(GRPC_CLIENTS)]
        clients = [Client(ask) for ask in asks]
        for client in clients:
            client.start()
        until(lambda: all(len(client.asked) > 2 for client in clients))
        threading.Event().wait(random.Random(seed).random() * 0.2)
        process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join(WAIT_S)
            assert not client.is_alive()
        assert process.wait(WAIT_S) == 0
        out, err = process.communicate()
    finally:
        process.kill()
        process.communicate()
    statuses = [asked.status for client in clients for asked in client.asked]
    answered = statuses.count(200)
    assert out.split() == ["dropped", "0", "accepted", str(answered)], out + err
    assert set(statuses) <= {200, 503, None}  # None: the connection had ended before the request
    return answered
