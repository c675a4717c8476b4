"""Show results in a notebook as tables, and everywhere else by a `repr` of a few lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, ClassVar

_ITEMS, _CHARACTERS, _ROWS = 20, 200, 100  # most shown of a list, a string and a table


class Shown:
    """An object that a notebook shows: the attributes in `in_notebook`, or a dataclass's fields.

    A dataclass's own `repr` holds all that is in it: that of a plan has 150,000 characters.
    """

    in_notebook: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "__repr__" not in vars(cls):
            cls.__repr__ = Shown.__repr__  # type: ignore[method-assign] # before `dataclass` adds one

    def __repr__(self) -> str:
        shown = [
            f"{name}={text}"
            for name, value in _facts(self)
            if (text := _text(value) or "…" * bool(value))
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_html_(self) -> str:
        return _tables_of(type(self).__name__, self)


def _facts(value: Any) -> Iterable[tuple[str, Any]]:
    names: tuple[str, ...] = getattr(value, "in_notebook", ())
    if dataclasses.is_dataclass(value):
        names = names or tuple(each.name for each in dataclasses.fields(value))
    return ((name, getattr(value, name, None)) for name in names)


def _text(value: Any) -> str:
    """Return a value as one short line; "" for what is empty, or a table of its own."""
    if value is None:
        return ""
    if isinstance(value, str) and len(value) > _CHARACTERS:
        return value[:_CHARACTERS] + "…"
    if hasattr(value, "ndim"):  # an array or a tensor
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (Mapping, tuple, list)):
        pairs = value.items() if isinstance(value, Mapping) else (("", each) for each in value)
        plain = [f"{key} {_text(each)}".lstrip() for key, each in pairs if _is_plain(each)]
        more = f" and {len(value) - _ITEMS} more" * (len(value) > _ITEMS)
        return ", ".join(plain[:_ITEMS]) + more if plain else ""
    return str(value) if _is_plain(value) else ""


def _is_plain(value: Any) -> bool:
    """Return whether a value's `str` is short: a number, a name, a tensor's type."""
    kind: Any = type(value)
    return not isinstance(value, (Mapping, tuple, list)) and (
        kind.__str__ is not object.__str__
        or not (dataclasses.is_dataclass(value) or hasattr(value, "ndim"))
    )


def table_of(name: str, value: Any) -> str:
    """Return a table of an object, or of several or of dicts, with each fact that fits a cell."""
    if isinstance(value, Shown) and not _is_plain(value):
        return _tables_of(name, value)
    if not isinstance(value, (tuple, list)) or all(map(_is_plain, value)):
        return ""
    known = [each for each in value if isinstance(each, Mapping) or dataclasses.is_dataclass(each)]
    facts = [each if isinstance(each, Mapping) else dict(_facts(each)) for each in known]
    names = list(dict.fromkeys(key for row in facts for key, each in row.items() if _text(each)))
    cells = [tuple(_text(row.get(key)) for key in names) for row in facts[:_ROWS]]
    more = f", the first {_ROWS} of {len(facts)}" * (len(facts) > _ROWS)
    return _table(name + more, tuple(key.replace("_", " ") for key in names), cells)


def _tables_of(title: str, value: Any) -> str:
    """Return a table of the facts that fit a cell, and below it those of the others."""
    facts = [(name.replace("_", " "), each) for name, each in _facts(value)]
    rows = [(name, text) for name, each in facts if (text := _text(each))]
    return "".join([_table(title, ("", ""), rows), *(table_of(*each) for each in facts)])


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows or not columns:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns) if any(columns) else ""
    lines = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    caption = f'<caption style="text-align: left">{escape(title)}</caption>'
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
