"""Raw requests: the whole body is one tensor."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.serving.oip import json as oip
from deploykit.serving.oip.request import Signature
from tests.support.serving.requests import DTYPES, model, two_inputs, values, wire


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "string"])
def test_a_raw_request_has_one_row_and_a_binary_answer(dtype: str) -> None:
    array, signature = values(dtype, 1, 4), model(dtype)
    request = oip.decode(wire(dtype, array), 0, signature)
    np.testing.assert_array_equal(request.feeds["x"], array, strict=True)
    assert request.rows == 1
    parts, header = oip.encode("m", "1", request, {"y": array}, signature)
    assert parts[1] == wire(dtype, array)
    assert header == len(parts[0])
    assert "id" not in json.loads(parts[0])


@pytest.mark.parametrize(
    ("axes", "max_batch", "shape"),
    [
        (("N", 4), 8, (1, 4)),
        (("N", "T", 2), 8, (1, 6, 2)),
        (("N", 4), 0, (3, 4)),
        (("T",), 0, (12,)),
        ((12,), 0, (12,)),
    ],
)
def test_the_size_of_one_variable_axis_follows_from_the_byte_count(
    axes: tuple[int | str, ...], max_batch: int, shape: tuple[int, ...]
) -> None:
    array = values("float32", *shape)
    signature = model("float32", *axes, max_batch=max_batch)
    request = oip.decode(array.tobytes(), 0, signature)
    np.testing.assert_array_equal(request.feeds["x"], array, strict=True)


@pytest.mark.parametrize(
    ("axes", "max_batch"), [(("N", 1), 8), (("N",), 8), ((1,), 0), (("T",), 0)]
)
def test_a_raw_string_is_the_whole_body(axes: tuple[int | str, ...], max_batch: int) -> None:
    signature = model("string", *axes, max_batch=max_batch)
    request = oip.decode("é\0b".encode(), 0, signature)
    assert request.feeds["x"].size == 1
    assert request.feeds["x"].item() == "é\0b"


@pytest.mark.parametrize(
    ("signature", "size", "message"),
    [
        (two_inputs(), 16, "one input, this one has 2"),
        (model(), 0, "has no bytes"),
        (model("string", "N"), 0, "has no bytes"),
        (model(), 15, "is 16 bytes, got 15"),
        (model(), 17, "is 16 bytes, got 17"),
        (model(), 32, "is 16 bytes, got 32"),
        (model("float32", "H", "W", max_batch=0), 16, "one variable axis at most"),
        (model("float32", "N", "H", "W"), 16, "one variable axis at most"),
        (model("float32", "N", "T", 2), 12, "is 8 bytes, got 12"),
        (model("float32", "T", 0, max_batch=0), 4, "is 0 bytes, got 4"),
        (model("string", "N", 2), 4, "holds one string, the input is x:string"),
        (model("string", "N", "T", 2), 16, "holds one string, the input is x:string"),
    ],
)
def test_a_raw_request_that_does_not_fit_the_model_is_refused(
    signature: Signature, size: int, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        oip.decode(b"a" * size, 0, signature)
