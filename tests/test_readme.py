"""The README: its length, its links, and that it shows every command."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.blocks import begun, commands, run

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def test_the_blocks_show_the_whole_line_from_training_to_serving() -> None:
    """That they run is tested with those of the other pages, in test_docs.py."""
    words = [command[1] for command in commands(README)]
    assert {"train", "export", "quantize", "build", "compare", "bench", "load", "-c"} <= {*words}
    assert words.count("serve") == 1


def test_every_command_of_the_program_is_in_the_readme() -> None:
    text = README.read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "deploykit", "--help"], capture_output=True, text=True, check=True
    )
    names = re.findall(r"^  (\w+)  ", done.stdout.partition("Make:")[2], re.MULTILINE)
    assert len(names) >= 12
    for name in names:
        assert f"deploykit {name}" in text or f"make {name}" in text, name


def test_every_local_link_and_image_of_the_readme_exists() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", README.read_text(encoding="utf-8"))
    assert links
    for link in links:
        if not link.startswith("http"):
            assert (ROOT / link.partition("#")[0]).exists(), link


def test_the_readme_has_at_most_150_lines() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.nvidia
def test_nvidias_parser_takes_what_the_readme_bundles(tmp_path: Path) -> None:
    for module in ("torch", "onnxscript", "sklearn", "onnxruntime"):
        pytest.importorskip(module)
    pytest.importorskip("tensorrt", reason="NVIDIA's parser and builder are not here")
    shutil.copytree(begun(tmp_path), tmp_path, dirs_exist_ok=True)
    bundled = 0
    for command in commands(README):
        if command[1] in ("quantize", "bundle"):
            run(command, tmp_path)
        if command[1] == "bundle":
            profile, out = (command[command.index(name) + 1] for name in ("--profile", "-o"))
            (model,) = (tmp_path / out / "model").glob("*.onnx")
            run(["deploykit", "build", str(model), "--profile", profile, "--check"], tmp_path)
            bundled += 1
    assert bundled
