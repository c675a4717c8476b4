"""Refuse a report.json whose values nothing can be made of, with the key that is wrong.

What `Report` declares as any value is checked against the shapes below: the keys that tables and
charts read. Others are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, make_dataclass
from types import GenericAlias
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.manifest import from_json

_MOST_ITEMS = 100_000  # of a list
_MAY_BE_INFINITE = {"max_ms"}  # of calls without an answer; written as null
Number = float | None


def _shape(name: str, needed: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
    """A dataclass of these keys with their types; those that are only `known` may be missing."""
    optional = [(key, kind, None) for key, kind in known.items()]
    return make_dataclass(name, [*needed.items(), *optional])


def _list(shape: Any) -> Any:
    return GenericAlias(tuple, (shape, ...))


_NUMBERS = dict.fromkeys(("error", "max_abs", "rms", "sqnr_db", "agreement"), Number)
_PARITY_ROW = _shape(
    "ParityRow", {"output": str, "batch": int, "values": int, **_NUMBERS}, {"mean_iou": Number}
)
_PARITY = _shape(
    "Parity",
    {"a": str, "b": str, "max_error": float, "passed": bool, "rows": _list(_PARITY_ROW)},
    {},
)
_GPU = _shape("Gpu", {"name": str, "driver": str | None}, {})
_MACHINE: dict[str, Any] = {"memory_bytes": int | None, "gpus": _list(_GPU) | None}
_MACHINE |= {"packages": Mapping[str, Any] | None, "power_mode": str | None}
_ARTEFACT = dict.fromkeys(("file", "sha256", "precision"), str | None) | {"bytes": int | None}
_PLACE = _shape("Place", {"label": str, "batch": int, "intensity": float, "gflops": float}, {})
_ROOFLINE: dict[str, Any] = {"ceilings": Mapping[str, float] | None, "points": _list(_PLACE) | None}
_COMMIT = _shape("Commit", {}, {"commit": str | None, "changed": bool | None})
_PROVENANCE: dict[str, Any] = {"project": _COMMIT | None, "deploykit": _COMMIT | None}
_PROVENANCE |= {"clocks": Mapping[str, Any] | None, "environment": Mapping[str, str] | None}
_SHAPES: Mapping[str, Any] = {
    "machine": _shape("Machine", {}, _MACHINE),
    "artefacts": _list(_shape("Artefact", {}, _ARTEFACT)),
    "parity": _list(_PARITY),
    "roofline": _shape("Roofline", {}, _ROOFLINE),
    "gpu_roofline": _shape("Roofline", {}, _ROOFLINE),
    "provenance": _shape("Provenance", {}, _PROVENANCE),
}


def refuse_huge_integers(values: object, where: str) -> None:
    """Of the document, before floats are made of them: raises BadInput, naming the key."""
    for key, each in _items(values):
        at = f"{where}[{key}]" if isinstance(key, int) else f"{where}: '{key}'"
        if isinstance(each, int) and abs(each) >> 63:
            raise BadInput(f"{at} must be below 2^63")
        refuse_huge_integers(each, at)


def check_shapes(report: Any, where: str) -> None:
    """Of a Report as it was read: raises BadInput, naming the key."""
    for name, shape in _SHAPES.items():
        found = from_json(shape, _as_lists(getattr(report, name)), f"{where}: '{name}'")
        _check_numbers(found, f"{where}: '{name}'")
    _check_numbers(report, where)


def _as_lists(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _check_numbers(value: object, where: str) -> None:
    for key, each in _items(value):
        at = f"{where}[{key}]" if isinstance(key, int) else f"{where}: '{key}'"
        if isinstance(each, float) and not (math.isfinite(each) or key in _MAY_BE_INFINITE):
            raise BadInput(f"{at} must be a finite number")
        if isinstance(each, tuple) and len(each) > _MOST_ITEMS:
            raise BadInput(f"{at} has more than {_MOST_ITEMS:,} items")
        _check_numbers(each, at)


def _items(value: object) -> Iterator[tuple[str | int, object]]:
    if is_dataclass(value):
        yield from ((each.name, getattr(value, each.name)) for each in fields(value))
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield from enumerate(value)
