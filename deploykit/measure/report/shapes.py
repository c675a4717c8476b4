"""Refuse a report.json whose values nothing can be made of, with the key that is wrong.

What `Report` declares as any value is checked against the shapes below: the keys that tables and
charts read. Others are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.manifest import from_json

_MOST_ITEMS = 100_000  # of a list
_MAY_BE_INFINITE = {"max_ms"}  # of calls without an answer; written as null
Number = float | None


@dataclass(frozen=True)
class ParityRowShape:
    output: str
    batch: int
    values: int
    error: Number
    max_abs: Number
    rms: Number
    sqnr_db: Number
    agreement: Number
    mean_iou: Number = None


@dataclass(frozen=True)
class ParityShape:
    a: str
    b: str
    max_error: float
    passed: bool
    rows: tuple[ParityRowShape, ...]


@dataclass(frozen=True)
class GpuShape:
    name: str
    driver: str | None


@dataclass(frozen=True)
class MachineShape:
    memory_bytes: int | None = None
    gpus: tuple[GpuShape, ...] | None = None
    packages: Mapping[str, Any] | None = None
    power_mode: str | None = None


@dataclass(frozen=True)
class ArtefactShape:
    file: str | None = None
    sha256: str | None = None
    precision: str | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class RoofPointShape:
    label: str
    batch: int
    intensity: float
    gflops: float


@dataclass(frozen=True)
class RooflineShape:
    ceilings: Mapping[str, float] = field(default_factory=dict)
    points: tuple[RoofPointShape, ...] = ()


@dataclass(frozen=True)
class CommitShape:
    commit: str | None = None
    changed: bool | None = None


@dataclass(frozen=True)
class ProvenanceShape:
    project: CommitShape | None = None
    deploykit: CommitShape | None = None
    clocks: Mapping[str, Any] | None = None
    environment: Mapping[str, str] | None = None


_SHAPES: Mapping[str, Any] = {
    "machine": MachineShape,
    "artefacts": tuple[ArtefactShape, ...],
    "parity": tuple[ParityShape, ...],
    "roofline": RooflineShape,
    "provenance": ProvenanceShape,
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
