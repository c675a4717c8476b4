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
class Plain:
    number: int = 1


@dataclass(frozen=True)
class Outer:
    path: Path = Path("a/b")
    many: tuple[Inner, ...] = (Inner(2.0),)
    plain: Plain = field(default_factory=Plain)
    counts: Mapping[object, int] = field(default_factory=lambda: MappingProxyType({1: 1}))
    color: Color = Color.RED
    size: Size = field(default_factory=lambda: Size(3, 4))
    missing: None = None
    numbers: tuple[float, ...] = (math.inf, -math.inf, math.nan)

    @property
    def not_a_field(self) -> str:
        return "left out"


def test_a_dataclass_becomes_its_fields_and_a_number_that_json_lacks_null() -> None:
    assert json_value(Outer()) == {
        "path": "a/b",
        "many": [{"value": 2.0, "doubled": 4.0}],
        "plain": {"number": 1},
        "counts": {"1": 1},
        "color": "red",
        "size": {"width": 3, "height": 4},
        "missing": None,
        "numbers": [None, None, None],
    }


@pytest.mark.parametrize("value", [b"bytes", object(), {1, 2}, Inner], ids=str)
def test_a_type_without_a_json_form_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match="JSON"):
        json_value({"key": value})
