"""Ray Serve: one replica with its batching, a raw tensor in, a raw tensor out.

python ray_app.py MODEL PORT THREADS
"""

from __future__ import annotations

import logging
import signal
import sys

import numpy as np
import ray
from ray import serve
from session import open_session
from starlette.requests import Request
from starlette.responses import Response

MODEL, PORT, THREADS = sys.argv[1:4]


@serve.deployment(num_replicas=1, max_ongoing_requests=1024, ray_actor_options={"num_cpus": 1})
class Model:
    def __init__(self, model: str, threads: int) -> None:
        self.session = open_session(model, threads)
        self.shape = self.session.get_inputs()[0].shape[1:]

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.002)
    async def infer(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        return list(self.session.run(["y"], {"x": np.stack(rows)})[0])

    async def __call__(self, request: Request) -> Response:
        rows = np.frombuffer(await request.body(), np.float32).reshape(self.shape)
        found = await self.infer(rows)
        return Response(found.tobytes(), media_type="application/octet-stream")


ray.init(
    num_cpus=2,
    include_dashboard=False,
    logging_level=logging.WARNING,
    log_to_driver=False,
    object_store_memory=128 << 20,
)
serve.start(
    http_options={"host": "127.0.0.1", "port": int(PORT)},
    logging_config={"log_level": "WARNING", "enable_access_log": False},
)
serve.run(Model.bind(MODEL, int(THREADS)), route_prefix="/infer")
signal.sigwait({signal.SIGTERM, signal.SIGINT})
serve.shutdown()
ray.shutdown()
