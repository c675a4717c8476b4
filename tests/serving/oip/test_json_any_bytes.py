"""Random and damaged bytes: the decoder returns a valid request or raises one of our errors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.tensors import TensorSpec, carrier
from deploykit.serving.oip import json as oip
from deploykit.serving.oip.request import Request, RequestedOutput, Signature
from deploykit.serving.oip.request import signature as signature_of
from tests.support.campaign import rounds
from tests.support.serving.requests import (
    DTYPES,
    JSON_DTYPES,
    LIMIT,
    FakeMemory,
    model,
    one,
    two_inputs,
    values,
)

MODELS = [
    two_inputs(),
    *(model(dtype) for dtype in DTYPES),
    *(model(dtype, "H", 3, "W", max_batch=0) for dtype in ("float32", "string", "bfloat16")),
    signature_of([TensorSpec("x", "float64", ())], [TensorSpec("y", "float64", ())], 0, LIMIT),
]
MEMORY = FakeMemory(64)
SETTINGS = settings(
    max_examples=rounds(60, 5000),
    deadline=None,
    database=None,
    derandomize=True,  # the same examples each time: a failure is reproducible
    suppress_health_check=[HealthCheck.too_slow],
)


def survives(body: bytes, json_bytes: int | None, signature: Signature) -> Request | None:
    """The accepted request, which must fit the model, or None for a refusal."""
    refusal = None
    try:
        request = oip.decode(body, json_bytes, signature, MEMORY)
    except DeploykitError as exc:
        refusal = exc
    if refusal is not None:
        assert 400 <= refusal.http_status < 500
        assert refusal.message.isprintable()
        assert refusal.message.isascii()
        return None
    assert list(request.feeds) == list(signature.inputs)
    for name, array in request.feeds.items():
        spec = signature.inputs[name].spec
        assert array.dtype == carrier(spec.dtype)
        assert len(array.shape) == len(spec.shape)
        if signature.max_batch:
            assert array.shape[0] == request.rows <= signature.max_batch
        if spec.dtype == "string":
            assert all(type(text) is str for text in array.flat)
    return request


@SETTINGS
@given(st.data(), st.sampled_from(["float32", "string", "bool", "bfloat16"]))
def test_a_valid_request_with_damaged_bytes_is_decoded_or_refused(
    draw: st.DataObject, dtype: str
) -> None:
    body, json_bytes = one(dtype, values(dtype, 2, 4), id="abc", parameters={"timeout": 5})
    damaged = bytearray(body)
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(damaged) - 1))
        piece = draw.draw(st.binary(max_size=4) | st.sampled_from([b"null", b"-1", b"[]", b"1e5"]))
        damaged[at : at + draw.draw(st.integers(0, 8))] = piece
    survives(bytes(damaged), draw.draw(st.sampled_from([json_bytes, None, 1])), model(dtype))


def arrays(dtype: str) -> st.SearchStrategy[np.ndarray]:
    shapes = st.tuples(st.integers(0, 8), st.just(4))
    if dtype == "string":
        return hnp.arrays(object, shapes, elements=st.text(max_size=8))
    if dtype == "bfloat16":
        halves = hnp.arrays(np.uint16, shapes)
        return halves.map(lambda array: (array.astype(np.uint32) << 16).view(np.float32))
    return hnp.arrays(dtype, shapes)


def same(got: np.ndarray, sent: np.ndarray) -> bool:
    """Whether the arrays are equal bit for bit, NaN and -0.0 included."""
    if sent.dtype == object:
        return got.shape == sent.shape and got.tolist() == sent.tolist()
    return got.dtype == sent.dtype and got.shape == sent.shape and got.tobytes() == sent.tobytes()


@settings(parent=SETTINGS, max_examples=rounds(30, 1000))
@given(st.data())
@pytest.mark.parametrize(
    ("dtype", "binary"),
    [*((dtype, True) for dtype in DTYPES), *((each, False) for each in JSON_DTYPES)],
)
def test_encoded_outputs_decode_to_the_same_array(
    dtype: str, binary: bool, draw: st.DataObject
) -> None:
    """The encoder's tensor is sent back as an input."""
    array = draw.draw(arrays(dtype))
    signature = model(dtype)
    request = Request({}, len(array), (), (RequestedOutput("y", binary),), id="7")
    if not binary and array.dtype.kind == "f" and not np.isfinite(array).all():
        with pytest.raises(BadInput, match="NaN or infinity") as caught:
            oip.encode("m", "1", request, {"y": array}, signature)
        assert "binary_data" in (caught.value.hint or "")
        return
    parts, json_bytes = oip.encode("m", "1", request, {"y": array}, signature)
    body = b"".join(parts)
    output = json.loads(body[:json_bytes])["outputs"][0]
    if not binary:
        assert (json_bytes, "parameters" in output) == (None, False)  # C++ looks for binary data
        if draw.draw(st.booleans()):
            output["data"] = np.array(output["data"], object).reshape(output["shape"]).tolist()
    wanted = {"binary_data_output": binary}
    head = json.dumps({"inputs": [{**output, "name": "x"}], "parameters": wanted}).encode()
    again = oip.decode(head + body[json_bytes or len(body) :], len(head), signature).feeds["x"]
    expected = array
    if dtype == "bfloat16":  # a signalling NaN becomes a quiet one
        quiet = (array.view(np.uint32) | np.where(np.isnan(array), 0x400000, 0)).astype(np.uint32)
        expected = quiet.view(np.float32)
    assert same(again, expected)
