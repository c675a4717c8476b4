"""The gRPC port: inference, as one call or as a stream, and the protocol's other methods.

Those are the methods of the Open Inference Protocol, health checks, and reflection.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from deploykit.core.errors import NotFound, quote
from deploykit.core.tensors import Bytes
from deploykit.engines.oip import FILES, MESSAGES, POOL, message_from
from deploykit.pipelines.threads import Peer
from deploykit.serving.grpc.call import STATUS, GrpcCall, Method, Replying, fail_with, parse_head
from deploykit.serving.http2 import Http2Limits, Http2Port
from deploykit.serving.models.inference import Inference, Items, ModelRoute, TaskCall
from deploykit.serving.models.offload import Lane, Offload
from deploykit.serving.models.pipelines import ServedPipeline
from deploykit.serving.models.repository import ModelRepository, Served
from deploykit.serving.oip import messages
from deploykit.serving.oip.request import Request, Result, Signature, collect_results
from deploykit.serving.options import VERSION
from deploykit.serving.transport.connection import About, MemoryBudget
from deploykit.serving.transport.security import AccessControl
from deploykit.serving.workers.group import Result as Collected
from deploykit.serving.workers.group import ServerGroup, of_model

log = logging.getLogger(__name__)

SERVICE = "inference.GRPCInferenceService"
_HEALTH = "grpc.health.v1.Health"
_SMALL_BYTES = 64 << 10  # the largest message to any method but inference
_WATCHES = 1024  # concurrent calls of Health.Watch, which needs no token
_WATCHES_EACH = 16  # the same, per connection
_REFLECTION_BYTES = 4096  # the largest question of a tool
_SERVICE_BYTES = 256  # the longest service name in those calls
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3

Make = Callable[[Any], Mapping[str, Any]]  # makes the reply to a request, as for JSON
Then = Callable[[Collected], None]  # takes a function that returns the reply or raises
Handler = Callable[[Any, Then], None]  # takes the request, and the function to call with the result
LARGE_BYTES = 32 << 10  # what is slow to decode is decoded on another thread above this size
_LONG_BYTES = 128 << 10  # above this size, together with other long ones
_LARGE_ITEMS_BYTES = 256 << 10  # images or sentences above this size are split on another thread
Message = tuple[messages.Split, bytes, int]  # the arguments of `messages.decode`


def _decode(source: Message, route: ModelRoute, model: Signature, client: Replying) -> Request:
    """Decode a message, which may wait until the deadline of its call at most."""
    request, left_us = messages.decode(*source, model, route.memory), client.left_us
    if left_us is None:
        return request
    return request._replace(timeout_us=max(1, min(left_us, request.timeout_us or left_us)))


class GrpcTaskCall(TaskCall):
    """ModelInfer of a model with images or sentences: one BYTES input, answered with JSON.

    The input is "image" or "text", of shape [N]; the output is "answer", of the same shape.
    """

    client: Replying

    def items(self, source: Message) -> Items:
        return self.items_of(_decode(source, self.route, self.signature, self.client))

    def reply(self, answers: Sequence[bytes]) -> None:
        found, name = self.outputs_of(answers), self.route.model.name
        self.client.reply(messages.encode(name, self.request.id, found))

    def refuse(self, error: Exception) -> None:
        fail_with(self.client, error)


def infer_pipeline(
    pipeline: ServedPipeline, client: Replying, source: Message, trace: str | None
) -> None:
    """Answer ModelInfer of a pipeline, with one BYTES element, with one of BYTES.

    An input image may be a UINT8 tensor [height, width, 3] instead. Raises Overloaded.
    """

    def decode() -> Request:
        sends_bytes = messages.sends_bytes(source[0].head)
        signature = pipeline.signature if sends_bytes else pipeline.tensors
        return messages.decode(*source, signature, pipeline.memory)

    def reply(request: Request, found: list[Result]) -> None:
        client.reply(messages.encode(pipeline.name, request.id, found))

    pipeline.infer(decode, reply, partial(fail_with, client), client, trace, client.left_us)


class GrpcInference(Inference):
    """One inference message. Its source is the message with the result of `split_request`."""

    __slots__ = ()

    client: Replying

    def decode(self, source: Message) -> Request:
        return _decode(source, self.route, self.route.model.signature, self.client)

    def encodes_slowly(self) -> bool:
        large = self.route.model.largest_output_bytes > _LONG_BYTES
        return large and self.set_lane(self.slow_bytes(), _LONG_BYTES)

    def encode(self) -> tuple[list[Bytes]]:
        model, request = self.route.model, self.request
        found = collect_results(request, self.pending.outputs, model.signature, self.route.memory)
        return (messages.encode(model.name, request.id, found),)

    def fail(self, error: Exception) -> None:
        fail_with(self.client, error)


class ReplySlot:
    """The place of one reply in a streaming call: replies keep the order of the messages."""

    __slots__ = ("_call", "about", "cancel", "parts")

    def __init__(self, call: GrpcCall) -> None:
        self._call = call
        self.parts: list[Bytes] | None = None
        self.about: About | None = None
        self.cancel: Callable[[], object] | None = None

    @property
    def gone(self) -> bool:
        return self._call.gone or self._call.trailers is not None  # both end the slot

    @property
    def peer(self) -> Peer:
        return self._call.peer

    @property
    def left_us(self) -> int | None:
        return self._call.left_us

    def reserve(self, size: int) -> bool:
        return self._call.reserve(size, self._call.slots.index(self))

    def reply(self, parts: list[Bytes]) -> None:
        self._put(messages.wrap_in_stream(parts))

    def fail(self, status: str, message: str) -> None:
        log.info("%s: %s %s", quote(self._call.head.path), status, quote(message))
        self._put(messages.stream_error(message))

    def _put(self, parts: list[Bytes]) -> None:
        self.parts = parts
        call, slots = self._call, self._call.slots
        while slots and slots[0].parts is not None:
            call.send_message(slots.pop(0).parts)
        call.read()  # reads messages that waited for this reply, or ends the call


class GrpcPort(Http2Port):
    """Serves a repository to the gRPC clients of one port. `offload`: see ModelRoute."""

    def __init__(
        self,
        repository: ModelRepository,
        access: AccessControl,
        memory: MemoryBudget,
        offload: Offload,
        limits: Http2Limits,
        group: ServerGroup,
    ) -> None:
        self._repository = repository
        self._group = group
        self.routes = {
            name: ModelRoute(repository, model, offload)
            for name, model in repository.models.items()
        }
        self._watching: dict[GrpcCall, tuple[str, int]] = {}  # service, and the health last sent
        at_once: dict[str, Make] = {
            "ServerLive": lambda _: {"live": True},
            "ServerReady": lambda _: {"ready": not repository.why_not_ready()},
            "ServerMetadata": lambda _: repository.metadata(),
            "ModelReady": self._model_ready,
            "ModelMetadata": lambda request: self._find(request).metadata(),
            "ModelConfig": lambda request: {"config": self._find(request).config()},
            "RepositoryIndex": self._index,
        }
        handlers: dict[str, Handler] = {"ModelStatistics": self._statistics}
        if (regions := repository.memory) is not None:
            at_once["SystemSharedMemoryStatus"] = lambda request: {
                "regions": {each["name"]: each for each in regions.status(request.name or None)}
            }
            at_once["CudaSharedMemoryUnregister"] = lambda _: {}  # NVIDIA's examples call it first
            for action in ("Register", "Unregister"):
                handlers[f"SystemSharedMemory{action}"] = partial(self._change, action)
        handlers |= {name: _at_once(make) for name, make in at_once.items()}
        methods = {
            f"/{SERVICE}/ModelInfer": Method(self.infer),
            f"/{SERVICE}/ModelStreamInfer": Method(self.stream, _end_stream),
            f"/{_HEALTH}/Check": _small("HealthCheck", _at_once(self._check), public=True),
            f"/{_HEALTH}/Watch": Method(self._watch, public=True, max_bytes=_SMALL_BYTES),
        }
        for version in ("v1", "v1alpha"):  # of the same messages: some tools ask for the older one
            path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            methods[path] = Method(_reflect, GrpcCall.complete, max_bytes=_REFLECTION_BYTES)
        for name, handler in handlers.items():
            public = name in ("ServerLive", "ServerReady")
            methods[f"/{SERVICE}/{name}"] = _small(name, handler, public=public)
        most = repository.options.max_body_bytes
        parse = partial(parse_head, methods, access.allows, limits.headers)
        large = partial(offload, lane=Lane.LARGE)
        super().__init__(parse, GrpcCall, limits, most, memory, large)

    def tick(self, now_s: float) -> None:
        """Send health changes to the Watch calls as well."""
        names = {name for name, _ in self._watching.values()}
        health = {name: self._health(name) for name in names}
        for call, (name, sent) in list(self._watching.items()):
            if health[name] != sent:
                self._send_health(call, name, health[name])
        super().tick(now_s)

    # -- inference -----------------------------------------------------------------------------

    def stream(self, call: GrpcCall, data: bytes, at: int) -> None:
        slot = ReplySlot(call)
        call.slots.append(slot)
        call.cancel = partial(_cancel, call.slots)
        self.infer(call, data, at, slot)

    def infer(self, call: GrpcCall, data: bytes, at: int, slot: ReplySlot | None = None) -> None:
        """Start one message of a call; `slot` takes the answer if the call is a stream."""
        client: Replying = call if slot is None else slot
        trace = call.head.trace
        try:
            split = messages.split_request(data, at)
            head, _, name, version = split
            source = (split, data, at)
            if name in self._repository.pipelines and version in ("", VERSION):
                pipeline = self._repository.pipelines[name]
                infer_pipeline(pipeline, client, source, trace)
                return
            model = self._repository.find(name, version or VERSION)
            route = self.routes[model.name]
            if model.task.ready and messages.sends_bytes(head):
                task = GrpcTaskCall(route, client, trace)
                task.split(source, task.items, large=len(data) > _LARGE_ITEMS_BYTES)
                return
            inference = GrpcInference(route, client, source, trace)
            slow = len(head) > LARGE_BYTES or len(data) > route.slow_bytes
            if slow or (route.memory is not None and messages.names_regions(head)):
                large = not slow or len(data) > _LONG_BYTES
                inference.lane = Lane.LARGE if large else Lane.SMALL
                del split, head, data, source
                inference.start_offloaded()
                return
        except Exception as exc:  # noqa: BLE001 - every error is a reply
            fail_with(client, exc)
            return
        inference.start()

    # -- unary methods ---------------------------------------------------------------------------

    def _model_ready(self, request: Any) -> Mapping[str, Any]:
        try:
            return {"ready": self._repository.why_not_ready(self._find(request)) is None}
        except NotFound:
            return {"ready": False}

    def _index(self, request: Any) -> Mapping[str, Any]:
        models = self._repository.index()
        if request.ready:
            models = [model for model in models if model["state"] == "READY"]
        return {"models": models}

    def _find(self, request: Any) -> Served:
        return self._repository.find_any(request.name, request.version or VERSION)

    # -- methods in which other processes take part ----------------------------------------------

    def _statistics(self, request: Any, then: Then) -> None:
        name = self._find(request).name if request.name else None
        self._group.collect("statistics", lambda result: then(lambda: of_model(name, result())))

    def _change(self, action: str, request: Any, then: Then) -> None:
        arguments: tuple[Any, ...] = (request.name or None,)
        if action == "Register":
            arguments = request.name, request.key, request.offset, request.byte_size
        self._group.change(action.lower(), arguments, lambda done: then(lambda: done() or {}))

    # -- health ----------------------------------------------------------------------------------

    def _health(self, name: str) -> int:
        if name in ("", SERVICE):
            return _NOT_SERVING if self._repository.why_not_ready() else _SERVING
        try:
            model = self._repository.find_any(name)
        except NotFound:
            return _UNKNOWN
        return _NOT_SERVING if self._repository.why_not_ready(model) else _SERVING

    def _check(self, request: Any) -> Mapping[str, Any]:
        status = self._health(request.service)
        if status == _UNKNOWN:
            raise NotFound(f"there is no service {quote(request.service)}")
        return {"status": status}

    def _watch(self, call: GrpcCall, data: bytes, at: int) -> None:
        name, link = messages.parse("HealthCheckRequest", data[at:]).service, call.link
        links = [each.link for each in self._watching]
        if len(links) >= _WATCHES or links.count(link) >= _WATCHES_EACH:
            text = f"of at most {_WATCHES_EACH} Watch calls of a client and {_WATCHES} of all"
            call.fail("RESOURCE_EXHAUSTED", f"there is one too many, {text}; use Check instead")
            return
        if len(name) > _SERVICE_BYTES:
            call.fail("INVALID_ARGUMENT", f"a service's name has at most {_SERVICE_BYTES} bytes")
            return
        call.cancel = partial(self._watching.pop, call, None)
        self._send_health(call, name, self._health(name))

    def _send_health(self, call: GrpcCall, name: str, status: int) -> None:
        self._watching[call] = name, status
        message = message_from("HealthCheckResponse", {"status": status})
        call.send_message([message.SerializeToString()])


def _cancel(slots: list[ReplySlot]) -> None:
    for slot in slots:
        if slot.cancel is not None:
            slot.cancel()
    slots.clear()


def _end_stream(call: GrpcCall) -> None:
    """End a call after the client's last message."""
    if not call.slots:
        call.complete()


