"""The messages of the .proto files here as classes, in a private descriptor pool.

protobuf's global pool rejects a second definition of a name, and tritonclient defines the same
names: with a private pool, server and client can run in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

__all__ = ["CONTENTS", "FILES", "MESSAGES", "POOL", "DecodeError", "Message", "message_from"]

DESCRIPTORS = Path(__file__).with_name("descriptors.binpb")  # scripts/make_descriptors.py writes it


FILES: Final[Sequence[FileDescriptorProto]] = FileDescriptorSet.FromString(
    DESCRIPTORS.read_bytes()
).file


POOL: Final = DescriptorPool()
for _file in FILES:
    POOL.Add(_file)

MESSAGES: Final[Mapping[str, Any]] = {
    name: GetMessageClass(message)
    for file in FILES
    for name, message in POOL.FindFileByName(file.name).message_types_by_name.items()
}

# The field of gRPC's InferTensorContents for each datatype; FP16 and BF16 have none.
CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def message_from(name: str, values: Mapping[str, Any]) -> Message:
    """Return the message for a JSON object of the HTTP API, without members unknown to gRPC."""
    message: Message = MESSAGES[name]()
    ParseDict(dict(values), message, ignore_unknown_fields=True)
    return message
