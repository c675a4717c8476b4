"""Compare the annotations of two stages where they meet, and values with an annotation.

What Python cannot compare, such as a type variable or a protocol, is taken to fit.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, is_typeddict

import numpy as np

WHOLE, EACH = "whole", "each"
_LISTS = (list, tuple)
_NUMBERS: Mapping[type, tuple[type, ...]] = {
    float: (float, int, np.floating, np.integer),
    int: (int, np.integer),
}


def meeting(given: Any, wanted: Any) -> str | None:
    """How a value annotated `given` reaches a parameter annotated `wanted`.

    "whole": as it is; "each": a list, of which each element is one call; None: not at all.
    """
    if _assignable(given, wanted):
        return WHOLE
    given = _unwrap(given)
    if _class(given) in _LISTS and _assignable((get_args(given) or (Any,))[0], wanted):
        return EACH
    return None


def conforms(value: object, annotation: Any) -> bool:
    """Whether `value`, with the elements of a list, tuple or dict, is what `annotation` says."""
    kind = _unwrap(annotation)
    args = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return any(conforms(value, each) for each in args)
    if get_origin(kind) is Literal:
        return value in args
    wanted = _class(kind)
    if wanted is None:
        return True
    try:
        if not isinstance(value, _NUMBERS.get(wanted, wanted)):
            return False
    except TypeError:  # a protocol
        return True
    if not args:
        return True
    if isinstance(value, np.ndarray):
        return _assignable(np.dtype[value.dtype.type], args[-1])  # type: ignore[name-defined]
    if isinstance(value, dict):
        return all(conforms(each, args[-1]) for each in value.values())
    if isinstance(value, tuple) and args[-1] is not Ellipsis:
        return len(value) == len(args) and all(map(conforms, value, args))
    if isinstance(value, (list, tuple)):
        return all(conforms(each, args[0]) for each in value)
    return True


def shown(annotation: Any) -> str:
    """As it is written in a program: `list[numpy.ndarray]`."""
    return "None" if annotation is type(None) else inspect.formatannotation(annotation)


def describe_value(value: object) -> str:
    """What a value is, for an error: `list of str`, `numpy.ndarray of uint8`."""
    name = shown(type(value))
    if isinstance(value, np.ndarray):
        return f"{name} of {value.dtype}"
    if isinstance(value, (list, tuple)) and value:
        return f"{name} of {' and '.join(sorted({shown(type(each)) for each in value})[:3])}"
    return name


def _assignable(given: Any, wanted: Any) -> bool:
    given, wanted = _unwrap(given), _unwrap(wanted)
    unions = (Union, types.UnionType)
    if get_origin(given) in unions:
        return all(_assignable(each, wanted) for each in get_args(given))
    if get_origin(wanted) in unions:
        return any(_assignable(given, each) for each in get_args(wanted))
    have, want = _class(given), _class(wanted)
    if have is None or want is None:
        return True
    try:
        if not issubclass(have, want) and not (want is float and have is int):
            return False
    except TypeError:  # a protocol
        return True
    inner_given, inner_wanted = get_args(given), get_args(wanted)
    if len(inner_given) != len(inner_wanted):
        return True
    return all(map(_assignable, inner_given, inner_wanted))


def _unwrap(annotation: Any) -> Any:
    """Without `Annotated`, `NewType` and None for its type."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        else:
            return type(None) if annotation is None else annotation


def _class(annotation: Any) -> type | None:
    """The class that a value has; None for any, and for what Python cannot check."""
    if is_typeddict(annotation):
        return dict
    if get_origin(annotation) is Literal:
        return type(get_args(annotation)[0])
    found = get_origin(annotation) or annotation
    return found if isinstance(found, type) and found is not object else None
