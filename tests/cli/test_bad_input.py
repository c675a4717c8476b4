"""Wrong files, options and places: one `error:` line, the right exit code, nothing left behind."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.support.cli.command import Run
from tests.support.cli.damage import Bomb, damaged

KINDS = ("missing", "empty", "folder", "half", "last-byte-missing", "page", "pointer")
COMMANDS = {
    "inspect": ("inspect", "FILE"),
    "quantize": ("quantize", "FILE", "--to", "fp16", "-o", "OUT"),
    "build": ("build", "FILE", "--profile", "cpu", "-o", "OUT"),
    "compare": ("compare", "FILE", "FILE"),
    "predict": ("predict", "FILE", "DATA", "-o", "PREDICTIONS"),
    "bench": ("bench", "FILE", "-o", "REPORT"),
    "serve": ("serve", "--engine", "m=FILE", "--http-port", "0"),
}


def words(command: str, path: Path, samples: Path, folder: Path) -> list[str]:
    """The command line of `command` with the model `path`; it writes into `folder`."""
    places = {
        "FILE": str(path),
        "OUT": str(folder / "out.onnx"),
        "DATA": str(samples),
        "PREDICTIONS": str(folder / "out.npz"),
        "REPORT": str(folder / "report"),
        "m=FILE": f"m={path}",
    }
    return [places.get(word, word) for word in COMMANDS[command]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_onnx_file_is_exit_2(
    run: Run, command: str, kind: str, model: Path, samples: Path, tmp_path: Path
) -> None:
    path = damaged(kind, tmp_path, model)
    ran = run(*words(command, path, samples, tmp_path))
    assert ran.code == 2, ran.err
    assert path.name in ran.error()
    assert not (tmp_path / "out.onnx").exists()
    assert not list(tmp_path.glob(".*")), "a temporary file was left"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_its_manifest_does_not_describe_is_exit_2(
    run: Run, command: str, model: Path, samples: Path, tmp_path: Path
) -> None:
    path = tmp_path / "q.onnx"
    assert run("quantize", model, "--to", "fp16", "-o", path).code == 0
    path.write_bytes(model.read_bytes())
    ran = run(*words(command, path, samples, tmp_path))
    assert ran.code == 2, ran.err
    assert "q.onnx: is not the file that q.onnx.json describes" in ran.error()


@pytest.mark.torch
@pytest.mark.parametrize("command", ["export", "inspect"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    run: Run, command: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    marker, path = tmp_path / "marker", tmp_path / "evil.pt"
    path.write_bytes(pickle.dumps(Bomb(marker), protocol=2))
    ran = run(command, path)
    assert ran.code == 2
    assert not marker.exists()
    assert "evil.pt" in ran.error()
    assert "--allow-pickle" in ran.err


@pytest.mark.torch
def test_train_refuses_weights_that_would_run_code(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    marker, path = tmp_path / "marker", tmp_path / "evil.pt"
    path.write_bytes(pickle.dumps(Bomb(marker), protocol=2))
    ran = run("train", "mnist-cnn", "--weights", path, "-o", tmp_path / "m.pt")
    assert ran.code == 2
    assert not marker.exists()
    assert not (tmp_path / "m.pt").exists()


DATA = {
    "wrong name": ({"photo": (4, 1, 28, 28), "other": (4, 2)}, "float32", "image"),
    "wrong shape": ({"image": (4, 1, 28, 29)}, "float32", "[4,1,28,29]"),
    "wrong rank": ({"image": (4, 28, 28)}, "float32", "[4,28,28]"),
    "wrong dtype": ({"image": (4, 1, 28, 28)}, "float64", "float64"),
    "no samples": ({"image": (0, 1, 28, 28)}, "float32", "samples"),
}


@pytest.mark.parametrize("case", DATA)
def test_data_that_do_not_fit_the_model_are_exit_2(
    run: Run, case: str, model: Path, tmp_path: Path
) -> None:
    from deploykit.engines.engine import load

    with load(model, "cpu") as engine:
        name = engine.inputs[0].name
    shapes, dtype, message = DATA[case]
    path = tmp_path / "data.npz"
    named = {name if key == "image" else key: shape for key, shape in shapes.items()}
    np.savez(path, **{key: np.zeros(shape, dtype) for key, shape in named.items()})
    for command in (
        ("predict", model, path, "-o", tmp_path / "out.npz"),
        ("quantize", model, "--to", "int8", "--calib", path, "-o", tmp_path / "out.onnx"),
        ("compare", model, model, "--data", path),
    ):
        ran = run(*command)
        assert ran.code == 2, (command, ran.err)
        assert message.replace("image", name) in ran.error()
    assert not (tmp_path / "out.npz").exists()
    assert not (tmp_path / "out.onnx").exists()


OPTIONS = {
    "unknown command": (("fly",), "fly"),
    "unknown option": (("inspect", "MODEL", "--loud"), "--loud"),
    "missing argument": (("inspect",), "FILE"),
    "missing option": (("quantize", "MODEL"), "--to"),
    "not a number": (("load", "http://127.0.0.1:1", "--duration", "long"), "--duration"),
    "unknown profile": (("build", "MODEL", "--profile", "h2o"), "h2o"),
    "unknown mode": (("profiles", "jetson-orin-nano-8gb@9W"), "9W"),
    "unknown recipe": (("train", "mnist-rnn", "-o", "OUT"), "mnist-rnn"),
    "a recipe's name is no path": (("train", "../mnist_cnn", "-o", "OUT"), "../mnist_cnn"),
    "unknown precision": (("quantize", "MODEL", "--to", "fp12"), "fp12"),
    "unknown build precision": (("build", "MODEL", "--profile", "cpu", "--precision", "x"), "x"),
    "build precision of another target": (
        ("build", "MODEL", "--profile", "cpu", "--precision", "bf16"),
        "--profile cpu does not run bf16",
    ),
    "metric without labels": (
        ("quantize", "MODEL", "--to", "fp16", "--metric", "perplexity"),
        "--metric perplexity",
    ),
    "no such metric": (("quantize", "MODEL", "--to", "fp16", "--metric", "top7"), "top7"),
    "unknown runtime": (
        ("quantize", "MODEL", "--to", "int8", "--calib", "DATA", "--runtime", "x"),
        "'x'",
    ),
    "int8 without data": (("quantize", "MODEL", "--to", "int8"), "calibration"),
    "max drop of 0": (("quantize", "MODEL", "--to", "fp16", "--max-drop", "0"), "--max-drop"),
    "an axis without a size": (("bench", "MODEL", "--axis", "T="), "--axis T="),
    "unknown device": (("predict", "MODEL", "DATA", "-o", "OUT", "--device", "tpu"), "tpu"),
    "batch of 0": (
        ("predict", "MODEL", "DATA", "-o", "OUT", "--batch", "0"),
        "--batch must be 1 or more",
    ),
    "batches of words": (("bench", "MODEL", "--batches", "1,two"), "1,two"),
    "negative seconds": (("bench", "MODEL", "--seconds", "-1", "-o", "REPORT"), "-1"),
    "max error nan": (("compare", "MODEL", "MODEL", "--max-error", "nan"), "nan"),
    "serve: a name twice": (("serve", "--engine", "a=MODEL", "--engine", "a=MODEL"), "'a'"),
    "serve: threads": (("serve", "--engine", "MODEL", "--threads", "9" * 30), "--threads must be"),
    "serve: port": (("serve", "--engine", "MODEL", "--http-port", "99999"), "99999"),
    "load: rate and concurrency": (
        ("load", "http://127.0.0.1:1", "--rate", "1", "--concurrency", "1"),
        "rate",
    ),
    "load: not a URL": (("load", "ftp://x"), "ftp://x"),
    "load: nobody there": (("load", "http://127.0.0.1:1"), "127.0.0.1:1"),
    "export takes no onnx": (("export", "MODEL", "-o", "OUT"), "model.onnx"),
    "output is the model": (("build", "MODEL", "--profile", "cpu", "-o", "MODEL"), "model"),
    "train: no epochs": (("train", "mnist-cnn", "-o", "OUT", "--epochs", "0"), "epochs"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_wrong_option_is_exit_2_and_names_it(
    run: Run, case: str, model: Path, samples: Path, tmp_path: Path
) -> None:
    words, message = OPTIONS[case]
    if case == "train: no epochs":
        pytest.importorskip("torch")
    places = {
        "MODEL": str(model),
        "a=MODEL": f"a={model}",
        "DATA": str(samples),
        "PREDICTIONS": str(tmp_path / "out.npz"),
        "OUT": str(tmp_path / "out"),
        "REPORT": str(tmp_path / "report"),
    }
    before = model.read_bytes()
    ran = run(*(places.get(word, word) for word in words))
    assert ran.code == 2, (ran.code, ran.err)
    assert message in ran.error()
    assert model.read_bytes() == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("quantize", "m.onnx", "--to", "INT8"), "did you mean int8, int8-dynamic"),
        (("build", "m.onnx", "--precision", "int4"), "did you mean int4-weight-only?"),
        (("bundle", "m.onnx", "--profile", "l4", "-o", "b", "--to", "doker"), "docker?"),
        (("predict", "m.onnx", "great film"), "hint: a sentence goes with --text"),
        (("bundle", "stages.py", "--profile", "cpu", "-o", "b"), "bundle each of its models"),
    ],
)
def test_the_hint_says_what_was_meant(run: Run, words: tuple[str, ...], hint: str) -> None:
    ran = run(*words)
    assert ran.code == 2
    assert hint in ran.err


UNWRITABLE = {
    "a missing folder": "nowhere/out.onnx",
    "a folder": "",
    "a file as folder": "model.onnx/out.onnx",
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_an_output_that_cannot_be_written_is_exit_2_before_the_work(
    run: Run, case: str, model: Path, samples: Path, tmp_path: Path
) -> None:
    out = tmp_path / UNWRITABLE[case]
    for command in (
        ("quantize", model, "--to", "fp16", "-o", out),
        ("build", model, "--profile", "cpu", "-o", out),
        ("predict", model, samples, "-o", out),
        ("train", "mnist-cnn", "-o", out),
    ):
        ran = run(*command)
        assert ran.code == 2, (command, ran.err)
        assert str(out) in ran.error()


@pytest.mark.parametrize("command", [("bench", "MODEL"), ("demo",)], ids=["bench", "demo"])
def test_a_file_as_report_folder_is_exit_2(run: Run, model: Path, command: tuple[str, ...]) -> None:
    if command == ("demo",):
        pytest.importorskip("torch")
    ran = run(*(model if word == "MODEL" else word for word in command), "-o", model)
    assert ran.code == 2
    assert str(model) in ran.error()


def test_a_bug_is_exit_70_with_one_line(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("deploykit.evaluation.inspect.inspect", broken)
    ran = run("inspect", model)
    assert ran.code == 70
    assert "RuntimeError: first second" in ran.error()


def test_a_file_name_cannot_write_on_the_terminal(run: Run, tmp_path: Path) -> None:
    ran = run("inspect", tmp_path / "a\x1b[2Jb\nc.onnx")
    assert ran.code == 2
    assert "\x1b" not in ran.err
    assert "a [2Jb c.onnx" in ran.error()


def test_calibration_data_that_are_all_the_same_are_exit_2(
    run: Run, model: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "zeros.npz", image=np.zeros((9, 1, 28, 28), np.float32))
    words = ("--calib", tmp_path / "zeros.npz", "-o", tmp_path / "out.onnx")
    ran = run("quantize", model, "--to", "int8", *words)
    assert (ran.code, "same" in ran.error()) == (2, True), ran.err
    assert not (tmp_path / "out.onnx").exists()
