"""mosec: a raw tensor in, a raw tensor out; its front end forms batches for WORKERS processes.

python mosec_app.py MODEL PORT THREADS GRPC_PORT [WORKERS]    (it has no gRPC)
"""

from __future__ import annotations

import os
import sys

import numpy as np
from mosec import Runtime, Server, Worker
from session import MAX_BATCH, open_session

DELAY_MS = 2


class Model(Worker):
    """One process with a session of its own, and its share of the threads."""

    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        self.session = open_session(os.environ["MODEL"], int(os.environ["THREADS"]))
        self.shape = (-1, *self.session.get_inputs()[0].shape[1:])

    def deserialize(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.float32).reshape(self.shape)

    def forward(self, data: list[np.ndarray]) -> list[np.ndarray]:
        (found,) = self.session.run(["y"], {"x": np.concatenate(data)})
        return list(found)

    def serialize(self, data: np.ndarray) -> bytes:
        return data.tobytes()


def main() -> None:
    model, port, threads = sys.argv[1:4]
    workers = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    os.environ.update(MODEL=model, THREADS=str(max(1, int(threads) // workers)))
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", port, "--log-level", "warning"]
    server = Server()
    runtime = Runtime(Model, num=workers, max_batch_size=MAX_BATCH, max_wait_time=DELAY_MS)
    server.register_runtime({"/infer": [runtime]})
    server.run()


if __name__ == "__main__":
    main()
