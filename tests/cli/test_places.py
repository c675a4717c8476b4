"""Places that no file can be written to, by a command: one line and its code, and never a bug."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.cli.command import Run

COMMANDS = {
    "quantize": ("quantize", "FILE", "--to", "fp16", "-o", "OUT.onnx"),
    "calibrate": ("quantize", "FILE", "--to", "int8", "--calib", "DATA", "-o", "OUT.onnx"),
    "build": ("build", "FILE", "--profile", "cpu", "-o", "OUT.onnx"),
    "bench": ("bench", "FILE", "--seconds", "0.01", "--batches", "1", "-o", "OUT"),
    "predict": ("predict", "FILE", "DATA", "-o", "OUT.npz"),
    "bundle": ("bundle", "FILE", "--profile", "cpu", "-o", "OUT"),
}
WORKS = ("bench", "predict", "bundle")  # these write no model
ODD = os.fsdecode(b"\xff")
PLACES = {
    "a name that is no UTF-8": (ODD, "the path is not UTF-8"),
    "a long name": (
        "x" * 245,
        "name too long",
    ),  # it fits, the names of the files next to it do not
    "a longer name": ("x" * 300, "name too long"),
    "a file as a folder": ("DATA/out", "(does not exist|cannot be used|Not a directory)"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_cannot_be_written_is_one_line(
    run: Run, command: str, place: str, model: Path, samples: Path, tmp_path: Path
) -> None:
    name, says = PLACES[place]
    out = str(samples / "out") if place.startswith("a file") else str(tmp_path / name)
    words = [
        word.replace("FILE", str(model)).replace("DATA", str(samples)) for word in COMMANDS[command]
    ]
    ran = run(*[word.replace("OUT", out) for word in words])
    if ran.code == 0:
        assert command in WORKS
        assert place in ("a name that is no UTF-8", "a long name")
    else:
        assert ran.code == 2, ran.err
        assert re.search(says, ran.error())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("command", ["calibrate", "predict"])
def test_data_may_have_a_name_that_is_no_utf_8(
    run: Run, command: str, model: Path, samples: Path, tmp_path: Path
) -> None:
    odd = tmp_path / f"{ODD}.npz"
    shutil.copy(samples, odd)
    words = [
        word.replace("FILE", str(model)).replace("DATA", str(odd)) for word in COMMANDS[command]
    ]
    ran = run(*[word.replace("OUT", str(tmp_path / "out")) for word in words])
    assert ran.code in (0, 1), ran.err  # a gate may fail on few samples
