"""The routes of the Open Inference Protocol over a Service: a call in, one reply out.

In: a `Call` (verb, target, body) that the transport has read whole and bounded. Out: exactly one
`reply`, at once or, for inference, when the engine is done. Routes stand in a table made at start:
no name in a target ever becomes a path, and an unknown one is a plain 404.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import orjson

from deploykit.core.errors import BadInput, DeploykitError, NotFound, Overloaded
from deploykit.serving import oip
from deploykit.serving.payload import show
from deploykit.serving.policy import Pending
from deploykit.serving.service import VERSION, ServedModel, Service

log = logging.getLogger(__name__)

JSON = b"Content-Type: application/json\r\n"
_BINARY = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
_PROMETHEUS = b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
_RETRY = b"Retry-After: 1\r\n"
_NOT_OFFERED = (
    "/v2/systemsharedmemory",
    "/v2/cudasharedmemory",
    "/v2/trace",
    "/v2/logging",
    "/v2/repository/models",
)


class Call(Protocol):
    """One request as the transport read it, and the way back to who sent it."""

    method: str
    target: str
    body: bytes
    json_bytes: bytes | None  # the header Inference-Header-Content-Length
    encoding: bytes | None  # the header Content-Encoding
    cancel: Callable[[], object] | None  # what to do if the client goes before the reply

    def reply(self, status: int, headers: bytes, parts: list[bytes]) -> None: ...


Route = Callable[[Call], None]


class Routes:
    """The table: target -> (verb, what answers it). HEAD is GET without a body."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._table: dict[str, tuple[str, Route]] = {
            "/v2": ("GET", self._value(service.metadata)),
            "/v2/": ("GET", self._value(service.metadata)),
            "/v2/health/live": ("GET", self._value(lambda: {"live": True})),
            "/v2/health/ready": ("GET", self._ready("the server", {"ready": True})),
            "/v2/models/stats": ("GET", self._value(service.statistics)),
            "/v2/repository/index": ("POST", self._value(service.index)),
            "/metrics": ("GET", self._metrics),
        }
        for name, model in service.models.items():
            ready = {"name": name, "ready": True}
            for base in (f"/v2/models/{name}", f"/v2/models/{name}/versions/{VERSION}"):
                self._table[base] = ("GET", self._value(model.metadata))
                self._table[f"{base}/ready"] = ("GET", self._ready(f"model '{name}'", ready))
                self._table[f"{base}/config"] = ("GET", self._value(model.config))
                statistics = partial(service.statistics, model)
                self._table[f"{base}/stats"] = ("GET", self._value(statistics))
                self._table[f"{base}/infer"] = ("POST", partial(self._infer, model))

    def handle(self, call: Call) -> None:
        """Answer one call, now or later. Never raises: a bug is a 500, not a lost connection."""
        try:
            found = self._table.get(call.target)
            if found is None:
                found = self._table.get(call.target.partition("?")[0])
            if found is None:
                self._unknown(call)
                return
            verb, route = found
            if call.method != verb and not (verb == "GET" and call.method == "HEAD"):
                allow = "GET, HEAD" if verb == "GET" else verb
                text = f"{show(call.method)} is not allowed here, use {verb}"
                reply_error(call, 405, text, f"Allow: {allow}\r\n".encode())
                return
            route(call)
        except DeploykitError as exc:
            reply_exception(call, exc)
        except Exception:
            log.exception("a request to %s failed", show(call.target))
            reply_error(call, 500, "an error inside the server; its log says more")

    def _unknown(self, call: Call) -> None:
        path = call.target.partition("?")[0]
        parts = path.split("/")
        if path.startswith(_NOT_OFFERED) or path.endswith("/trace/setting"):
            reply_error(call, 501, "this extension is not offered by this server")
            return
        if path.startswith("/v2/models/"):
            version = parts[5] if len(parts) > 5 and parts[4] == "versions" else VERSION
            self._service.find(parts[3], version)
        raise NotFound(f"there is no route {show(path)}")

    def _value(self, make: Callable[[], object]) -> Route:
        def route(call: Call) -> None:
            call.reply(200, JSON, [orjson.dumps(make())])

        return route

    def _ready(self, what: str, value: object) -> Route:
        body = orjson.dumps(value)

        def route(call: Call) -> None:
            if self._service.draining:
                raise Overloaded(f"{what} is shutting down")
            call.reply(200, JSON, [body])

        return route

    def _metrics(self, call: Call) -> None:
        call.reply(200, _PROMETHEUS, [self._service.prometheus().encode()])

    def _infer(self, model: ServedModel, call: Call) -> None:
        if call.encoding is not None and call.encoding.lower() != b"identity":
            model.metrics.bad_request()
            text = "compressed requests are not offered; send the body uncompressed"
            reply_error(call, 415, text)
            return
        try:
            json_bytes = oip.header_length(call.json_bytes)
            request = oip.decode(call.body, json_bytes, model.signature)
        except BadInput:
            model.metrics.bad_request()
            raise
        call.body = b""  # the arrays hold what they need of it
        done = partial(self._answer, model, call, request)
        pending = self._service.infer(model, request, done)
        call.cancel = partial(model.batcher.cancel, pending)

    def _answer(
        self, model: ServedModel, call: Call, request: oip.Request, pending: Pending
    ) -> None:
        call.cancel = None
        try:
            if pending.error is not None:
                raise pending.error
            parts, json_bytes = oip.encode(
                model.name, VERSION, request, pending.outputs, model.signature
            )
            call.reply(200, JSON if json_bytes is None else _BINARY % json_bytes, parts)
        except DeploykitError as exc:
            reply_exception(call, exc)
        except Exception:
            log.exception("an answer of model '%s' could not be sent", model.name)
            reply_error(call, 500, "an error inside the server; its log says more")


def reply_exception(call: Call, exc: DeploykitError) -> None:
    text = f"{exc.message}; {exc.hint}" if exc.hint else exc.message
    reply_error(call, exc.http_status, text, _RETRY if exc.http_status == 503 else b"")


def reply_error(call: Call, status: int, text: str, headers: bytes = b"") -> None:
    """The protocol's error body, `{"error": "one sentence"}`, and one line in the log."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s %s: %d %s", show(call.method), show(call.target), status, show(text))
    call.reply(status, JSON + headers, [orjson.dumps({"error": text})])
