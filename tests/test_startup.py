"""What a bare start imports, and what type checkers see of `import deploykit as dk`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import deploykit

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {
    *("numpy", "torch", "onnx", "onnxruntime", "sklearn", "starlette", "google", "hpack"),
    *("httptools", "rich", "email"),  # the last by importlib.metadata
}
LIST = """
import contextlib, io, sys
from deploykit.cli.main import main
sys.argv = ["deploykit", "--help"]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as page:
    main()
assert "quantize" in page.getvalue()
loaded = {name.rpartition(".")[2] for name in sys.modules if name.startswith("deploykit.cli.")}
assert loaded.isdisjoint(("make", "prove", "serve", "machine")), loaded
"""


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `code`."""
    program = (
        f"{code}\nimport sys, json; print(json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_list_of_commands_imports_nothing_heavy_and_no_command() -> None:
    assert not modules_after(LIST) & HEAVY


def test_importing_the_package_imports_nothing_else_and_every_public_name_is_there() -> None:
    assert not modules_after("import deploykit") & (HEAVY | {"typer"})
    modules_after("import deploykit\nfor name in deploykit._PUBLIC: getattr(deploykit, name)")
    with pytest.raises(AttributeError, match="nothing"):
        deploykit.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_see_the_objects_that_are_loaded_at_run_time() -> None:
    seen = {}
    for node in ast.walk(ast.parse(Path(str(deploykit.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("deploykit."):
            for alias in node.names:
                seen[alias.asname or alias.name] = f"{node.module}:{alias.name}"
    assert seen == deploykit._PUBLIC
    assert sorted(deploykit.__all__) == sorted(deploykit._PUBLIC)
    assert set(deploykit.__all__) <= set(dir(deploykit))
