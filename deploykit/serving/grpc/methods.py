"""The methods of the Open Inference Protocol over gRPC, and of grpc.health.v1, over a Service.

In: whole messages of `Call`s. Out: their answers, at once or when the engine is done; a streaming
call's in the order of its messages. Errors are in the words of HTTP's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from deploykit.core.errors import BadInput, DeploykitError, NotFound, Unsupported, quote
from deploykit.serving.batching.delivery import monotonic_us
from deploykit.serving.batching.policy import Pending
from deploykit.serving.http2.headers import Method
from deploykit.serving.http2.stream import Call
from deploykit.serving.models.repository import VERSION, ServedModel, Service
from deploykit.serving.oip import messages as infer
from deploykit.serving.oip.protobuf import MESSAGES, Message, message_from
from deploykit.serving.oip.request import Request, fill
from deploykit.serving.oip.response import results
from deploykit.serving.shared_memory import SharedMemory

log = logging.getLogger(__name__)

T = TypeVar("T")
Then = Callable[[Callable[[], T]], None]
Aside = Callable[[Callable[[], T], Then[T]], None]
Cancel = Callable[[], object]
Answer = Callable[[Callable[[], list[bytes]]], None]  # gets a function that gives it, or raises

SERVICE = "inference.GRPCInferenceService"
_HEALTH = "grpc.health.v1.Health"
_EXTENSIONS = (  # those that this server has stand in `Calls.methods`
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "TraceSetting",
    "LogSettings",
    *(
        f"{kind}SharedMemory{what}"
        for kind in ("System", "Cuda")
        for what in ("Status", "Register", "Unregister")
    ),
)
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3
LARGE_BYTES = 256 << 10  # typed contents above it are read on another thread
_BUG = "an error inside the server; its log says more"


class Calls:
    """`methods` by path. `aside` runs work elsewhere and calls back on the loop's thread."""

    def __init__(self, service: Service, aside: Aside[Request]) -> None:
        self._service = service
        self._aside = aside
        self._watching: dict[Call, tuple[str, int]] = {}
        unary: dict[str, Callable[[Any], Message]] = {
            "ServerMetadata": lambda _: message_from("ServerMetadataResponse", service.metadata()),
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            **(_regions(service.memory) if service.memory is not None else {}),
        }
        self.methods = {
            f"/{SERVICE}/ServerLive": Method(_unary("ServerLive", self._live), open=True),
            f"/{SERVICE}/ServerReady": Method(_unary("ServerReady", self._ready), open=True),
            f"/{SERVICE}/ModelInfer": Method(self._infer),
            f"/{SERVICE}/ModelStreamInfer": Method(self._stream, self._streamed),
            **{f"/{SERVICE}/{name}": Method(_not_offered) for name in _EXTENSIONS},
            **{f"/{SERVICE}/{name}": Method(_unary(name, to)) for name, to in unary.items()},
            f"/{_HEALTH}/Check": Method(_unary("HealthCheck", self._check), open=True),
            f"/{_HEALTH}/Watch": Method(self._watch, open=True),
        }

    def tick(self) -> None:
        """Tell those who watch the health what has changed."""
        for call, (name, status) in list(self._watching.items()):
            now = self._health(name)
            if now != status:
                self._tell(call, name, now)

    # -- one message in, one out -----------------------------------------------------------------

    def _live(self, _: Any) -> Message:
        return _message("ServerLiveResponse", live=True)

    def _ready(self, _: Any) -> Message:
        return _message("ServerReadyResponse", ready=self._service.why_not_ready() is None)

    def _model_ready(self, asked: Any) -> Message:
        try:
            model = self._find(asked.name, asked.version)
            ready = self._service.why_not_ready(model) is None
        except NotFound:
            ready = False
        return _message("ModelReadyResponse", ready=ready)

    def _model_metadata(self, asked: Any) -> Message:
        model = self._find(asked.name, asked.version)
        return message_from("ModelMetadataResponse", model.metadata())

    def _model_config(self, asked: Any) -> Message:
        model = self._find(asked.name, asked.version)
        return message_from("ModelConfigResponse", {"config": model.config()})

    def _statistics(self, asked: Any) -> Message:
        model = self._find(asked.name, asked.version) if asked.name else None
        return message_from("ModelStatisticsResponse", self._service.statistics(model))

    def _index(self, asked: Any) -> Message:
        models = self._service.index()
        if asked.ready:
            models = [model for model in models if model["state"] == "READY"]
        return message_from("RepositoryIndexResponse", {"models": models})

    def _find(self, name: str, version: str) -> ServedModel:
        return self._service.find(name, version or VERSION)

    # -- health ----------------------------------------------------------------------------------

    def _health(self, name: str) -> int:
        if name in ("", SERVICE):
            return _NOT_SERVING if self._service.why_not_ready() else _SERVING
        model = self._service.models.get(name)
        if model is None:
            return _UNKNOWN
        return _NOT_SERVING if self._service.why_not_ready(model) else _SERVING

    def _check(self, asked: Any) -> Message:
        status = self._health(asked.service)
        if status == _UNKNOWN:
            raise NotFound(f"there is no service {quote(asked.service)}")
        return _message("HealthCheckResponse", status=status)

    def _watch(self, call: Call, data: bytes, at: int) -> None:
        try:
            name = infer.parse("HealthCheckRequest", data[at:]).service
        except BadInput as exc:
            _refuse(call, exc)
            return
        call.cancel = partial(self._watching.pop, call, None)
        self._tell(call, name, self._health(name))

    def _tell(self, call: Call, name: str, status: int) -> None:
        self._watching[call] = (name, status)
        call.send([_message("HealthCheckResponse", status=status).SerializeToString()])

    # -- inference -------------------------------------------------------------------------------

    def _infer(self, call: Call, data: bytes, at: int) -> None:
        def running(cancel: Cancel) -> None:
            call.cancel = cancel

        def answer(make: Callable[[], list[bytes]]) -> None:
            call.cancel = None
            _reply(call, make)

        self._run(call, data, at, running, answer)

    def _stream(self, call: Call, data: bytes, at: int) -> None:
        slot = _Slot()
        call.slots.append(slot)
        if call.cancel is None:
            call.cancel = partial(_cancel_all, call)

        def running(cancel: Cancel) -> None:
            slot.cancel = cancel

        def answer(make: Callable[[], list[bytes]]) -> None:
            slot.cancel = None
            try:
                slot.parts = infer.streamed(make())
            except DeploykitError as exc:
                log.info("%s: %s", quote(call.head.path), quote(_text(exc)))
                slot.parts = infer.failed(_text(exc))
            except Exception:
                log.exception("an answer could not be made")
                slot.parts = infer.failed(_BUG)
            self._answer_in_order(call)

        self._run(call, data, at, running, answer)

    def _streamed(self, call: Call) -> None:
        """The client has sent its last message."""
        if not call.slots:
            call.finish()

    def _answer_in_order(self, call: Call) -> None:
        slots = call.slots
        if not slots or slots[0].parts is None:
            return
        while slots and slots[0].parts is not None:
            call.send(slots.popleft().parts)
        call.read()  # what waited for room, or the end

    def _run(
        self,
        call: Call,
        data: bytes,
        at: int,
        running: Callable[[Cancel], None],
        answer: Answer,
    ) -> None:
        """`running` gets what is to be done if the client gives up, as that changes."""
        started_us = monotonic_us()
        model: ServedModel | None = None
        try:
            head, start, spans = infer.split(data, at)
            message = infer.header(head)
            model = self._find(message.model_name, message.model_version)
            held = [head, data]  # emptied when the client gives up: a thread may yet wait for it
            decode = partial(self._decode, held, start, spans, model)
        except Exception as exc:  # noqa: BLE001 - raised again where it is answered
            answer(partial(_raise, exc))
            return

        def submit(decoded: Callable[[], Request]) -> None:
            if call.finished:
                return
            try:
                request = decoded()
                limit_us = self._left_us(call)
                if limit_us is not None:
                    asked_us = request.timeout_us or limit_us
                    request = request._replace(timeout_us=max(1, min(asked_us, limit_us)))
                done = partial(self._done, model, request, answer)
                decode_us = monotonic_us() - started_us
                trace = call.head.trace
                pending = self._service.infer(
                    model, request, done, trace=trace, decode_us=decode_us
                )
            except BadInput as exc:
                model.metrics.bad_request()
                answer(partial(_raise, exc))
            except Exception as exc:  # noqa: BLE001 - the same
                answer(partial(_raise, exc))
            else:
                running(partial(model.cancel, pending))

        if len(head) > LARGE_BYTES:
            del head, data
            running(held.clear)
            self._aside(decode, submit)
        else:
            submit(decode)

    def _decode(
        self,
        held: Sequence[bytes],
        start: int,
        spans: tuple[infer.Span, ...],
        model: ServedModel,
    ) -> Request:
        head, data = held
        return fill(infer.planned(head, spans, model.signature), data, start, self._service.memory)

    def _left_us(self, call: Call) -> int | None:
        if call.deadline_s is None:
            return None
        return int((call.deadline_s - call.connection.shared.clock_s()) * 1e6)

    def _done(self, model: ServedModel, request: Request, answer: Answer, pending: Pending) -> None:
        if pending.error is not None:
            answer(partial(_raise, pending.error))
            return
        answer(partial(self._encoded, model, request, pending))

    def _encoded(self, model: ServedModel, request: Request, pending: Pending) -> list[bytes]:
        started_us = monotonic_us()
        found = results(request, pending.outputs, model.signature, self._service.memory)
        parts = infer.encode(model.name, VERSION, request.id, found)
        now_us = monotonic_us()
        model.metrics.answered(pending, now_us - started_us, now_us)
        return parts


