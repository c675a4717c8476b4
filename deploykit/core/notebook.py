"""Show results in a notebook as tables, and everywhere else by a `repr` of a few lines."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, ClassVar

_ITEMS, _CHARACTERS, _ROWS = 6, 80, 100  # most shown of a list, a string and a table


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
        shown = [f"{name}={_short(value)}" for name, value in _facts(self)]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_html_(self) -> str:
        others = (table_of(name.replace("_", " "), value) for name, value in _facts(self))
        return "".join([_facts_table(type(self).__name__, self), *others])


def _facts(value: Any) -> Iterable[tuple[str, Any]]:
    names: tuple[str, ...] = getattr(value, "in_notebook", ())
    if dataclasses.is_dataclass(value):
        names = names or tuple(each.name for each in dataclasses.fields(value))
    return ((name, getattr(value, name, None)) for name in names)


def _short(value: Any) -> str:
    """Return the `repr` of a plain value, and of others what they are."""
    if isinstance(value, str) and len(value) > _CHARACTERS:
        return repr(value[:_CHARACTERS] + "…")
    if isinstance(value, Mapping):
        plain = len(value) <= _ITEMS and all(map(_is_plain, value.values()))
        return repr(dict(value)) if plain else f"<{len(value)} keys>"
    if isinstance(value, (tuple, list)):
        kinds = sorted({type(each).__name__ for each in value})
        plain = len(value) <= _ITEMS and all(map(_is_plain, value))
        return repr(value) if plain else f"<{len(value)} {' or '.join(kinds)}>"
    if hasattr(value, "ndim"):  # an array or a tensor
        return f"<{value.dtype} {list(value.shape)}>"
    if dataclasses.is_dataclass(value) and not _is_plain(value):
        return f"<{type(value).__name__}>"
    return repr(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value's `repr` or `str` is short: a number, a name, a tensor's type."""
    if isinstance(value, str):
        return len(value) <= _CHARACTERS
    if dataclasses.is_dataclass(value):
        return type(value).__str__ is not object.__str__ or _is_interval(value)
    return value is None or isinstance(value, (bool, int, float, os.PathLike))


def _is_interval(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and {"value", "low", "high"} <= vars(value).keys()


def _text(value: Any) -> str:
    """Return a fact as one cell; "" for what is empty, or a table of its own."""
    if value is None or isinstance(value, str):
        return value or ""
    if hasattr(value, "ndim"):  # an array or a tensor
        return f"{value.dtype} {list(value.shape)}"
    if _is_interval(value):
        return f"{value.value:.4g} ({value.low:.4g} to {value.high:.4g})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        plain = [f"{key} {_text(each)}" for key, each in value.items() if _is_plain(each)]
        return ", ".join(plain[:_ROWS])
    if isinstance(value, (tuple, list)):
        plain = [_text(each) for each in value if _is_plain(each)]
        more = f" and {len(plain) - _ROWS} more" * (len(plain) > _ROWS)
        return ", ".join(plain[:_ROWS]) + more
    return str(value) if _is_plain(value) or not dataclasses.is_dataclass(value) else ""


def table_of(name: str, value: Any) -> str:
    """Return a table of an object, or of several or of dicts, with each fact that fits a cell."""
    if isinstance(value, Shown) and not _is_plain(value):
        return _facts_table(name, value)
    if not isinstance(value, (tuple, list)) or all(map(_is_plain, value)):
        return ""
    known = [each for each in value if isinstance(each, Mapping) or dataclasses.is_dataclass(each)]
    rows = [each if isinstance(each, Mapping) else dict(_facts(each)) for each in known]
    names = list(dict.fromkeys(key for row in rows for key, each in row.items() if _text(each)))
    cells = [tuple(_text(row.get(key)) for key in names) for row in rows[:_ROWS]]
    more = f", the first {_ROWS} of {len(rows)}" * (len(rows) > _ROWS)
    return _table(name + more, tuple(key.replace("_", " ") for key in names), cells)


def _facts_table(title: str, value: Any) -> str:
    rows = [(name.replace("_", " "), _text(each)) for name, each in _facts(value)]
    return _table(title, ("", ""), [row for row in rows if row[1]])


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows or not columns:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns) if any(columns) else ""
    lines = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    caption = f'<caption style="text-align: left">{escape(title)}</caption>'
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
