"""FastAPI by hand: a raw tensor in, a raw tensor out, one call of the session per request.

python fastapi_app.py MODEL PORT THREADS
"""

from __future__ import annotations

import sys

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from session import open_session

MODEL, PORT, THREADS = sys.argv[1:4]
session = open_session(MODEL, int(THREADS))
SHAPE = (-1, *session.get_inputs()[0].shape[1:])
app = FastAPI()


@app.post("/infer")
async def infer(request: Request) -> Response:
    rows = np.frombuffer(await request.body(), np.float32).reshape(SHAPE)
    (found,) = session.run(["y"], {"x": rows})
    return Response(found.tobytes(), media_type="application/octet-stream")


uvicorn.run(
    app, port=int(PORT), loop="uvloop", http="httptools", access_log=False, log_level="warning"
)
