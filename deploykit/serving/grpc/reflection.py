"""Server reflection: from it grpcurl, Postman and other tools learn services and messages."""

from __future__ import annotations

from typing import Any

from deploykit.engines.oip.protobuf import FILES, MESSAGES, POOL
from deploykit.serving.grpc.call import STATUS, GrpcCall, Method
from deploykit.serving.oip import messages

# of the same messages: some tools ask for the older one
REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
_MOST_BYTES = 4096


def reflection_method() -> Method:
    """Return the method ServerReflectionInfo, which answers each message of a stream."""

    def message(call: GrpcCall, data: bytes, at: int) -> None:
        request = messages.parse("ServerReflectionRequest", data[at:])
        call.send_message([reflect(request).SerializeToString()])

    return Method(message, GrpcCall.complete, max_bytes=_MOST_BYTES)


def reflect(request: Any) -> Any:
    """Return the answer to one ServerReflectionRequest. None of our files imports another."""
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
    return answer


def _file_with(symbol: str) -> Any:
    try:
        return POOL.FindFileContainingSymbol(symbol)
    except KeyError:
        return POOL.FindMethodByName(symbol).containing_service.file
