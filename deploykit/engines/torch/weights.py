"""Build the user's architecture and put a file's weights into it.

A note reports everything that is not a plain copy. An error names weights that do not fit: missing,
unexpected, of another shape or kind.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput, first_line
from deploykit.core.extras import require
from deploykit.core.files import import_object
from deploykit.engines.torch.files import dtype_of, module_errors
from deploykit.engines.torch.presets import build_named, common_prefix, recognise

torch = require("torch")

_LISTED, _SHOWN = 10, 2  # most names in a note, and of each kind in an error
_AVERAGED = "n_averaged"  # AveragedModel adds this name


def build_module(
    arch: str,
    arguments: Mapping[str, Any] | None = None,
    weights: Mapping[str, Any] | None = None,
) -> tuple[Any, tuple[str, ...]]:
    """Build a module on the CPU by `arch`, `pkg.mod:callable` or `./file.py:callable`.

    The callable gets those of `arguments` that it names; a note lists them. A library's model,
    such as "resnet18", is built to fit `weights`. Raises BadInput, NotFound, MissingExtra.
    """
    given: dict[str, Any] = {}
    with module_errors(f"`arch` {arch}"):
        named = build_named(arch, weights or {})
    found: Any = named if named is not None else import_object(arch)
    if not isinstance(found, torch.nn.Module):
        given = _arguments(arch, found, arguments or {})
        with module_errors(f"`arch` {arch}"):
            found = found(**given)
    if not isinstance(found, torch.nn.Module):
        raise BadInput(f"`arch` {arch}: returned a {type(found).__name__}, not a torch.nn.Module")
    note = "built with the file's hyper_parameters: "
    notes = (note + ", ".join(f"{k}={v!r}" for k, v in given.items()),) if given else ()
    return found.cpu(), notes


def _arguments(arch: str, function: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `offered` that `function` takes. Raises BadInput if it needs others."""
    if not callable(function):
        raise BadInput(f"`arch` {arch}: is a {type(function).__name__}, a callable is needed")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it is written in C
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = {p.name: offered[p.name] for p in parameters if p.kind in named and p.name in offered}
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in open_ended]
    lacking = [name for name in needed if name not in given]
    if lacking:
        raise BadInput(
            f"`arch` {arch}: needs the arguments {', '.join(lacking)}",
            hint="write a function without arguments and name that: "
            f"def build(): return {arch.rpartition(':')[2]}(...)  ->  `arch` ./file.py:build",
        )
    return given


def in_float32(module: Any) -> tuple[Any, tuple[str, ...]]:
    """Convert a module saved in float16, as Ultralytics does, to float32; return it and a note."""
    if isinstance(module, torch.jit.ScriptModule):
        return module, ()
    count = sum(tensor.dtype == torch.float16 for tensor in module.state_dict().values())
    note = f"{count} tensors converted from float16 to float32"
    return (module.float(), (note,)) if count else (module, ())


def copy_weights(
    where: Path, module: Any, weights: Mapping[str, Any], source: str = ""
) -> tuple[str, ...]:
    """Copy `weights` into `module`; returns notes. Raises BadInput when they do not fit.

    `source`: a "Lightning" checkpoint may hold more than the model, such as a loss with weights.
    """
    own = module.state_dict()
    notes: list[str] = []
    if source == "Lightning":
        weights, notes = _of_attribute(own, weights)
    weights, removed = _without_prefix(module, weights)
    notes += removed
    pairs = {
        key: (value, own[key])
        for key, value in weights.items()
        if key in own and _is_tensor(value, own[key])
    }
    wrong = [
        f"{key} is {dtype_of(theirs)} in the file, {dtype_of(ours)} in the model"
        for key, (theirs, ours) in pairs.items()
        if theirs.is_floating_point() != ours.is_floating_point()
        or theirs.is_complex() != ours.is_complex()
    ]
    if wrong:  # torch would convert them silently
        raise _misfit(where, weights, {"": wrong})
    try:
        missing, unexpected = module.load_state_dict(weights, strict=False)
    except RuntimeError as exc:
        shapes = [
            f"{key} {list(theirs.shape)} in the file, {list(ours.shape)} in the model"
            for key, (theirs, ours) in pairs.items()
            if theirs.shape != ours.shape
        ]
        raise _misfit(where, weights, {"size mismatch: ": shapes or [first_line(exc)]}) from exc
    holders: dict[int, set[str]] = {}  # names that share a parameter
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), set()).add(name)
    groups = {name: names for names in holders.values() for name in names}
    tied = [key for key in missing if not groups.get(key, {key}) <= set(missing)]
    if tied:
        notes.append(f"not in the file, as they share another's weights: {list_names(tied)}")
    missing = [key for key in missing if key not in tied]
    if missing or unexpected:
        raise _misfit(where, weights, {"missing ": missing, "unexpected ": unexpected})
    casts = Counter(
        f"{dtype_of(theirs)} to {dtype_of(ours)}"
        for theirs, ours in pairs.values()
        if theirs.dtype != ours.dtype
    )
    notes += [f"{count} tensors converted from {cast}" for cast, count in casts.items()]
    return tuple(notes)


def _without_prefix(module: Any, weights: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Drop a wrapper's prefix from every name, if the module has no such names itself."""
    notes = []
    if _AVERAGED in weights and not hasattr(module, _AVERAGED):
        weights = {key: value for key, value in weights.items() if key != _AVERAGED}
        notes.append("took the averaged weights of a torch.optim.swa_utils.AveragedModel")
    own = [name for name, _ in module.named_children()]
    own += [name for name, _ in module.named_parameters(recurse=False)]
    while (prefix := common_prefix(weights)) and prefix[:-1] not in own:
        weights = {key.removeprefix(prefix): value for key, value in weights.items()}
        notes.append(f"removed '{prefix}' from the front of every name")
    return weights, notes


def _of_attribute(
    own: Mapping[str, Any], weights: Mapping[str, Any]
) -> tuple[Mapping[str, Any], list[str]]:
    """Return the weights of the LightningModule's attribute that has all the names in `own`."""
    prefixes = dict.fromkeys(f"{key.partition('.')[0]}." for key in weights)
    fitting = [each for each in prefixes if all(f"{each}{name}" in weights for name in own)]
    if not own or len(fitting) != 1:
        return weights, []
    prefix = fitting[0]
    others = [key for key in weights if not key.startswith(prefix)]
    notes = [f"took the weights under '{prefix}'; not used: {list_names(others)}"]
    own_part = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    return own_part, notes


def _misfit(
    where: Path, weights: Mapping[str, Any], reasons: Mapping[str, Sequence[str]]
) -> BadInput:
    """Return the error with a few of the names by reason, and the number of the others."""
    known = recognise(weights, where)
    listed = (f"{why}{list_names(names, _SHOWN)}" for why, names in reasons.items() if names)
    return BadInput(
        f"{where}: weights do not fit the model: {'; '.join(listed)}",
        hint=f"these are the weights of {known[0]}: `arch` {known[1]}" if known else None,
    )


def _is_tensor(*values: Any) -> bool:
    """Return whether all are tensors with a shape: a lazy module's parameters have none yet."""
    return all(
        isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value)
        for value in values
    )


def list_names(words: Sequence[str], most: int = _LISTED) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more if words else "none"
