"""The one rule that turns results into JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import pytest

from deploykit.core.json_value import json_value

Color = Enum("Color", {"RED": "red"})


class Size(NamedTuple):
    width: int
    height: int


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
    many: Any = (Path("a/b"), Inner(2.0), Plain(math.inf), Color["RED"], Size(3, 4), math.nan, None)
    counts: Mapping[object, int] = field(default_factory=lambda: MappingProxyType({1: 1}))
    not_a_field: ClassVar[str] = "left out"


def test_a_dataclass_becomes_its_fields_and_a_number_that_json_lacks_null() -> None:
    inner, size = {"value": 2.0, "doubled": 4.0}, {"width": 3, "height": 4}
    many = ["a/b", inner, {"number": None}, "red", size, None, None]
    assert json_value(Outer()) == {"many": many, "counts": {"1": 1}}


@pytest.mark.parametrize("value", [b"bytes", object(), {1, 2}, Inner], ids=str)
def test_a_type_without_a_json_form_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match="JSON"):
        json_value({"key": value})
