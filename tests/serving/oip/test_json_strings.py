"""BYTES tensors: strings in and out, wrong lengths, and a real model with string tensors."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deploykit.core.errors import BadInput, TooLarge
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import load
from deploykit.serving.oip import json as oip
from deploykit.serving.oip.request import Request, RequestedOutput
from deploykit.serving.oip.request import signature as signature_of
from tests.support.serving.requests import LIMIT, model, one, tensor, values, wire

SIGNATURE = model("string", "N", 2)


def decode_binary(payload: bytes, shape: tuple[int, ...] = (1, 2)) -> Request:
    item = {
        "name": "x",
        "datatype": "BYTES",
        "shape": shape,
        "parameters": {"binary_data_size": len(payload)},
    }
    head = json.dumps({"inputs": [item]}).encode()
    return oip.decode(head + payload, len(head), SIGNATURE)


def decode_json(data: object, shape: tuple[int, ...] = (1, 2)) -> Request:
    item = {"name": "x", "datatype": "BYTES", "shape": shape, "data": data}
    return oip.decode(json.dumps({"inputs": [item]}).encode(), None, SIGNATURE)


def packed(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (packed(b"ab") + struct.pack("<I", 3) + b"cd", "element 1 claims 3 bytes, 2 remain"),
        (packed(b"ab") + b"\xff\xff\xff\xff" + b"cd", "claims 4294967295 bytes, 2 remain"),
        (packed(b"ab", b"cd", b"ef"), "6 bytes follow the last of 2"),
        (packed(b"ab", b"cd") + b"\0", "1 bytes follow the last of 2"),
        (packed(b"abcd"), "the bytes end before element 1 of 2"),
        (packed(b"abcd") + b"\0\0", "the bytes end before element 1 of 2"),
        (b"\0" * 7, "at least 8 bytes, got 7"),
        (b"", "at least 8 bytes, got 0"),
        (packed(b"ab", b"\xff\xfe"), "element 1 is not UTF-8"),
        (packed(b"ab", "\ud800".encode(errors="surrogatepass")), "element 1 is not UTF-8"),
    ],
)
def test_string_elements_with_a_wrong_length_are_refused(payload: bytes, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        decode_binary(payload)


@pytest.mark.parametrize(
    "elements", [("", ""), ("a\0b", "\0"), ("é😀", "\n"), ("a" * 5000, "")], ids=ascii
)
def test_empty_strings_and_nul_characters_are_kept(elements: tuple[str, str]) -> None:
    sent = packed(*(element.encode() for element in elements))
    for request in (
        decode_binary(sent),
        decode_json(list(elements)),
        decode_json([list(elements)]),
    ):
        assert request.feeds["x"].tolist() == [list(elements)]


@pytest.mark.parametrize("data", [["a", 1], ["a", None], ["a", ["b"]], ["a", True], ["a", {}]])
def test_elements_that_are_not_strings_are_refused(data: list) -> None:
    with pytest.raises(BadInput, match="is BYTES, 'data' holds"):
        decode_json(data)


@pytest.mark.parametrize("data", [["a"], ["a", "b", "c"], [], "ab", [["a", "b"], ["c"]]])
def test_the_number_of_strings_must_match_the_shape(data: object) -> None:
    with pytest.raises(BadInput):
        decode_json(data)


def test_strings_count_towards_the_limit_with_their_size_in_memory() -> None:
    """A 4-byte element takes about 60 bytes as a Python string."""
    count = LIMIT // 40
    free = signature_of([TensorSpec("x", "string", ("N",))], [], 0, LIMIT)
    payload = bytes(4 * count)
    assert len(payload) < LIMIT
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "x",
                    "datatype": "BYTES",
                    "shape": [count],
                    "parameters": {"binary_data_size": len(payload)},
                }
            ]
        }
    ).encode()
    with pytest.raises(TooLarge, match="above the limit"):
        oip.decode(head + payload, len(head), free)
    item = {"name": "x", "datatype": "BYTES", "shape": [count], "data": [""] * count}
    with pytest.raises(TooLarge, match="above the limit"):
        oip.decode(json.dumps({"inputs": [item]}).encode(), None, free)


def answer(array: np.ndarray, *, binary: bool) -> list[bytes]:
    request = Request({}, 1, (), (RequestedOutput("y", binary),))
    return oip.encode("m", "1", request, {"y": array}, SIGNATURE)[0]


def test_an_output_that_is_not_utf8_is_sent_as_binary_only() -> None:
    array = np.array([[b"\xff\xfe", "é"]], object)
    assert answer(array, binary=True)[1] == packed(b"\xff\xfe", "é".encode())
    with pytest.raises(BadInput, match="output 'y' holds bytes that are not UTF-8") as caught:
        answer(array, binary=False)
    assert "binary_data" in (caught.value.hint or "")


def test_a_utf8_bytes_output_can_be_sent_as_json() -> None:
    array = np.array([["é".encode(), "b"]], object)
    assert json.loads(answer(array, binary=False)[0])["outputs"][0]["data"] == ["é", "b"]


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_onnx_runtime_reads_and_returns_strings(tmp_path: Path, binary: bool) -> None:
    """Decoder, a real engine, encoder; the inputs and outputs of the model are tensor(string)."""
    path = tmp_path / "strings.onnx"
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "strings",
        [helper.make_tensor_value_info("x", TensorProto.STRING, ["N", 2])],
        [helper.make_tensor_value_info("y", TensorProto.STRING, ["N", 2])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, path)
    array = values("string", 3, 2)
    with load(path, "cpu") as engine:
        assert engine.inputs == (TensorSpec("x", "string", ("N", 2)),)
        signature = signature_of(engine.inputs, engine.outputs, 8, LIMIT)
        body, json_bytes = one("string", array, parameters={"binary_data_output": binary})
        request = oip.decode(body, json_bytes, signature)
        outputs = engine(request.feeds)
    parts, _ = oip.encode("m", "1", request, outputs, signature)
    if binary:
        assert parts[1] == wire("string", array)
    else:
        assert json.loads(parts[0])["outputs"][0]["data"] == array.ravel().tolist()


def test_strings_of_several_requests_can_be_joined_and_split() -> None:
    """As the batcher does: rows of several requests in one array, and slices of the output."""
    first, second = decode_json(["a", "b"]), decode_json(["c", "d"])
    joined = np.concatenate([first.feeds["x"], second.feeds["x"]])
    assert answer(joined[1:2], binary=True)[1] == packed(b"c", b"d")
    assert tensor("string", joined)["shape"] == [2, 2]
