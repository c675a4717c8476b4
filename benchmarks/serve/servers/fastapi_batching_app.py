"""FastAPI by hand with batching by hand: one thread runs what queued while it was busy.

python fastapi_batching_app.py MODEL PORT THREADS
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from session import open_session

MAX_BATCH = 32
MODEL, PORT, THREADS = sys.argv[1:4]
session = open_session(MODEL, int(THREADS))
SHAPE = (-1, *session.get_inputs()[0].shape[1:])
waiting: list[tuple[np.ndarray, asyncio.Future[np.ndarray]]] = []
arrived = asyncio.Event()


def run(rows: list[np.ndarray]) -> np.ndarray:
    return session.run(["y"], {"x": np.concatenate(rows)})[0]


async def batches() -> None:
    while True:
        await arrived.wait()
        batch, waiting[:] = waiting[:MAX_BATCH], waiting[MAX_BATCH:]
        if not waiting:
            arrived.clear()
        found = await asyncio.to_thread(run, [rows for rows, _ in batch])
        for (_, answer), row in zip(batch, found, strict=True):
            answer.set_result(row)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    task = asyncio.create_task(batches())
    yield
    task.cancel()


app = FastAPI(lifespan=lifespan)


@app.post("/infer")
async def infer(request: Request) -> Response:
    answer = asyncio.get_running_loop().create_future()
    waiting.append((np.frombuffer(await request.body(), np.float32).reshape(SHAPE), answer))
    arrived.set()
    return Response((await answer).tobytes(), media_type="application/octet-stream")


uvicorn.run(
    app, port=int(PORT), loop="uvloop", http="httptools", access_log=False, log_level="warning"
)
