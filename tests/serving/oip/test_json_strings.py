"""BYTES: texts in and out, with every lie about a length; and a real model that takes them."""

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
from deploykit.runtimes.engine import load
from deploykit.serving.oip import json as oip
from deploykit.serving.oip.request import Request, RequestedOutput
from deploykit.serving.oip.request import signature as signature_of
from tests.support.serving.requests import LIMIT, model, one, tensor, values, wire

SIGNATURE = model("string", "N", 2)


def given_bytes(payload: bytes, shape: tuple[int, ...] = (1, 2)) -> Request:
    item = {
        "name": "x",
        "datatype": "BYTES",
        "shape": shape,
        "parameters": {"binary_data_size": len(payload)},
    }
    head = json.dumps({"inputs": [item]}).encode()
    return oip.decode(head + payload, len(head), SIGNATURE)


def given_json(data: object, shape: tuple[int, ...] = (1, 2)) -> Request:
    item = {"name": "x", "datatype": "BYTES", "shape": shape, "data": data}
    return oip.decode(json.dumps({"inputs": [item]}).encode(), None, SIGNATURE)


def texts(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (texts(b"ab") + struct.pack("<I", 3) + b"cd", "element 1 claims 3 bytes, 2 remain"),
        (texts(b"ab") + b"\xff\xff\xff\xff" + b"cd", "claims 4294967295 bytes, 2 remain"),
        (texts(b"ab", b"cd", b"ef"), "6 bytes follow the last of 2"),
        (texts(b"ab", b"cd") + b"\0", "1 bytes follow the last of 2"),
        (texts(b"abcd"), "the bytes end before element 1 of 2"),
        (texts(b"abcd") + b"\0\0", "the bytes end before element 1 of 2"),
        (b"\0" * 7, "at least 8 bytes, got 7"),
        (b"", "at least 8 bytes, got 0"),
        (texts(b"ab", b"\xff\xfe"), "element 1 is not UTF-8"),
        (texts(b"ab", "\ud800".encode(errors="surrogatepass")), "element 1 is not UTF-8"),
    ],
)
def test_bytes_with_a_lying_length_are_refused(payload: bytes, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        given_bytes(payload)


@pytest.mark.parametrize(
    "elements", [("", ""), ("a\0b", "\0"), ("é😀", "\n"), ("a" * 5000, "")], ids=ascii
)
def test_empty_texts_and_nuls_come_through(elements: tuple[str, str]) -> None:
    sent = texts(*(element.encode() for element in elements))
    for request in (given_bytes(sent), given_json(list(elements)), given_json([list(elements)])):
        assert request.feeds["x"].tolist() == [list(elements)]


@pytest.mark.parametrize("data", [["a", 1], ["a", None], ["a", ["b"]], ["a", True], ["a", {}]])
def test_what_is_no_text_is_refused(data: list) -> None:
    with pytest.raises(BadInput, match="is BYTES, 'data' holds"):
        given_json(data)


@pytest.mark.parametrize("data", [["a"], ["a", "b", "c"], [], "ab", [["a", "b"], ["c"]]])
def test_the_number_of_texts_must_be_that_of_the_shape(data: object) -> None:
    with pytest.raises(BadInput):
        given_json(data)


def test_texts_count_with_what_python_needs_for_them() -> None:
    """A 4-byte element costs some 60 bytes: the limit is on that."""
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


def test_bytes_that_are_no_text_go_out_binary_only() -> None:
    array = np.array([[b"\xff\xfe", "é"]], object)
    assert answer(array, binary=True)[1] == texts(b"\xff\xfe", "é".encode())
    with pytest.raises(BadInput, match="output 'y' holds bytes that are not UTF-8") as caught:
        answer(array, binary=False)
    assert "binary_data" in (caught.value.hint or "")


def test_bytes_that_are_text_go_out_as_json() -> None:
    array = np.array([["é".encode(), "b"]], object)
    assert json.loads(answer(array, binary=False)[0])["outputs"][0]["data"] == ["é", "b"]


@pytest.mark.parametrize("asked", [True, False], ids=["binary", "json"])
def test_onnx_runtime_takes_and_gives_texts(tmp_path: Path, asked: bool) -> None:
    """Decoder, a real engine, encoder; the inputs and outputs of the model are tensor(string)."""
    path = tmp_path / "texts.onnx"
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "texts",
        [helper.make_tensor_value_info("x", TensorProto.STRING, ["N", 2])],
        [helper.make_tensor_value_info("y", TensorProto.STRING, ["N", 2])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, path)
    array = values("string", 3, 2)
    with load(path, "cpu") as engine:
        assert engine.inputs == (TensorSpec("x", "string", ("N", 2)),)
        signature = signature_of(engine.inputs, engine.outputs, 8, LIMIT)
        body, json_bytes = one("string", array, parameters={"binary_data_output": asked})
        request = oip.decode(body, json_bytes, signature)
        outputs = engine(request.feeds)
    parts, _ = oip.encode("m", "1", request, outputs, signature)
    if asked:
        assert parts[1] == wire("string", array)
    else:
        assert json.loads(parts[0])["outputs"][0]["data"] == array.ravel().tolist()


def test_texts_of_a_batch_may_be_joined_and_cut() -> None:
    """What the batcher does: rows of several requests in one array, and slices of the answer."""
    first, second = given_json(["a", "b"]), given_json(["c", "d"])
    joined = np.concatenate([first.feeds["x"], second.feeds["x"]])
    assert answer(joined[1:2], binary=True)[1] == texts(b"c", b"d")
    assert tensor("string", joined)["shape"] == [2, 2]
