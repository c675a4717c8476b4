from __future__ import annotations

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.tensors import (
    DTYPE_BYTES,
    PROTOCOL_NAMES,
    TensorSpec,
    carrier,
    concrete,
    mismatch,
    parse_spec,
    spec_from_dict,
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
    assert spec_from_dict(spec.to_dict(), "f") == spec


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
        {"name": "x", "dtype": "complex64", "shape": []},
        *(
            {"name": "x", "dtype": "float32", "shape": shape}
            for shape in ("N", [True], [1.5], [None], [[1]], [-1])
        ),
    ],
    ids=str,
)
def test_bad_dict_names_the_file_or_the_tensor(values: dict[str, object]) -> None:
    with pytest.raises(BadInput, match=r"m\.json|x: "):
        spec_from_dict(values, "m.json")


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
