"""The messages of the Open Inference Protocol over gRPC, in a descriptor pool of their own.

In: the table below. Out: message classes by name, `MESSAGES["ModelInferRequest"]`. protobuf's
global pool refuses a second definition of a name, and tritonclient defines these names there: with
a private pool both can live in one process. No compiler and no generated file are needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

__all__ = ["MESSAGES", "DecodeError", "Message", "filled"]

# Message: number name type; ... A type with * is repeated, {T} is a map from strings to T, and
# ?name makes it a member of the message's "oneof" of that name. enum E: the names of 0, 1, 2, ...
_INFERENCE = """
ServerLiveRequest:
ServerLiveResponse: 1 live bool
ServerReadyRequest:
ServerReadyResponse: 1 ready bool
ModelReadyRequest: 1 name string; 2 version string
ModelReadyResponse: 1 ready bool
ServerMetadataRequest:
ServerMetadataResponse: 1 name string; 2 version string; 3 extensions string*
ModelMetadataRequest: 1 name string; 2 version string
ModelMetadataResponse: 1 name string; 2 versions string*; 3 platform string;
  4 inputs ModelMetadataResponse.TensorMetadata*; 5 outputs ModelMetadataResponse.TensorMetadata*
ModelMetadataResponse.TensorMetadata: 1 name string; 2 datatype string; 3 shape int64*
InferParameter: 1 bool_param bool?parameter_choice; 2 int64_param int64?parameter_choice;
  3 string_param string?parameter_choice; 4 double_param double?parameter_choice;
  5 uint64_param uint64?parameter_choice
InferTensorContents: 1 bool_contents bool*; 2 int_contents int32*; 3 int64_contents int64*;
  4 uint_contents uint32*; 5 uint64_contents uint64*; 6 fp32_contents float*;
  7 fp64_contents double*; 8 bytes_contents bytes*
ModelInferRequest: 1 model_name string; 2 model_version string; 3 id string;
  4 parameters {InferParameter}; 5 inputs ModelInferRequest.InferInputTensor*;
  6 outputs ModelInferRequest.InferRequestedOutputTensor*; 7 raw_input_contents bytes*
ModelInferRequest.InferInputTensor: 1 name string; 2 datatype string; 3 shape int64*;
  4 parameters {InferParameter}; 5 contents InferTensorContents
ModelInferRequest.InferRequestedOutputTensor: 1 name string; 2 parameters {InferParameter}
ModelInferResponse: 1 model_name string; 2 model_version string; 3 id string;
  4 parameters {InferParameter}; 5 outputs ModelInferResponse.InferOutputTensor*;
  6 raw_output_contents bytes*
ModelInferResponse.InferOutputTensor: 1 name string; 2 datatype string; 3 shape int64*;
  4 parameters {InferParameter}; 5 contents InferTensorContents
ModelStreamInferResponse: 1 error_message string; 2 infer_response ModelInferResponse
ModelConfigRequest: 1 name string; 2 version string
ModelConfigResponse: 1 config ModelConfig
ModelStatisticsRequest: 1 name string; 2 version string
ModelStatisticsResponse: 1 model_stats ModelStatistics*
ModelStatistics: 1 name string; 2 version string; 3 last_inference uint64;
  4 inference_count uint64; 5 execution_count uint64; 6 inference_stats InferStatistics;
  7 batch_stats InferBatchStatistics*; 8 memory_usage MemoryUsage*;
  9 response_stats {InferResponseStatistics}
StatisticDuration: 1 count uint64; 2 ns uint64
InferStatistics: 1 success StatisticDuration; 2 fail StatisticDuration; 3 queue StatisticDuration;
  4 compute_input StatisticDuration; 5 compute_infer StatisticDuration;
  6 compute_output StatisticDuration; 7 cache_hit StatisticDuration; 8 cache_miss StatisticDuration
InferResponseStatistics: 1 compute_infer StatisticDuration; 2 compute_output StatisticDuration;
  3 success StatisticDuration; 4 fail StatisticDuration; 5 empty_response StatisticDuration;
  6 cancel StatisticDuration
InferBatchStatistics: 1 batch_size uint64; 2 compute_input StatisticDuration;
  3 compute_infer StatisticDuration; 4 compute_output StatisticDuration
MemoryUsage: 1 type string; 2 id int64; 3 byte_size uint64
RepositoryIndexRequest: 1 repository_name string; 2 ready bool
RepositoryIndexResponse: 1 models RepositoryIndexResponse.ModelIndex*
RepositoryIndexResponse.ModelIndex: 1 name string; 2 version string; 3 state string; 4 reason string
SystemSharedMemoryStatusRequest: 1 name string
SystemSharedMemoryStatusResponse: 1 regions {SystemSharedMemoryStatusResponse.RegionStatus}
SystemSharedMemoryStatusResponse.RegionStatus: 1 name string; 2 key string; 3 offset uint64;
  4 byte_size uint64
