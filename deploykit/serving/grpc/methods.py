"""The methods of the Open Inference Protocol over gRPC, and of grpc.health.v1."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from deploykit.core.errors import BadInput, NotFound, Unsupported, quote
from deploykit.serving.grpc.call import Call
from deploykit.serving.grpc.headers import Method
from deploykit.serving.grpc.infer import InferMethods, fail_with
from deploykit.serving.models.offload import Offload
from deploykit.serving.models.repository import VERSION, ModelRepository, ServedModel
from deploykit.serving.oip import messages as infer
from deploykit.serving.oip.protobuf import MESSAGES, Message, message_from
from deploykit.serving.shared_memory import SharedMemory

log = logging.getLogger(__name__)

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


class Calls:
    """`methods` by path. `offload`: see Inference."""

    def __init__(self, service: ModelRepository, offload: Offload) -> None:
        self._service = service
        self.inference = inference = InferMethods(service, offload)
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
            f"/{SERVICE}/ServerLive": Method(_unary("ServerLive", self._live), public=True),
            f"/{SERVICE}/ServerReady": Method(_unary("ServerReady", self._ready), public=True),
            f"/{SERVICE}/ModelInfer": Method(inference.infer),
            f"/{SERVICE}/ModelStreamInfer": Method(inference.stream, inference.end_stream),
            **{f"/{SERVICE}/{name}": Method(_not_offered) for name in _EXTENSIONS},
            **{f"/{SERVICE}/{name}": Method(_unary(name, to)) for name, to in unary.items()},
            f"/{_HEALTH}/Check": Method(_unary("HealthCheck", self._check), public=True),
            f"/{_HEALTH}/Watch": Method(self._watch, public=True),
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
            fail_with(call, exc)
            return
        call.cancel = partial(self._watching.pop, call, None)
        self._tell(call, name, self._health(name))

    def _tell(self, call: Call, name: str, status: int) -> None:
        self._watching[call] = (name, status)
        call.send_message([_message("HealthCheckResponse", status=status).SerializeToString()])


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
    fail_with(call, Unsupported("this extension is not offered by this server"))


def _reply(call: Call, make: Callable[[], list[bytes]]) -> None:
    """Answer a call that has one reply."""
    try:
        parts = make()
    except Exception as exc:  # noqa: BLE001 - every error is a reply
        fail_with(call, exc)
    else:
        call.reply(parts)
