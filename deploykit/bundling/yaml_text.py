"""Write plain values as YAML: strings always in quotes, so that none turns into another type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_NO_STRINGS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # in YAML 1.1
_ESCAPES: Mapping[str, str] = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


class Commented(str):
    """A key with a comment on the line above it."""

    comment: str

    def __new__(cls, key: str, comment: str) -> Commented:
        made = super().__new__(cls, key)
        made.comment = comment
        return made


def yaml_document(*documents: Mapping[str, Any]) -> str:
    """Mappings, lists, strings, integers, floats and booleans; several documents in one stream."""
    return "---\n".join("".join(_mapping(each, "")) for each in documents)


def _mapping(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(key, Commented):
            yield f"{indent}# {key.comment}\n"
        name = key if key.isidentifier() and key.lower() not in _NO_STRINGS else _quote(key)
        yield from _entry(f"{indent}{name}:", value, indent)


def _entry(head: str, value: Any, indent: str) -> Iterator[str]:
    """`head` is "key:"; a nested value starts on the next line, indented by two more."""
    if isinstance(value, Mapping) and value:
        yield f"{head}\n"
        yield from _mapping(value, f"{indent}  ")
    elif _is_list(value) and value:
        yield f"{head}\n"
        for item in value:
            yield from _item(item, f"{indent}  ")
    else:
        yield f"{head} {_scalar(value)}\n"


def _item(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        deeper = f"{indent}  "
        lines = [line.removeprefix(deeper) for line in _mapping(value, deeper)]
        while lines[0].startswith("#"):
            yield f"{indent}{lines.pop(0)}"
        yield f"{indent}- {lines.pop(0)}"
        yield from (f"{deeper}{line}" for line in lines)
    else:
        yield f"{indent}- {_scalar(value)}\n"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, str):
        return _quote(value)
    return "{}" if isinstance(value, Mapping) else "[]"


def _quote(text: str) -> str:
    return f'"{"".join(map(_letter, text))}"'


def _letter(letter: str) -> str:
    if letter in _ESCAPES:
        return _ESCAPES[letter]
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\U{code:08x}"
