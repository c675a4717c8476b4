"""Build the user's architecture and put a file's weights into it.

In: `pkg.mod:callable` and tensors by name. Out: the filled module, and notes on everything that was
not a plain copy. Weights that do not fit are named: missing, unexpected, of another shape or kind.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from deploykit.core.errors import BadInput, first_line
from deploykit.core.extras import require
from deploykit.core.paths import import_object
from deploykit.runtimes.torch.files import users_code

torch = require("torch")

_LISTED = 10
# left by DataParallel, torch.compile and Lightning in front of every name
_PREFIXES = ("module.", "_orig_mod.", "model.")
_TORCHVISION_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    (
        "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, "
        "int pooled_width, int sampling_ratio, bool aligned) -> Tensor"
    ),
)
_T = TypeVar("_T")


def build(arch: str) -> Any:
    """The module on the CPU that `arch`, `pkg.mod:callable` or `./file.py:callable`, builds.

    It is called without arguments. Raises BadInput, NotFound, MissingExtra.
    """
    found = with_torchvision(lambda: import_object(arch))
    if not isinstance(found, torch.nn.Module):
        found = _called(arch, found)
    if not isinstance(found, torch.nn.Module):
        raise BadInput(f"--arch {arch}: returned a {type(found).__name__}, not a torch.nn.Module")
    return found.cpu()


def _called(arch: str, found: Any) -> Any:
    if not callable(found):
        raise BadInput(f"--arch {arch}: is a {type(found).__name__}, a callable is needed")
    needed = _needed_arguments(found)
    if needed:
        raise BadInput(
            f"--arch {arch}: needs the arguments {', '.join(needed)}",
            hint="write a function without arguments and name that: "
            f"def build(): return {arch.rpartition(':')[2]}(...)  ->  --arch ./file.py:build",
        )
    with users_code(f"--arch {arch}"):
        return with_torchvision(found)


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return []
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in open_ended]


def with_torchvision(run: Callable[[], _T]) -> _T:
    """`run()`, once more if it imported a torchvision that was built for another torch.

    Such a one (its wheel beside a CPU build of torch) stops at its first operator, though its
    networks need none of them; with the operators declared it imports. A torchvision that matches
    never comes here.
    """
    try:
        return run()
    except Exception as exc:  # only looked at: what it is not for goes on
        if "operator torchvision::" not in str(exc):
            raise
        _declare_torchvision_operators()
        return run()


@cache  # torch forgets them when the library object goes
def _declare_torchvision_operators() -> Any:
    library = torch.library.Library("torchvision", "DEF")
    for schema in _TORCHVISION_OPERATORS:
        library.define(schema)
    return library


def fill(where: Path, module: Any, weights: Mapping[str, Any]) -> tuple[str, ...]:
    """Copy `weights` into `module`; returns notes. Raises BadInput when they do not fit."""
    weights, notes = _without_prefix(module, weights)
    own = module.state_dict()
    _check_kinds(where, own, weights)
    try:
        missing, unexpected = module.load_state_dict(weights, strict=False)
    except RuntimeError as exc:
        raise _misfit(where, _differences(own, weights) or [_second_line(exc)]) from exc
    tied = _tied(module, missing)
    if tied:
        notes.append(f"not in the file, as they share another's weights: {_listed(tied)}")
    missing = [key for key in missing if key not in tied]
    if missing or unexpected:
        raise _misfit(where, _differences(own, weights, missing, unexpected))
    casts = Counter(
        (_type(value), _type(own[key]))
        for key, value in weights.items()
        if key in own and _is_tensor(value, own[key]) and value.dtype != own[key].dtype
    )
    notes += [
        f"{count} tensors converted from {old} to {new}" for (old, new), count in casts.items()
    ]
    return tuple(notes)


def _without_prefix(module: Any, weights: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Drop what a wrapper put before every name, if the module has no such names itself."""
    notes = []
    own = [name for name, _ in module.named_children()]
    own += [name for name, _ in module.named_parameters(recurse=False)]
    for _ in _PREFIXES:
        for prefix in _PREFIXES:
            if prefix[:-1] not in own and all(key.startswith(prefix) for key in weights):
                weights = {key.removeprefix(prefix): value for key, value in weights.items()}
                notes.append(f"removed '{prefix}' from the front of every name")
    return weights, notes


def _check_kinds(where: Path, own: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Refuse whole numbers for real ones and so on: torch would convert them in silence."""
    wrong = [
        f"{key} is {_type(value)} in the file, {_type(own[key])} in the model"
        for key, value in weights.items()
        if key in own and _is_tensor(value, own[key])
        if value.is_floating_point() != own[key].is_floating_point()
        or value.is_complex() != own[key].is_complex()
    ]
    if wrong:
        raise _misfit(where, [_listed(wrong)])


def _differences(
    own: Mapping[str, Any],
    weights: Mapping[str, Any],
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
) -> list[str]:
    """Shapes that differ, missing and unexpected names: ten of each at most."""
    shapes = [
        f"{key} {_shape(value)} in the file, {_shape(own[key])} in the model"
        for key, value in weights.items()
        if key in own and _is_tensor(value, own[key]) and value.shape != own[key].shape
    ]
    if shapes:
        missing = [key for key in own if key not in weights]
        unexpected = [key for key in weights if key not in own]
    said = [f"size mismatch: {_listed(shapes)}"] if shapes else []
    if missing or unexpected:
        said += [f"missing {_listed(missing)}", f"unexpected {_listed(unexpected)}"]
    return said


def _tied(module: Any, missing: Sequence[str]) -> list[str]:
    """Of the missing names, those of a parameter that stands in the module under another name."""
    holders: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    groups = {name: names for names in holders.values() for name in names}
    return [key for key in missing if not set(groups.get(key, [key])) <= set(missing)]


def _misfit(where: Path, reasons: Sequence[str]) -> BadInput:
    return BadInput(f"{where}: weights do not fit the model: {'; '.join(reasons)}")


def _is_tensor(*values: Any) -> bool:
    """Whether all are tensors with a shape: a lazy module's parameters have none yet."""
    return all(
        isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value)
        for value in values
    )


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - _LISTED} more" if len(words) > _LISTED else ""
    return ", ".join(words[:_LISTED]) + more if words else "none"


def _shape(tensor: Any) -> str:
    return f"[{','.join(str(size) for size in tensor.shape)}]"


def _type(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _second_line(exc: Exception) -> str:
    """What load_state_dict says below its heading, in one line."""
    return " ".join(line.strip() for line in str(exc).splitlines()[1:3]) or first_line(exc)
