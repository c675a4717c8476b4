"""Requests and answers of the Open Inference Protocol over HTTP: what is valid passes unchanged."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deploykit.core.errors import BadInput, DeploykitError, TooLarge
from deploykit.core.tensors import PROTOCOL_NAMES, TensorSpec, carrier
from deploykit.serving.oip import json as oip
from deploykit.serving.oip.request import (
    Request,
    RequestedOutput,
    Signature,
    classify,
    to_bytes,
)
from deploykit.serving.oip.request import signature as signature_of
from tests.support.campaign import rounds
from tests.support.serving.requests import (
    DTYPES,
    JSON_DTYPES,
    LIMIT,
    FakeMemory,
    binary,
    model,
    one,
    tensor,
    two_inputs,
    values,
    wire,
)


def head_of(shape: object, size: object, datatype: str = "FP32") -> bytes:
    """The JSON part of a request whose input has `size` bytes after it."""
    more = {"parameters": {"binary_data_size": size}}
    item = {"name": "x", "datatype": datatype, "shape": shape, **more}
    return json.dumps({"inputs": [item]}).encode()


def followed(shape: object, size: object, data: bytes, datatype: str = "FP32") -> tuple[bytes, int]:
    """A request whose JSON part claims `size` bytes after it."""
    head = head_of(shape, size, datatype)
    return head + data, len(head)


def request_of(shape: object = (1, 4), data: object = (1, 2, 3, 4), **more: object) -> bytes:
    item = {"name": "x", "datatype": "FP32", "shape": shape, "data": data, **more}
    return json.dumps({"inputs": [item]}).encode()


def adding(member: bytes) -> bytes:
    """A request with one member more."""
    return request_of()[:-1] + b", " + member + b"}"


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


def test_a_long_answer_is_written_in_steps_and_is_one_document() -> None:
    outputs = {"p": np.arange(140_000, dtype=np.float32).reshape(2, -1), "q": np.array([5, 7])}
    specs = [TensorSpec("p", "float32", ("N", "W")), TensorSpec("q", "int64", ("N",))]
    wanted = (RequestedOutput("p", False), RequestedOutput("q", True))
    signature = signature_of(specs, specs, 8, LIMIT)
    parts, json_bytes = oip.encode("m", Request({}, 2, (), wanted), outputs, signature)
    body = b"".join(parts)
    p, q = json.loads(body[:json_bytes])["outputs"]
    assert (p["shape"], p["data"], q["shape"]) == ([2, 70_000], list(range(140_000)), [2])
    assert body[json_bytes:] == outputs["q"].tobytes()
    assert max(map(len, parts)) < 1 << 20


def test_a_non_contiguous_slice_of_a_batch_is_encoded() -> None:
    body, json_bytes = binary({"x": values("float32", 1, 4)})
    request = oip.decode(body, json_bytes, model())
    whole = np.arange(24, dtype=np.float32).reshape(4, 6).T  # not contiguous
    parts, _ = oip.encode("m", request, {"y": whole[2:3]}, model())
    assert json.loads(b"".join(parts))["outputs"][0]["data"] == [2, 8, 14, 20]


def test_a_json_part_that_is_repeated_is_decoded_once_for_its_model_and_its_bytes() -> None:
    signature = model()
    first = values("float32", 2, 4)
    for array in (first, first + 1):
        body, json_bytes = binary({"x": array})
        np.testing.assert_array_equal(oip.decode(body, json_bytes, signature).feeds["x"], array)
    with pytest.raises(BadInput, match="above 1"):
        oip.decode(body, json_bytes, model(max_batch=1))
    one, two = (oip.decode(request_of(), None, signature).feeds["x"] for _ in range(2))
    assert one is two
    with pytest.raises(ValueError, match="read-only"):
        one[0] = one[0]


@pytest.mark.parametrize(
    ("parameters", "timeout_us", "priority"),
    [
        ({}, None, 0),
        ({"timeout": 0, "priority": 0, "sequence_id": 0, "sequence_start": True}, None, 0),
        ({"timeout": 5, "priority": 3, "sequence_id": "", "nested": {"a": [1]}}, 5, 3),
    ],
)
def test_parameters_are_decoded_and_unknown_fields_ignored(
    parameters: dict, timeout_us: int | None, priority: int
) -> None:
    outputs = [{"name": "y", "extra": 1, "parameters": {"mine": "x"}}]
    more = {"extra": {"a": [1]}, "parameters": parameters, "outputs": outputs}
    request = oip.decode(*binary({"x": values("float32", 1, 4)}, **more), model())
    assert (request.rows, request.timeout_us, request.priority) == (1, timeout_us, priority)


# -- Raw requests: the whole body is one tensor


SIZES: list[tuple[tuple[int | str, ...], int, tuple[int, ...]]] = [
    (("N", "T", 2), 8, (1, 6, 2)),
    (("N", 4), 0, (3, 4)),
    (("T",), 0, (12,)),
    ((12,), 0, (12,)),
]


@pytest.mark.parametrize(
    ("dtype", "axes", "max_batch", "shape"),
    [
        *((dtype, ("N", 4), 8, (1, 4)) for dtype in DTYPES if dtype != "string"),
        *(("float32", *sizes) for sizes in SIZES),  # the variable axis follows from the size
    ],
)
def test_a_raw_request_has_one_row_and_a_binary_answer(
    dtype: str, axes: tuple[int | str, ...], max_batch: int, shape: tuple[int, ...]
) -> None:
    array, signature = values(dtype, *shape), model(dtype, *axes, max_batch=max_batch)
    request = oip.decode(wire(dtype, array), 0, signature)
    np.testing.assert_array_equal(request.feeds["x"], array, strict=True)
    assert request.rows == 1
    parts, header = oip.encode("m", request, {"y": array}, signature)
    body = b"".join(parts)
    assert body[header:] == wire(dtype, array)
    assert "id" not in json.loads(body[:header])


def test_a_raw_string_is_the_whole_body() -> None:
    for axes, max_batch in ((("N", 1), 8), (("N",), 8), ((1,), 0), (("T",), 0)):
        request = oip.decode("é\0b".encode(), 0, model("string", *axes, max_batch=max_batch))
        assert request.feeds["x"].ravel().tolist() == ["é\0b"]


# -- Tensors in shared memory, referenced by JSON requests


REGION = {"shared_memory_region": "r", "shared_memory_byte_size": 16}


def ask_input(**parameters: object) -> bytes:
    """A request whose input is in shared memory."""
    item = tensor("float32", np.empty((1, 4), np.float32), **parameters)
    return json.dumps({"inputs": [item]}).encode()


def ask_output(**parameters: object) -> bytes:
    return adding(b'"outputs": ' + json.dumps([{"name": "y", "parameters": parameters}]).encode())


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
    parts, header = oip.encode("m", request, {"y": array}, signature, memory)
    assert memory.bytes[8 + len(payload) :] == payload
    assert header is None
    (output,) = json.loads(b"".join(parts))["outputs"]
    assert output == {"name": "y", "datatype": output["datatype"], "shape": [2, 4]}


def test_shared_memory_is_refused_when_it_is_not_enabled() -> None:
    for body in (ask_input(**REGION), ask_output(**REGION)) * 2:  # then the JSON part is cached
        with pytest.raises(BadInput, match="shared memory is not enabled"):
            oip.decode(body, None, model())
    oip.decode(body, None, model(), FakeMemory(16))


# -- BYTES tensors: strings in and out


SIGNATURE = model("string", "N", 2)


def packed(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def answer(array: np.ndarray, *, binary: bool) -> tuple[bytes, int | None]:
    request = Request({}, 1, (), (RequestedOutput("y", binary),))
    parts, json_bytes = oip.encode("m", request, {"y": array}, SIGNATURE)
    return b"".join(parts), json_bytes


def test_an_output_that_is_not_utf8_is_sent_as_binary_only() -> None:
    array = np.array([[b"\xff\xfe", "é"]], object)
    body, json_bytes = answer(array, binary=True)
    assert body[json_bytes:] == packed(b"\xff\xfe", "é".encode())
    with pytest.raises(BadInput, match="output 'y' holds bytes that are not UTF-8") as caught:
        answer(array, binary=False)
    assert "binary_data" in (caught.value.hint or "")
    array = np.array([["é".encode(), "b"]], object)
    assert json.loads(answer(array, binary=False)[0])["outputs"][0]["data"] == ["é", "b"]


# -- The classification extension: `value:index[:label]`, highest first


@pytest.mark.parametrize(
    ("array", "batched", "expected"),
    [
        (
            np.array([[1, 5, 10, 4], [7, 7, -1, 7]], np.float32),
            True,
            [
                ["10.000000:2", "5.000000:1", "4.000000:3"],
                ["7.000000:0", "7.000000:1", "7.000000:3"],
            ],
        ),
        (np.array([0, 2**64 - 1], np.uint64), False, ["18446744073709551615:1", "0:0"]),
        (np.array([-(2**63), -1]), False, ["-1:1", "-9223372036854775808:0"]),
        (np.array(2.5), False, ["2.500000:0"]),
        (np.array([np.nan, -np.inf, np.inf]), False, ["inf:2", "-inf:1", "nan:0"]),
        (np.array([[[1, 2], [4, 3]]]), True, [["4:2", "3:3", "2:1"]]),
        (np.empty((0, 4)), True, []),
        (np.empty((2, 0)), True, [[], []]),
    ],
    ids=str,
)
def test_numbers_of_any_type_and_shape_can_be_classified(
    array: np.ndarray, batched: bool, expected: list
) -> None:
    found = classify(array, 3, batched=batched)
    assert found.tolist() == expected
    assert found.shape[:1] == ((len(array),) if batched else (len(expected),))


# -- in either protocol: limits, and no copies


def test_strings_and_shared_memory_count_towards_the_limit_with_their_size_in_memory() -> None:
    """A 4-byte element takes about 60 bytes as a Python string."""
    count = LIMIT // 40
    strings = signature_of([TensorSpec("x", "string", ("N",))], [], 0, LIMIT)
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 2 * LIMIT}
    shared = tensor("float32", np.empty((2, LIMIT // 4), np.float32), **region)
    for sent, signature in (
        (followed([count], 4 * count, bytes(4 * count), "BYTES"), strings),
        ((request_of([count], [""] * count, datatype="BYTES"), None), strings),
        ((json.dumps({"inputs": [shared]}).encode(), None), FREE),
    ):
        with pytest.raises(TooLarge, match="above the limit"):
            oip.decode(*sent, signature, FakeMemory(16))


def test_the_size_limit_applies_to_the_sum_of_all_inputs() -> None:
    a, b = values("float32", 1, 2), values("string", 3)  # numbers are read in place
    strings = sum(68 + len(text.encode()) for text in b)  # in memory, with their prefixes
    specs = [TensorSpec("a", "float32", (1, 2)), TensorSpec("b", "string", (3,))]
    body, json_bytes = binary({"a": a, "b": b})
    oip.decode(body, json_bytes, signature_of(specs, specs, 0, strings))
    with pytest.raises(TooLarge, match="with input 'b' the request is"):
        oip.decode(body, json_bytes, signature_of(specs, specs, 0, strings - 1))


def test_bfloat16_is_rounded_as_by_ml_dtypes() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint32)
    ties = (bits & 0xFFFF0000) | 0x8000
    special = np.float32([0.0, -0.0, 3.4e38, -1e-40, 1e-45, np.inf, -np.inf, np.nan])
    drawn = np.concatenate([bits, ties, ties + 1, ties - 1]).view(np.float32)
    array = np.concatenate([drawn, special])[::-1]  # not contiguous
    got = np.frombuffer(to_bytes(array, "BF16"), np.uint16)
    with np.errstate(invalid="ignore"):
        expected = array.astype(ml_dtypes.bfloat16)
    numbers = ~np.isnan(array)
    np.testing.assert_array_equal(got[numbers], expected[numbers].view(np.uint16), strict=True)
    assert np.isnan(got[~numbers].view(ml_dtypes.bfloat16).astype(np.float32)).all()


# -- Invalid requests are refused with an error that names the culprit


Sent = tuple[bytes, int | None]  # a body, and the length of its JSON part
HUGE = 1152921504606846978  # 2**60 + 2
DOCUMENTS: list[tuple[bytes, str]] = [
    *(
        (body, "not valid JSON")
        for body in (
            *(b"", b"{", b'"\xff\xfe"', request_of() + b"x", b"\0" + request_of()),
            request_of(data=[float("nan"), 2, 3, 4]),
            request_of().replace(b"[1, 2", b"[1e999, 2"),
            request_of().replace(b"[1, 2", b"[" + b"9" * 5000 + b", 2"),
            b"[" * 100_000 + b"]" * 100_000,
        )
    ),
    (b"[]", "must be a JSON object"),
    (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "more than 100 deep"),
    (b"{}", "missing input 'x'"),
    (b'{"inputs": []}', "missing input 'x'"),
    (b'{"inputs": 5}', "'inputs' must be a list"),
    (b'{"inputs": [5]}', "must be an object"),
    (adding(b'"id": 5'), "'id' must be a string"),
    (adding(b'"id": "' + b"i" * 2048 + b'"'), "'id' must be a string"),
    (adding(b'"parameters": []'), "must be an object"),
    *(
        (adding(b'"parameters": ' + json.dumps({name: value}).encode()), says)
        for name, values_of, says in (
            ("timeout", (-1, "1"), "'timeout'"),
            ("priority", (-1, "1"), "'priority'"),
            ("binary_data_output", (1,), "true or false"),
            ("sequence_id", (3, "s", False), "sequence_id"),
            ("triton_x", (3,), "reserved"),
        )
        for value in values_of
    ),
    (adding(b'"outputs": [{"name": "z"}]'), "unknown output 'z'"),
    (adding(b'"outputs": "y"'), "'outputs' must be a list"),
    (adding(b'"outputs": ["y"]'), "each of 'outputs' must be an object"),
    (adding(b'"outputs": [' + b'{"name":"y"},' * 50_000 + b'{"name":"y"}]'), "requested twice"),
    *(
        (ask_output(classification=value), "from 1 to 10000, got")
        for value in (0, -1, 2.0, "3", True, 10001)
    ),
    (ask_input(shared_memory_region="r"), "is 16 bytes, got 0"),
    *(
        (place(shared_memory_byte_size=16), "'shared_memory_region' must be a name")
        for place in (ask_input, ask_output)
    ),
    *(
        (place(**{**REGION, **change}), message)
        for place in (ask_input, ask_output)
        for change, message in (
            ({"shared_memory_region": 5}, "must be a name"),
            *(({"shared_memory_offset": at}, "integer >= 0 .bytes.") for at in (-1, 2**64, "8")),
            *(({"shared_memory_byte_size": size}, "integer >= 0 .bytes.") for size in ("16", True)),
        )
    ),
    *(
        (ask_input(**{**REGION, "shared_memory_byte_size": size}), f"is 16 bytes, got {size}")
        for size in (15, 17, 0, 2**63)
    ),
]
TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"name": "z"}, "unknown input 'z'"),
    ({"name": ["x"]}, "unknown input"),
    ({"name": "x\n\x1b[2J" + "é" * 1000}, "unknown input"),
    ({"datatype": "fp32"}, "is FP32, got datatype 'fp32'"),
    ({"datatype": None}, "got datatype None"),
    *(({"shape": shape}, "'shape' must be a list") for shape in (4, [1.0, 4], [True, 4], [-1, -4])),
    ({"shape": [4]}, r"x:float32\[N,4\], got shape \[4\]"),
    ({"shape": [1] * 4097}, "got shape"),
    ({"shape": [1, 5], "data": [0] * 5}, r"got shape \[1, 5\]"),
    ({"shape": [9, 4], "data": [0] * 36}, "batch 9 is above 8"),
    ({"data": [1, 2, 3]}, "4 elements, 'data' has 3"),
    ({"shape": [2, 4], "data": [[1, 2, 3, 4], [5, 6]]}, "not nested like"),
    ({"shape": [2, 4], "data": [[1, 2, 3, 4], 5]}, "not nested like"),
    ({"data": [[[1], [2], [3], [4]]]}, r"'data' holds \[1\]"),
    ({"data": [[1, 2, 3, 4], [1, 2, 3, 4]]}, "not nested like"),
    ({"data": 5}, "'data' must be a list"),
    ({"data": [1, 2, 3, "4"]}, "holds '4'"),
    ({"data": [1, 2, 3, True]}, "holds True"),
    ({"data": [1, 2, 3, 1e300]}, "out of range for FP32"),
    ({"parameters": {"binary_data_size": 16}}, "exactly one of"),
    ({"parameters": REGION}, "exactly one of"),
    ({"parameters": 5}, "must be an object"),
]
VALUES: list[tuple[str, object, str]] = [
    ("int8", 300, "300 is out of range for INT8"),
    ("uint8", -1, "-1 is out of range for UINT8"),
    ("int64", 1.5, "holds 1.5"),
    ("int64", 2**63, "out of range for INT64"),
    ("uint64", 2**64, "holds 1.8446744073709552e"),
    ("bool", 2, "is BOOL, 'data' holds 2"),
    ("int32", True, "holds True"),
    ("string", 1, "is BYTES, 'data' holds 1"),
]
RAW: list[tuple[Signature, int, str]] = [
    (two_inputs(), 16, "one input, this one has 2"),
    (model(), 0, "has no bytes"),
    *((model(), size, f"is 16 bytes, got {size}") for size in (15, 17, 32)),
    (model("float32", "H", "W", max_batch=0), 16, "one variable axis at most"),
    (model("float32", "N", "T", 2), 12, "is 8 bytes, got 12"),
    (model("float32", "T", 0, max_batch=0), 4, "is 0 bytes, got 4"),
    (model("string", "N", 2), 4, "holds one string, the input is x:string"),
]
STRINGS: list[tuple[bytes, str]] = [
    (packed(b"ab") + struct.pack("<I", 3) + b"cd", "bytes are not 2 strings"),
    (packed(b"ab") + b"\xff\xff\xff\xff" + b"cd", "bytes are not 2 strings"),
    (packed(b"ab", b"cd") + b"\0", "bytes are not 2 strings"),
    (packed(b"abcd"), "bytes are not 2 strings"),
    (packed(b"abcd") + b"\0\0", "bytes are not 2 strings"),
    (b"\0" * 7, "at least 8 bytes, got 7"),
    (packed(b"ab", b"\xff\xfe"), "element 1 is not UTF-8"),
    (packed(b"ab", "\ud800".encode(errors="surrogatepass")), "element 1 is not UTF-8"),
]
FREE = model("float32", "H", "W", max_batch=0)
GOOD, GOOD_BYTES = binary({"x": values("float32", 1, 4)})
ROW, INT = values("float32", 1, 2), values("int64", 1)
OTHERS: list[tuple[Sent, Signature, str]] = [
    (binary({"a": ROW}), two_inputs(), "missing input 'b'"),
    (
        binary({"a": values("float32", 3, 2), "b": values("int64", 4)}),
        two_inputs(),
        "axis N is 3 and 4",
    ),
    (binary({"a": ROW, "b": INT}, outputs=[{"name": "p"}] * 2), two_inputs(), "twice"),
    (binary({"x": values("float16", 1, 4)}), model("float16"), "no JSON form"),
    (one("bool", np.full((1, 4), 2, np.uint8)), model("bool"), "neither 0 nor 1"),
    (
        one(
            "string",
            values("string", 1, 4),
            outputs=[{"name": "y", "parameters": {"classification": 1}}],
        ),
        model("string"),
        "cannot be classified",
    ),
    (
        (json.dumps({"inputs": 2 * json.loads(request_of())["inputs"]}).encode(), None),
        model(),
        "'x' appears twice",
    ),
    *(
        ((request_of(shape=shape, data=[1.0] * 32), None), FREE, "elements, 'data' has 32")
        for shape in ([16, HUGE], [4, HUGE], [2**63, 2], [HUGE, HUGE])  # they overflow 64 bits
    ),
    *(
        ((request_of(shape=shape, data=[]), None), FREE, "too large")
        for shape in ([0, 2**63], [2**62, 0])
    ),
    *(
        (followed(shape, 128, bytes(128)), FREE, "bytes, got 128")
        for shape in ([16, HUGE], [HUGE, HUGE])
    ),
    *(
        (followed([1, 4], size, bytes(16)), model(), "is 16 bytes, got")
        for size in (-4, 2**63, 15, 17, 16.0, "16", True)
    ),
    (
        (request_of(datatype="FP16")[:-1] + b', "parameters": {"binary_data_output": true}}', None),
        model("float16"),
        "must be sent as binary",
    ),
    ((GOOD[:-1], GOOD_BYTES), model(), "16 bytes"),
    ((GOOD + b"x", GOOD_BYTES), model(), "16 bytes, but 17 follow"),
    ((GOOD[:GOOD_BYTES], GOOD_BYTES), model(), "but 0 follow"),
]
REFUSED: list[tuple[Sent, Signature, str]] = [
    *(((body, None), model(), message) for body, message in DOCUMENTS),
    *(((request_of(**change), None), model(), message) for change, message in TENSORS),
    *(
        (
            (request_of([1], [value], datatype=PROTOCOL_NAMES[dtype]), None),
            model(dtype, 1, max_batch=0),
            message,
        )
        for dtype, value, message in VALUES
    ),
    *(((b"a" * size, 0), signature, message) for signature, size, message in RAW),
    *(
        (followed([1, 2], len(payload), payload, "BYTES"), SIGNATURE, message)
        for payload, message in STRINGS
    ),
    *OTHERS,
]


@pytest.mark.parametrize(("sent", "signature", "message"), REFUSED)
def test_an_invalid_request_is_refused(sent: Sent, signature: Signature, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        oip.decode(*sent, signature, FakeMemory(16))
    assert caught.value.message.isascii()
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300


def test_a_claimed_binary_size_allocates_nothing() -> None:
    free = model("float32", "H", "W", max_batch=0)
    size = 2**30
    head = head_of([2, size // 8], size)
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match="but 5 follow"):
            oip.decode(head + b"12345", len(head), free)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# -- Any bytes, and any arrays


SETTINGS = settings(
    max_examples=rounds(60, 5000),
    deadline=None,
    database=None,
    derandomize=True,  # the same examples each time: a failure is reproducible
    suppress_health_check=[HealthCheck.too_slow],
)


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
    signature, json_part = model(dtype), draw.draw(st.sampled_from([json_bytes, None, 1]))
    try:
        request = oip.decode(bytes(damaged), json_part, signature, FakeMemory(64))
    except DeploykitError as exc:
        refusal = exc
    else:
        array = request.feeds["x"]
        assert array.dtype == carrier(dtype)
        assert array.shape == (request.rows, 4)
        assert request.rows <= signature.max_batch
        assert dtype != "string" or all(type(text) is str for text in array.flat)
        return
    assert 400 <= refusal.http_status < 500
    assert refusal.message.isprintable()
    assert refusal.message.isascii()


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
            oip.encode("m", request, {"y": array}, signature)
        assert "binary_data" in (caught.value.hint or "")
        return
    parts, json_bytes = oip.encode("m", request, {"y": array}, signature)
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