def _at_once(make: Make) -> Handler:
    return lambda request, then: then(partial(make, request))


def _small(name: str, handle: Handler, *, public: bool = False) -> Method:
    """Return a method whose requests and replies are one small message each."""

    def message(call: GrpcCall, data: bytes, at: int) -> None:
        def then(result: Collected) -> None:
            try:
                reply = message_from(f"{name}Response", result()).SerializeToString()
            except Exception as exc:  # noqa: BLE001 - every error is a reply
                fail_with(call, exc)
            else:
                call.reply([reply])

        handle(messages.parse(f"{name}Request", data[at:]), then)

    return Method(message, public=public, max_bytes=_SMALL_BYTES)


def _reflect(call: GrpcCall, data: bytes, at: int) -> None:
    """Describe a service or a file to grpcurl, Postman and other tools; no file imports another."""
    request = messages.parse("ServerReflectionRequest", data[at:])
    kind = request.WhichOneof("message_request") or ""
    find = {"file_by_filename": POOL.FindFileByName, "file_containing_symbol": _file_with}
    answer = MESSAGES["ServerReflectionResponse"](valid_host=request.host, original_request=request)
    if kind == "list_services":
        for file in FILES:
            for service in file.service:
                answer.list_services_response.service.add(name=f"{file.package}.{service.name}")
    else:
        try:
            found = find[kind](getattr(request, kind)).serialized_pb
            answer.file_descriptor_response.file_descriptor_proto.append(found)
        except KeyError:
            answer.error_response.error_code = STATUS["NOT_FOUND"]
            answer.error_response.error_message = "there is no such file, symbol or extension"
    call.send_message([answer.SerializeToString()])


def _file_with(symbol: str) -> Any:
    try:
        return POOL.FindFileContainingSymbol(symbol)
    except KeyError:
        return POOL.FindMethodByName(symbol).containing_service.file
