"""Benchmarks run seldom: what they import from the package and the tests has to be there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def names(module: str) -> frozenset[str]:
    """What a module of the checkout defines or imports at its top, and its submodules."""
    path = ROOT.joinpath(*module.split("."))
    below = {each.stem for each in path.glob("*")} if path.is_dir() else set()
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return frozenset(below)
    found = list(ast.walk(ast.parse(file.read_text("utf-8"))))
    stored = {node.id for node in found if isinstance(node, ast.Name)}
    defined = {node.name for node in found if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imported = {node.asname or node.name for node in found if isinstance(node, ast.alias)}
    return frozenset(below | stored | defined | imported)


def test_benchmarks_import_what_is_there() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.split(".")[0] in ("deploykit", "tests", "scripts")
        for alias in node.names
        if alias.name not in names(node.module)
    ]
    assert missing == []
