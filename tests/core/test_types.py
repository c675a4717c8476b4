from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest

from deploykit.core import errors, precision
from deploykit.core.errors import BadInput
from deploykit.core.json_value import from_json, json_value
from deploykit.core.profile import load_profile
from deploykit.core.tensors import (
    DTYPE_BYTES,
    PROTOCOL_NAMES,
    TensorSpec,
    carrier,
    concrete,
    mismatch,
    parse_spec,
)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("x:float32[N,3,224,224]", TensorSpec("x", "float32", ("N", 3, 224, 224))),
        ("s:bool[]", TensorSpec("s", "bool", ())),
        ("serving_default:0:float16[1]", TensorSpec("serving_default:0", "float16", (1,))),
        ("/a/b[0]:int8[N]", TensorSpec("/a/b[0]", "int8", ("N",))),
        ("two words:uint8[4]", TensorSpec("two words", "uint8", (4,))),
    ],
    ids=str,
)
def test_a_spec_parses_from_its_string_and_prints_as_it(text: str, spec: TensorSpec) -> None:
    assert parse_spec(text) == spec == parse_spec(f" {text} ")
    assert str(spec) == text
    assert from_json(TensorSpec, spec.to_dict(), "f") == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, text) for text in ("", "x", "x:float32", "float32[N]", ":float32[N]", "x y")),
        *((f"x:float32[{text}", "") for text in ("N", "N]]", "N,]", "-1]", "1.5]", "N+1]", "²]")),
        ("x:float32[" + "9" * 5000 + "]", ""),
        ("x:float32[N]\nfoo", ""),
        ("x:float32[N,3x]", "'x:float32[N,3x]': axis '3x'"),
        ("x:half[N]", "x: unknown dtype 'half'"),
        ("x:FP32[N]", "x: unknown dtype 'FP32'"),
        ("x:string[N]", ""),  # PyTorch has none
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_malformed_spec_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_spec(text)
    assert says in caught.value.message
    assert "unknown dtype" not in says or "float16" in str(caught.value.hint)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"name": 1, "dtype": "float32", "shape": []},
        *(
            {"name": "x", "dtype": "float32", "shape": shape}
            for shape in ("N", [True], [1.5], [None], [[1]])
        ),
    ],
    ids=str,
)
def test_bad_dict_names_the_file(values: dict[str, object]) -> None:
    with pytest.raises(BadInput, match=r"m\.json"):
        from_json(TensorSpec, values, "m.json")


SPEC = TensorSpec("x", "float32", ("N", 3))


@pytest.mark.parametrize(
    ("dtype", "shape", "got"),
    [
        ("float64", (1, 3), "float64[1,3]"),
        ("float32", (1, 4), "float32[1,4]"),
        ("float32", (3,), "float32[3]"),
        ("float32", (1, 3, 1), "float32[1,3,1]"),
        ("float32", (), "float32[]"),
    ],
)
def test_a_mismatch_names_both_sides(dtype: str, shape: tuple[int, ...], got: str) -> None:
    assert all(mismatch(SPEC, "float32", (count, 3)) is None for count in (0, 1, 9))
    found = mismatch(SPEC, dtype, shape) or ""
    assert found.startswith(f"input 'x' is float32[N,3], got {got}")
    without_axis = found.endswith("one sample without its batch axis, which x[None] adds")
    assert without_axis == (shape == (3,))


def test_a_spec_is_batched_by_a_dynamic_axis_0_and_concrete_by_named_sizes_else_1() -> None:
    for shape, batched in ((("N", 3), True), (("T",), True), ((1, "N"), False), ((), False)):
        assert TensorSpec("x", "float32", shape).batched is batched
    assert concrete(TensorSpec("x", "int64", ("N", 3, "T")), {"N": 8}) == (8, 3, 1)


def test_every_dtype_has_the_size_that_numpy_has_and_a_name_in_the_protocol() -> None:
    numpys = {name: np.dtype(name).itemsize for name in DTYPE_BYTES if name != "bfloat16"}
    assert {**numpys, "bfloat16": 2} == dict(DTYPE_BYTES)
    assert set(PROTOCOL_NAMES) == {*DTYPE_BYTES, "string"}
    assert len(set(PROTOCOL_NAMES.values())) == len(PROTOCOL_NAMES)


def test_types_that_numpy_lacks_are_stored_in_types_that_it_has() -> None:
    carriers = {name: carrier(name) for name in PROTOCOL_NAMES if carrier(name) != name}
    assert carriers == {"bfloat16": "float32", "string": "object"}
    assert mismatch(TensorSpec("x", "string", ("N",)), "object", (2,)) is None
    assert mismatch(TensorSpec("x", "bfloat16", ("N",)), "float32", (2,)) is None
    assert mismatch(TensorSpec("x", "object", ("N",)), "float32", (2,)) is not None


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


CODES = {  # exit code, HTTP, gRPC: the published ones
    "GateFailed": (1, 500, "INTERNAL"),
    "BadInput": (2, 400, "INVALID_ARGUMENT"),
    "NotFound": (2, 404, "NOT_FOUND"),
    "TooLarge": (2, 413, "RESOURCE_EXHAUSTED"),
    "UnknownEncoding": (2, 415, "UNIMPLEMENTED"),
    "Unsupported": (3, 501, "UNIMPLEMENTED"),
    "MissingExtra": (3, 501, "UNIMPLEMENTED"),
    "Overloaded": (3, 503, "UNAVAILABLE"),
    "Expired": (3, 504, "DEADLINE_EXCEEDED"),
    "DeploykitError": (70, 500, "INTERNAL"),
}


def test_exit_codes_and_statuses_are_the_published_ones() -> None:
    kinds = [getattr(errors, name) for name in CODES]
    assert all(issubclass(kind, errors.DeploykitError) for kind in kinds)
    found = [(kind.exit_code, kind.http_status, kind.grpc_status) for kind in kinds]
    assert found == list(CODES.values())


@pytest.mark.parametrize(
    ("text", "line"), [("a\nb", "a"), ("\n  \n b \nc", "b"), (" \n", "ValueError")]
)
def test_first_line_returns_one_printable_line(text: str, line: str) -> None:
    assert errors.first_line(ValueError(text)) == line


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host:8000", "http://host:8000"),
        ("http://me:secret@host:8000/v2?token=secret#secret", "http://host:8000/v2"),
        ("me:secret@host", "host"),
        ("http://me:sec@r?e#t/secret@host", "http://host"),
    ],
)
def test_no_url_in_a_message_holds_a_secret(url: str, shown: str) -> None:
    assert errors.without_secrets(url) == shown


@dataclass(frozen=True)
class Inner:
    value: float
    secret: int = 0
    doubled: ClassVar[float] = 4.0

    def to_dict(self) -> dict[str, Any]:
        return json_value(self, "doubled", without=("secret",))


@dataclass(frozen=True)
class Plain:
    number: float


@dataclass(frozen=True)
class Outer:
    many: Any = (Path("a/b"), Inner(2.0), Plain(math.inf), math.nan, None)
    counts: Mapping[object, int] = field(default_factory=lambda: MappingProxyType({1: 1}))
    not_a_field: ClassVar[str] = "left out"


def test_a_dataclass_becomes_its_fields_and_a_number_that_json_lacks_null() -> None:
    many = ["a/b", {"value": 2.0, "doubled": 4.0}, {"number": None}, None, None]
    assert json_value(Outer()) == {"many": many, "counts": {"1": 1}}


@pytest.mark.parametrize("value", [b"bytes", object(), {1, 2}, Inner])
def test_a_type_without_a_json_form_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match="JSON"):
        json_value({"key": value})
