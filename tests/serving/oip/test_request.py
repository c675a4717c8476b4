"""Building a request from inputs of either transport, HTTP or gRPC."""

from __future__ import annotations

import numpy as np
import pytest

from deploykit.core.errors import BadInput, TooLarge
from deploykit.core.tensors import PROTOCOL_NAMES, TensorSpec
from deploykit.serving.oip.request import (
    Binary,
    InputData,
    fill,
    plan,
)
from deploykit.serving.oip.request import signature as signature_of
from deploykit.serving.oip.tensors import CONTENTS, typed_values
from tests.support.serving.requests import (
    DTYPES,
    build,
    model,
    two_inputs,
    values,
    wire,
)


def raw(dtype: str, array: np.ndarray, name: str = "x") -> InputData:
    payload = wire(dtype, array)
    data = Binary(payload, 0, len(payload))
    return InputData(name, PROTOCOL_NAMES[dtype], list(array.shape), data)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int8", 128),
        ("int8", -129),
        ("int16", 2**15),
        ("int16", -(2**15) - 1),
        ("uint8", 256),
        ("uint16", 2**16),
    ],
)
def test_typed_integers_out_of_range_of_their_datatype_are_refused(dtype: str, value: int) -> None:
    datatype = PROTOCOL_NAMES[dtype]
    data = typed_values("x", datatype, {CONTENTS[datatype]: [value, 0, 0, 0]})
    given = InputData("x", datatype, [1, 4], data)
    with pytest.raises(BadInput, match=f"{value} is out of range for {datatype}"):
        build([given], None, {}, None, model(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("field", sorted(set(CONTENTS.values())))
def test_values_in_the_wrong_field_are_refused(dtype: str, field: str) -> None:
    datatype = PROTOCOL_NAMES[dtype]
    if CONTENTS.get(datatype) == field:
        assert typed_values("x", datatype, {field: [1], "none": []}) == [1]
        return
    with pytest.raises(BadInput, match=f"'{datatype}' .*, got {field}"):
        typed_values("x", datatype, {field: [1], CONTENTS.get(datatype, "none"): []})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float16_and_bfloat16_have_no_typed_contents(dtype: str) -> None:
    datatype = PROTOCOL_NAMES[dtype]
    given = InputData("x", datatype, [1, 4], typed_values("x", datatype, {}))
    with pytest.raises(BadInput, match="must be sent as binary data"):
        build([given], None, {}, None, model(dtype), binary=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_typed_floats_may_be_nan_or_infinite(value: float) -> None:
    given = InputData("x", "FP32", [1, 4], [value, 1.0, 2.0, 3.0])
    request = build([given], None, {}, None, model(), binary=True)
    np.testing.assert_array_equal(request.feeds["x"], np.array([[value, 1, 2, 3]], np.float32))


def test_a_finite_number_never_becomes_infinite() -> None:
    given = InputData("x", "FP32", [1, 4], [np.inf, 1e300, 2.0, 3.0])
    with pytest.raises(BadInput, match="out of range for FP32"):
        build([given], None, {}, None, model())


def test_one_plan_serves_many_requests() -> None:
    given = [
        InputData("b", "INT64", [1], Binary(None, 0, 8)),
        InputData("a", "FP32", [1, 2], Binary(None, 8, 8)),
    ]
    kept = plan(given, None, {}, None, two_inputs())
    for number in range(3):
        body = b"head" + np.int64(number).tobytes() + np.full(2, number, np.float32).tobytes()
        request = fill(kept, body, 4)
        assert list(request.feeds) == ["a", "b"]
        assert request.feeds["a"].tolist() == [[number, number]]
        assert request.feeds["b"].tolist() == [number]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "string"])
def test_the_size_limit_applies_to_the_sum_of_all_inputs(dtype: str) -> None:
    count = {"float64": 100, "bfloat16": 200, "string": 10}[dtype]
    specs = [TensorSpec(name, dtype, (count,)) for name in "ab"]
    array = values(dtype, count)
    one_of_two = array.nbytes if dtype != "string" else sum(64 + len(t.encode()) for t in array)
    enough, short = (signature_of(specs, specs, 0, 2 * one_of_two - less) for less in (0, 1))
    if dtype == "float64":
        given = [InputData(name, "FP64", [count], array.tolist()) for name in "ab"]
    else:
        given = [raw(dtype, array, name) for name in "ab"]
        if dtype == "string":  # the length prefixes count too
            grown = 2 * 4 * count
            enough = signature_of(specs, specs, 0, 2 * one_of_two + grown)
            short = signature_of(specs, specs, 0, 2 * one_of_two + grown - 1)
    build(given, None, {}, None, enough, binary=True)
    with pytest.raises(TooLarge, match="with input 'b' the request is"):
        build(given, None, {}, None, short, binary=True)
