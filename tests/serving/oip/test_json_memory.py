"""Tensors in shared memory, referenced by JSON requests."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deploykit.core.errors import BadInput, TooLarge
from deploykit.serving.oip import json as oip
from deploykit.serving.oip.request import Region, Signature
from tests.support.serving.requests import DTYPES, LIMIT, FakeMemory, model, tensor, values, wire

REGION = {"shared_memory_region": "r", "shared_memory_byte_size": 16}


def ask(**parameters: object) -> bytes:
    """A request whose input is in shared memory."""
    item = tensor("float32", np.empty((1, 4), np.float32), **parameters)
    return json.dumps({"inputs": [item]}).encode()


def ask_output(**parameters: object) -> bytes:
    item = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    outputs = [{"name": "y", "parameters": parameters}]
    return json.dumps({"inputs": [item], "outputs": outputs}).encode()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_input_is_read_from_and_an_output_written_to_shared_memory(dtype: str) -> None:
    array, signature = values(dtype, 2, 4), model(dtype)
    payload = wire(dtype, array)
    memory = FakeMemory(8 + 2 * len(payload))
    memory.bytes[8 : 8 + len(payload)] = payload
    size = {"shared_memory_region": "r", "shared_memory_byte_size": len(payload)}
    item = tensor(dtype, array, **size, shared_memory_offset=8)
    wanted = {"name": "y", "parameters": {**size, "shared_memory_offset": 8 + len(payload)}}
    body = json.dumps({"inputs": [item], "outputs": [wanted]}).encode()

    request = oip.decode(body, None, signature, memory)
    np.testing.assert_array_equal(request.feeds["x"], array, strict=True)
    parts, header = oip.encode("m", "1", request, {"y": array}, signature, memory)
    assert memory.bytes[8 + len(payload) :] == payload
    assert header is None
    (output,) = json.loads(parts[0])["outputs"]
    assert output == {"name": "y", "datatype": output["datatype"], "shape": [2, 4]}


@pytest.mark.parametrize("body", [ask(**REGION), ask_output(**REGION)], ids=["input", "output"])
def test_shared_memory_is_refused_when_it_is_not_enabled(body: bytes) -> None:
    for _ in range(2):  # also when the JSON part is in the cache
        with pytest.raises(BadInput, match="shared memory is not enabled"):
            oip.decode(body, None, model())
    oip.decode(body, None, model(), FakeMemory(16))


BAD = {
    "no size": ({"shared_memory_region": "r"}, "'shared_memory_byte_size' is missing"),
    "no name": ({"shared_memory_byte_size": 16}, "'shared_memory_region' is missing"),
    "an empty name": ({**REGION, "shared_memory_region": ""}, "must be a name"),
    "a number for a name": ({**REGION, "shared_memory_region": 5}, "must be a name"),
    "a long name": ({**REGION, "shared_memory_region": "r" * 257}, "must be a name"),
    "a negative offset": ({**REGION, "shared_memory_offset": -1}, "integer >= 0 .bytes."),
    "a huge offset": ({**REGION, "shared_memory_offset": 2**64}, "integer >= 0 .bytes."),
    "an offset that is a string": ({**REGION, "shared_memory_offset": "8"}, "integer >= 0 .bytes."),
    "a size that is a string": (
        {**REGION, "shared_memory_byte_size": "16"},
        "integer >= 0 .bytes.",
    ),
    "a true size": ({**REGION, "shared_memory_byte_size": True}, "integer >= 0 .bytes."),
}


@pytest.mark.parametrize(("parameters", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("place", [ask, ask_output], ids=["input", "output"])
def test_an_invalid_region_reference_is_refused(
    place: object, parameters: dict, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        oip.decode(place(**parameters), None, model(), FakeMemory(16))  # type: ignore[operator]


@pytest.mark.parametrize("size", [15, 17, 0, 2**63])
def test_the_size_of_an_input_must_be_that_of_its_shape(size: int) -> None:
    with pytest.raises(BadInput, match=f"is 16 bytes, got {size}"):
        oip.decode(
            ask(**{**REGION, "shared_memory_byte_size": size}), None, model(), FakeMemory(16)
        )


def test_an_output_larger_than_its_region_is_refused() -> None:
    memory = FakeMemory(16)
    body = ask_output(**{**REGION, "shared_memory_byte_size": 15})
    request = oip.decode(body, None, model(), memory)
    with pytest.raises(BadInput, match="16 bytes do not fit"):
        oip.encode("m", "1", request, {"y": np.ones((1, 4), np.float32)}, model(), memory)


def test_inputs_in_shared_memory_count_towards_the_size_limit() -> None:
    size = {"shared_memory_region": "r", "shared_memory_byte_size": 2 * LIMIT}
    free = model("float32", "H", "W", max_batch=0)
    item = tensor("float32", np.empty((2, LIMIT // 4), np.float32), **size)
    with pytest.raises(TooLarge, match="above the limit"):
        oip.decode(json.dumps({"inputs": [item]}).encode(), None, free, FakeMemory(16))


def test_a_repeated_request_reads_the_memory_again() -> None:
    memory, signature = FakeMemory(16), model()
    assert oip.decode(ask(**REGION), None, signature, memory).feeds["x"].tolist() == [[0, 0, 0, 0]]
    memory.write(Region("r", 0, 16), np.ones(4, np.float32).tobytes())
    assert oip.decode(ask(**REGION), None, signature, memory).feeds["x"].tolist() == [[1, 1, 1, 1]]


def test_a_classified_output_is_written_to_shared_memory() -> None:
    memory = FakeMemory(64)
    body = ask_output(**{**REGION, "shared_memory_byte_size": 64, "classification": 1})
    signature: Signature = model()
    request = oip.decode(body, None, signature, memory)
    parts, _ = oip.encode("m", "1", request, {"y": request.feeds["x"]}, signature, memory)
    assert json.loads(parts[0])["outputs"][0]["shape"] == [1, 1]
    assert bytes(memory.bytes).rstrip(b"\0") == b"\x0a\0\0\0" + b"4.000000:3"
