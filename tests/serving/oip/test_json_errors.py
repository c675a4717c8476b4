"""Invalid JSON requests are refused with an error that names the culprit."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from deploykit.core.errors import BadInput, TooLarge
from deploykit.core.tensors import PROTOCOL_NAMES, TensorSpec
from deploykit.serving.oip import json as oip
from deploykit.serving.oip.request import Signature
from deploykit.serving.oip.request import signature as signature_of
from tests.support.serving.requests import LIMIT, binary, model, two_inputs, values


def one(shape: object = (1, 4), data: object = (1, 2, 3, 4), **more: object) -> bytes:
    item = {"name": "x", "datatype": "FP32", "shape": shape, "data": data, **more}
    return json.dumps({"inputs": [item]}).encode()


BAD_DOCUMENTS = {
    "empty": (b"", "not valid JSON"),
    "cut off": (b"{", "not valid JSON"),
    "not UTF-8": (b'"\xff\xfe"', "not valid JSON"),
    "a list": (b"[]", "must be a JSON object"),
    "null": (b"null", "must be a JSON object"),
    "trailing bytes": (one() + b"x", "not valid JSON"),
    "two documents": (one() + one(), "not valid JSON"),
    "a leading NUL": (b"\0" + one(), "not valid JSON"),
    "NaN": (one(data=[float("nan"), 2, 3, 4]), "not valid JSON"),
    "a number above every float": (one().replace(b"[1, 2", b"[1e999, 2"), "not valid JSON"),
    "5000 digits": (one().replace(b"[1, 2", b"[" + b"9" * 5000 + b", 2"), "not valid JSON"),
    "nested 101 deep": (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "more than 100 deep"),
    "nested 100000 deep": (b"[" * 100_000 + b"]" * 100_000, "not valid JSON"),
    "no inputs": (b"{}", "'inputs' must be a list"),
    "inputs an object": (b'{"inputs": {}}', "'inputs' must be a list"),
    "inputs empty": (b'{"inputs": []}', "at least one"),
    "inputs of numbers": (b'{"inputs": [5]}', "must be an object"),
    "an id that is a number": (one()[:-1] + b', "id": 5}', "'id' must be a string"),
    "an id of 2 KiB": (one()[:-1] + b', "id": "' + b"i" * 2048 + b'"}', "'id' must be a string"),
    "parameters a list": (one()[:-1] + b', "parameters": []}', "must be an object"),
    "a negative timeout": (one()[:-1] + b', "parameters": {"timeout": -1}}', "'timeout'"),
    "a timeout that is a string": (one()[:-1] + b', "parameters": {"timeout": "1"}}', "'timeout'"),
    "a flag that is a number": (
        one()[:-1] + b', "parameters": {"binary_data_output": 1}}',
        "true or false",
    ),
    "a sequence": (one()[:-1] + b', "parameters": {"sequence_id": 3}}', "sequence_id"),
    "a reserved parameter": (one()[:-1] + b', "parameters": {"triton_x": 3}}', "reserved"),
    "an unknown output": (one()[:-1] + b', "outputs": [{"name": "z"}]}', "unknown output 'z'"),
    "outputs a string": (one()[:-1] + b', "outputs": "y"}', "'outputs' must be a list"),
    "many outputs": (
        one()[:-1] + b', "outputs": [' + b'{"name":"y"},' * 50_000 + b'{"name":"y"}]}',
        "50001 outputs",
    ),
    **{
        f"classification {value}": (
            one()[:-1]
            + b', "outputs": [{"name": "y", "parameters": {"classification": %s}}]}' % value,
            "from 1 to 10000, got",
        )
        for value in (b"0", b"-1", b"2.0", b'"3"', b"true", b"10001", b"[]")
    },
    "a priority below 0": (one()[:-1] + b', "parameters": {"priority": -1}}', "'priority'"),
    "a priority that is a string": (
        one()[:-1] + b', "parameters": {"priority": "1"}}',
        "'priority'",
    ),
    "a sequence that is a string": (
        one()[:-1] + b', "parameters": {"sequence_id": "s"}}',
        "sequence_id",
    ),
    "a sequence that is false": (
        one()[:-1] + b', "parameters": {"sequence_id": false}}',
        "sequence_id",
    ),
}


@pytest.mark.parametrize(("body", "message"), BAD_DOCUMENTS.values(), ids=BAD_DOCUMENTS)
def test_a_bad_document_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        oip.decode(body, None, model())


HUGE = 1152921504606846978  # 2**60 + 2
BAD_TENSORS = {
    "an unknown input": ({"name": "z"}, "unknown input 'z'"),
    "no name": ({"name": None}, "unknown input None"),
    "a name that is a list": ({"name": ["x"]}, "unknown input"),
    "a datatype in lower case": ({"datatype": "fp32"}, "is FP32, got datatype 'fp32'"),
    "another datatype": ({"datatype": "INT64"}, "is FP32, got datatype 'INT64'"),
    "no datatype": ({"datatype": None}, "got datatype None"),
    "no shape": ({"shape": None}, "'shape' must be a list"),
    "a shape that is a number": ({"shape": 4}, "'shape' must be a list"),
    "a float in the shape": ({"shape": [1.0, 4]}, "'shape' must be a list of integers"),
    "a string in the shape": ({"shape": ["1", 4]}, "'shape' must be"),
    "true in the shape": ({"shape": [True, 4]}, "'shape' must be"),
    "a negative size": ({"shape": [-1, -4]}, "'shape' must be"),
    "a wrong rank": ({"shape": [4]}, r"x:float32\[N,4\], got shape \[4\]"),
    "4097 dimensions": ({"shape": [1] * 4097}, "got shape"),
    "a fixed size that differs": ({"shape": [1, 5], "data": [0] * 5}, r"got shape \[1, 5\]"),
    "a batch above the limit": ({"shape": [9, 4], "data": [0] * 36}, "batch 9 is above 8"),
    "one element short": ({"data": [1, 2, 3]}, "4 elements, 'data' has 3"),
    "one element over": ({"data": [1, 2, 3, 4, 5]}, "4 elements, 'data' has 5"),
    "ragged": ({"shape": [2, 4], "data": [[1, 2, 3, 4], [5, 6]]}, "not nested like"),
    "nested too deep": ({"data": [[[1], [2], [3], [4]]]}, r"'data' holds \[1\]"),
    "rows and numbers mixed": ({"shape": [2, 4], "data": [[1, 2, 3, 4], 5]}, "not nested like"),
    "too many rows": ({"data": [[1, 2, 3, 4], [1, 2, 3, 4]]}, "'data' has 2 rows"),
    "data a number": ({"data": 5}, "'data' must be a list"),
    "data null": ({"data": None}, "'data' must be a list"),
    "a string for a number": ({"data": [1, 2, 3, "4"]}, "holds '4'"),
    "null for a number": ({"data": [1, 2, 3, None]}, "holds None"),
    "true for a number": ({"data": [1, 2, 3, True]}, "holds True"),
    "above float32": ({"data": [1, 2, 3, 1e300]}, "out of range for FP32"),
    "data and bytes": ({"parameters": {"binary_data_size": 16}}, "exactly one of"),
    "shared memory and data": (
        {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16}},
        "exactly one of",
    ),
    "parameters a number": ({"parameters": 5}, "must be an object"),
}


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_a_bad_tensor_is_refused(change: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        oip.decode(one(**change), None, model())


@pytest.mark.parametrize("shape", [[16, HUGE], [4, HUGE], [2**63, 2], [HUGE, HUGE]], ids=str)
def test_a_shape_that_overflows_64_bits_is_refused(shape: list[int]) -> None:
    free = model("float32", "H", "W", max_batch=0)
    with pytest.raises(BadInput, match="elements, 'data' has 32"):
        oip.decode(one(shape=shape, data=[1.0] * 32), None, free)
    item = {
        "name": "x",
        "datatype": "FP32",
        "shape": shape,
        "parameters": {"binary_data_size": 128},
    }
    head = json.dumps({"inputs": [item]}).encode()
    with pytest.raises(BadInput, match="bytes, got 128"):
        oip.decode(head + bytes(128), len(head), free)


@pytest.mark.parametrize("shape", [[0, 2**63], [2**62, 0]], ids=str)
def test_an_empty_tensor_of_impossible_sizes_is_refused(shape: list[int]) -> None:
    with pytest.raises(BadInput, match="too large"):
        oip.decode(one(shape=shape, data=[]), None, model("float32", "H", "W", max_batch=0))


@pytest.mark.parametrize(
    ("dtype", "data", "message"),
    [
        ("int8", [300], "300 is out of range for INT8"),
        ("uint8", [-1], "-1 is out of range for UINT8"),
        ("int64", [1.5], "holds 1.5"),
        ("int64", [2**63], "out of range for INT64"),
        ("uint64", [2**64], "holds 1.8446744073709552e"),
        ("bool", [2], "is BOOL, 'data' holds 2"),
        ("bool", [1], "is BOOL, 'data' holds 1"),
        ("int32", [True], "holds True"),
        ("float16", [1.0], "must be sent as binary"),
    ],
)
def test_values_are_never_converted_to_another_type(dtype: str, data: list, message: str) -> None:
    item = {"name": "x", "datatype": PROTOCOL_NAMES[dtype], "shape": [1], "data": data}
    signature = signature_of([TensorSpec("x", dtype, (1,))], [], 0, LIMIT)
    with pytest.raises(BadInput, match=message):
        oip.decode(json.dumps({"inputs": [item]}).encode(), None, signature)


@pytest.mark.parametrize(
    ("change", "message"),
    [(-1, "16 bytes"), (1, "16 bytes, but 17 follow"), (-16, "but 0 follow")],
)
def test_binary_data_must_have_exactly_the_size_of_the_inputs(change: int, message: str) -> None:
    body, json_bytes = binary({"x": values("float32", 1, 4)})
    body = body[:change] if change < 0 else body + bytes(change)
    with pytest.raises(BadInput, match=message):
        oip.decode(body, json_bytes, model())


@pytest.mark.parametrize("size", [-4, 2**63, 15, 17, 16.0, "16", True], ids=str)
def test_a_wrong_binary_data_size_is_refused(size: object) -> None:
    item = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, 4],
        "parameters": {"binary_data_size": size},
    }
    head = json.dumps({"inputs": [item]}).encode()
    with pytest.raises(BadInput, match="is 16 bytes, got"):
        oip.decode(head + bytes(16), len(head), model())


ROW, INT = values("float32", 1, 2), values("int64", 1)
BAD_REQUESTS = {
    "a missing input": (binary({"a": ROW}), two_inputs(), "missing input 'b'"),
    "other batch sizes": (
        binary({"a": values("float32", 3, 2), "b": values("int64", 4)}),
        two_inputs(),
        "axis N is 3 and 4",
    ),
    "the same output twice": (
        binary({"a": ROW, "b": INT}, outputs=[{"name": "p"}, {"name": "p"}]),
        two_inputs(),
        "twice",
    ),
    "float16 as JSON": (binary({"x": values("float16", 1, 4)}), model("float16"), "no JSON form"),
    "a bool of 2": (
        (lambda body, size: (body[:-1] + b"\2", size))(*binary({"x": values("bool", 1, 4)})),
        model("bool"),
        "neither 0 nor 1",
    ),
    "the same input twice": (
        (json.dumps({"inputs": 2 * json.loads(one())["inputs"]}).encode(), None),
        model(),
        "'x' appears twice",
    ),
}


@pytest.mark.parametrize(("sent", "signature", "message"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_request_that_does_not_fit_its_model_is_refused(
    sent: tuple[bytes, int | None], signature: Signature, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        oip.decode(*sent, signature)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_in_a_json_output_is_an_error_and_not_null(value: float) -> None:
    body, json_bytes = binary({"x": values("float32", 1, 4)})
    request = oip.decode(body, json_bytes, model())
    with pytest.raises(BadInput, match="output 'y' holds NaN") as caught:
        oip.encode("m", "1", request, {"y": np.array([[value]], np.float32)}, model())
    assert "binary_data" in (caught.value.hint or "")


def test_a_header_length_of_the_whole_body_is_accepted() -> None:
    assert oip.decode(one(), len(one()), model()).rows == 1


def test_the_size_limit_applies_to_the_decoded_tensor() -> None:
    free = signature_of([TensorSpec("x", "float64", ("W",))], [], 0, 1000)
    item = {"name": "x", "datatype": "FP64", "shape": [200], "data": [0] * 200}
    with pytest.raises(TooLarge, match="1600 bytes, above the limit of 1000"):
        oip.decode(json.dumps({"inputs": [item]}).encode(), None, free)


def test_a_claimed_binary_size_allocates_nothing() -> None:
    free = model("float32", "H", "W", max_batch=0)
    size = 2**30
    item = {
        "name": "x",
        "datatype": "FP32",
        "shape": [2, size // 8],
        "parameters": {"binary_data_size": size},
    }
    head = json.dumps({"inputs": [item]}).encode()
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match="but 5 follow"):
            oip.decode(head + b"12345", len(head), free)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_client_strings_in_errors_are_short_and_printable() -> None:
    item = {"name": "x\n\x1b[2J" + "é" * 1000, "datatype": "FP32", "shape": [1, 4], "data": []}
    with pytest.raises(BadInput) as caught:
        oip.decode(json.dumps({"inputs": [item]}).encode(), None, model())
    assert caught.value.message.isascii()
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 200
