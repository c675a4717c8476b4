"""What works without the packages of the extra [serve], and how the rest says what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.core.extras import install_command

SERVE = ("uvloop", "httptools", "hpack", "orjson", "prometheus_client")
BLOCKED = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {SERVE}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def without_serve(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python where nothing of [serve] is installed, but for protobuf, which onnx needs."""
    command = [sys.executable, "-c", BLOCKED + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


COMMAND = "from deploykit.cli.main import main; sys.exit(main())"


def test_the_api_is_imported_without_the_serve_extra() -> None:
    done = without_serve("import deploykit.api.serve")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_model_is_inspected_quantized_and_built_without_the_serve_extra(
    affine_onnx: Path, tmp_path: Path
) -> None:
    half, engine = tmp_path / "half.onnx", tmp_path / "engine.onnx"
    for command in (
        ["inspect", affine_onnx],
        ["quantize", affine_onnx, "--to", "fp16", "--out", half],
        ["build", affine_onnx, "--profile", "cpu", "--out", engine],
    ):
        done = without_serve(COMMAND, *command)
        assert done.returncode == 0, done.stderr
    assert half.exists()
    assert engine.exists()


@pytest.mark.parametrize("command", ["serve", "load"])
def test_what_needs_the_serve_extra_names_it(command: str, affine_onnx: Path) -> None:
    target = ["--engine", affine_onnx] if command == "serve" else ["http://127.0.0.1:9/"]
    done = without_serve(COMMAND, command, *target)
    assert done.returncode == 3, done.stderr
    assert "is not installed" in done.stderr
    assert install_command("serve") in done.stderr
    assert "Traceback" not in done.stderr
