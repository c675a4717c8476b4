"""Write the JSON Schema of the manifest from its classes: `python scripts/manifest_schema.py`."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deploykit.core.artefact import MANIFEST_VERSION, Manifest  # noqa: E402

SCHEMA = ROOT / "deploykit" / "core" / "manifest.schema.json"
SIMPLE = {str: "string", int: "integer", bool: "boolean"}


def schema() -> dict[str, Any]:
    """The JSON Schema of `Manifest.to_dict()`."""
    definitions: dict[str, Any] = {}
    manifest = _object(Manifest, definitions)
    version = {"const": MANIFEST_VERSION}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "deploykit manifest",
        **manifest,
        "properties": {"manifest": version, **manifest["properties"]},
        "required": ["manifest", *(name for name in manifest["required"] if name != "task")],
        "$defs": dict(sorted(definitions.items())),
    }


def _object(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    properties = {each.name: _of(hints[each.name], definitions) for each in fields(kind)}
    for name in getattr(kind, "shown", ()):
        returned = get_type_hints(getattr(kind, name).fget)["return"]
        properties[name] = {**_of(returned, definitions), "readOnly": True}
    optional = {each.name for each in fields(kind) if kind is not Manifest and _has_default(each)}
    return {
        "type": "object",
        "description": (kind.__doc__ or "").partition("\n\n")[0],
        "properties": properties,
        "required": [each.name for each in fields(kind) if each.name not in optional],
    }


def _has_default(each: Any) -> bool:
    return each.default is not MISSING or each.default_factory is not MISSING


def _of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return {}
    if origin in (Union, types.UnionType):
        kinds = [_of(arg, definitions) for arg in args if arg is not type(None)]
        return {"anyOf": [*kinds, *([{"type": "null"}] if type(None) in args else [])]}
    if origin is tuple:
        return {"type": "array", "items": _of(args[0], definitions)}
    if origin is not None:  # Mapping[str, X]
        return {"type": "object", "additionalProperties": _of(args[1], definitions)}
    if is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}  # known while it is written: Evidence holds itself
            definitions[kind.__name__] = _object(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if kind is float:  # JSON has no infinity: null
        return {"type": ["number", "null"]}
    return {"type": SIMPLE[kind]}


def main() -> None:
    SCHEMA.write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
