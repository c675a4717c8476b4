"""Read a pipeline's file, Python with functions and model files, or TOML.

Every function and every model that the file itself defines is a stage, unless its name begins with
an underscore. Reading a pipeline runs its code, as running any Python program does.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, get_type_hints

from deploykit.core.errors import BadInput, NotFound, did_you_mean, users_code
from deploykit.core.files import StrPath, check_readable, import_object, load_py, read_toml
from deploykit.core.runtime import READS
from deploykit.pipelines.stages import Definition, Function, Model, located

SUFFIXES = (".py", ".toml")
_IN_FLIGHT, _TIMEOUT = "IN_FLIGHT", "TIMEOUT_MS"
_KEYS = ("before", "model", "after", "in_flight", "timeout_ms")
_MOST = {_IN_FLIGHT: 1 << 20, _TIMEOUT: 86_400_000}


def read_pipeline(path: Path) -> Definition:
    """Read a pipeline. Raises NotFound, or BadInput with the line to change."""
    check_readable(path)
    if path.suffix not in SUFFIXES:
        raise BadInput(f"{path}: a pipeline is a .py or a .toml file")
    return _read_toml(path) if path.suffix == ".toml" else _read_python(path)


def _read_python(path: Path) -> Definition:
    with users_code(f"{path}: not a Python program"):
        tree = ast.parse(path.read_bytes(), path.name)
    with users_code(f"{path}: running it failed"), redirect_stdout(sys.stderr):
        module = load_py(path)
    found = {
        name: stage
        for name, value in vars(module).items()
        if not name.startswith("_") and (stage := _stage(path, module.__name__, name, value))
    }
    if not found:
        raise BadInput(f"{path}: defines no function and no model")
    _check_names(path, tree, found)
    limits = [
        _limits(path, name, getattr(module, name, {}), found) for name in (_IN_FLIGHT, _TIMEOUT)
    ]
    return Definition(path, tuple(found.values()), *limits)


def _stage(path: Path, module: str, name: str, value: object) -> Function | Model | None:
    if callable(value) and inspect.isfunction(inspect.unwrap(value)):  # unwrap lru_cache
        return _function(path, name, value) if value.__module__ == module else None
    if isinstance(value, dict) and "model" in value:
        file, wired = value["model"], {k: v for k, v in value.items() if k != "model"}
        if not isinstance(file, (str, PathLike)) or not all(
            isinstance(each, str) for pair in wired.items() for each in pair
        ):
            hint = f"{name} = {{'model': 'FILE.onnx', 'INPUT': 'STAGE'}}"
            raise BadInput(f"{path.name}: '{name}' is not a model", hint=hint)
        return Model(name, path.parent / file, wired)
    if isinstance(value, (str, PathLike)) and fspath(value).endswith(READS):
        return Model(name, path.parent / value)
    return None


def _function(path: Path, name: str, call: Callable[..., Any]) -> Function:
    where = f"{path.name}: stage '{name}'"
    signature = inspect.signature(call)
    if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call):
        raise BadInput(f"{where} is async; a stage is a plain function, which runs in a thread")
    if inspect.isgeneratorfunction(call):
        raise BadInput(f"{where} is a generator; a stage returns what it gives, such as a list")
    for each in signature.parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
            raise BadInput(f"{where}: {each} takes no value by its name, as a stage's do")
    with users_code(f"{where}: its annotations cannot be read"):
        hints = get_type_hints(call)
    missing = [f"of '{each}'" for each in signature.parameters if each not in hints]
    missing += ["of what it returns"] if "return" not in hints else []
    if missing:
        hint = f"or name it _{name} if it is not a stage"
        raise BadInput(f"{where}: the annotation {missing[0]} is missing", hint=hint)
    gives = hints.pop("return")
    optional = {n for n, each in signature.parameters.items() if each.default is not each.empty}
    return Function(name, call, hints, gives, frozenset(optional))


def _check_names(path: Path, tree: ast.Module, stages: Mapping[str, object]) -> None:
    """Refuse two definitions of a name, as Python would silently keep the last."""
    lines: dict[str, int] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        names = [each.id for each in targets if isinstance(each, ast.Name)]
        if isinstance(node, ast.FunctionDef):
            names = [node.name]
        for name in names:
            if name in lines and name in stages:
                raise BadInput(
                    f"{path.name}: two stages are called '{name}', in lines {lines[name]} and "
                    f"{node.lineno}"
                )
            lines[name] = node.lineno


def _limits(path: Path, name: str, given: Any, stages: Mapping[str, object]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise BadInput(f"{path.name}: {name} must be a dict, a number for each stage")
    for stage, value in given.items():
        if stage not in stages:
            hint = did_you_mean(str(stage), stages, f"there are: {', '.join(stages)}")
            raise BadInput(f"{path.name}: {name}: there is no stage '{stage}'", hint=hint)
        right = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not right or not 1 <= value <= _MOST[name] or (name == _IN_FLIGHT and value % 1):
            raise BadInput(
                f"{path.name}: {name}: '{stage}' must be from 1 to {_MOST[name]:,}, got {value!r}"
            )
    return dict(given)


def _read_toml(path: Path) -> Definition:
    """Read one model with an optional function before it and an optional one after it."""
    table = read_toml(path)
    for key in table:
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS, f"keys: {', '.join(_KEYS)}")
            raise BadInput(f"{path}: unknown key '{key}'", hint=hint)
    given = {key: table[key] for key in _KEYS[:3] if key in table}
    if "model" not in given or not all(isinstance(each, str) for each in given.values()):
        hint = "model = 'FILE.onnx', before = 'steps.py:NAME', after = 'steps.py:NAME'"
        raise BadInput(f"{path}: a pipeline needs the file of a model", hint=hint)
    before, after = (_imported(path, key, given.get(key)) for key in ("before", "after"))
    model = Model("model", path.parent / given["model"], {"": before.name} if before else {})
    after = after and replace(after, wired={next(iter(after.takes), ""): "model"})
    stages = [each for each in (before, model, after) if each]
    names = {each.name: each for each in stages}
    if len(names) < len(stages):
        raise BadInput(f"{path}: the functions need two names, and neither may be 'model'")
    limits = [_limits(path, key.upper(), table.get(key, {}), names) for key in _KEYS[3:]]
    return Definition(path, tuple(stages), *limits)


def _imported(path: Path, key: str, reference: str | None) -> Function | None:
    if reference is None:
        return None
    place = str(path.parent / reference) if ".py:" in reference else reference
    with located(f"{path}: {key}"):
        found = import_object(place)
    if not inspect.isfunction(found):
        raise BadInput(f"{path}: {key}: '{reference}' is not a function")
    return _function(path, found.__name__, found)


def files_of_models(definition: Definition) -> dict[str, Path]:
    """Return the file of each model. Raises NotFound or BadInput naming the model."""
    for name, file in definition.models.items():
        with located(f"{definition.path.name}: model '{name}'"):
            check_readable(file)
    return definition.models


def input_files(data: Sequence[StrPath]) -> list[Path]:
    """Return files and, sorted by name, those in folders. Raises NotFound, BadInput."""
    found: list[Path] = []
    for each in map(Path, data):
        inside = sorted(each.iterdir()) if each.is_dir() else [check_readable(each)]
        found += [file for file in inside if file.is_file() and file.name[0] != "."]
    if not found:
        names = ", ".join(map(str, data))
        raise NotFound(f"{names}: holds no file" if names else "there is no file to answer")
    return found


def read_answers(path: Path) -> list[tuple[Path, Any]]:
    """Read files and answers from the lines that `predict` wrote. Raises NotFound, BadInput."""
    found = []
    lines = check_readable(path).read_text("utf-8", "replace").removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
            found.append((Path(one["file"]), one["answer"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise BadInput(
                f"{path}: line {number} holds no file with its answer",
                hint="deploykit predict PIPELINE.py FILES -o answers.jsonl writes such lines",
            ) from None
    return found
