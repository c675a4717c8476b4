"""Check the arguments of a public function against its annotations, which Python does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from deploykit.core.errors import BadInput, quote

_NUMBERS: Mapping[Any, type] = {int: Integral, float: Real}  # these include numpy's
_MOST_BITS = 64  # the most bits that an integer may have
_P = ParamSpec("_P")
_R = TypeVar("_R")


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return `function`, changed to check its arguments before anything else.

    One item in place of a list is a list of it: a string is otherwise one of single letters.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        bound, kinds = signature(function).bind(*args, **kwargs), get_type_hints(function)
        for name, value in bound.arguments.items():
            if not _fits(value, kinds[name]) and _fits([value], kinds[name]):
                bound.arguments[name] = [value]
            elif isinstance(value, Real) and hasattr(value, "item"):  # numpy's, which are no JSON
                bound.arguments[name] = value.item()
        check_arguments(function, bound.arguments)
        return function(*bound.args, **bound.kwargs)

    return call


def check_arguments(function: Callable[..., object], given: Mapping[str, object]) -> None:
    """Raise BadInput for the first value of `given` that has another type than its parameter."""
    kinds = get_type_hints(function)
    for name, value in given.items():
        if not _fits(value, kinds[name]):
            limit = " within 64 bits" * (type(value) is int and value.bit_length() > _MOST_BITS)
            raise BadInput(f"`{name}` must be {_describe(kinds[name])}{limit}, got {quote(value)}")


def _fits(value: Any, kind: Any) -> bool:
    outer, parts = get_origin(kind) or kind, get_args(kind)
    if outer in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if outer in _NUMBERS:
        huge = isinstance(value, int) and value.bit_length() > _MOST_BITS
        return isinstance(value, _NUMBERS[outer]) and not (huge or isinstance(value, bool))
    if not isinstance(value, outer):
        return False
    if outer is Mapping:
        return all(_fits(key, parts[0]) and _fits(each, parts[1]) for key, each in value.items())
    if outer is Sequence:  # a string is a sequence of strings, too
        return not isinstance(value, (str, bytes)) and all(_fits(one, parts[0]) for one in value)
    return True


def _describe(kind: Any) -> str:
    """Return an annotation as it is written, without the modules: `Sequence[str] | None`."""
    return re.sub(r"(\w+\.)+", "", str(kind) if get_args(kind) else kind.__name__)
