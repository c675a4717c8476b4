"""Find a model on a server over gRPC: one call on a connection of its own for each question."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

from deploykit.core.errors import BadInput, NotFound, os_reason
from deploykit.measure.load.check import message_fields, varints
from deploykit.measure.load.grpc import CALLER, Grpc, call_of, field, header_block
from deploykit.measure.load.http1 import NotHttpError
from deploykit.measure.load.http_target import TIMEOUT_S
from deploykit.measure.load.server_side import Stage, stages_of

if TYPE_CHECKING:
    from deploykit.measure.load.target import RemoteModel

_NOT_FOUND, _OK = 5, 0
_DURATIONS = {"queue": 3, "compute_input": 4, "compute_infer": 5, "compute_output": 6}
_KINDS = ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL")


class GrpcQuestions:
    """What a server says over gRPC."""

    def __init__(self, url: str, host: str, address: str, port: int) -> None:
        self.url, self.host, self.address, self.port = url, host, address, port

    def model_names(self) -> list[str] | None:
        code, message, error = self.call("RepositoryIndex", b"")
        if code != _OK:
            if "name" not in self.about():
                raise self._not_oip(error)
            return None
        items = [_values(item) for number, item, _ in message_fields(message) if number == 1]
        ready = [item for item in items if item.get(3, b"READY") in (b"READY", b"")]
        return list(dict.fromkeys(_string(item.get(1)) for item in ready))

    def metadata(self, model: str) -> dict[str, Any]:
        code, message, error = self.call("ModelMetadata", field(1, model.encode()))
        if code == _NOT_FOUND:
            raise NotFound(f"{self.url}: no model '{model}': {error}")
        if code != _OK:
            raise self._not_oip(error)
        found = list(message_fields(message))
        tensors = {
            name: [_tensor(item) for number, item, _ in found if number == key]
            for name, key in (("inputs", 4), ("outputs", 5))
        }
        return {"platform": _string(_values(message).get(3)), **tensors}

    def about(self) -> dict[str, Any]:
        code, message, _ = self.call("ServerMetadata", b"")
        values = _values(message) if code == _OK else {}
        return {"name": _string(values.get(1)), "version": _string(values.get(2))} if values else {}

    def config(self, model: str) -> dict[str, Any]:
        code, message, _ = self.call("ModelConfig", field(1, model.encode()))
        config = _values(message).get(1) if code == _OK else None
        if not isinstance(config, bytes):
            return {}
        values = _values(config)
        entries = [_values(item) for number, item, _ in message_fields(config) if number == 14]
        batching = values.get(11)
        found: dict[str, Any] = {
            "backend": _string(values.get(17)),
            "max_batch_size": values.get(4, 0),
            "instance_group": [
                {"name": _string(each.get(1)), "count": each.get(2, 0), "kind": _kind(each.get(4))}
                for each in (
                    _values(item) for number, item, _ in message_fields(config) if number == 7
                )
            ],
            "parameters": {
                _string(each.get(1)): {"string_value": _string(_values(each.get(2, b"")).get(1))}
                for each in entries
            },
        }
        if isinstance(batching, bytes):
            parts = [part for number, part, _ in message_fields(batching) if number == 1]
            found["dynamic_batching"] = {
                "preferred_batch_size": [size for part in parts for size in varints(part)],
                "max_queue_delay_microseconds": _values(batching).get(2, 0),
            }
        return found

    def stages(self, model: str) -> dict[str, Stage]:
        code, message, _ = self.call("ModelStatistics", field(1, model.encode()))
        stats = _values(message).get(1) if code == _OK else None
        inferences = _values(stats).get(6) if isinstance(stats, bytes) else None
        if not isinstance(stats, bytes) or not isinstance(inferences, bytes):
            return {}
        values = _values(inferences)
        entries = [_values(item) for number, item, _ in message_fields(stats) if number == 9]
        responses = {
            _string(each.get(1)): {"compute_infer": _duration(_values(each.get(2, b"")).get(1))}
            for each in entries
        }
        durations = {name: _duration(values.get(at, b"")) for name, at in _DURATIONS.items()}
        return stages_of(durations, responses)

    def call(self, method: str, message: bytes) -> tuple[int | None, bytes, str]:
        """GRPC's status, the answer, and what is wrong. Raises BadInput where there is none."""
        try:
            return self.exchange(method, call_of(message))
        except TimeoutError as exc:
            raise BadInput(f"{self.url}: {method}: no answer within {TIMEOUT_S:g} s") from exc
        except OSError as exc:
            raise self._not_oip(f"{method}: {os_reason(exc)}") from exc
        except NotHttpError as exc:
            raise self._not_oip(f"{method}: it {exc}") from exc

    def exchange(self, method: str, call: bytes) -> tuple[int | None, bytes, str]:
        """The same. Raises OSError, TimeoutError in time, and NotHttpError."""
        wire = Grpc(header_block(self.host, method), [call], None)
        until_s = time.monotonic() + TIMEOUT_S
        with socket.create_connection((self.address, self.port), TIMEOUT_S) as connection:
            connection.sendall(wire.greeting + wire.request(0))
            while True:
                data = connection.recv(1 << 16)
                if not data:
                    raise NotHttpError("closed the connection")
                status = wire.feed(data)
                control, wire.control = wire.control, b""
                if control:
                    connection.sendall(control)
                if status is not None:
                    return wire.code, wire.message, wire.error or ""
                if time.monotonic() > until_s:
                    raise TimeoutError

    def _not_oip(self, why: str) -> BadInput:
        return BadInput(
            f"{self.url}: is not an Open Inference Protocol server over gRPC ({why})",
            hint="grpc:// takes the port of its gRPC interface, 8001 by default",
        )


def probe_call(remote: RemoteModel, call: bytes) -> None:
    """Send one call before the run. Raises BadInput when the server blames the request."""
    server = GrpcQuestions(remote.url, remote.host, remote.address, remote.port)
    try:
        code, _, error = server.exchange("ModelInfer", call)
    except TimeoutError as exc:
        why = f"no answer to an inference within {TIMEOUT_S:g} s"
        raise BadInput(f"{remote.url}: {remote.model}: {why}") from exc
    except (OSError, NotHttpError):
        return  # the run counts it as a failure, with its message
    if code in CALLER:
        raise BadInput(f"{remote.url}: {remote.model}: answered {error}")


def _values(message: bytes) -> dict[int, Any]:
    """The last value of each field."""
    return {number: value for number, value, _ in message_fields(message)}


def _tensor(message: bytes) -> dict[str, Any]:
    values = _values(message)
    parts = [part for number, part, _ in message_fields(message) if number == 3]
    shape = [size for part in parts for size in varints(part)]
    return {"name": _string(values.get(1)), "datatype": _string(values.get(2)), "shape": shape}


def _string(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _duration(message: object) -> dict[str, int]:
    values = _values(message) if isinstance(message, bytes) else {}
    return {"count": values.get(1, 0), "ns": values.get(2, 0)}


def _kind(number: object) -> str:
    known = isinstance(number, int) and number < len(_KINDS)
    return _KINDS[number] if known and isinstance(number, int) else str(number or _KINDS[0])