class _Slot:
    """The place of one answer of a streaming call."""

    __slots__ = ("cancel", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] | None = None
        self.cancel: Callable[[], object] | None = None


def _cancel_all(call: Call) -> None:
    for slot in call.slots:
        if slot.cancel is not None:
            slot.cancel()
    call.slots.clear()


def _raise(exc: Exception) -> list[bytes]:
    raise exc


def _message(name: str, **values: Any) -> Message:
    message: Message = MESSAGES[name](**values)
    return message


def _unary(name: str, make: Callable[[Any], Message]) -> Callable[[Call, bytes, int], None]:
    def message(call: Call, data: bytes, at: int) -> None:
        def answer() -> list[bytes]:
            return [make(infer.parse(f"{name}Request", data[at:])).SerializeToString()]

        _reply(call, answer)

    return message


def _regions(memory: SharedMemory) -> dict[str, Callable[[Any], Message]]:
    """The methods of the system shared-memory extension."""

    def status(asked: Any) -> Message:
        regions = {region["name"]: region for region in memory.status(asked.name or None)}
        return message_from("SystemSharedMemoryStatusResponse", {"regions": regions})

    def register(asked: Any) -> Message:
        memory.register(asked.name, asked.key, asked.offset, asked.byte_size)
        return _message("SystemSharedMemoryRegisterResponse")

    def unregister(asked: Any) -> Message:
        memory.unregister(asked.name or None)
        return _message("SystemSharedMemoryUnregisterResponse")

    return {
        "SystemSharedMemoryStatus": status,
        "SystemSharedMemoryRegister": register,
        "SystemSharedMemoryUnregister": unregister,
        # NVIDIA's examples begin by calling it
        "CudaSharedMemoryUnregister": lambda _: _message("CudaSharedMemoryUnregisterResponse"),
    }


def _not_offered(call: Call, _data: bytes, _at: int) -> None:
    _refuse(call, Unsupported("this extension is not offered by this server"))


def _reply(call: Call, make: Callable[[], list[bytes]]) -> None:
    """Answer a call that has one answer."""
    try:
        parts = make()
    except DeploykitError as exc:
        _refuse(call, exc)
    except Exception:
        log.exception("a call of %s failed", quote(call.head.path))
        call.fail("INTERNAL", _BUG)
    else:
        call.reply(parts)


def _refuse(call: Call, exc: DeploykitError) -> None:
    call.fail(exc.grpc_status, _text(exc))


def _text(exc: DeploykitError) -> str:
    return f"{exc.message}; {exc.hint}" if exc.hint else exc.message
