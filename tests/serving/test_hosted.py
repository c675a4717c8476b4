"""The server's routes in another server's event loop, as a replica on a Ray cluster runs them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from deploykit.serving.hosted import Asked, HostedApp
from deploykit.serving.options import ServeOptions
from tests.support.fake_engine import FakeEngine
from tests.support.serving.running import GatedEngine, infer_json

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
INFER: Asked = ("POST", "/v2/models/m/infer", (), infer_json(ROWS.tolist(), [2, 4]))


def serve(act: Callable[[HostedApp], Awaitable[Any]], engine: FakeEngine | None = None) -> Any:
    """What `act` returns; the end closes the engine."""
    engine = engine or FakeEngine()

    async def run() -> Any:
        options = ServeOptions(max_batch=4, max_body_bytes=4096)
        app = HostedApp({"m": [engine]}, options)
        try:
            return await act(app)
        finally:
            app.close()

    found = asyncio.run(run())
    assert engine.closed
    return found


def test_requests_that_wait_together_are_joined_and_answered_as_over_a_socket() -> None:
    async def act(app: HostedApp) -> None:
        for status, headers, body in await asyncio.gather(*(app.answer(INFER) for _ in range(8))):
            assert (status, dict(headers)[b"content-type"]) == (200, b"application/json")
            assert json.loads(body)["outputs"][0]["data"] == (2 * ROWS + 1).reshape(-1).tolist()
        found = app.repository.models["m"].metrics.statistics()
        assert found["inference_count"] == 16
        assert found["execution_count"] < 8
        assert app._memory.bytes == 0

    serve(act)


@pytest.mark.parametrize(
    ("asked", "status", "reason"),
    [
        (("GET", "/nowhere", (), b""), 404, "there is no route"),
        (("GET", "/v2/models/m/infer", (), b""), 405, "use POST"),
        (("POST", "/v2/models/m/infer", (), b"{"), 400, "JSON"),
        (("HEAD", "/v2/health/ready", (), b""), 200, ""),
    ],
)
def test_an_error_is_an_answer_and_head_has_no_body(asked: Asked, status: int, reason: str) -> None:
    got, _, body = serve(lambda app: app.answer(asked))
    assert got == status
    assert reason in json.loads(body)["error"] if reason else body == b""


def test_a_cancelled_request_leaves_the_queue() -> None:
    engine = GatedEngine(max_batch=2)

    async def act(app: HostedApp) -> tuple[int, int]:
        engine.warm, model = True, app.repository.models["m"]
        tasks = [asyncio.create_task(app.answer(INFER)) for _ in range(4)]
        while model.unanswered < 4 or model.batcher.waiting > 3:  # the engine has one
            await asyncio.sleep(0)
        before = model.batcher.waiting
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        after = model.batcher.waiting
        engine.gate.set()
        return before, after

    assert serve(act, engine) == (3, 0)
