"""Serve a model in Ray Serve: a front on each node calls replicas, each with its own engine.

Ray places replicas, scales them and routes to them. The front sends a request once more if its
replica or node is lost, as inference can be repeated; Ray's proxy would answer 500.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploykit.core.extras import require
from deploykit.core.files import StrPath
from deploykit.serving.hosted import Answered, Asked, HostedApp
from deploykit.serving.options import ServeOptions
from deploykit.serving.serve import open_engines

serve = require("ray.serve")
ray_exceptions = require("ray.exceptions")
ray_serve_exceptions = require("ray.serve.exceptions")
responses = require("starlette.responses")

log = logging.getLogger(__name__)

FRONT, REPLICA = "front", "model"  # the deployments' names in serve.yaml
ASKS = 2  # one retry after a replica or node is lost
_LOST = (ray_exceptions.RayActorError, ray_exceptions.WorkerCrashedError)
_AGAIN_S = 0.1  # time for Ray to notice other losses


def ray_application(open_service: Callable[[], HostedApp]) -> Any:
    """Return the application for `serve run` and serve.yaml, which holds its options.

    `open_service` runs in each replica, on its event loop's thread, and calls `open_replica`. Ray
    pickles it by name, so its module must be importable on every node.
    """
    replica = serve.deployment(name=REPLICA)(Replica)
    front = serve.deployment(name=FRONT)(Front)
    return front.bind(replica.bind(open_service), ServeOptions.max_body_bytes)


def open_replica(
    model: StrPath,
    name: str,
    *,
    device: str = "auto",
    threads: int | None = None,
    max_batch: int = 32,
) -> HostedApp:
    """Open `model` and serve it as `name` on the running event loop, once it is warm."""
    options = ServeOptions(device=device, threads=threads, max_batch=max_batch)
    return HostedApp({name: open_engines(Path(model), options)}, options)


class Replica:
    def __init__(self, open_service: Callable[[], HostedApp]) -> None:
        self._service = open_service()

    async def __call__(self, asked: Asked) -> Answered:
        return await self._service.answer(asked)

    def check_health(self) -> None:
        """Raise if the replica cannot serve; after three failures Ray replaces it."""
        reason = self._service.repository.why_not_ready()
        if reason is not None:
            raise RuntimeError(reason)

    def __del__(self) -> None:
        """Close the engine. Ray calls this once no request is in flight."""
        if hasattr(self, "_service"):
            self._service.close()


class Front:
    """Forwards requests from its node's proxy to a replica, and retries once if that is lost."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas = replicas
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Any) -> Any:
        path = request.scope.get("raw_path") or request.scope["path"].encode()
        query = request.scope.get("query_string", b"")
        target = (path + b"?" + query if query else path).decode("latin-1")
        headers = tuple((name, value) for name, value in request.headers.raw)
        received = await self._receive(request)
        if received is None:
            answered = _refused(413, f"the body is above {self._max_body_bytes} bytes")
        else:
            answered = await self._ask((request.method, target, headers, received))
        status, fields, body = answered
        response = responses.Response(body, status_code=status)
        response.raw_headers = [*fields, (b"content-length", str(len(body)).encode())]
        return response

    async def _receive(self, request: Any) -> bytes | None:
        """Return the body, or None if it is too large, without reading it to the end."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_body_bytes:
                return None
        return bytes(body)

    async def _ask(self, asked: Asked) -> Answered:
        for attempt in range(1, ASKS + 1):
            try:
                answered: Answered = await self._replicas.remote(asked)
            except _LOST as exc:
                log.warning("%s: a replica was lost with it (%s)", asked[1], type(exc).__name__)
                if attempt < ASKS:
                    await asyncio.sleep(_AGAIN_S)
            except (
                ray_serve_exceptions.BackPressureError,
                ray_serve_exceptions.DeploymentUnavailableError,
            ):
                return _refused(503, "the queue is full, or no replica runs; try again later")
            else:
                return answered
        return _refused(503, "two replicas were lost with the request; try again later")


def _refused(status: int, reason: str) -> Answered:
    again = ((b"retry-after", b"1"),) if status == 503 else ()
    body = json.dumps({"error": reason}).encode()
    return status, ((b"content-type", b"application/json"), *again), body
