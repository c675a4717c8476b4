"""The manifest `FILE.json` next to an artefact: tensors, precision, hash, origin and evidence.

`manifest.schema.json` is the JSON Schema of its version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput, NotFound
from deploykit.core.evidence import Evidence
from deploykit.core.files import manifest_path, read_json, write_json
from deploykit.core.json_value import field_types, from_json, json_value
from deploykit.core.task import Task
from deploykit.core.tensors import TensorSpec, spec_from_dict

MANIFEST_VERSION = 2
_SPEC_LISTS = ("inputs", "outputs")


@dataclass(frozen=True)
class Manifest:
    """The facts about one artefact. Hashes are SHA-256 in hexadecimal.

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
        """Whether this is a TensorRT engine that later versions of the same major run too."""
        return self.evidence.build is not None and self.evidence.build.version_compatible

    @property
    def plugins(self) -> Mapping[str, str]:
        """The libraries that an engine needs to run: path -> SHA-256."""
        return self.evidence.build.plugins if self.evidence.build else {}

    def to_dict(self) -> dict[str, Any]:
        return {"manifest": MANIFEST_VERSION, **json_value(self)}


def write_manifest(artefact: Path, manifest: Manifest) -> None:
    """Write `FILE.json`. Write `artefact` first: a manifest never names a missing file."""
    write_json(manifest_path(artefact), manifest.to_dict())


def load_manifest(artefact: Path) -> Manifest | None:
    """Return the manifest next to `artefact` without comparing hashes; None if there is none."""
    where = str(manifest_path(artefact))
    try:
        values = read_json(Path(where))
    except NotFound:
        return None
    if not isinstance(values, dict) or values.get("manifest") != MANIFEST_VERSION:
        raise BadInput(
            f"{where}: is not a deploykit manifest of version {MANIFEST_VERSION}",
            hint="make the file that it describes again",
        )
    hints = field_types(Manifest)
    known: dict[str, Any] = {}
    for name, hint in hints.items():
        if name == "task" and name not in values:  # version 2 lacks it
            continue
        if name not in values:
            raise BadInput(f"{where}: '{name}' is missing")
        if name in _SPEC_LISTS:
            items = from_json(list[dict[str, Any]], values[name], f"{where}: '{name}'")
            known[name] = tuple(spec_from_dict(item, where) for item in items)
        else:
            known[name] = from_json(hint, values[name], f"{where}: '{name}'")
    return Manifest(**known)
