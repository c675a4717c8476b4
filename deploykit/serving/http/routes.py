"""The routes of the HTTP server in a table: each gets a Call and replies once.

Inference decodes the call's body and encodes the outputs as its reply; large JSON and compressed
bodies are offloaded to another thread. No name in a target becomes a file path; an unknown one is a
plain 404.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

import orjson

from deploykit.core.errors import (
    BadInput,
    DeploykitError,
    NotFound,
    Overloaded,
    TooLarge,
    Unsupported,
    quote,
)
from deploykit.core.tensors import Bytes
from deploykit.serving.http.predict import (
    HttpTaskCall,
    PipelineRoute,
    PredictRoute,
    from_base64,
)
from deploykit.serving.models.inference import Inference, Items, ModelRoute
from deploykit.serving.models.offload import Lane, Offload
from deploykit.serving.models.offload import Result as Offloaded
from deploykit.serving.models.pipelines import over_budget
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.observe.metrics import Sample, expositions
from deploykit.serving.oip import json
from deploykit.serving.oip.request import LARGE_BYTES, Request, Result, array_bytes
from deploykit.serving.options import VERSION
from deploykit.serving.transport.connection import (
    JSON,
    Call,
    Head,
    reply_error,
    reply_exception,
    reply_with,
)
from deploykit.serving.transport.encodings import (
    COMPRESSED,
    check_charset,
    compress,
    decompress,
)
from deploykit.serving.transport.security import PREFLIGHT
from deploykit.serving.web.page import FILES, HTML, Address, guide, openapi, status
from deploykit.serving.workers.group import ServerGroup, of_model

PAGE_HEADERS = (  # a page loads nothing from other sites and cannot be framed
    b"Content-Security-Policy: default-src 'self'; frame-ancestors 'none'\r\n"
    b"X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nContent-Type: %s\r\n"
)
_PAUSE_S = 0.01  # pause after the metrics were written, if other clients wait
_REPLIES = 100  # replies with metrics in one turn of the event loop
_ACCEPT_BYTES = 1024  # the rest of a longer header is ignored
_DOCUMENT_BYTES = 64 << 10
_REGION = re.compile(r"/v2/systemsharedmemory(?:/region/([^/]+))?/(status|register|unregister)")
_UNREGISTER_CUDA = "/v2/cudasharedmemory/unregister"  # NVIDIA's examples begin by calling it
_NOT_OFFERED = (
    "/v2/systemsharedmemory", "/v2/cudasharedmemory", "/v2/trace", "/v2/logging",
    "/v2/repository/models",
)  # fmt: skip

_BINARY = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
_INLINE_BYTES = 4 << 10  # outputs up to this size are compressed on the event loop's thread

Exposition = tuple[bytes, bytes]  # headers and text of the metrics
Route = Callable[[Call], None]


class InferRoute(ModelRoute):
    """Answers the inference requests of one model."""

    def __call__(self, call: Call) -> None:
        """Answer a request."""
        head, body = call.head, call.body
        json_bytes = head.json_bytes
        if self.model.task.ready and _sends_bytes(head, body):
            large = len(body) > LARGE_BYTES or head.encoding is not None
            task = HttpTaskInference(self, call, head.trace)
            call.body = b""
            task.split(body, task.items, large=large)
            return
        call.body = b""
        large = self.model.largest_output_bytes > LARGE_BYTES
        if large and not call.reserve(0):  # checked before the engine runs in vain
            raise over_budget()
        slow = json_bytes is None or len(body) > self.slow_bytes
        slow_bytes = len(body) if slow else json_bytes or 0
        inference = HttpInference(self, call, body, head.trace)
        del body
        if slow_bytes > LARGE_BYTES or head.encoding is not None:
            inference.set_lane(slow_bytes, LARGE_BYTES)
            inference.start_offloaded()
        else:
            inference.start()


class HttpInference(Inference):
    """One inference call. Its source is the body."""

    __slots__ = ()

    client: Call
    route: InferRoute

    def decode(self, source: Bytes) -> Request:
        route = self.route
        return json.decode(source, self.client.head.json_bytes, route.model.signature, route.memory)

    def decode_large(self) -> Request:
        body = source = self.take_source()
        route, encoding = self.route, self.client.head.encoding
        if encoding is not None:
            limit = route.max_body_bytes
            limit = limit if self.lane else min(limit, LARGE_BYTES)
            try:
                body = decompress(body, encoding, limit)
            except TooLarge:
                if limit < route.max_body_bytes:  # it waits with the large requests
                    self._source, self.lane = source, Lane.LARGE
                raise
        request = self.decode(body)
        if encoding is None:
            return request
        return request._replace(copied_bytes=max(request.copied_bytes, len(body)))

    def encodes_slowly(self) -> bool:
        large = self.route.model.largest_output_bytes > LARGE_BYTES
        slow = large and self.set_lane(self.slow_bytes(), LARGE_BYTES)
        if slow or self.client.head.coding is None:
            return slow
        size = sum(map(array_bytes, self.pending.outputs.values()))
        self.set_lane(size, LARGE_BYTES)
        return size > _INLINE_BYTES

    def encode(self) -> tuple[int, bytes, Sequence[Bytes]]:
        route, request, outputs = self.route, self.request, self.pending.outputs
        name, signature = route.model.name, route.model.signature
        parts, json_bytes = json.encode(name, request, outputs, signature, route.memory)
        headers = JSON if json_bytes is None else _BINARY % json_bytes
        coding = self.client.head.coding
        if coding is None:
            return 200, headers, parts
        return 200, headers + COMPRESSED % coding, [compress(parts, coding)]

    def fail(self, error: Exception) -> None:
        reply_exception(self.client, error)


def _sends_bytes(head: Head, body: Bytes) -> bool:
    """Return whether the JSON part has a BYTES tensor: images or sentences, not a model's input."""
    if head.encoding is not None:  # the tensors are described at its beginning
        with contextlib.suppress(zlib.error):
            start = bytes(body[:LARGE_BYTES])
            return b'"BYTES"' in zlib.decompressobj(47).decompress(start, LARGE_BYTES)
    return b'"BYTES"' in bytes(body[: head.json_bytes])


