"""Valid requests pass the JSON decoder and encoder unchanged."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.tensors import PROTOCOL_NAMES, TensorSpec, carrier
from deploykit.serving.oip import json as oip
from deploykit.serving.oip.request import signature as signature_of
from tests.support.serving.requests import (
    DTYPES,
    JSON_DTYPES,
    LIMIT,
    binary,
    model,
    one,
    two_inputs,
    values,
    wire,
)


@pytest.mark.parametrize("rows", [0, 1, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_binary_inputs_and_outputs_keep_their_values(dtype: str, rows: int) -> None:
    array = values(dtype, rows, 4)
    signature = model(dtype)
    body, json_bytes = one(dtype, array, parameters={"binary_data_output": True})
    request = oip.decode(body, json_bytes, signature)
    np.testing.assert_array_equal(request.feeds["x"], array, strict=True)
    assert request.rows == rows

    parts, header = oip.encode("m", "1", request, {"y": request.feeds["x"]}, signature)
    output = json.loads(parts[0])["outputs"][0]
    assert output["parameters"] == {"binary_data_size": len(wire(dtype, array))}
    assert output["shape"] == [rows, 4]
    assert output["datatype"] == PROTOCOL_NAMES[dtype]
    assert b"".join(parts[1:]) == wire(dtype, array)
    assert header == (len(parts[0]) if rows else None)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
@pytest.mark.parametrize("dtype", JSON_DTYPES)
def test_json_inputs_and_outputs_keep_their_values(dtype: str, nested: bool) -> None:
    array = values(dtype, 3, 2, 2)
    signature = model(dtype, "N", 2, 2)
    data = array.tolist() if nested else array.ravel().tolist()
    item = {"name": "x", "datatype": PROTOCOL_NAMES[dtype], "shape": [3, 2, 2], "data": data}
    request = oip.decode(json.dumps({"inputs": [item]}).encode(), None, signature)
    np.testing.assert_array_equal(request.feeds["x"], array, strict=True)

    parts, header = oip.encode("m", "1", request, {"y": array}, signature)
    output = json.loads(parts[0])["outputs"][0]
    back = np.array(output["data"], carrier(dtype)).reshape(output["shape"])
    np.testing.assert_array_equal(back, array, strict=True)
    assert header is None
    assert "parameters" not in output  # a C++ client would look for binary data


def test_inputs_are_decoded_in_the_order_of_the_model() -> None:
    a, b = values("float32", 3, 2), values("int64", 3)
    body, json_bytes = binary({"b": b, "a": a})
    request = oip.decode(body, json_bytes, two_inputs())
    assert list(request.feeds) == ["a", "b"]
    np.testing.assert_array_equal(request.feeds["a"], a)
    np.testing.assert_array_equal(request.feeds["b"], b)


def test_a_binary_and_a_json_input_in_one_request() -> None:
    b = values("int64", 2)
    items = [
        {"name": "a", "datatype": "FP32", "shape": [2, 2], "data": [1, 2.5, 3, 4]},
        {"name": "b", "datatype": "INT64", "shape": [2], "parameters": {"binary_data_size": 16}},
    ]
    head = json.dumps({"inputs": items}).encode()
    request = oip.decode(head + b.tobytes(), len(head), two_inputs())
    np.testing.assert_array_equal(request.feeds["a"], [[1, 2.5], [3, 4]])
    np.testing.assert_array_equal(request.feeds["b"], b)


def test_outputs_have_the_requested_order_and_form() -> None:
    body, json_bytes = binary(
        {"a": values("float32", 1, 2), "b": values("int64", 1)},
        outputs=[{"name": "q", "parameters": {"binary_data": True}}, {"name": "p"}],
        id="7",
    )
    signature = two_inputs()
    request = oip.decode(body, json_bytes, signature)
    answers = {"p": np.ones((1, 2), np.float32), "q": np.array([5])}
    parts, header = oip.encode("m", "1", request, answers, signature)
    document = json.loads(parts[0])
    assert [output["name"] for output in document["outputs"]] == ["q", "p"]
    assert document["outputs"][1]["data"] == [1, 1]
    assert document["id"] == "7"
    assert parts[1:] == [np.array([5]).tobytes()]
    assert header == len(parts[0])


def test_a_non_contiguous_slice_of_a_batch_is_encoded() -> None:
    body, json_bytes = binary({"x": values("float32", 1, 4)})
    request = oip.decode(body, json_bytes, model())
    whole = np.arange(24, dtype=np.float32).reshape(4, 6).T  # not contiguous
    parts, _ = oip.encode("m", "1", request, {"y": whole[2:3]}, model())
    assert json.loads(parts[0])["outputs"][0]["data"] == [2, 8, 14, 20]


def test_a_repeated_json_part_is_decoded_with_the_new_binary_data() -> None:
    signature = model()
    first, second = values("float32", 2, 4), values("float32", 2, 4) + 1
    for array in (first, second):
        body, json_bytes = binary({"x": array})
        np.testing.assert_array_equal(oip.decode(body, json_bytes, signature).feeds["x"], array)


@pytest.mark.parametrize("dtype", JSON_DTYPES)
def test_arrays_decoded_from_json_are_read_only(dtype: str) -> None:
    """A small JSON part is decoded once: an equal request gets the same array."""
    array, signature = values(dtype, 1, 4), model(dtype)
    item = {"name": "x", "datatype": PROTOCOL_NAMES[dtype], "shape": [1, 4]}
    body = json.dumps({"inputs": [{**item, "data": array.tolist()}]}).encode()
    first, second = (oip.decode(body, None, signature).feeds["x"] for _ in range(2))
    assert first is second
    with pytest.raises(ValueError, match="read-only"):
        first[0] = first[0]


def test_a_cached_json_part_is_not_shared_between_models() -> None:
    body, json_bytes = binary({"x": values("float32", 2, 4)})
    oip.decode(body, json_bytes, model())
    with pytest.raises(BadInput, match="above 1"):
        oip.decode(body, json_bytes, model(max_batch=1))


def test_a_scalar_has_one_element() -> None:
    item = {"name": "x", "datatype": "FP64", "shape": [], "data": [2.5]}
    scalar = signature_of([TensorSpec("x", "float64", ())], [], 0, LIMIT)
    request = oip.decode(json.dumps({"inputs": [item]}).encode(), None, scalar)
    assert request.feeds["x"].shape == ()
    assert request.feeds["x"] == 2.5


@pytest.mark.parametrize(
    ("parameters", "expected"), [({}, None), ({"timeout": 0}, None), ({"timeout": 5}, 5)]
)
def test_the_timeout_is_in_microseconds(parameters: dict, expected: int | None) -> None:
    body, json_bytes = binary({"x": values("float32", 1, 4)}, parameters=parameters)
    assert oip.decode(body, json_bytes, model()).timeout_us == expected


@pytest.mark.parametrize(
    ("parameters", "expected"), [({}, 0), ({"priority": 0}, 0), ({"priority": 3}, 3)]
)
def test_the_priority_is_decoded(parameters: dict, expected: int) -> None:
    body, json_bytes = binary({"x": values("float32", 1, 4)}, parameters=parameters)
    assert oip.decode(body, json_bytes, model()).priority == expected


@pytest.mark.parametrize(
    "parameters",
    [
        {"z": 1, "headers": "x", "nested": {"a": [1]}},
        {"sequence_id": 0, "sequence_start": True},
        {"sequence_id": ""},
    ],
    ids=str,
)
def test_unknown_fields_and_parameters_are_ignored(parameters: dict) -> None:
    body, json_bytes = binary(
        {"x": values("float32", 1, 4)},
        extra={"a": [1]},
        parameters=parameters,
        outputs=[{"name": "y", "extra": 1, "parameters": {"mine": "x"}}],
    )
    assert oip.decode(body, json_bytes, model()).rows == 1


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "\x1b[2J", "é" * 512, ""], ids=ascii)
def test_the_id_is_echoed_exactly(name: str) -> None:
    body, json_bytes = binary({"x": values("float32", 1, 4)}, id=name)
    request = oip.decode(body, json_bytes, model())
    parts, _ = oip.encode("m", "1", request, {"y": request.feeds["x"]}, model())
    assert json.loads(parts[0])["id"] == name
