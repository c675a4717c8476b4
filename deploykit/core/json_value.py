"""Turn results into JSON values and back, and show them in a notebook: one rule for the package.

JSON has no infinity and no NaN: either is written as null. A notebook shows tables, and everything
else a `repr` of a few lines.
"""

from __future__ import annotations

import math
import os
import threading
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from html import escape
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from deploykit.core.errors import BadInput, TooLarge

# A JSON parser holds the GIL for up to 0.1 s, so only one runs at a time.
ONE_JSON = threading.Lock()
MOST_JSON_VALUES, MOST_JSON_BYTES = 1 << 18, 24 << 20
_WINDOW_BYTES = 1 << 20


def check_json_size(text: bytes | memoryview, hint: str) -> None:
    """Raise TooLarge for more than MOST_JSON_VALUES values, keys and lists, or MOST_JSON_BYTES."""
    if len(text) > MOST_JSON_BYTES:
        raise TooLarge(f"the JSON is longer than {MOST_JSON_BYTES >> 20} MiB", hint=hint)
    left = MOST_JSON_VALUES
    for at in range(0, len(text) if len(text) > left else 0, _WINDOW_BYTES):
        left -= sum(map(bytes(text[at : at + _WINDOW_BYTES]).count, (b",", b":", b"[", b"{")))
        if left < 0:
            raise TooLarge(f"the JSON has more than {MOST_JSON_VALUES} values", hint=hint)


def json_value(obj: object, *properties: str, without: Collection[str] = ()) -> Any:
    """Return `obj` as dicts, lists, strings, numbers, booleans and None.

    A dataclass `obj` becomes a dict of its fields, in order, except those in `without`, and then
    the named `properties`: a class writes `def to_dict(self): return json_value(self, "passed")`.
    A value inside `obj` is converted by its own `to_dict` if it has one. Keys and paths become
    strings. Raises TypeError for any other type.
    """
    if is_dataclass(obj) and not isinstance(obj, type):
        names = [each.name for each in fields(obj) if each.name not in without]
        return {name: _inner(getattr(obj, name)) for name in (*names, *properties)}
    return _inner(obj)


def _inner(obj: object) -> Any:
    if isinstance(obj, type):
        raise TypeError(f"the class {obj.__name__} has no JSON form")
    if obj is None or isinstance(obj, (str, bool, int)):
        return obj
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else None
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    if hasattr(obj, "to_dict"):
        return obj.to_dict()
    if is_dataclass(obj):
        return json_value(obj)
    if isinstance(obj, Mapping):
        return {str(key): _inner(value) for key, value in obj.items()}
    if isinstance(obj, Sequence) and not isinstance(obj, (bytes, bytearray, memoryview)):
        return [_inner(value) for value in obj]
    raise TypeError(f"a {type(obj).__name__} has no JSON form")


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
        parts = {name: _text(each) or "…" * bool(each) for name, each in _facts(self).items()}
        shown = ", ".join(f"{name}={text}" for name, text in parts.items() if text)
        return f"{type(self).__name__}({shown})"

    def _repr_html_(self) -> str:
        return table_of(type(self).__name__, self, whole=True)


def _facts(value: Any) -> dict[str, Any]:
    """Return what is shown of an object or a dict, by name."""
    if isinstance(value, Mapping):
        return dict(value)
    names = getattr(value, "in_notebook", ()) or [each.name for each in fields(value)]
    return {name: getattr(value, name, None) for name in names}


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
        kind.__str__ is not object.__str__ or not (is_dataclass(value) or hasattr(value, "ndim"))
    )


def table_of(title: str, value: Any, *, whole: bool = False) -> str:
    """Return a table of an object, or of several or of dicts, with each fact that fits a cell.

    Below that of an object are those of its other facts. `whole`: also for an object that fits one.
    """
    if isinstance(value, Shown) and (whole or not _is_plain(value)):
        facts = {name.replace("_", " "): each for name, each in _facts(value).items()}
        rows = [(name, text) for name, each in facts.items() if (text := _text(each))]
        return _table(title, ("", ""), rows) + "".join(table_of(*fact) for fact in facts.items())
    if not isinstance(value, (tuple, list)) or all(map(_is_plain, value)):
        return ""
    known = [_facts(each) for each in value if isinstance(each, Mapping) or is_dataclass(each)]
    names = list(dict.fromkeys(key for row in known for key, each in row.items() if _text(each)))
    cells = [tuple(_text(row.get(key)) for key in names) for row in known[:_ROWS]]
    more = f", the first {_ROWS} of {len(known)}" * (len(known) > _ROWS)
    return _table(title + more, tuple(key.replace("_", " ") for key in names), cells)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows or not columns:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns) if any(columns) else ""
    lines = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    caption = f'<caption style="text-align: left">{escape(title)}</caption>'
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


class Record(Shown):
    """A dataclass with `to_dict`; `shown` names the properties that the JSON holds as well."""

    shown: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = json_value(self, *self.shown)
        return found


_NAMES: Mapping[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


@cache
def field_types(kind: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, by name."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def from_json(kind: Any, value: object, where: str) -> Any:
    """Convert `value`, read from JSON, to the type `kind`. Raises BadInput, which names `where`.

    A dataclass's missing fields take their defaults; unknown keys are ignored.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        kinds = [each for each in args if each is not types.NoneType]
        if value is None and len(kinds) < len(args):
            return None
        return from_json(type(value) if type(value) in kinds else kinds[0], value, where)
    if origin in (tuple, list):
        items = _of(list, value, where)
        found = [from_json(args[0], item, f"{where}[{n}]") for n, item in enumerate(items)]
        return tuple(found) if origin is tuple else found
    if origin is not None:  # it is Mapping[str, X]
        entries = _of(dict, value, where).items()
        return {key: from_json(args[1], item, f"{where}: '{key}'") for key, item in entries}
    if isinstance(kind, type) and is_dataclass(kind):
        entries = _of(dict, value, where)
        known = {
            name: from_json(hint, entries[name], f"{where}: '{name}'")
            for name, hint in field_types(kind).items()
            if name in entries
        }
        try:
            return kind(**known)
        except TypeError as exc:  # its message names the missing fields
            missing = str(exc).rpartition(": ")[2]
            raise BadInput(f"{where}: is not a complete {kind.__name__}: no {missing}") from None
    if kind is float:
        return math.inf if value is None else float(_of(float, value, where))
    return _of(kind, value, where)


def _of(kind: type, value: object, where: str) -> Any:
    """Return `value` if it is of the JSON type `kind`, where a boolean is not a number."""
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        raise BadInput(f"{where} must be {_NAMES[kind]}")
    return value
