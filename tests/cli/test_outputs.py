"""No command's output takes the place of an input, or of a file that deploykit did not write."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import onnx
import pytest
import typer

from deploykit.cli.main import app
from tests.support.cli.command import Run

WRITES = {"-o", "--out", "--save-splits"}  # the options that name an output
MODEL, DATA = "model.onnx", "samples.npz"
# option -> the command up to the output, what it writes where, inputs that it must not replace
MADE = ("x.onnx", "x.onnx.json", "x.onnx.data", "x.onnx.golden.npz", "x.rejected.onnx")
REPORT = ("report.json", "report.md", "report.html")
CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "train --out": ("train mnist-cnn --weights w.pt -o", ("x.pt",), ("w.pt",)),
    "train --save-splits": (
        "train mnist-cnn -o x.pt --save-splits",
        ("calibration.npz", "test.npz"),
        (),
    ),
    "export --out": (f"export w.pt --samples {DATA} -o", MADE, ("w.pt", DATA)),
    "quantize --out": (
        f"quantize {MODEL} --to int8 --calib {DATA} --metric m.py:f -o",
        MADE,
        (MODEL, DATA, "m.py", "link.onnx", "hard.onnx"),
    ),
    "build --out": (f"build {MODEL} --profile cpu -o", MADE, (MODEL, "link.onnx")),
    "predict --out": (f"predict {MODEL} {DATA} -o", ("x.npz",), (MODEL, DATA)),
    "bench --out": (f"bench {MODEL} --quick -o", REPORT, ()),
    "load --out": ("load http://127.0.0.1:9 -o", REPORT, ()),
    # a folder of a bundle's own, or none: tests/deploying
    "bundle --out": (f"bundle {MODEL} --profile l4 -o", (), (MODEL, DATA, "link.onnx")),
    "demo --out": ("demo -o", REPORT, ()),
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
    words = CASES[case][0].split()
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
    ran = run(*CASES[case][0].split(), here / name, *(["--force"] if force else []))
    assert (ran.code, name in ran.error()) == (2, True), ran.err
    assert state(here) == before


def test_what_deploykit_wrote_is_replaced_and_what_the_user_changed_is_not(
    run: Run, here: Path
) -> None:
    for words, out in (
        (("predict", MODEL, DATA, "-o", "out.npz"), Path("out.npz")),
        (("quantize", MODEL, "--to", "fp16", "-o", "q.onnx"), Path("q.onnx")),
    ):
        assert [run(*words).code, run(*words).code] == [0, 0]
        mine = Path(DATA).read_bytes()
        if out.suffix == ".onnx":
            changed = onnx.load(out)
            changed.doc_string = "mine"
            mine = changed.SerializeToString()
        out.write_bytes(mine)
        assert run(*words).code == 2
        assert out.read_bytes() == mine
        assert run(*words, "--force").code == 0


def test_weights_of_a_model_and_files_of_a_folder_of_data_are_inputs_too(
    run: Run, here: Path
) -> None:
    apart = {"save_as_external_data": True, "location": "q.onnx.data"}
    onnx.save(onnx.load(MODEL), "big.onnx", size_threshold=0, **apart)
    (here / "data").mkdir()
    shutil.copyfile(DATA, "data/test.npz")
    before = state(here)
    for words, name in (
        (("quantize", "big.onnx", "--to", "fp16", "-o", "q.onnx"), "q.onnx.data"),
        (("predict", MODEL, "data", "-o", "data/test.npz"), "test.npz"),
    ):
        ran = run(*words, "--force")
        assert (ran.code, f"{name}: is an input" in ran.error()) == (2, True)
    assert state(here) == before


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
