"""Write the tables of keys in docs/manifest.md and docs/report.md from the classes.

Run it after a change of the classes: `python scripts/class_tables.py`.
"""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deploykit.core.manifest import Manifest  # noqa: E402
from deploykit.measure.report.report import Report  # noqa: E402

PAGES = {ROOT / "docs" / "manifest.md": Manifest, ROOT / "docs" / "report.md": Report}
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


def _dataclasses(root: type) -> list[type]:
    """`root` and the dataclasses in its fields, each once, in the order of the fields."""
    found: dict[type, None] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, type) and is_dataclass(kind) and kind not in found:
            found[kind] = None
            for each in get_type_hints(kind).values():
                visit(each)
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