def _reply(call: Call, name: str, request: Request, results: Sequence[Result]) -> None:
    parts, json_bytes = json.encode_results(name, request.id, results)
    call.reply(200, JSON if json_bytes is None else _BINARY % json_bytes, parts)


class HttpTaskInference(HttpTaskCall):
    """A request with images, which JSON has in base64, or sentences: one BYTES input."""

    route: InferRoute

    def items(self, source: Bytes) -> Items:
        head = self.client.head
        body = decompress(source, head.encoding, self.route.max_body_bytes)
        request = json.decode(body, head.json_bytes, self.signature, self.route.memory)
        found = self.items_of(request)
        if self.steps.task.image is None:
            return found
        images = cast("Sequence[bytes]", found.items)
        return Items([_from_json(item, number) for number, item in enumerate(images, 1)])

    def reply(self, answers: Sequence[bytes]) -> None:
        _reply(self.client, self.route.model.name, self.request, self.outputs_of(answers))


def _from_json(item: bytes, number: int) -> bytes:
    """Return an image that came as it is, or in base64 where it came as a string of JSON."""
    with contextlib.suppress(UnicodeDecodeError, BadInput):
        return from_base64(item.decode("ascii"), number)
    return item


class PipelineInferRoute(PipelineRoute):
    """Answers inference requests of a pipeline: a BYTES input, or an image's UINT8 pixels."""

    def __call__(self, call: Call) -> None:
        """Start the pipeline. Raises Overloaded at the shutdown."""
        pipeline, body, json_bytes = self._pipeline, call.body, call.head.json_bytes
        call.body = b""

        def read() -> Request:
            plain = decompress(body, call.head.encoding, pipeline.options.max_body_bytes)
            sends_bytes = b'"BYTES"' in bytes(plain[:json_bytes])
            signature = pipeline.signature if sends_bytes else pipeline.tensors
            request = json.decode(plain, json_bytes, signature, pipeline.memory)
            if sends_bytes and pipeline.takes == "image":
                (image,) = request.feeds.values()
                plain_image = image.copy()
                plain_image[0] = _from_json(image[0], 1)
                request = request._replace(feeds={pipeline.input: plain_image})
            return request

        reply, fail = partial(_reply, call, pipeline.name), partial(reply_exception, call)
        pipeline.infer(read, reply, fail, call, call.head.trace)


