"""Our gRPC messages agree with tritonclient's, and both can be imported in one process."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from deploykit.engines.oip.protobuf import DESCRIPTORS, FILES, MESSAGES, message_from
from tests.support.serving.grpc_cases import serving

triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
from tritonclient.grpc import model_config_pb2, service_pb2  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
(_SERVICE,) = (file for file in FILES if file.package == "inference")
INFERENCE = sorted(message.name for message in _SERVICE.message_type)


def tritons(name: str) -> Any:
    found = service_pb2.DESCRIPTOR.message_types_by_name.get(name)
    return found or model_config_pb2.DESCRIPTOR.message_types_by_name[name]


def described(message: Any) -> dict[str, Any]:
    """Every field and nested message of a descriptor, in values that compare."""
    fields = {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.message_type.full_name if field.message_type else None,
            field.enum_type.full_name if field.enum_type else None,
            field.containing_oneof.name if field.containing_oneof else None,
        )
        for field in message.fields
    }
    return fields | {inner.name: described(inner) for inner in message.nested_types}


PARTIAL = {"ModelConfig", "ModelInput", "ModelOutput", "ModelInstanceGroup", "ModelDynamicBatching"}


@pytest.mark.parametrize("name", INFERENCE)
def test_every_field_is_the_same_in_tritonclient(name: str) -> None:
    """A value in a field that is missing here would be ignored without an error."""
    ours, theirs = described(MESSAGES[name].DESCRIPTOR), described(tritons(name))
    if name in PARTIAL:
        theirs = {field: theirs[field] for field in ours}
    assert ours == theirs


@pytest.mark.parametrize("first", ["tritonclient.grpc", "deploykit.serving.grpc.methods"])
def test_tritonclient_and_the_server_can_be_imported_in_either_order(first: str) -> None:
    second = ({"tritonclient.grpc", "deploykit.serving.grpc.methods"} - {first}).pop()
    subprocess.run([sys.executable, "-c", f"import {first}, {second}"], check=True, timeout=60)


def test_the_descriptor_set_is_compiled_from_the_proto_files(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    script = runpy.run_path(str(ROOT / "scripts" / "make_descriptors.py"))
    script["compile_protos"](tmp_path / "new.binpb")
    read = FileDescriptorSet.FromString
    assert read((tmp_path / "new.binpb").read_bytes()) == read(DESCRIPTORS.read_bytes()), (
        "run scripts/make_descriptors.py"
    )


def test_the_server_answers_every_method_of_the_proto_files() -> None:
    import grpc

    files = FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file
    methods = {
        f"/{file.package}.{service.name}/{method.name}"
        for file in files
        for service in file.service
        for method in service.method
        if not method.server_streaming
    }
    assert "/inference.GRPCInferenceService/ModelInfer" in methods
    not_offered = set()
    with (
        serving(shared_memory=True) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        for path in methods:
            try:
                channel.unary_unary(path)(b"")
            except grpc.RpcError as exc:
                if exc.code() is grpc.StatusCode.UNIMPLEMENTED:
                    not_offered.add(path)
    assert not_offered == set()


def test_config_keys_without_a_protobuf_field_are_dropped() -> None:
    config = message_from(
        "ModelConfig", {"name": "m", "max_batch_size": 4, "something_new": {"a": 1}}
    )
    assert (config.name, config.max_batch_size) == ("m", 4)
