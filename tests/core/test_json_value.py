"""The one rule that turns results into JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from deploykit.core.json_value import json_value


class Color(Enum):
    RED = "red"


class Size(NamedTuple):
    width: int
    height: int


@dataclass(frozen=True)
class Inner:
    value: float
    secret: int = 0

    @property
    def doubled(self) -> float:
        return self.value * 2

    def to_dict(self) -> dict[str, Any]:
        return json_value(self, "doubled", without=("secret",))


@dataclass(frozen=True)
class Outer:
    path: Path = Path("a/b")
    inner: Inner = Inner(1.5)
    many: tuple[Inner, ...] = (Inner(2.0),)
    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({"x": 1}))
    color: Color = Color.RED
    size: Size = field(default_factory=lambda: Size(3, 4))
    missing: None = None

    @property
    def not_a_field(self) -> str:
        return "left out"


def test_a_dataclass_becomes_its_fields_without_its_properties() -> None:
    assert json_value(Outer()) == {
        "path": "a/b",
        "inner": {"value": 1.5, "doubled": 3.0},
        "many": [{"value": 2.0, "doubled": 4.0}],
        "counts": {"x": 1},
        "color": "red",
        "size": {"width": 3, "height": 4},
        "missing": None,
    }


def test_named_properties_are_added_and_named_fields_left_out() -> None:
    assert json_value(Inner(1.0), "doubled", without=("value",)) == {"secret": 0, "doubled": 2.0}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
def test_a_number_that_json_lacks_is_null(value: float) -> None:
    assert json_value({"error": value, "rows": [value]}) == {"error": None, "rows": [None]}


def test_keys_become_strings() -> None:
    assert json_value({1: "one", Path("p"): 2}) == {"1": "one", "p": 2}


@pytest.mark.parametrize(
    "value", [b"bytes", object(), {1, 2}, Inner], ids=["bytes", "object", "set", "class"]
)
def test_a_type_without_a_json_form_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match="JSON"):
        json_value({"key": value})
