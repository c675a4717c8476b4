"""Arguments of another type than their parameters: one line that names the parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.benchmarking.bench import bench
from deploykit.core.arguments import check_arguments, checked
from deploykit.core.errors import BadInput
from deploykit.core.files import StrPath
from deploykit.evaluation.predict import predict, predict_items
from deploykit.loadtest.load import load_test
from deploykit.planning.plan import plan
from deploykit.serving.serve import serve


def public(
    count: int = 1,
    share: float = 0.5,
    name: str | None = None,
    file: StrPath = "",
    on: bool = True,
    sizes: Sequence[int] = (),
    names: Mapping[str, Sequence[str]] | None = None,
) -> None: ...


@pytest.mark.parametrize(
    "given",
    [
        {"count": np.int64(3), "share": 1, "name": None, "file": Path("a"), "on": False},
        {"share": np.float32(0.5), "sizes": [1, 2], "names": {"a": ("b", "c")}},
        {"sizes": (), "names": {}, "file": "a", "name": "b"},
    ],
)
def test_what_a_parameter_takes_passes(given: dict[str, Any]) -> None:
    check_arguments(public, given)


def test_one_item_in_place_of_a_list_is_a_list_of_it() -> None:
    @checked
    def seen(first: Sequence[str], *, names: Sequence[str | Path] = (), n: int = 0) -> object:
        return first, names, n

    globals()["seen"] = seen
    assert seen("ab", names=Path("x"), n=1) == (["ab"], [Path("x")], 1)
    assert seen(["a", "b"], names=("y",)) == (["a", "b"], ("y",), 0)
    with pytest.raises(BadInput, match="`first` must be a list of strings, got 5"):
        seen(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        seen("a", "b")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": "8"}, "`count` must be an integer, got '8'"),
        ({"count": 1.5}, "`count` must be an integer, got 1.5"),
        ({"count": True}, "`count` must be an integer, got True"),
        ({"count": None}, "`count` must be an integer, got None"),
        ({"share": "0.5"}, "`share` must be a number, got '0.5'"),
        ({"name": 5}, "`name` must be a string or None, got 5"),
        ({"file": 5}, "`file` must be a string or a path, got 5"),
        ({"on": 1}, "`on` must be True or False, got 1"),
        ({"sizes": "12"}, "`sizes` must be a list of integers, got '12'"),
        ({"sizes": [1, "2"]}, "`sizes` must be a list of integers, got [1, '2']"),
        (
            {"names": {"a": "b"}},
            "`names` must be a dict of lists of strings or None, got {'a': 'b'}",
        ),
        (
            {"names": {1: ["b"]}},
            "`names` must be a dict of lists of strings or None, got {1: ['b']}",
        ),
    ],
    ids=str,
)
def test_another_type_is_refused_by_its_parameters_name(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput) as caught:
        check_arguments(public, given)
    assert caught.value.message == message


@pytest.mark.parametrize(
    "given",
    [
        {"max_batch": "8"},
        {"http_port": "8000"},
        {"workers": 1.5},
        {"origins": "https://a.example"},
        {"buckets": {"T": 16}},
        {"pad": [0]},
        {"shadows": "x.onnx"},
        {"token": b"0123456789abcdef"},
        {"tls_cert": 5},
        {"reload": "no"},
        {"models": 5},
        {"models": [5]},
    ],
    ids=str,
)
def test_serve_checks_its_arguments_before_it_opens_a_model(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(BadInput, match=f"^`{name}` must be "):
        serve(**{"models": "missing.onnx", **given})


@pytest.mark.parametrize(
    ("verb", "required", "given"),
    [
        (bench, {}, {"engines": 5}),
        (bench, {"engines": ["model.onnx"]}, {"batches": "1,8"}),
        (bench, {"engines": ["model.onnx"]}, {"axis": "T=8"}),
        (load_test, {"url": "http://h"}, {"rate": "200"}),
        (load_test, {"url": "http://h"}, {"batch": 10**400}),
        (load_test, {"url": "http://h"}, {"text": 5}),
        (plan, {"model": "model.onnx"}, {"profiles": ["l4", 5]}),
        (plan, {"model": "model.onnx"}, {"on_progress": True}),
        (predict, {"engine": "model.onnx", "out": "out.npz"}, {"data": ["a.npz"]}),
        (predict, {"engine": "model.onnx", "data": "a.npz", "out": "out.npz"}, {"batch": 1.5}),
        (predict_items, {"engine": "model.onnx"}, {"files": 5}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_verbs_check_their_arguments_before_they_open_anything(
    verb: Callable[..., object], required: dict[str, Any], given: dict[str, Any]
) -> None:
    (name,) = given
    with pytest.raises(BadInput, match=f"^`{name}` must be "):
        verb(**required, **given)
