"""No command's output takes the place of an input, or of a file that deploykit did not write."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer

from deploykit.cli.main import app
from tests.support.cli.command import Run
from tests.support.onnx_zoo import save

WRITES = {"-o", "--out", "--save-splits"}  # the options that name an output
MODEL, DATA = "model.onnx", "samples.npz"
# option -> the command up to the output, what it writes where, inputs that it must not replace
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "train --out": (("train", "mnist-cnn", "--weights", "w.pt", "-o"), ("x.pt",), ("w.pt",)),
    "train --save-splits": (
        ("train", "mnist-cnn", "-o", "x.pt", "--save-splits"),
        ("calibration.npz", "test.npz"),
        (),
    ),
    "export --out": (
        ("export", "w.pt", "--samples", DATA, "-o"),
        ("x.onnx", "x.onnx.json", "x.onnx.data", "x.onnx.golden.npz", "x.rejected.onnx"),
        ("w.pt", DATA),
    ),
    "quantize --out": (
        ("quantize", MODEL, "--to", "int8", "--calib", DATA, "--metric", "m.py:f", "-o"),
        ("x.onnx", "x.onnx.json", "x.onnx.data", "x.onnx.golden.npz", "x.rejected.onnx"),
        (MODEL, DATA, "m.py", "link.onnx", "hard.onnx"),
    ),
    "build --out": (
        ("build", MODEL, "--profile", "cpu", "-o"),
        ("x.onnx", "x.onnx.json", "x.onnx.data", "x.onnx.golden.npz", "x.rejected.onnx"),
        (MODEL, "link.onnx"),
    ),
    "predict --out": (("predict", MODEL, DATA, "-o"), ("x.npz",), (MODEL, DATA)),
    "bench --out": (
        ("bench", MODEL, "--quick", "-o"),
        ("report.json", "report.md", "report.html"),
        (),
    ),
    "load --out": (
        ("load", "http://127.0.0.1:9", "-o"),
        ("report.json", "report.md", "report.html"),
        (),
    ),
    # a folder of a bundle's own, or none: tests/bundling
    "bundle --out": (("bundle", MODEL, "--profile", "l4", "-o"), (), (MODEL, DATA, "link.onnx")),
    "demo --out": (("demo", "-o"), ("report.json", "report.md", "report.html"), ()),
}
FOLDERS = ("--save-splits", "bench", "load", "demo")  # whose output is a folder


@pytest.fixture
def here(tmp_path: Path, model: Path, samples: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with one input of each kind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.pt").write_bytes(b"\x80\x02}q\x00.")
    (tmp_path / "m.py").write_text("def f(outputs, labels): return 1.0\n")
    (tmp_path / "link.onnx").symlink_to(MODEL)
    os.link(model, tmp_path / "hard.onnx")
    return tmp_path


def state(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_option_that_names_an_output_is_a_case_here() -> None:
    root = typer.main.get_command(app)
    found = {
        f"{name} {option.opts[-1]}"
        for name, command in root.commands.items()  # type: ignore[attr-defined]
        for option in command.params
        if WRITES & set(option.opts)
    }
    assert found == set(CASES)


@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case, found in CASES.items() for name in found[1]]
)
def test_a_file_that_deploykit_did_not_write_stays(
    run: Run, here: Path, case: str, name: str
) -> None:
    words, _, _ = CASES[case]
    if words[0] == "demo":
        pytest.importorskip("torch")
    folder = here / "out"
    folder.mkdir()
    (folder / name).write_bytes(b"mine")
    before = state(here)
    first = CASES[case][1][0]
    ran = run(*words, folder if any(each in case for each in FOLDERS) else folder / first)
    assert (ran.code, name in ran.error()) == (2, True), ran.err
    assert "--force" in ran.err
    assert state(here) == before


@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case, found in CASES.items() for name in found[2]]
)
@pytest.mark.parametrize("force", [False, True])
def test_an_input_is_never_an_output(
    run: Run, here: Path, case: str, name: str, force: bool
) -> None:
    before = state(here)
    ran = run(*CASES[case][0], here / name, *(["--force"] if force else []))
    assert (ran.code, name in ran.error()) == (2, True), ran.err
    assert state(here) == before


def predict(run: Run, *more: object) -> int:
    return run("predict", MODEL, DATA, "-o", "out.npz", *more).code


def test_what_deploykit_wrote_is_replaced_and_what_the_user_changed_is_not(
    run: Run, here: Path
) -> None:
    assert [predict(run), predict(run)] == [0, 0]
    shutil.copyfile(DATA, "out.npz")
    assert predict(run) == 2
    assert predict(run, "--force") == 0
    words = ("quantize", MODEL, "--to", "fp16", "-o", "q.onnx")
    assert [run(*words).code, run(*words).code] == [0, 0]
    changed = onnx.load("q.onnx")
    changed.doc_string = "mine"
    save(changed, Path("q.onnx"))
    assert run(*words).code == 2
    assert onnx.load("q.onnx").doc_string == "mine"
    assert run(*words, "--force").code == 0


def test_the_weights_of_a_model_are_its_inputs_too(run: Run, here: Path) -> None:
    model = onnx.load(MODEL)
    onnx.save(model, "big.onnx", save_as_external_data=True, location="q.onnx.data",
              size_threshold=0)  # fmt: skip
    before = state(here)
    ran = run("quantize", "big.onnx", "--to", "fp16", "-o", "q.onnx", "--force")
    assert (ran.code, "q.onnx.data: is an input" in ran.error()) == (2, True)
    assert state(here) == before


def test_a_file_of_a_folder_of_data_is_an_input(run: Run, here: Path) -> None:
    (here / "data").mkdir()
    shutil.copyfile(DATA, "data/test.npz")
    ran = run("predict", MODEL, "data", "-o", "data/test.npz", "--force")
    assert (ran.code, "is an input" in ran.error()) == (2, True)
    assert np.load("data/test.npz").files == np.load(DATA).files


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("build", MODEL, "--profile", "cpu"), "x.trt"),
        (("build", MODEL, "--profile", "cpu"), "x.PLAN"),
        (("export", "w.pt"), "x.trt"),
        (("export", "w.pt"), "x.pt"),
        (("quantize", MODEL, "--to", "fp16"), "x.npz"),
        (("train", "mnist-cnn"), "x.onnx"),
        (("predict", MODEL, DATA), "x.onnx"),
    ],
)
def test_a_name_of_another_kind_of_file_is_refused(
    run: Run, here: Path, words: tuple[str, ...], name: str
) -> None:
    ran = run(*words, "-o", name, "--force")
    assert (ran.code, name in ran.error()) == (2, True), ran.err
    assert "hint: --out x." in ran.err
    assert not Path(name).exists()


def no_folder() -> str:
    raise FileNotFoundError(2, "No usable temporary directory found in ['/proc']")


def test_a_machine_without_a_folder_for_temporary_files_is_no_bug(run: Run, here: Path) -> None:
    """A container whose file system is read-only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", None)
        patch.setattr("tempfile._get_default_tempdir", no_folder)
        ran = run("bench", MODEL, "--batches", "1", "--seconds", "0.05", "-o", "report")
    assert ran.code == 3
    assert "No usable temporary directory" in ran.error()
