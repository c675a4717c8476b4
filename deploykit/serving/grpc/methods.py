"""The methods of the Open Inference Protocol over gRPC, and of grpc.health.v1."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from deploykit.core.errors import BadInput, NotFound, Unsupported, quote
from deploykit.serving.grpc.call import GrpcCall, Method, fail_with
from deploykit.serving.grpc.infer import InferMethods
from deploykit.serving.http2.flow import Flow
from deploykit.serving.models.offload import Offload
from deploykit.serving.models.repository import ModelRepository, Served
from deploykit.serving.models.worker import WorkerProcess
from deploykit.serving.oip import messages as infer
from deploykit.engines.oip.protobuf import MESSAGES, Message, message_from
from deploykit.serving.options import VERSION
from deploykit.serving.shared_memory import SharedMemory
from deploykit.serving.workers.group import Result, ServerGroup, of_model

log = logging.getLogger(__name__)

SERVICE = "inference.GRPCInferenceService"
_HEALTH = "grpc.health.v1.Health"
_EXTENSIONS = (  # not supported, unless `Calls.methods` has them
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
_SMALL_BYTES = 64 << 10  # of a message to any method but inference
_WATCHES = 1024  # calls of Health.Watch, which needs no token
_WATCHES_EACH = 16  # of one connection
_SERVICE_BYTES = 256  # of a service's name in them
_SERVING, _NOT_SERVING, _UNKNOWN = 1, 2, 3

Later = Callable[[Any, Callable[[Result], None]], None]  # takes the request, and what to call then


class Calls:
    """The handlers of all methods by path. `offload`, `worker`: see ModelRoute."""

    def __init__(
        self,
        repository: ModelRepository,
        offload: Offload,
        worker: WorkerProcess | None,
        group: ServerGroup,
    ) -> None:
        self._repository = repository
        self._group = group
        self.inference = inference = InferMethods(repository, offload, worker)
        self._watching: dict[str, dict[GrpcCall, None]] = {}  # by the name of the service
        self._health_sent: dict[str, int] = {}
        self._watches: Counter[Flow] = Counter()
        unary: dict[str, Callable[[Any], Message]] = {
            "ServerMetadata": lambda _: message_from(
                "ServerMetadataResponse", repository.metadata()
            ),
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "RepositoryIndex": self._index,
            **(_regions(repository.memory) if repository.memory is not None else {}),
        }
        later: dict[str, Later] = {"ModelStatistics": self._statistics}
        if repository.memory is not None:
            later |= _changes(group)
        self.methods = {
            f"/{SERVICE}/ServerLive": _small(_unary("ServerLive", self._live), public=True),
            f"/{SERVICE}/ServerReady": _small(_unary("ServerReady", self._ready), public=True),
            f"/{SERVICE}/ModelInfer": Method(inference.infer),
            f"/{SERVICE}/ModelStreamInfer": Method(inference.stream, inference.end_stream),
            **{f"/{SERVICE}/{name}": _small(_not_offered) for name in _EXTENSIONS},
            **{f"/{SERVICE}/{name}": _small(_unary(name, to)) for name, to in unary.items()},
            **{
                f"/{SERVICE}/{name}": _small(_answered_later(name, to))
                for name, to in later.items()
            },
            f"/{_HEALTH}/Check": _small(_unary("HealthCheck", self._check), public=True),
            f"/{_HEALTH}/Watch": _small(self._watch, public=True),
        }

    def tick(self) -> None:
        """Send health changes to the Watch calls."""
        for name, calls in list(self._watching.items()):
            now = self._health(name)
            if now != self._health_sent[name]:
                self._health_sent[name] = now
                for call in list(calls):
                    _send_health(call, now)

    # -- unary methods ---------------------------------------------------------------------------

    def _live(self, _: Any) -> Message:
        return _message("ServerLiveResponse", live=True)

    def _ready(self, _: Any) -> Message:
        return _message("ServerReadyResponse", ready=self._repository.why_not_ready() is None)

    def _model_ready(self, request: Any) -> Message:
        try:
            model = self._find(request.name, request.version)
            ready = self._repository.why_not_ready(model) is None
        except NotFound:
            ready = False
        return _message("ModelReadyResponse", ready=ready)

    def _model_metadata(self, request: Any) -> Message:
        model = self._find(request.name, request.version)
        return message_from("ModelMetadataResponse", model.metadata())

    def _model_config(self, request: Any) -> Message:
        model = self._find(request.name, request.version)
        return message_from("ModelConfigResponse", {"config": model.config()})

    def _statistics(self, request: Any, then: Callable[[Result], None]) -> None:
        name = self._find(request.name, request.version).name if request.name else None

        def answer(result: Result) -> None:
            then(lambda: message_from("ModelStatisticsResponse", of_model(name, result())))

        self._group.collect("statistics", answer)

    def _index(self, request: Any) -> Message:
        models = self._repository.index()
        if request.ready:
            models = [model for model in models if model["state"] == "READY"]
        return message_from("RepositoryIndexResponse", {"models": models})

    def _find(self, name: str, version: str) -> Served:
        return self._repository.find_any(name, version or VERSION)

    # -- health ----------------------------------------------------------------------------------

    def _health(self, name: str) -> int:
        if name in ("", SERVICE):
            return _NOT_SERVING if self._repository.why_not_ready() else _SERVING
        try:
            model = self._repository.find_any(name)
        except NotFound:
            return _UNKNOWN
        return _NOT_SERVING if self._repository.why_not_ready(model) else _SERVING

    def _check(self, request: Any) -> Message:
        status = self._health(request.service)
        if status == _UNKNOWN:
            raise NotFound(f"there is no service {quote(request.service)}")
        return _message("HealthCheckResponse", status=status)

    def _watch(self, call: GrpcCall, data: bytes, at: int) -> None:
        try:
            name = infer.parse("HealthCheckRequest", data[at:]).service
        except BadInput as exc:
            fail_with(call, exc)
            return
        link = call.link
        if self._watches[link] >= _WATCHES_EACH or self._watches.total() >= _WATCHES:
            text = f"of at most {_WATCHES_EACH} Watch calls of a client and {_WATCHES} of all"
            call.fail("RESOURCE_EXHAUSTED", f"there is one too many, {text}; use Check instead")
            return
        if len(name) > _SERVICE_BYTES:
            call.fail("INVALID_ARGUMENT", f"a service's name has at most {_SERVICE_BYTES} bytes")
            return
        self._watches[link] += 1
        self._watching.setdefault(name, {})[call] = None
        call.cancel = partial(self._unwatch, name, call)
        status = self._health_sent.setdefault(name, self._health(name))
        _send_health(call, status)

    def _unwatch(self, name: str, call: GrpcCall) -> None:
        calls = self._watching[name]
        del calls[call]
        if not calls:
            del self._watching[name], self._health_sent[name]
        self._watches[call.link] -= 1
        if not self._watches[call.link]:
            del self._watches[call.link]


def _send_health(call: GrpcCall, status: int) -> None:
    call.send_message([_message("HealthCheckResponse", status=status).SerializeToString()])


def _small(message: Callable[[GrpcCall, bytes, int], None], *, public: bool = False) -> Method:
    return Method(message, public=public, max_bytes=_SMALL_BYTES)


def _message(name: str, **values: Any) -> Message:
    message: Message = MESSAGES[name](**values)
    return message


def _unary(name: str, make: Callable[[Any], Message]) -> Callable[[GrpcCall, bytes, int], None]:
    def message(call: GrpcCall, data: bytes, at: int) -> None:
        try:
            reply = make(infer.parse(f"{name}Request", data[at:])).SerializeToString()
        except Exception as exc:  # noqa: BLE001 - every error is a reply
            fail_with(call, exc)
        else:
            call.reply([reply])

    return message


def _answered_later(name: str, start: Later) -> Callable[[GrpcCall, bytes, int], None]:
    """A method that other processes take part in."""

    def message(call: GrpcCall, data: bytes, at: int) -> None:
        def then(result: Result) -> None:
            try:
                reply = result().SerializeToString()
            except Exception as exc:  # noqa: BLE001 - every error is a reply
                fail_with(call, exc)
            else:
                call.reply([reply])

        try:
            start(infer.parse(f"{name}Request", data[at:]), then)
        except Exception as exc:  # noqa: BLE001 - every error is a reply
            fail_with(call, exc)

    return message


def _regions(memory: SharedMemory) -> dict[str, Callable[[Any], Message]]:
    """The methods of the system shared-memory extension that change nothing."""

    def status(request: Any) -> Message:
        regions = {region["name"]: region for region in memory.status(request.name or None)}
        return message_from("SystemSharedMemoryStatusResponse", {"regions": regions})

    return {
        "SystemSharedMemoryStatus": status,
        # NVIDIA's examples call it first
        "CudaSharedMemoryUnregister": lambda _: _message("CudaSharedMemoryUnregisterResponse"),
    }


def _changes(group: ServerGroup) -> dict[str, Later]:
    """The methods of the extension that register regions in all processes."""

    def register(request: Any, then: Callable[[Result], None]) -> None:
        arguments = request.name, request.key, request.offset, request.byte_size
        group.change("register", arguments, done("SystemSharedMemoryRegisterResponse", then))

    def unregister(request: Any, then: Callable[[Result], None]) -> None:
        answer = done("SystemSharedMemoryUnregisterResponse", then)
        group.change("unregister", (request.name or None,), answer)

    def done(name: str, then: Callable[[Result], None]) -> Callable[[Result], None]:
        def answer(result: Result) -> None:
            def message() -> Message:
                result()  # raises what is wrong
                return _message(name)

            then(message)

        return answer

    return {"SystemSharedMemoryRegister": register, "SystemSharedMemoryUnregister": unregister}


def _not_offered(call: GrpcCall, _data: bytes, _at: int) -> None:
    fail_with(call, Unsupported("this extension is not offered by this server"))
