"""FastAPI by hand: a raw tensor in, a raw tensor out, one call of the session per request.

python fastapi_app.py MODEL PORT THREADS [GRPC_PORT WORKERS]    (it has no gRPC)
"""

from __future__ import annotations

import sys

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from session import open_session

MODEL, PORT, THREADS = sys.argv[1:4]
WORKERS = int(sys.argv[5]) if len(sys.argv) > 5 else 1


def make() -> FastAPI:
    """The program of one process, with a session of its own and its share of the threads."""
    session = open_session(MODEL, max(1, int(THREADS) // WORKERS))
    shape = (-1, *session.get_inputs()[0].shape[1:])
    app = FastAPI()

    @app.post("/infer")
    async def infer(request: Request) -> Response:
        rows = np.frombuffer(await request.body(), np.float32).reshape(shape)
        (found,) = session.run(["y"], {"x": rows})
        return Response(found.tobytes(), media_type="application/octet-stream")

    return app


if __name__ == "__main__":
    uvicorn.run(
        "fastapi_app:make",
        factory=True,
        workers=WORKERS,
        port=int(PORT),
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )
