"""An error of a command names options of that command only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from deploykit.cli.main import app
from tests.support.cli.command import Run
from tests.support.onnx_zoo import conv_relu, save

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]

WRONG: dict[str, tuple[str | Path, ...]] = {
    "no calibration data": ("--precision", "int8"),
    "a precision of another runtime": ("--precision", "fp8", "--calib", "samples.npz"),
    "a drop above 1": ("--precision", "int8", "--calib", "samples.npz", "--max-drop", "3"),
    "a metric without labels": ("--precision", "int8", "--calib", "samples.npz", "--metric", "a:b"),
    "data that are missing": ("--precision", "int8", "--calib", "nothere.npz"),
}


@pytest.mark.parametrize("words", WRONG.values(), ids=WRONG)
def test_an_error_of_build_names_options_of_build(
    run: Run, model: Path, samples: Path, words: tuple[str, ...]
) -> None:
    own = {name for each in COMMANDS["build"].params for name in each.opts}
    given = [samples if word == "samples.npz" else word for word in words]
    ran = run("build", model, "--profile", "cpu", *given)
    assert ran.code == 2
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", ran.err)) <= own, ran.err


@pytest.mark.parametrize("name", ["two words", "", "ä", "x" * 129])
def test_what_cannot_be_the_name_of_a_model_is_called_so(run: Run, model: Path, name: str) -> None:
    ran = run("serve", "--engine", f"{name}={model.name}")
    assert ran.code == 2
    assert f"'{name}' cannot be the name of a model" in ran.err
    assert "NAME=FILE" in ran.err


def test_the_hint_of_a_quantization_names_the_precision_of_build(run: Run, tmp_path: Path) -> None:
    ran = run(
        "build", save(conv_relu(), tmp_path / "m.onnx"), "--profile", "cpu",
        "--precision", "int8-dynamic",
    )  # fmt: skip
    assert ran.code == 2
    assert "hint: --precision int8 quantizes convolutions too" in ran.err
