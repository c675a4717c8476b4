from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli.command import Run
from tests.support.runtimes.cases import AFFINE, onnx_model


@pytest.mark.parametrize("text", ["T", "T=", "=3", "T=x", "T=-1", "T=1,T=2", "T=1,", "T=١"])
def test_axis_on_the_command_line_is_refused_with_the_right_form(
    tmp_path: Path, text: str, run: Run
) -> None:
    path = tmp_path / "affine.onnx"
    path.write_bytes(onnx_model(AFFINE).SerializeToString())
    done = run("bench", str(path), "--axis", text)
    assert done.code == 2
    assert "hint: --axis T=128,H=224" in done.err
