"""Our messages are tritonclient's on the wire, and live beside them in one process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from deploykit.serving.oip.protobuf import MESSAGES, filled

triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
from tritonclient.grpc import model_config_pb2, service_pb2  # noqa: E402

INFERENCE = sorted(name for name in MESSAGES if not name.startswith("Health"))


def theirs(name: str) -> Any:
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
    nested = {
        inner.name: (inner.GetOptions().map_entry, described(inner))
        for inner in message.nested_types
    }
    enums = {
        enum.full_name: {value.name: value.number for value in enum.values}
        for field in message.fields
        if (enum := field.enum_type)
    }
    return {"fields": fields, "nested": nested, "enums": enums}


def within(ours: dict[str, Any], other: dict[str, Any]) -> None:
    """Everything of ours is there, and the same."""
    for field, value in ours["fields"].items():
        assert other["fields"][field] == value, field
    assert {**other["enums"], **ours["enums"]} == other["enums"]
    for name, (is_map, inner) in ours["nested"].items():
        their_map, their_inner = other["nested"][name]
        assert is_map == their_map
        within(inner, their_inner)


@pytest.mark.parametrize("name", INFERENCE)
def test_every_field_of_ours_is_tritonclients(name: str) -> None:
    within(described(MESSAGES[name].DESCRIPTOR), described(theirs(name)))


def test_the_whole_of_the_inference_messages_is_there() -> None:
    """Where a field were missing, what a client sends in it would be lost in silence."""
    partial = {"ModelConfig", "ModelInput", "ModelOutput", "ModelInstanceGroup"}
    partial |= {"ModelDynamicBatching"}
    for name in set(INFERENCE) - partial:
        assert described(MESSAGES[name].DESCRIPTOR) == described(theirs(name)), name


@pytest.mark.parametrize("first", ["tritonclient.grpc", "deploykit.serving.grpc.server"])
def test_both_can_be_imported_in_either_order(first: str) -> None:
    second = ({"tritonclient.grpc", "deploykit.serving.grpc.server"} - {first}).pop()
    subprocess.run([sys.executable, "-c", f"import {first}, {second}"], check=True, timeout=60)


def test_bytes_of_one_are_read_by_the_other() -> None:
    sent = service_pb2.ModelInferRequest(model_name="m", id="7")
    sent.parameters["timeout"].int64_param = 5
    sent.inputs.add(name="x", datatype="INT8", shape=[2, -1]).contents.int_contents.extend([1, -1])
    sent.raw_input_contents.append(b"abc")
    ours = MESSAGES["ModelInferRequest"].FromString(sent.SerializeToString())
    assert list(ours.inputs[0].contents.int_contents) == [1, -1]
    assert ours.SerializeToString(deterministic=True) == sent.SerializeToString(deterministic=True)


def test_members_that_grpc_does_not_have_are_left_out() -> None:
    config = filled("ModelConfig", {"name": "m", "max_batch_size": 4, "something_new": {"a": 1}})
    assert (config.name, config.max_batch_size) == ("m", 4)
