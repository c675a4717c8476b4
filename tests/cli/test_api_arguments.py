"""Commands hand `locals()` to their API function, where mypy sees nothing: names and types fit."""

from __future__ import annotations

import typing
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal

import pytest

from deploykit.cli import deploy, make, prove, serve

# command -> its API function's module and name
CALLS: dict[Callable[..., None], str] = {
    make.train: "train.train",
    make.export: "export.export",
    make.quantize: "quantize.quantize",
    prove.compare: "compare.compare",
    serve.load: "load_test.load_test",
    deploy.bundle: "bundle.bundle",
}
TORCH = {"torch": SimpleNamespace(nn=SimpleNamespace(Module=type("Module", (), {})))}


def fits(given: Any, taken: Any) -> bool:
    """Whether every value of the type `given` is one of `taken`, as far as our commands go."""
    if typing.get_origin(given) in (typing.Union, UnionType):
        return all(fits(one, taken) for one in typing.get_args(given))
    if typing.get_origin(given) is Literal:
        return all(fits(type(value), taken) for value in typing.get_args(given))
    if typing.get_origin(taken) in (typing.Union, UnionType):
        return any(fits(given, one) for one in typing.get_args(taken))
    outer, wanted = (typing.get_origin(t) or t for t in (given, taken))
    parts, of = typing.get_args(given), typing.get_args(taken)
    kind = wanted is Any or issubclass(outer, wanted) or (outer, wanted) == (int, float)
    return kind and all(fits(*pair) for pair in zip(parts, of, strict=False))


@pytest.mark.parametrize("command", CALLS, ids=lambda command: command.__name__)
def test_a_command_gives_what_its_api_function_takes(command: Callable[..., None]) -> None:
    module, _, name = CALLS[command].partition(".")
    place = import_module(f"deploykit.api.{module}")
    takes = getattr(place, name).__annotations__
    gives = typing.get_type_hints(command)
    del gives["as_json"], gives["return"]
    gives.pop("compare_devices", None)  # which of two verbs `train` calls
    gives |= {key: list[str] for key in ("inputs", "axes") if key in gives}  # `or ()` for None
    gives |= {"axes": dict[str, int]} if gives.pop("axis", None) else {}
    wrong = {
        key: (hint, takes.get(key))
        for key, hint in gives.items()
        if key not in takes or not fits(hint, eval(takes[key], {**vars(place), **TORCH}))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("given", "taken", "right"),
    [
        (Path | None, str | Path | None, True),
        (int, float | None, True),
        (float, int, False),
        (Literal["a", "b"], str, True),
        (Literal["a", 1], str, False),
        (str | None, str, False),
        (NoneType, str | None, True),
        (list[str], typing.Sequence[str] | None, True),
        (list[int], typing.Sequence[str], False),
    ],
)
def test_the_comparison_tells_types_apart(given: Any, taken: Any, right: bool) -> None:
    assert fits(given, taken) is right
