"""The manifest `FILE.json` next to an artefact: tensors, precision, hash, origin and evidence.

`manifest.schema.json` is the JSON Schema of its version.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from deploykit.core.errors import BadInput, NotFound
from deploykit.core.evidence import Evidence
from deploykit.core.files import manifest_path, read_json, write_json
from deploykit.core.json_value import json_value
from deploykit.core.task import Task
from deploykit.core.tensors import TensorSpec, spec_from_dict

MANIFEST_VERSION = 2
_NAMES: Mapping[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
_SPEC_LISTS = ("inputs", "outputs")


@dataclass(frozen=True)
class Manifest:
    """What is known of one artefact. Hashes are SHA-256 in hexadecimal.

    `precision`: number of nodes by the type they compute in. `made_from`: hashes of the sources.
    `made_with`: version by tool. `built_on`: profile, device, versions. `task`: None where the
    model's purpose is not known.
    """

    format: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: Mapping[str, int] = field(default_factory=dict)
    sha256: str = ""
    made_from: tuple[str, ...] = ()
    made_with: Mapping[str, str] = field(default_factory=dict)
    built_on: Mapping[str, str] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=Evidence)
    task: Task | None = None

    @property
    def version_compatible(self) -> bool:
        """A TensorRT engine that later versions of the same major run too."""
        return self.evidence.build is not None and self.evidence.build.version_compatible

    @property
    def plugins(self) -> Mapping[str, str]:
        """The libraries that an engine needs to run: path -> SHA-256."""
        return self.evidence.build.plugins if self.evidence.build else {}

    def to_dict(self) -> dict[str, Any]:
        return {"manifest": MANIFEST_VERSION, **json_value(self)}


def write_manifest(artefact: Path, manifest: Manifest) -> None:
    """Write `FILE.json`. Call it once `artefact` is in place: it never names a missing file."""
    write_json(manifest_path(artefact), manifest.to_dict())


def load_manifest(artefact: Path) -> Manifest | None:
    """The manifest next to `artefact`, its hashes not compared; None if there is none."""
    path = manifest_path(artefact)
    try:
        values = read_json(path)
    except NotFound:
        return None
    return _manifest(values, str(path))


def _manifest(values: object, where: str) -> Manifest:
    if not isinstance(values, dict) or values.get("manifest") != MANIFEST_VERSION:
        raise BadInput(
            f"{where}: is not a deploykit manifest of version {MANIFEST_VERSION}",
            hint="make the file that it describes again",
        )
    hints = _hints(Manifest)
    known: dict[str, Any] = {}
    for name, hint in hints.items():
        if name == "task" and name not in values:  # it came after version 2
            continue
        if name not in values:
            raise BadInput(f"{where}: '{name}' is missing")
        if name in _SPEC_LISTS:
            items = from_json(list[dict[str, Any]], values[name], f"{where}: '{name}'")
            known[name] = tuple(spec_from_dict(item, where) for item in items)
        else:
            known[name] = from_json(hint, values[name], f"{where}: '{name}'")
    return Manifest(**known)


@cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's own fields, by name."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def from_json(kind: Any, value: object, where: str) -> Any:
    """`value` out of a JSON document as the type `kind`; BadInput, naming `where`, if not.

    A dataclass's fields that are missing take their defaults; what it does not know is left out.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):  # `X | None` alone
        if value is None:
            return None
        return from_json(next(arg for arg in args if arg is not type(None)), value, where)
    if origin in (tuple, list):
        items = _of(list, value, where)
        found = [from_json(args[0], item, f"{where}[{n}]") for n, item in enumerate(items)]
        return tuple(found) if origin is tuple else found
    if origin is not None:  # Mapping[str, X]
        entries = _of(dict, value, where).items()
        return {key: from_json(args[1], item, f"{where}: '{key}'") for key, item in entries}
    if isinstance(kind, type) and is_dataclass(kind):
        entries = _of(dict, value, where)
        known = {
            name: from_json(hint, entries[name], f"{where}: '{name}'")
            for name, hint in _hints(kind).items()
            if name in entries
        }
        try:
            return kind(**known)
        except TypeError as exc:  # it names those that are missing
            missing = str(exc).rpartition(": ")[2]
            raise BadInput(f"{where}: is not a complete {kind.__name__}: no {missing}") from None
    if kind is float:
        return math.inf if value is None else float(_of(float, value, where))
    return _of(kind, value, where)


def _of(kind: type, value: object, where: str) -> Any:
    """`value`, if it is of the JSON type `kind`; a boolean is not a number."""
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        raise BadInput(f"{where} must be {_NAMES[kind]}")
    return value
