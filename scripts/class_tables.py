"""Write the tables of keys in docs/manifest.md and docs/report.md, and the schema of report.json.

Run it after a change of the classes: `python scripts/class_tables.py`.
"""

from __future__ import annotations

import inspect
import json
import sys
import types
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deploykit.core.artefact import Manifest  # noqa: E402
from deploykit.reporting.report import VERSION, Report  # noqa: E402

PAGES = {ROOT / "docs" / "manifest.md": Manifest, ROOT / "docs" / "report.md": Report}
SCHEMA = ROOT / "docs" / "report.schema.json"
MARK = "<!-- from here on written by scripts/class_tables.py -->\n"
_WORDS = {
    str: "string",
    int: "integer",
    float: "number; null where it is infinite",
    bool: "true or false",
    types.NoneType: "null",
}


def written(page: Path) -> str:
    """The page as it should be: its own text, then a table for each class."""
    return page.read_text(encoding="utf-8").partition(MARK)[0] + "\n".join(tables(PAGES[page]))


def tables(root: type) -> list[str]:
    """`root` and every dataclass in its fields, with their docstrings and keys."""
    parts = [MARK]
    for kind in _dataclasses(root):
        hints = get_type_hints(kind)
        parts += [f"### {kind.__name__}\n", inspect.cleandoc(kind.__doc__ or "") + "\n"]
        parts += ["| key | value |\n| --- | --- |"]
        parts += [f"| `{each.name}` | {_words(hints[each.name])} |" for each in fields(kind)]
        for name in getattr(kind, "shown", ()):
            returned = get_type_hints(getattr(kind, name).fget)["return"]
            parts += [f"| `{name}` | {_words(returned)}; follows from the others |"]
        parts += [""]
    return parts


def schema() -> str:
    """The JSON Schema (draft 2020-12) of report.json. A reader should ignore keys it does not know.

    Keys that have a default in the class came later or are optional, so they are not required.
    """
    kinds = {kind.__name__: _object(kind) for kind in _dataclasses(Report)}
    report = kinds.pop("Report")
    version = {"const": VERSION, "description": "the version of this format"}
    found = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"deploykit report.json, version {VERSION}",
        **report,
        "required": ["report", *report["required"]],
        "properties": {"report": version, **report["properties"]},
        "$defs": kinds,
    }
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def _object(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    properties = {each.name: _schema(hints[each.name]) for each in fields(kind)}
    derived = getattr(kind, "shown", ())
    for name in derived:
        properties[name] = _schema(get_type_hints(getattr(kind, name).fget)["return"])
    required = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]
    about = inspect.cleandoc(kind.__doc__ or "")
    return {
        "description": about,
        "type": "object",
        "required": [*required, *derived],
        "properties": properties,
    }


_TYPES = {str: "string", int: "integer", bool: "boolean", types.NoneType: "null"}


def _schema(kind: Any) -> dict[str, Any]:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return {}
    if kind is float:
        return {"type": ["number", "null"]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(arg) for arg in args]}
    if origin is tuple:
        return {"type": "array", "items": _schema(args[0])}
    if origin is not None:
        return {"type": "object", "additionalProperties": _schema(args[1])}
    if is_dataclass(kind) and isinstance(kind, type):
        return {"$ref": f"#/$defs/{kind.__name__}"}
    return {"type": _TYPES[kind]}


def _dataclasses(root: type) -> list[type]:
    """`root` and the dataclasses in its fields, each once, in the order of the fields."""
    found: dict[type, None] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, type) and is_dataclass(kind) and kind not in found:
            found[kind] = None
            for each in get_type_hints(kind).values():
                visit(each)
            for name in getattr(kind, "shown", ()):
                visit(get_type_hints(getattr(kind, name).fget)["return"])
        for arg in get_args(kind):
            visit(arg)

    visit(root)
    return list(found)


def _words(kind: Any) -> str:
    """A type as a reader of the JSON sees it."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return "any value"
    if origin in (Union, types.UnionType):
        return "number or null" if float in args else " or ".join(map(_words, args))
    if origin is tuple:
        return f"list: {_words(args[0])}"
    if origin is not None:
        return f"object by name: {_words(args[1])}"
    if is_dataclass(kind):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    return _WORDS[kind]


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(written(each), encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")
