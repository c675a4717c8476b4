"""Every command, in a folder full of Python files with the names of modules that it imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bundles import proven_model
from tests.support.installed import needs
from tests.support.serving.faults import ROOT, Process, request, until
from tests.support.serving.reloading import model

needs("onnxruntime", "orjson")

LIMIT_S = 120  # against hanging, not a measure
PACKAGES = (
    "click deploykit google h2 hpack httptools ml_dtypes numpy onnx onnx_ir onnxruntime onnxscript "
    "openvino orjson PIL pip psutil rich safetensors scipy setuptools sitecustomize sklearn tests "
    "tokenizers tomli torch torchvision tqdm transformers typer typing_extensions usercustomize "
    "uvloop yaml"
)
HOSTILE = sorted(sys.stdlib_module_names | set(PACKAGES.split()))
# Python itself imports a few before `python -m deploykit` begins, which nothing here can prevent
AFTER_THE_START = ("csv", "json", "logging", "numpy", "random", "signal", "subprocess", "tempfile")
COMMANDS = (
    *("doctor", "profiles", "inspect model.onnx", "plan model.onnx --profile cpu"),
    *("compare model.onnx model.onnx", "quantize model.onnx --to fp16 -o half.onnx"),
    "build model.onnx --profile cpu -o built.onnx",
    "predict model.onnx model.onnx.golden.npz -o predictions.npz",
    "bench model.onnx --seconds 0.1 --batches 1 --layers -o report",
    "bundle model.onnx --profile cpu -o bundle",
)
# each command in the same process: a module that one of them imports is looked for once
PROGRAM = """
import sys
if len(sys.argv) > 1:
    from deploykit.__main__ import main
    main()
from deploykit.__main__ import main
for line in {lines!r}:
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 0, line
"""


class Folder:
    """A folder of modules that write down their names and raise ImportError, and a `deploykit`.

    The program lies elsewhere, as the one that pip installs: its own folder is on the path.
    """

    def __init__(self, place: Path, names: Sequence[str] = HOSTILE) -> None:
        self.path, program, self._mark = place / "downloads", place / "deploykit", place / "mark"
        self.path.mkdir()
        for name in names:
            code = f"open({str(self._mark)!r}, 'a').write({name!r} + ' ')\nraise ImportError\n"
            (self.path / f"{name}.py").write_text(code)
        program.write_text(PROGRAM.format(lines=COMMANDS))
        self.deploykit = [sys.executable, str(program)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process: dict[str, Any] = {"cwd": self.path, "env": environment}

    def ran(self) -> str:
        """The names of the modules that ran."""
        return self._mark.read_text() if self._mark.exists() else ""

    def run(self, *words: str, start: Sequence[str] = ()) -> tuple[int, str]:
        """Run a command in the folder; its exit code and what it printed."""
        command = [*(start or self.deploykit), *words]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, **self.process, **out, timeout=LIMIT_S, check=False)
        assert self.ran() == "", done.stdout
        return done.returncode, done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """One with a model, in which each command ran."""
    made = Folder(tmp_path_factory.mktemp("hostile"))
    proven_model(made.path / "model.onnx")
    code, out = made.run()
    assert code == 0, out
    return made


def test_no_command_nor_pip_nor_boot_runs_a_file_of_the_current_folder(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(folder.process["env"], "PIP_NO_INDEX", "1")
    words = "bundle model.onnx --profile cpu --wheels -o wheels"
    code, out = folder.run(*words.split())
    assert code == 3
    assert "pip could not download" in out
    assert "No matching distribution" in out
    folder.process["env"] |= {"DEPLOYKIT_HTTP_PORT": "0", "DEPLOYKIT_GRPC_PORT": "none"}
    command = [*folder.deploykit, "boot", "bundle", "--cache", "cache"]
    with subprocess.Popen(command, **folder.process, stdout=subprocess.PIPE) as device:
        assert device.stdout is not None
        line = device.stdout.readline()
        device.terminate()
    assert folder.ran() == ""
    assert json.loads(line)["engine"]["source"] == "build"


def test_a_server_runs_no_file_of_the_current_folder(tmp_path: Path) -> None:
    """Neither for a large request, nor for a replaced file, nor where another command calls it."""
    folder = Folder(tmp_path)
    model(folder.path / "model.onnx", 1)
    program = {"command": folder.deploykit, "engine": "m=model.onnx"}
    with Process(folder.path, **program) as server:
        large = request(1.0) + b" " * (1 << 20)
        status, _, body = server.ask("POST", "/v2/models/m/infer", large)
        assert (status, folder.ran()) == (200, ""), body
        load = ("load", "--concurrency", "2", "--duration", "0.1")
        for words in (("health",), load):
            code, out = folder.run(*words, f"http://127.0.0.1:{server.port}")
            assert code == 0, out
        model(folder.path / "new", 2).replace(folder.path / "model.onnx")
        until(lambda: folder.ran() or server.infer(1.0) == (200, [3.0]))
        assert folder.ran() == ""


def test_python_m_deploykit_leaves_the_current_folder(tmp_path: Path) -> None:
    folder = Folder(tmp_path, AFTER_THE_START)
    np.savez(folder.path / "data.npz", x=np.zeros((1, 4), np.float32))
    model(folder.path / "model.onnx", 1)
    words = "predict model.onnx data.npz -o out.npz"
    code, out = folder.run(*words.split(), start=(sys.executable, "-m", "deploykit"))
    assert code == 0, out
