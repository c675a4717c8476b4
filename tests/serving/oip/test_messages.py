"""gRPC messages: raw contents are read in place, the rest is parsed by protobuf."""

from __future__ import annotations

import contextlib
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet

from deploykit.core.errors import BadInput
from deploykit.core.tensors import TensorSpec
from deploykit.engines.oip import DESCRIPTORS, FILES, MESSAGES
from deploykit.serving.oip import messages as infer
from deploykit.serving.oip.request import Request, RequestedOutput, Result, signature
from deploykit.serving.shared_memory import Region
from tests.support.campaign import rounds
from tests.support.serving.grpc_cases import serving

triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")

from tritonclient.grpc import model_config_pb2, service_pb2  # noqa: E402

TWO = signature(
    [TensorSpec("a", "float32", ("N", 2)), TensorSpec("b", "int8", ("N", 3))],
    [TensorSpec("y", "float32", ("N", 2)), TensorSpec("z", "int8", ("N", 3))],
    8,
    1 << 20,
)
A = np.array([[1.5, -2]], np.float32)
B = np.array([[1, -2, 3]], np.int8)


def message(**fields: Any) -> Any:
    request = MESSAGES["ModelInferRequest"](**{"model_name": "m", **fields})
    request.inputs.add(name="a", datatype="FP32", shape=[1, 2])
    request.inputs.add(name="b", datatype="INT8", shape=[1, 3])
    return request


def raw(**fields: Any) -> Any:
    request = message(**fields)
    request.raw_input_contents.extend([A.tobytes(), B.tobytes()])
    return request


def decode(data: bytes, at: int = 0) -> Request:
    return infer.decode(infer.split_request(data, at), data, at, TWO)


def test_raw_contents_are_read_in_place() -> None:
    data = b"12345" + raw(id="7").SerializeToString()
    request = decode(data, 5)
    assert np.shares_memory(request.feeds["b"], np.frombuffer(data, np.uint8))
    np.testing.assert_array_equal(request.feeds["a"], A)
    np.testing.assert_array_equal(request.feeds["b"], B)
    assert request.id == "7"
    assert [wanted.name for wanted in request.outputs] == ["y", "z"]
    assert all(wanted.binary for wanted in request.outputs)


def test_a_request_as_long_as_the_last_is_read_for_itself() -> None:
    """Where only raw contents differ, what was found in the last one holds."""
    first = b"1" + raw(id="7").SerializeToString()
    parts = infer._split(first, 1)
    for place in range(1, len(first)):
        for bit in (1, 8, 128):
            other = bytearray(first)
            other[place] ^= bit
            assert infer.split_request(first, 1) == parts
            try:
                expected = infer._split(bytes(other), 1)
            except BadInput:
                with pytest.raises(BadInput):
                    infer.split_request(bytes(other), 1)
            else:
                assert infer.split_request(bytes(other), 1) == expected


def test_the_layouts_of_few_requests_are_remembered() -> None:
    data = message().SerializeToString()
    for size in range(2 * infer._MOST_LAYOUTS):
        contents = MESSAGES["ModelInferRequest"](raw_input_contents=[bytes(size)])
        infer.split_request(data + contents.SerializeToString(), 0)
        assert len(infer._layouts) <= infer._MOST_LAYOUTS


def test_parameters_of_every_type_are_decoded() -> None:
    request = raw()
    request.parameters["timeout"].int64_param = 1500
    request.parameters["priority"].uint64_param = 1
    request.parameters["other"].double_param = 1.5
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    found = decode(request.SerializeToString())
    assert (found.timeout_us, found.priority) == (1500, 1)


RAW_A, RAW_B = A.tobytes(), B.tobytes()