class Scrapes:
    """GET /metrics for any number of clients: a reply is never older than its request.

    Writing the metrics takes some ms of Python, on any thread: done for each request, it would keep
    the event loop from running. They are written once for all that wait, then after a pause.
    """

    def __init__(self, group: ServerGroup, offload: Offload) -> None:
        self._group = group
        self._offload = offload
        self._waiting: list[Call] = []
        self._busy = False

    def __call__(self, call: Call) -> None:
        self._waiting.append(call)
        if not self._busy:
            self._write()

    def _write(self) -> None:
        calls, self._waiting, self._busy = self._waiting, [], True
        self._group.collect("samples", partial(self._expose, calls))

    def _expose(self, calls: list[Call], samples: Offloaded[Iterable[Sample]]) -> None:
        try:
            self._offload(lambda: _expose(samples(), calls), partial(self._reply, calls))
        except DeploykitError as exc:
            self._busy = False
            for call in calls:
                reply_exception(call, exc)

    def _reply(self, calls: list[Call], result: Offloaded[Mapping[Call, Exposition]]) -> None:
        for call in calls[:_REPLIES]:
            try:
                headers, text = result()[call]
                call.reply(200, headers, [text])
            except Exception as exc:  # noqa: BLE001 - every error is a reply
                reply_exception(call, exc)
        if rest := calls[_REPLIES:]:
            asyncio.get_running_loop().call_soon(self._reply, rest, result)
        elif self._waiting:
            asyncio.get_running_loop().call_later(_PAUSE_S, self._write)
        else:
            self._busy = False


def _expose(samples: Iterable[Sample], calls: Sequence[Call]) -> dict[Call, Exposition]:
    """Write the samples in each form that a client wants: gzip makes a tenth of them."""
    accepts = [(call.head.accept or b"")[:_ACCEPT_BYTES].decode("latin-1") for call in calls]
    plain, pack = expositions(samples, set(accepts)), cache(compress)
    found = {}
    for call, accept in zip(calls, accepts, strict=True):
        text, content_type = plain[accept]
        headers, coding = PAGE_HEADERS % content_type.encode(), call.head.coding
        if coding is not None:
            text, headers = pack((text,), coding), headers + COMPRESSED % coding
        found[call] = headers, text
    return found


