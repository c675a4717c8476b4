"""What pyright and editors see of `import deploykit as dk`; `make lint` lets mypy read it."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import deploykit

ROOT = Path(__file__).resolve().parents[2]
CALLS = ROOT / "tests" / "support" / "typing" / "public_api.py"


def test_type_checkers_see_the_objects_that_are_loaded_at_run_time() -> None:
    seen = {}
    for node in ast.walk(ast.parse(Path(str(deploykit.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("deploykit."):
            for alias in node.names:
                seen[alias.asname or alias.name] = f"{node.module}:{alias.name}"
    assert seen == deploykit._PUBLIC


def test_every_public_name_is_listed_for_star_imports_and_completion() -> None:
    assert sorted(deploykit.__all__) == sorted(deploykit._PUBLIC)
    assert set(deploykit.__all__) <= set(dir(deploykit))


def test_pyright_accepts_the_public_calls() -> None:
    pytest.importorskip("torch")
    program = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("pyright is not installed")
    command = [program, "--pythonpath", sys.executable, "--outputjson", str(CALLS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        pytest.skip(f"pyright cannot run here (it fetches itself with npm): {done.stderr[-200:]}")
    assert report["summary"]["filesAnalyzed"] == 1
    assert not report["generalDiagnostics"], report["generalDiagnostics"]