SystemSharedMemoryRegisterRequest: 1 name string; 2 key string; 3 offset uint64; 4 byte_size uint64
SystemSharedMemoryRegisterResponse:
SystemSharedMemoryUnregisterRequest: 1 name string
SystemSharedMemoryUnregisterResponse:
CudaSharedMemoryStatusRequest: 1 name string
CudaSharedMemoryStatusResponse: 1 regions {CudaSharedMemoryStatusResponse.RegionStatus}
CudaSharedMemoryStatusResponse.RegionStatus: 1 name string; 2 device_id uint64; 3 byte_size uint64
CudaSharedMemoryRegisterRequest: 1 name string; 2 raw_handle bytes; 3 device_id int64;
  4 byte_size uint64
CudaSharedMemoryRegisterResponse:
CudaSharedMemoryUnregisterRequest: 1 name string
CudaSharedMemoryUnregisterResponse:
ModelConfig: 1 name string; 2 platform string; 4 max_batch_size int32; 5 input ModelInput*;
  6 output ModelOutput*; 7 instance_group ModelInstanceGroup*;
  11 dynamic_batching ModelDynamicBatching?scheduling_choice; 14 parameters {ModelParameter};
  17 backend string; 19 model_transaction_policy ModelTransactionPolicy
ModelInput: 1 name string; 2 data_type DataType; 4 dims int64*
ModelOutput: 1 name string; 2 data_type DataType; 3 dims int64*; 4 label_filename string
ModelInstanceGroup: 1 name string; 2 count int32; 3 gpus int32*; 4 kind ModelInstanceGroup.Kind
enum ModelInstanceGroup.Kind: KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL
ModelDynamicBatching: 1 preferred_batch_size int32*; 2 max_queue_delay_microseconds uint64
ModelTransactionPolicy: 1 decoupled bool
ModelParameter: 1 string_value string
enum DataType: TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8
  TYPE_INT16 TYPE_INT32 TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16
"""
_HEALTH = """
HealthCheckRequest: 1 service string
HealthCheckResponse: 1 status HealthCheckResponse.ServingStatus
enum HealthCheckResponse.ServingStatus: UNKNOWN SERVING NOT_SERVING SERVICE_UNKNOWN
"""
_FIELD = re.compile(r"(\d+) (\w+) (\{?)([\w.]+)(\}?)(\*|\?\w+)?")
_SCALARS: Mapping[str, Any] = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ["bool", "int32", "int64", "uint32", "uint64", "float", "double", "string", "bytes"]
}


def _file(package: str, table: str) -> FileDescriptorProto:
    file = FileDescriptorProto(name=f"deploykit/{package}.proto", package=package, syntax="proto3")
    lines = re.sub(r"\n +", " ", table).strip().splitlines()
    enums = {line[5:].partition(":")[0] for line in lines if line.startswith("enum ")}
    made: dict[str, DescriptorProto] = {}
    for line in lines:
        title, _, rest = line.partition(":")
        name = title.removeprefix("enum ")
        outer, _, own = name.rpartition(".")
        where: Any = made[outer] if outer else file
        if title != name:
            enum = where.enum_type.add(name=own)
            for number, value in enumerate(rest.split()):
                enum.value.add(name=value, number=number)
            continue
        message = (where.nested_type if outer else where.message_type).add(name=own)
        made[name] = message
        for number, field, is_map, kind, _, more in _FIELD.findall(rest):
            _add(message, f".{package}.", name, (int(number), field, kind), is_map, more, enums)
    return file


def _add(
    message: DescriptorProto,
    package: str,
    owner: str,
    field: tuple[int, str, str],
    is_map: str,
    more: str,
    enums: set[str],
) -> None:
    number, name, kind = field
    made = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if is_map:
        entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=_SCALARS["string"], label=1)
        value = entry.field.add(name="value", number=2, label=1)
        value.type, value.type_name = FieldDescriptorProto.TYPE_MESSAGE, package + kind
        made.type_name = f"{package}{owner}.{entry.name}"
        made.type = FieldDescriptorProto.TYPE_MESSAGE
    elif kind in _SCALARS:
        made.type = _SCALARS[kind]
    else:
        enum = FieldDescriptorProto.TYPE_ENUM
        made.type = enum if kind in enums else FieldDescriptorProto.TYPE_MESSAGE
        made.type_name = package + kind
    if is_map or more == "*":
        made.label = FieldDescriptorProto.LABEL_REPEATED
    elif more:
        if not message.oneof_decl:
            message.oneof_decl.add(name=more[1:])
        made.oneof_index = 0


def _classes() -> dict[str, Any]:
    pool = DescriptorPool()
    classes = {}
    for package, table in (("inference", _INFERENCE), ("grpc.health.v1", _HEALTH)):
        pool.Add(_file(package, table))
        descriptor = pool.FindFileByName(f"deploykit/{package}.proto")
        for name, message in descriptor.message_types_by_name.items():
            classes[name] = GetMessageClass(message)
    return classes


MESSAGES: Final[Mapping[str, Any]] = _classes()


def filled(name: str, values: Mapping[str, Any]) -> Message:
    """A message from the HTTP side's JSON object; members that gRPC does not have are left out."""
    message: Message = MESSAGES[name]()
    ParseDict(dict(values), message, ignore_unknown_fields=True)
    return message
