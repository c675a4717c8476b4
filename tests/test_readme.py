"""The README's commands and programs, run in their order in an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.blocks import blocks, run_page

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


@pytest.mark.torch
@pytest.mark.slow
def test_every_code_block_of_the_readme_runs(tmp_path: Path) -> None:
    for module in ("torch", "onnxscript", "sklearn", "onnxruntime"):
        pytest.importorskip(module)
    ran = {command[1] for command in run_page(README, tmp_path)}
    assert {"train", "export", "quantize", "build", "compare", "bench", "load", "-c"} <= ran
    served = [text for _, text in blocks(README, "sh") if "deploykit serve" in text]
    assert len(served) == 1
    assert (tmp_path / "report/report.html").is_file()


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
