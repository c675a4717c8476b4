"""Skip a test or a test file for want of a package, that it or its processes import.

Every worker reads every test file: `pytest.importorskip` would import the package in all of them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.nvidia import fetch


def compiled(path: Path, code: str) -> Path:
    """A library of this C code; the test is skipped where there is no compiler."""
    try:
        fetch.library(path, code)
    except fetch.Unobtainable as exc:
        pytest.skip(str(exc))
    return path


def needs(*packages: str) -> None:
    """Skip the file or the test that calls this where one of `packages` is not installed."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
