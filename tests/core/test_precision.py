"""The table of precisions: its rows, and what the rest of the package reads off it."""

from __future__ import annotations

import onnx
import pytest

from deploykit.core import precision
from deploykit.core.profile import load_profile


def test_a_row_has_a_name_of_its_own_and_says_how_and_in_which_onnx_type_it_is_written() -> None:
    assert len(precision.BY_NAME) == len(precision.ALL)
    written = [row for row in precision.ALL if row.writer]
    assert {row.writer for row in written} == {
        *(precision.CAST, precision.PAIRS, precision.WEIGHTS, precision.DYNAMIC)
    }
    assert {row.onnx_type for row in written} <= set(dir(onnx.TensorProto))


def test_a_graph_is_called_by_its_narrowest_type() -> None:
    names = {"": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8e4m3fn": "fp8"}
    for dtype, name in names.items():
        assert precision.narrowest(("float32", *filter(None, [dtype]))) == name
    assert precision.narrowest(("float16", "int8")) == "int8"


def test_a_graph_needs_a_target_that_offers_its_types_and_float32_alone_has_a_tighter_bound() -> (
    None
):
    assert precision.names_of(("float32", "int64", "float16", "float8")) == {"fp16", "fp8"}
    assert precision.max_engine_error(["float32"]) == 1e-2
    assert precision.max_engine_error(["float32", "int8"]) == 1e-1
    assert precision.max_engine_error(["float32", "float64"]) == 1e-1


@pytest.mark.parametrize(
    ("profile", "runtime", "levels"),
    [
        ("l4", "tensorrt", ["int8+fp16", "fp8+fp16", "fp16+fp32", "bf16+fp32"]),
        ("t4", "tensorrt", ["int8+fp16", "fp16+fp32"]),
        ("v100", "tensorrt", ["fp16+fp32"]),
        ("cpu", "onnxruntime", ["int8+fp32", "int8-dynamic+fp32"]),
    ],
)
def test_auto_tries_what_the_target_offers_narrowest_first(
    profile: str, runtime: str, levels: list[str]
) -> None:
    found = precision.auto_levels(runtime, load_profile(profile).precisions)
    assert [f"{row.name}+{other}" for row, other in found] == levels
