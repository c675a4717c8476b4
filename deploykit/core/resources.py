"""Where the data files that come with deploykit are, and how a Python object is found by its name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from deploykit.core.errors import BadInput, NotFound, first_line
from deploykit.core.files import check_readable

_PACKAGE = Path(__file__).resolve().parent.parent


def folder(name: str) -> Path:
    """The folder `profiles` or `models`: inside an installed wheel, else beside the package."""
    packaged = _PACKAGE / "_data" / name
    return packaged if packaged.is_dir() else _PACKAGE.parent / name


def import_object(reference: str) -> object:
    """The object named by `pkg.mod:attr` or `./file.py:attr`.

    This runs the module's code: only what the user typed may come here, never text out of a file.
    Raises NotFound when there is no such module or attribute, BadInput when importing it fails.
    """
    where, separator, attribute = reference.rpartition(":")
    if not separator or not where or not attribute.isidentifier():
        raise BadInput(f"'{reference}' is not of the form pkg.mod:name or ./file.py:name")
    name = where
    try:
        if where.endswith(".py"):
            path = check_readable(Path(where)).resolve()
            name = f"_deploykit_file_{path.stem}"
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None:
                raise NotFound(f"{where}: cannot be imported")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module  # dataclasses and pickling look the module up by name
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except ModuleNotFoundError as exc:
        if exc.name is not None and (name == exc.name or name.startswith(exc.name + ".")):
            raise NotFound(f"'{reference}': no module '{exc.name}'") from exc
        raise BadInput(f"'{reference}': importing it failed: {first_line(exc)}") from exc
    except (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError) as exc:
        raise BadInput(f"'{reference}': importing it failed: {first_line(exc)}") from exc
    try:
        found: object = getattr(module, attribute)
    except AttributeError:
        raise NotFound(f"'{reference}': {where} has no '{attribute}'") from None
    return found
