"""Paths: the type that public functions take, packaged data files, Python objects found by name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from deploykit.core.errors import BadInput, NotFound, causes, did_you_mean, users_code
from deploykit.core.extras import EXTRAS, missing
from deploykit.core.files import check_readable

StrPath = str | os.PathLike[str]
_PACKAGE = Path(__file__).resolve().parent.parent


def folder(name: str) -> Path:
    """The folder `profiles` or `models`: inside an installed wheel, else next to the package."""
    packaged = _PACKAGE / "_data" / name
    return packaged if packaged.is_dir() else _PACKAGE.parent / name


def import_object(reference: str) -> object:
    """The object named by `pkg.mod:attr` or `./file.py:attr`.

    This runs the module's code: only what the user typed, or a pipeline's TOML, may come here.
    Raises NotFound when there is no such module or attribute, MissingExtra when it needs an
    optional package that is not installed, BadInput when importing it fails.
    """
    where, separator, attribute = reference.rpartition(":")
    named = where.endswith(".py") or "/" not in where
    if not separator or not where or not named or not attribute.isidentifier():
        raise BadInput(f"'{reference}' is not of the form pkg.mod:name or ./file.py:name")
    try:
        with users_code(f"'{reference}': importing it failed"):
            module = load_py(where) if where.endswith(".py") else importlib.import_module(where)
            found: object = getattr(module, attribute)  # a lazy library imports here
    except BadInput as exc:
        chain = list(causes(exc))[1:]
        absent = [each.name or "" for each in chain if isinstance(each, ModuleNotFoundError)]
        for name in absent:
            if name.partition(".")[0] in EXTRAS:
                raise missing(name.partition(".")[0]) from exc
            if where == name or where.startswith(f"{name}."):
                raise NotFound(
                    f"'{reference}': no module '{name}'",
                    hint="a file is named by its path: ./file.py:name",
                ) from exc
        if chain and isinstance(chain[-1], AttributeError) and chain[-1].name == attribute:
            raise NotFound(
                f"'{reference}': {where} has no '{attribute}'",
                hint=did_you_mean(attribute, dir(sys.modules.get(where))),
            ) from exc
        raise
    return found


def load_py(path: StrPath) -> ModuleType:
    """Run a Python file as a module of its own."""
    name = f"_deploykit_file_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, check_readable(Path(path)).resolve())
    if spec is None or spec.loader is None:
        raise BadInput(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look the module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