class Routes:
    """The table: path -> (method, route). HEAD is answered as GET without a body."""

    def __init__(
        self,
        repository: ModelRepository,
        offload: Offload,
        *,
        scheme: str = "http",
        group: ServerGroup | None = None,
        grpc_port: int | None = None,
    ) -> None:
        """Build the table. `scheme` and `grpc_port` are for the examples at /docs."""
        self._repository = repository
        self._scheme = scheme
        self._grpc_port = grpc_port
        self.group = group or ServerGroup()
        self._root_path = repository.options.root_path.rstrip("/")
        reports: dict[str, Callable[[], object]] = {  # that other processes may ask of this one
            "samples": repository.samples,
            "statistics": repository.statistics,
            "status": partial(status, repository),
        }
        names = () if repository.memory is None else ("register", "unregister")
        self.group.offer(reports, {name: getattr(repository.memory, name) for name in names})
        self._table: dict[str, tuple[str, Route]] = {
            **dict.fromkeys(("/v2", "/v2/"), ("GET", _value(repository.metadata))),
            "/v2/health/live": ("GET", _value(lambda: {"live": True})),
            "/v2/health/ready": ("GET", _ready(repository.why_not_ready, {"ready": True})),
            "/v2/models/stats": ("GET", partial(self._statistics, None)),
            "/v2/repository/index": ("POST", self._index),
            "/metrics": ("GET", Scrapes(self.group, offload)),
            "/status": ("GET", self._status),
            "/openapi.json": ("GET", _file("application/json", openapi(self._root_path))),
            "/docs": ("GET", self._guide),
        }
        if self._root_path:  # links of the dashboard are relative to this folder
            slash = f"Location: {self._root_path}/\r\n".encode()
            self._table[self._root_path] = ("GET", lambda call: call.reply(308, slash, []))
        for path, (content_type, body) in FILES.items():
            self._table[path] = ("GET", _file(content_type, body))
        for name, served in repository.served.items():
            why_not = partial(repository.why_not_ready, served)
            self._add(name, "", "GET", _value(served.metadata))
            self._add(name, "/ready", "GET", _ready(why_not, {"name": name, "ready": True}))
            self._add(name, "/config", "GET", _value(served.config))
            self._add(name, "/stats", "GET", partial(self._statistics, name))
        for name, model in repository.models.items():
            self._add(name, "/infer", "POST", InferRoute(repository, model, offload))
            self._add(name, "/predict", "POST", PredictRoute(repository, model, offload))
        for name, pipeline in repository.pipelines.items():
            self._add(name, "/predict", "POST", PipelineRoute(pipeline))
            self._add(name, "/infer", "POST", PipelineInferRoute(pipeline))

    def _add(self, name: str, rest: str, verb: str, route: Route) -> None:
        for base in (f"/v2/models/{name}", f"/v2/models/{name}/versions/{VERSION}"):
            self._table[base + rest] = (verb, route)

    def handle(self, call: Call) -> None:
        """Answer one call, now or later. Never raises: a bug is a 500, not a lost connection."""
        try:
            head = call.head
            if head.method == "OPTIONS" and head.cors:  # a CORS preflight request
                call.reply(200, PREFLIGHT, [])
                return
            verb, route = self._table.get(head.path) or self._find(head.path)
            if head.method == verb or (head.method == "HEAD" and verb == "GET"):
                if head.charset is not None and len(call.body):
                    check_charset(head.charset, call.body)
                route(call)
                return
            allow = "GET, HEAD" if verb == "GET" else verb
            text = f"{quote(head.method)} is not allowed here, use {verb}"
            reply_error(call, 405, text, f"Allow: {allow}\r\n".encode())
        except Exception as exc:  # noqa: BLE001 - every error is a reply
            reply_exception(call, exc)

    def _find(self, path: str) -> tuple[str, Route]:
        """Find a route that is not in the table. Raises NotFound, Unsupported."""
        memory = self._repository.memory
        region = _REGION.fullmatch(path)
        if region and memory is not None:
            name, action = region.groups()
            if action == "status":
                return "GET", _value(partial(memory.status, name))
            if action == "register":
                return "POST", partial(self._register, name)
            return "POST", partial(self._change, "unregister", (name,))
        if path == _UNREGISTER_CUDA and memory is not None:
            return "POST", lambda call: call.reply(200, JSON, [])
        if path.startswith(_NOT_OFFERED) or path.endswith("/trace/setting"):
            raise Unsupported("this extension is not offered by this server")
        if path.startswith("/v2/models/"):
            parts = path.split("/")
            version = parts[5] if len(parts) > 5 and parts[4] == "versions" else VERSION
            self._repository.find(parts[3], version)
        raise NotFound(f"there is no route {quote(path)}")

    def _status(self, call: Call) -> None:
        self.group.collect("status", lambda found: reply_with(call, lambda: orjson.dumps(found())))

    def _statistics(self, name: str | None, call: Call) -> None:
        self.group.collect(
            "statistics",
            lambda found: reply_with(call, lambda: orjson.dumps(of_model(name, found()))),
        )

    def _register(self, name: str | None, call: Call) -> None:
        body = _document(call)
        arguments = name, body.get("key"), body.get("offset", 0), body.get("byte_size")
        self._change("register", arguments, call)

    def _change(self, action: str, arguments: tuple[Any, ...], call: Call) -> None:
        self.group.change(action, arguments, lambda done: reply_with(call, lambda: done() or b""))

    def _guide(self, call: Call) -> None:
        host = (call.head.host or b"localhost").decode("latin-1")
        token = self._repository.options.token is not None
        address = Address(self._scheme, host, self._grpc_port, token, self._root_path)
        page = guide(self._repository, address)
        call.reply(200, PAGE_HEADERS % HTML.encode(), [page])

    def _index(self, call: Call) -> None:
        ready = _document(call).get("ready", False) if call.body else False
        if type(ready) is not bool:
            raise BadInput(f"'ready' must be true or false, got {quote(ready)}")
        models = self._repository.index()
        chosen = [model for model in models if model["state"] == "READY" or not ready]
        call.reply(200, JSON, [orjson.dumps(chosen)])


def _document(call: Call) -> dict[str, Any]:
    """Parse the JSON of a request other than inference, on the event loop's thread."""
    if len(call.body) > _DOCUMENT_BYTES:
        raise TooLarge(f"the body is above {_DOCUMENT_BYTES} bytes, more than this route needs")
    body = decompress(call.body, call.head.encoding, _DOCUMENT_BYTES)
    return json.parse_json(bytes(body))


def _value(make: Callable[[], object]) -> Route:
    return lambda call: call.reply(200, JSON, [orjson.dumps(make())])


def _file(content_type: str, content: bytes) -> Route:
    headers = PAGE_HEADERS % content_type.encode()
    return lambda call: call.reply(200, headers, [content])


def _ready(why_not: Callable[[], str | None], value: Mapping[str, Any]) -> Route:
    def make() -> Mapping[str, Any]:
        if reason := why_not():
            raise Overloaded(reason)
        return value

    return _value(make)