@pytest.mark.parametrize(
    ("contents", "of_a", "of_b", "error"),
    [
        ([RAW_A, RAW_B], {"fp32": [1, 2]}, {}, "'a' has both 'contents' and raw_input_contents"),
        ([RAW_A], {}, {}, "fewer entries than there are inputs"),
        ([RAW_A, RAW_B, b"abc"], {}, {}, "has 3 entries, 2 inputs need one"),
        ([], {"fp64": [1, 2]}, {"int": [1] * 3}, "belongs in fp32_contents, got fp64_contents"),
        ([], {"fp32": [1, 2], "int": [1, 2]}, {"int": [1] * 3}, "fp32_contents, got int_contents"),
        ([], {"fp32": [1, 2]}, {"int": [1, 2, 300]}, "300 is out of range for INT8"),
        ([], {}, {}, "has 2 elements, 'data' has 0"),
    ],
)
def test_invalid_contents_are_refused(
    contents: list[bytes], of_a: dict[str, Any], of_b: dict[str, Any], error: str
) -> None:
    request = message()
    request.raw_input_contents.extend(contents)
    for tensor, fields in zip(request.inputs, (of_a, of_b), strict=True):
        for name, values in fields.items():
            getattr(tensor.contents, f"{name}_contents").extend(values)
    with pytest.raises(BadInput, match=error):
        decode(request.SerializeToString())


def test_typed_floats_may_be_nan_or_infinite() -> None:
    """Other than in JSON."""
    request = message()
    request.inputs[0].contents.fp32_contents.extend([np.nan, -np.inf])
    request.inputs[1].contents.int_contents.extend([1, 2, 3])
    found = decode(request.SerializeToString()).feeds["a"]
    np.testing.assert_array_equal(found, np.array([[np.nan, -np.inf]], np.float32))


def test_damaged_messages_are_decoded_or_refused() -> None:
    rng = np.random.default_rng(0)
    good = raw(id="7").SerializeToString()
    for _ in range(rounds(1000, 100_000)):
        data = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(len(data)))
            data[at : at + int(rng.integers(3))] = rng.bytes(int(rng.integers(3)))
            data = data or bytearray(b"\0")
        with contextlib.suppress(BadInput):
            decode(bytes(data))


def test_an_encoded_answer_is_read_by_protobuf() -> None:
    y = np.arange(2, dtype=np.float32).reshape(1, 2)
    region = Region("out", 4, 16)
    found = [
        Result("y", "FP32", (1, 2), y, RequestedOutput("y", True)),
        Result("z", "INT8", (1, 3), None, RequestedOutput("z", True, region=region)),
        Result("t", "BYTES", (200,), np.array(["abc"] * 200, object), RequestedOutput("t", True)),
    ]
    parts = infer.encode("m", "die Nr. 7 ü", found)
    response = MESSAGES["ModelInferResponse"].FromString(b"".join(parts))
    assert (response.model_name, response.model_version, response.id) == ("m", "1", "die Nr. 7 ü")
    assert [(o.name, o.datatype, list(o.shape)) for o in response.outputs] == [
        ("y", "FP32", [1, 2]),
        ("z", "INT8", [1, 3]),
        ("t", "BYTES", [200]),
    ]
    assert list(response.raw_output_contents) == [y.tobytes(), b"", b"\3\0\0\0abc" * 200]
    assert response.outputs[1].parameters["shared_memory_region"].string_param == "out"
    streamed = MESSAGES["ModelStreamInferResponse"].FromString(
        b"".join(infer.wrap_in_stream(parts))
    )
    response.parameters["triton_final_response"].bool_param = True
    assert streamed.infer_response == response
    without = MESSAGES["ModelInferResponse"].FromString(
        b"".join(infer.encode("m", None, found[:1]))
    )
    assert without.id == ""


# -- The messages of the proto files agree with tritonclient's


ROOT = Path(__file__).resolve().parents[3]
(_SERVICE,) = (file for file in FILES if file.package == "inference")
INFERENCE = sorted(message.name for message in _SERVICE.message_type)


def tritons(name: str) -> Any:
    found = service_pb2.DESCRIPTOR.message_types_by_name.get(name)
    return found or model_config_pb2.DESCRIPTOR.message_types_by_name[name]


def described(message: Any) -> dict[str, str]:
    """Every field and nested message, as text."""
    found = DescriptorProto()
    message.CopyToProto(found)
    parts = (*found.field, *found.nested_type)
    return {each.name: re.sub(r"\s*json_name: .*", "", str(each)) for each in parts}


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
