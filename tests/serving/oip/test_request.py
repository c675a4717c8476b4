"""Building a request from inputs of either transport, HTTP or gRPC."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deploykit.core.errors import BadInput, TooLarge
from deploykit.core.tensors import PROTOCOL_NAMES, TensorSpec
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.oip.protobuf import CONTENTS
from deploykit.serving.oip import json as oip
from deploykit.serving.oip.messages import typed_values
from deploykit.serving.oip.request import (
    Binary,
    InputData,
    fill,
    plan,
)
from deploykit.serving.oip.request import signature as signature_of
from deploykit.serving.oip.tensors import to_bytes
from tests.support.serving.requests import (
    DTYPES,
    LIMIT,
    build,
    model,
    one,
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


# -- Decoding without copies, and bfloat16, which numpy does not have


@pytest.mark.parametrize("kind", [bytes, memoryview], ids=["bytes", "memoryview"])
def test_an_image_is_not_copied_between_the_body_and_the_engine(kind: type) -> None:
    """The only copy is the transport's, from the socket into the body."""
    image = values("uint8", 1, 224, 224, 3)
    body, json_bytes = one("uint8", image)
    request = oip.decode(kind(body), json_bytes, model("uint8", "N", 224, 224, 3))
    assert np.shares_memory(request.feeds["x"], np.frombuffer(body, np.uint8))
    np.testing.assert_array_equal(request.feeds["x"], image)
    raw = oip.decode(kind(image.tobytes()), 0, model("uint8", "N", 224, 224, 3))
    np.testing.assert_array_equal(raw.feeds["x"], image)


def test_an_image_over_grpc_is_not_copied() -> None:
    payload = values("uint8", 1, 224, 224, 3).tobytes()
    given = InputData("x", "UINT8", [1, 224, 224, 3], Binary(payload, 0, len(payload)))
    request = build([given], None, {}, None, model("uint8", "N", 224, 224, 3), binary=True)
    assert np.shares_memory(request.feeds["x"], np.frombuffer(payload, np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spaces", range(4))
def test_inputs_are_equal_wherever_the_json_part_ends(dtype: str, spaces: int) -> None:
    """A view of the body is read-only; `stack` aligns it."""
    array = values(dtype, 2, 4)
    body, json_bytes = one(dtype, array, parameters={"binary_data_output": True})
    body = body[: json_bytes - 1] + b" " * spaces + body[json_bytes - 1 :]
    x = oip.decode(body, json_bytes + spaces, model(dtype)).feeds["x"]
    assert x.flags.c_contiguous
    shared = np.shares_memory(x, np.frombuffer(body, np.uint8))
    assert not (shared and x.flags.writeable)
    np.testing.assert_array_equal(x, array, strict=True)


@pytest.mark.parametrize("special", [0.0, -0.0, 3.4e38, -1e-40, 1e-45, np.inf, -np.inf, np.nan])
def test_bfloat16_is_rounded_as_by_ml_dtypes(special: float) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 5000, dtype=np.uint32)
    ties = (bits & 0xFFFF0000) | 0x8000
    array = np.concatenate([bits, ties, ties + 1, ties - 1]).view(np.float32)
    array = np.append(array, np.float32(special)).astype(np.float32)
    got = np.frombuffer(to_bytes(array, "BF16"), np.uint16).view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):
        expected = array.astype(ml_dtypes.bfloat16)
    numbers = ~np.isnan(array)
    np.testing.assert_array_equal(
        got[numbers].view(np.uint16), expected[numbers].view(np.uint16), strict=True
    )
    assert np.isnan(got[~numbers].astype(np.float32)).all()


def test_a_non_contiguous_bfloat16_slice_is_encoded() -> None:
    array = values("bfloat16", 4, 6).T[2:4]
    back = np.frombuffer(to_bytes(array, "BF16"), np.uint16).astype(np.uint32) << 16
    np.testing.assert_array_equal(back.view(np.float32).reshape(2, 4), array)


def test_a_bfloat16_model_in_pytorch_is_served_as_bf16() -> None:
    """bfloat16 in the request, the model and the answer; float32 in numpy."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from deploykit.engines.torch.engine import TorchEngine
    from deploykit.engines.torch.loaded import Loaded

    class Half(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> tuple[Any]:
            assert x.dtype == torch.bfloat16
            return (x * 2,)

    x, y = (TensorSpec(name, "bfloat16", ("N", 4)) for name in "xy")
    engine = TorchEngine(Loaded(Half(), (x,), (y,), "checkpoint"), "half", "cpu", None)
    signature = signature_of([x], [y], 8, LIMIT)
    array = values("bfloat16", 2, 4)
    body, json_bytes = one("bfloat16", array, parameters={"binary_data_output": True})
    request = oip.decode(body, json_bytes, signature)
    parts, _ = oip.encode("m", "1", request, engine(request.feeds), signature)
    assert json.loads(parts[0])["outputs"][0]["datatype"] == PROTOCOL_NAMES["bfloat16"]
    back = np.frombuffer(parts[1], ml_dtypes.bfloat16).astype(np.float32).reshape(2, 4)
    np.testing.assert_array_equal(back, array * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_inputs_pass_the_protocol_unchanged(dtype: str) -> None:
    """So every model that can be served can be timed and compared on random inputs."""
    spec = TensorSpec("x", dtype, ("N", 4))
    array = random_feeds((spec,), {"N": 2})["x"]
    body, json_bytes = one(dtype, array, parameters={"binary_data_output": True})
    got = oip.decode(body, json_bytes, model(dtype)).feeds["x"]
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    if dtype != "bfloat16":  # a client drops the bits that bfloat16 lacks
        np.testing.assert_array_equal(got, array)
