"""The README's commands and programs, run in their order in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
pytestmark = [pytest.mark.torch, pytest.mark.slow]
for module in ("torch", "onnxscript", "sklearn", "onnxruntime", "tritonclient"):
    pytest.importorskip(module)


def blocks() -> list[tuple[str, str]]:
    """The fenced blocks marked `sh` or `python`, in order: (language, text)."""
    return re.findall(r"^```(sh|python)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def server_of(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Servers that a block started; ended afterwards."""
    servers: list[subprocess.Popen[str]] = []
    yield servers
    for server in servers:
        server.kill()
        server.communicate()


def test_every_code_block_of_the_readme_runs(
    tmp_path: Path, server_of: list[subprocess.Popen[str]]
) -> None:
    place = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    address = "127.0.0.1:8000"
    ran = []
    for language, text in blocks():
        text = text.replace("127.0.0.1:8000", address)
        if language == "python":
            commands = [[sys.executable, "-c", text]]
        else:
            commands = [shlex.split(line) for line in text.splitlines() if line.strip()]
        for command in commands:
            if command[:2] == ["deploykit", "serve"]:
                for port in ("8000", "8001"):
                    command[command.index(port)] = "0"  # any free one
                server = subprocess.Popen(
                    command, cwd=tmp_path, env=place, stdout=subprocess.PIPE, text=True
                )
                server_of.append(server)
                assert server.stdout is not None
                address = json.loads(server.stdout.readline())["http"]
                continue
            done = subprocess.run(
                command, cwd=tmp_path, env=place, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            ran.append(command[1])
    assert len(server_of) == 1
    assert {"train", "export", "quantize", "build", "compare", "bench", "load", "-c"} <= set(ran)
    assert (tmp_path / "report/report.html").is_file()


def test_every_command_of_the_program_is_in_the_readme() -> None:
    text = README.read_text()
    done = subprocess.run(
        [sys.executable, "-m", "deploykit", "--help"], capture_output=True, text=True, check=True
    )
    names = re.findall(r"^  (\w+)  ", done.stdout.partition("Options:")[0], re.MULTILINE)
    assert len(names) >= 12
    for name in names:
        assert f"deploykit {name}" in text or f"make {name}" in text, name
