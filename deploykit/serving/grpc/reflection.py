"""Server reflection: from it grpcurl, Postman and other tools learn services and messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.engines.oip.protobuf import FILES, MESSAGES, Message
from deploykit.serving.grpc.call import STATUS, GrpcCall, Method, fail_with
from deploykit.serving.oip import messages

# of the same messages: some tools ask for the older one
REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
_MOST_BYTES = 4096


def reflection_method() -> Method:
    """Return the method ServerReflectionInfo, which answers each message of a stream."""

    def message(call: GrpcCall, data: bytes, at: int) -> None:
        try:
            request = messages.parse("ServerReflectionRequest", data[at:])
        except BadInput as exc:
            fail_with(call, exc)
        else:
            call.send_message([reflect(request).SerializeToString()])

    return Method(message, GrpcCall.complete, max_bytes=_MOST_BYTES)


def reflect(request: Any) -> Message:
    """Return the answer to one ServerReflectionRequest."""
    kind = request.WhichOneof("message_request") or ""
    wanted = getattr(request, kind, None)
    answer = MESSAGES["ServerReflectionResponse"](valid_host=request.host, original_request=request)
    if kind == "list_services":
        for file in FILES:
            for service in file.service:
                answer.list_services_response.service.add(name=f"{file.package}.{service.name}")
    elif kind in ("file_by_filename", "file_containing_symbol") and wanted in _files():
        answer.file_descriptor_response.file_descriptor_proto.append(_files()[wanted])
    else:
        answer.error_response.error_code = STATUS["NOT_FOUND"]
        answer.error_response.error_message = "there is no such file, symbol or extension"
    made: Message = answer
    return made


@cache
def _files() -> dict[str, bytes]:
    """Return each file by its name, and by the names of what it defines. None imports another."""
    found: dict[str, bytes] = {}
    for file in FILES:
        content = file.SerializeToString()
        found |= dict.fromkeys([file.name, *_names(file)], content)
    return found


def _names(file: Any) -> Iterator[str]:
    for service in file.service:
        yield f"{file.package}.{service.name}"
        yield from (f"{file.package}.{service.name}.{each.name}" for each in service.method)
    yield from _inside(file.package, file.message_type, file.enum_type)


def _inside(prefix: str, types: Iterable[Any], enums: Iterable[Any]) -> Iterator[str]:
    yield from (f"{prefix}.{each.name}" for each in enums)
    for each in types:
        name = f"{prefix}.{each.name}"
        yield name
        yield from (f"{name}.{field.name}" for field in each.field)
        yield from _inside(name, each.nested_type, each.enum_type)
