"""The classification extension: `value:index[:label]`, highest first."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.serving.oip import json as oip
from deploykit.serving.oip.response import classify
from tests.support.serving.requests import DTYPES, model, one, values

ROWS = np.array([[1, 5, 10, 4], [7, 7, -1, 7]], np.float32)


def test_classes_are_sorted_by_value_and_then_by_index() -> None:
    assert classify(ROWS, 3, batched=True).tolist() == [
        ["10.000000:2", "5.000000:1", "4.000000:3"],
        ["7.000000:0", "7.000000:1", "7.000000:3"],
    ]


def test_labels_are_appended_where_they_are_known() -> None:
    found = classify(ROWS[:1], 4, batched=True, labels=["apple", "pickle", "pie"])
    assert found.tolist() == [
        ["10.000000:2:pie", "5.000000:1:pickle", "4.000000:3", "1.000000:0:apple"]
    ]


@pytest.mark.parametrize(
    ("array", "batched", "expected"),
    [
        (np.array([1, 2], np.uint8), False, ["2:1", "1:0"]),
        (np.array([0, 2**64 - 1], np.uint64), False, ["18446744073709551615:1", "0:0"]),
        (np.array([-(2**63), -1]), False, ["-1:1", "-9223372036854775808:0"]),
        (np.array([False, True]), False, ["1:1", "0:0"]),
        (np.array(2.5), False, ["2.500000:0"]),
        (np.array([np.nan, -np.inf, np.inf]), False, ["inf:2", "-inf:1", "nan:0"]),
        (np.array([[[1, 2], [4, 3]]]), True, [["4:2", "3:3", "2:1"]]),
        (np.array([[1, 2], [4, 3]]), False, ["4:2", "3:3", "2:1"]),
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


@pytest.mark.parametrize("max_batch", [8, 0])
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_the_output_is_replaced_by_strings(max_batch: int, binary: bool) -> None:
    signature = model("float32", "N", 4, max_batch=max_batch, labels={"y": ["a", "b", "c", "d"]})
    body, json_bytes = one(
        "float32",
        ROWS,
        outputs=[{"name": "y", "parameters": {"classification": 1, "binary_data": binary}}],
    )
    request = oip.decode(body, json_bytes, signature)
    parts, _ = oip.encode("m", "1", request, {"y": ROWS}, signature)
    output = json.loads(parts[0])["outputs"][0]
    strings = [b"10.000000:2:c", b"7.000000:0:a"][: 2 if max_batch else 1]
    assert output["datatype"] == "BYTES"
    assert output["shape"] == ([2, 1] if max_batch else [1])
    if binary:
        assert parts[1] == b"".join(struct.pack("<I", len(text)) + text for text in strings)
        assert output["parameters"] == {"binary_data_size": len(parts[1])}
    else:
        assert output["data"] == [text.decode() for text in strings]


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "string"])
def test_every_numeric_datatype_can_be_classified_even_without_a_json_form(dtype: str) -> None:
    array, signature = values(dtype, 2, 4), model(dtype)
    wanted = [{"name": "y", "parameters": {"classification": 1000}}]
    body, json_bytes = one(dtype, array, outputs=wanted)
    request = oip.decode(body, json_bytes, signature)
    parts, _ = oip.encode("m", "1", request, {"y": array}, signature)
    output = json.loads(parts[0])["outputs"][0]
    assert output["shape"] == [2, 4]  # cut to the number of classes
    best = [int(text.split(":")[1]) for text in output["data"][::4]]
    assert best == array.argmax(axis=1).tolist()


def test_strings_cannot_be_classified() -> None:
    wanted = [{"name": "y", "parameters": {"classification": 1}}]
    body, json_bytes = one("string", values("string", 1, 4), outputs=wanted)
    with pytest.raises(BadInput, match="cannot be classified"):
        oip.decode(body, json_bytes, model("string"))
