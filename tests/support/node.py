"""Run JavaScript in Node.js: an expression over a module of the package, and its value."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node on PATH")


def evaluate(module: Path, expression: str, **values: Any) -> Any:
    """`expression` over the exports of `module` (as `m`) and `values` (as `v`), as JSON."""
    assert NODE is not None
    script = (
        f"import * as m from {json.dumps(module.as_uri())};\n"
        "import { readFileSync } from 'node:fs';\n"
        "const v = JSON.parse(readFileSync(0, 'utf8'));\n"
        f"console.log(JSON.stringify({expression}));"
    )
    done = subprocess.run(
        [NODE, "--input-type=module", "-e", script],
        input=json.dumps(values), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
