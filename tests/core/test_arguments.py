"""Arguments of another type than their parameters: one line that names the parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.benchmarking.bench import bench
from deploykit.building.build import build
from deploykit.core.arguments import check_arguments, checked
from deploykit.core.errors import BadInput
from deploykit.evaluation.compare import compare
from deploykit.evaluation.predict import predict
from deploykit.loadtest.load import load_test
from deploykit.planning.plan import plan
from deploykit.quantization.quantize import quantize
from deploykit.serving.serve import serve


@checked
def public(
    first: Sequence[str], share: float = 0.5, *, names: Mapping[str, Sequence[str]] | None = None
) -> object:
    return first, share, names


def test_what_a_parameter_takes_passes_and_one_item_is_a_list_of_it() -> None:
    assert public("ab", np.float32(0.5), names={"a": ("b", "c")}) == (
        *(["ab"], np.float32(0.5)),
        {"a": ("b", "c")},
    )
    assert type(public("ab", np.float32(0.5))[1]) is float  # type: ignore[index]
    assert public(("a", "b"), 1) == (("a", "b"), 1, None)
    check_arguments(predict, {"batch": np.int64(3), "data": Path("a"), "force": False})
    with pytest.raises(TypeError):
        public("a", "b", "c")  # type: ignore[call-arg,arg-type]


ENGINE = {"engine": "model.onnx", "data": "a.npz", "out": "out.npz"}


@pytest.mark.parametrize(
    ("verb", "given", "message"),
    [
        (public, {"first": 5}, "`first` must be Sequence[str], got 5"),
        (public, {"first": [1, "2"]}, "`first` must be Sequence[str], got [1, '2']"),
        (public, {"names": {1: ["b"]}}, "`names` must be Mapping[str, Sequence[str]] | None, got"),
        (serve, {"max_batch": "8"}, "`max_batch` must be int"),
        (serve, {"buckets": {"T": 16}}, "`buckets` must be "),
        (serve, {"token": b"0123456789abcdef"}, "`token` must be str | None"),
        (serve, {"reload": "no"}, "`reload` must be bool, got 'no'"),
        (bench, {"axis": "T=8"}, "`axis` must be "),
        (load_test, {"rate": "200"}, "`rate` must be float"),
        (load_test, {"batch": 10**400}, "`batch` must be int within 64 bits"),
        (plan, {"profiles": ["l4", 5]}, "`profiles` must be "),
        (plan, {"on_progress": True}, "`on_progress` must be Callable[[str, float], None]"),
        (
            predict,
            ENGINE | {"data": ["a.npz"]},
            "`data` must be str | PathLike[str], got ['a.npz']",
        ),
        (predict, ENGINE | {"batch": True}, "`batch` must be int"),
        (quantize, {"metric": len}, "`metric` must be str | None"),
        (quantize, {"axis": "N=2"}, "`axis` must be Mapping[str, int] | None, got 'N=2'"),
        (build, {"profile": None}, "`profile` must be str, got None"),
        (build, {"shapes": "1,2,3"}, "`shapes` must be Shapes | None, got '1,2,3'"),
        (compare, {"max_error": "x"}, "`max_error` must be float | None, got 'x'"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_verbs_check_their_arguments_before_they_open_anything(
    verb: Callable[..., object], given: dict[str, Any], message: str
) -> None:
    required: dict[Any, dict[str, Any]] = {
        public: {"first": "a"},
        serve: {"models": "missing.onnx"},
        bench: {"engines": ["model.onnx"]},
        load_test: {"url": "http://h"},
        plan: {"model": "model.onnx"},
        quantize: {"model": "model.onnx", "to": "fp16"},
        build: {"model": "model.onnx"},
        compare: {"a": "model.onnx"},
    }
    with pytest.raises(BadInput) as caught:
        verb(**required.get(verb, {}) | given)
    assert caught.value.message.startswith(message)
