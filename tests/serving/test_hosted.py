"""The server's routes in another server's event loop, as a replica on a Ray cluster runs them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from deploykit.engines.engine import Engine
from deploykit.serving.hosted import Answered, Asked, HostedApp
from deploykit.serving.options import ServeOptions
from tests.support.fake_engine import FakeEngine
from tests.support.serving.running import GatedEngine

OPTIONS = ServeOptions(max_batch=4, max_body_bytes=4096)


def serve(
    act: Callable[[HostedApp], Awaitable[Any]], engines: Sequence[Engine] | None = None
) -> Any:
    """What `act` returns; `app.close` ends the engines."""

    async def run() -> Any:
        app = HostedApp({"m": engines or [FakeEngine()]}, OPTIONS)
        try:
            app.start()
            return await act(app)
        finally:
            app.close()

    return asyncio.run(run())


def get(path: str, method: str = "GET") -> Asked:
    return method, path, (), b""


def infer(values: np.ndarray, **fields: bytes) -> Asked:
    tensor = {"name": "x", "shape": values.shape, "datatype": "FP32", "data": values.tolist()}
    body = json.dumps({"inputs": [tensor]}).encode()
    headers = tuple((name.replace("_", "-").encode(), value) for name, value in fields.items())
    return "POST", "/v2/models/m/infer", headers, body


def ask(*asked: Asked) -> list[Answered]:
    async def act(app: HostedApp) -> list[Answered]:
        return await asyncio.gather(*map(app.answer, asked))

    found: list[Answered] = serve(act)
    return found


ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_an_inference_is_answered_as_over_a_socket() -> None:
    ((status, headers, body),) = ask(infer(ROWS))
    assert status == 200
    assert dict(headers)[b"content-type"] == b"application/json"
    assert json.loads(body)["outputs"][0]["data"] == (2 * ROWS + 1).reshape(-1).tolist()


def test_requests_that_wait_together_are_joined() -> None:
    async def act(app: HostedApp) -> dict[str, Any]:
        await asyncio.gather(*(app.answer(infer(ROWS)) for _ in range(8)))
        return app.repository.models["m"].metrics.statistics()

    found = serve(act)
    assert found["inference_count"] == 16
    assert found["execution_count"] < 8


@pytest.mark.parametrize(
    ("asked", "status", "reason"),
    [
        (get("/nowhere"), 404, "there is no route"),
        (get("/v2/models/m/infer"), 405, "use POST"),
        (("POST", "/v2/models/m/infer", (), b"{"), 400, "JSON"),
        (("POST", "/v2/models/m/infer", (), bytes(5000)), 413, "above 4096 bytes"),
    ],
)
def test_an_error_is_an_answer(asked: Asked, status: int, reason: str) -> None:
    ((got, _, body),) = ask(asked)
    assert got == status
    assert reason in json.loads(body)["error"]


def test_head_has_no_body() -> None:
    (answered,) = ask(get("/v2/health/ready", "HEAD"))
    assert (answered[0], answered[2]) == (200, b"")


def test_nothing_stays_in_the_memory_budget() -> None:
    async def act(app: HostedApp) -> int:
        await asyncio.gather(*(app.answer(infer(ROWS)) for _ in range(4)))
        return app._memory.bytes

    assert serve(act) == 0


def test_a_cancelled_request_leaves_the_queue() -> None:
    engine = GatedEngine(max_batch=2)

    async def act(app: HostedApp) -> tuple[int, int]:
        engine.warm, model = True, app.repository.models["m"]
        tasks = [asyncio.create_task(app.answer(infer(ROWS))) for _ in range(4)]
        while model.unanswered < 4 or model.waiting > 3:  # the engine has one
            await asyncio.sleep(0)
        before = model.waiting
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        after = model.waiting
        engine.gate.set()
        return before, after

    assert serve(act, [engine]) == (3, 0)


def test_the_end_closes_the_engines() -> None:
    engine = FakeEngine()

    async def act(_app: HostedApp) -> None: ...

    serve(act, [engine])
    assert engine.closed
