"""Serving imports no heavy package that it does not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


def test_serving_an_onnx_file_imports_neither_torch_nor_onnx() -> None:
    program = (
        "import sys, deploykit.serving.server, deploykit.engines.engine, "
        "deploykit.engines.onnxruntime.engine\n"
        "heavy = {'torch', 'onnx', 'typer', 'sklearn', 'onnxscript', 'tritonclient'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"
