"""Wrong command lines, files and data: one `error:` line, exit code 2, and nothing is left."""

from __future__ import annotations

import pickle
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import typer

import deploykit as dk
from deploykit.cli.main import app
from deploykit.reporting import report as reports
from tests.support.cli.command import Run
from tests.support.installed import needs
from tests.support.measure.simulated import simulated
from tests.support.onnx_zoo import conv_relu, linear, mnist_like, save

needs("PIL", "tokenizers")

from tests.support.runtimes.pictures import encoded  # noqa: E402
from tests.support.runtimes.tiles import write_pipeline  # noqa: E402
from tests.support.serving.task_models import write_task_model  # noqa: E402

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
GOOD = mnist_like().SerializeToString()
DAMAGED = {
    "empty": b"",
    "half": GOOD[: len(GOOD) // 2],
    "last-byte-missing": GOOD[:-1],
    "page": b"<!DOCTYPE html><html>404 not found</html>",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
}
LATIN_1 = "caf\udce9"  # a name of another system, as Python decodes it
ON_A_MODEL = (
    *("inspect MODEL", "quantize MODEL --to fp16 -o out.onnx", "compare MODEL MODEL"),
    *("build MODEL --profile cpu -o out.onnx", "predict MODEL data.npz -o out.npz"),
    *("bench MODEL -o report", "serve --engine m=MODEL --http-port 0"),
)
DATA = {  # arrays by name, what the error says
    "name": ({"photo": np.zeros((4, 1, 28, 28), "f4"), "other": np.zeros((4, 2), "f4")}, "image"),
    "shape": ({"image": np.zeros((4, 1, 28, 29), "f4")}, "[4,1,28,29]"),
    "rank": ({"image": np.zeros((4, 28, 28), "f4")}, "[4,28,28]"),
    "dtype": ({"image": np.zeros((4, 1, 28, 28), "f8")}, "float64"),
    "none": ({"image": np.zeros((0, 1, 28, 28), "f4")}, "samples"),
}
ON_DATA = (
    *("predict model.onnx DATA -o out.npz", "compare model.onnx model.onnx --data DATA"),
    "quantize model.onnx --to int8 --calib DATA -o out.onnx",
)


WRITES = (
    *("quantize model.onnx --to fp16 -o OUT", "build model.onnx --profile cpu -o OUT"),
    *("predict model.onnx data.npz -o OUT", "train mnist-cnn -o OUT"),
)


class Bomb:
    """Unpickling this writes a file: proof that code in a checkpoint ran."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.write_text, (Path("marker"), "ran"))


REFUSED = {  # the command line without `deploykit` -> what stderr says
    "fly": "fly",
    "inspect model.onnx --loud": "--loud",
    "inspect": "FILE",
    "inspect 'a\x1b[2Jb\nc.onnx'": "a [2Jb c.onnx: no such file",  # no control character
    "profiles jetson-orin-nano-8gb@9W": "9W",
    "train ../mnist_cnn -o out": "../mnist_cnn",  # a recipe's name is no path
    "train mnist-cnn --weights evil.pt -o m.pt": "evil.pt",
    "train mnist-cnn -o out --epochs 0": "epochs",
    "export model.onnx -o out": "model.onnx",
    "export evil.pt": "--allow-pickle",
    "inspect evil.pt": "--allow-pickle",
    "quantize model.onnx": "Missing option '--to'. Choose from: fp16, bf16, int8, ",
    "quantize evil.pt --to fp16": "is a PyTorch file",
    "quantize model.onnx --to fp12": "fp12",
    "quantize model.onnx --to INT8": "did you mean int8, int8-dynamic",
    "quantize model.onnx --to fp16 --metric top7": "top7",
    "quantize model.onnx --to fp16 --max-drop 0": "--max-drop",
    f"quantize model.onnx --to fp16 -o {'x' * 245}.onnx": "name too long",  # of its manifest
    "quantize model.onnx --to int8": "calibration",
    "quantize model.onnx --to int8 --calib data.npz --runtime x": "'x'",
    "quantize model.onnx --to int8 --calib zeros.npz -o out.onnx": "same",
    "build model.onnx --profile h2o": "h2o",
    "build model.onnx --profile cpu -o model.onnx": "model",
    "build model.onnx --profile cpu -o x.PLAN --force": "hint: --out x.",
    "build pairs.onnx --profile cpu": "it computes in float16 between",
    "build model.onnx --profile cpu --precision bf16": "--profile cpu does not run bf16",
    "build model.onnx --precision int4": "did you mean int4-weight-only?",
    "build model.onnx --profile cpu --precision int8": "--calib",
    "build model.onnx --profile cpu --precision fp8 --calib data.npz": "fp8",
    "build model.onnx --profile cpu --precision int8 --calib data.npz --max-drop 3": "--max-drop",
    "build model.onnx --profile cpu --precision int8 --calib data.npz --metric a:b": "'a'",
    "build model.onnx --profile cpu --precision int8 --calib nothere.npz": "nothere.npz",
    "build conv.onnx --profile cpu --precision int8-dynamic": "int8 quantizes convolutions too",
    "compare model.onnx model.onnx --max-error nan": "nan",
    "compare model.onnx --fail-on-regression 5%": "--fail-on-regression is for two reports",
    "compare a b --fail-on-regression 0.05": "a percentage",
    "compare a b --fail-on-regression -1%": "0 or more",
    "compare a b --max-error 1": "--max-error has no effect on two reports",
    "compare a": "a: is a report; which report is compared with it?",
    "compare a absent.onnx": "absent.onnx: no such file",
    "predict model.onnx data.npz -o out --device tpu": "tpu",
    "predict model.onnx data.npz -o out --batch 0": "--batch must be 1 or more",
    "predict model.onnx sky.png": "has no task, so it takes only tensors",
    "predict model.onnx 'great film'": "hint: a sentence goes with --text",
    "predict classify.onnx": "there is nothing to predict",
    "predict classify.onnx absent.png": "absent.png: no such file",
    "predict classify.onnx classify.onnx": "classify.onnx: is not a readable image",
    "predict classify.onnx x.npz": "holds samples; --out names the file",
    "predict classify.onnx --text good": "text 1: is a text, and the model takes images",
    "predict classify.onnx sky.png cave.webp -o x.npz": "--out is for the outputs of one",
    "predict classify.onnx nothing": "nothing: holds no file that ends in .jpg",
    "predict tiles.py sky.png --on ray": "--on has no",
    "predict tiles.py": "there is no file",
    "predict tiles.py mean.onnx": "mean.onnx: the image",
    "bench": "ENGINE",
    "bench alone/half.onnx": "the float32 model that it was made from is not next",
    "bench linear.onnx --against model.onnx -o r": "linear.onnx",
    "bench model.onnx --batches 1,two": "1,two",
    "bench model.onnx --seconds -1 -o report": "-1",
    "bench model.onnx -o model.onnx": "model.onnx",
    "bench model.onnx --axis T=1,T=2": "hint: --axis T=128,H=224",
    "bench tiles.py --slo-ms 3": "--slo-ms has no effect",
    "demo -o model.onnx": "model.onnx",
    "plan linear.onnx --profile h300": "error: no profile 'h300'\nhint: did you mean h200",
    "plan linear.onnx --slo-ms nan": "error: --slo-ms must be 1e-09 to 1e+15, got nan",
    "plan linear.onnx --rate 5": "error: --rate needs the latency",
    "plan linear.onnx --axis T": "--axis T: must be names of axes with a size each\nhint: --axis",
    "plan linear.onnx --axis T=3": "no dynamic axis 'T'; it has: none but the batch",
    "plan linear.onnx --axis N=3": "hint: --batches sets the batch",
    "plan linear.onnx --batches 0": "error: --batches 0: must be sizes of at least 1",
    "serve --engine a=model.onnx --engine a=model.onnx": "'a'",
    "serve model.onnx --threads 999999999999999999999999": "--threads must be",
    "serve model.onnx --http-port 99999": "99999",
    "serve --pipeline sky.png": "a pipeline is a .py or a .toml file",
    "serve --pipeline no.py": "no.py: no such file",
    "serve mean.onnx --pipeline mean=tiles.py": "'mean' is that of a model and of a pipeline",
    "serve --pipeline wrong.py": "'crops' as int",
    "load http://127.0.0.1:1": "127.0.0.1:1",
    "load http://127.0.0.1:1 --duration long": "'--duration': must be a valid number\n",
    "load http://127.0.0.1:1 --rate 1 --concurrency 1": "rate",
    "load ftp://x": "ftp://x",
    "load unix:none.sock --token-file empty": "token",
    "health http://user:pw@x": "error: 'http://x' is not a server's URL",
    "bundle m.onnx --profile l4 -o b --to doker": "docker?",
    "bundle tiles.py --profile cpu -o b": "is not a model file",
}
for name in ("two words", "", "ä", "x" * 129):
    REFUSED[f"serve --engine '{name}=mean.onnx'"] = f"'{name}' cannot be the name of a model"
for url in ("8000", "http://", "http://x:port", "http://a b"):
    REFUSED[f"health '{url}'"] = url
for line in ON_A_MODEL:
    REFUSED[line.replace("MODEL", f"{LATIN_1}.onnx")] = "not UTF-8"
    REFUSED[line.replace("MODEL", "changed.onnx")] = "is not the file that changed.onnx.json"
    for kind in (*DAMAGED, "missing", "folder"):
        REFUSED[line.replace("MODEL", f"{kind}.onnx")] = f"{kind}.onnx"
for line in ON_DATA:
    for kind, (_, words) in DATA.items():
        REFUSED[line.replace("DATA", f"wrong-{kind}.npz")] = words
for line in WRITES:
    for place in ("nowhere/out.onnx", "nothing", "model.onnx/out.onnx", "x" * 300):
        REFUSED[line.replace("OUT", place)] = place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with all files that the command lines name."""
    here = tmp_path_factory.mktemp("refused")
    for name, graph in (("model", mnist_like()), ("linear", linear()), ("conv", conv_relu())):
        save(graph, here / f"{name}.onnx")
    (here / f"{LATIN_1}.onnx").write_bytes(GOOD)
    for kind, content in DAMAGED.items():
        (here / f"{kind}.onnx").write_bytes(content)
    for kind, (arrays, _) in DATA.items():
        np.savez(here / f"wrong-{kind}.npz", **arrays)
    images = np.random.default_rng(0).random((60, 1, 28, 28), dtype=np.float32)
    np.savez(here / "data.npz", image=images)
    np.savez(here / "zeros.npz", image=images[:9] * 0)
    for name in ("nothing", "folder.onnx", "alone"):
        (here / name).mkdir()
    model, calib = here / "model.onnx", here / "data.npz"
    dk.quantize(model, "fp16", out=here / "alone/half.onnx")
    dk.quantize(model, "int8", calib=calib, other_nodes="fp16", out=here / "pairs.onnx")
    changed = dk.quantize(model, "fp16", out=here / "changed.onnx").path
    changed.write_bytes(GOOD)
    (here / "evil.pt").write_bytes(pickle.dumps(Bomb(), protocol=2))
    for name, report in (("a", simulated(1)), ("b", simulated(2, 1.2))):
        reports.write(report, here / name)
    write_task_model(here, "classify")
    for name in ("sky.png", "cave.webp"):
        pixels = np.full((32, 48, 3), 204, np.uint8)
        (here / name).write_bytes(encoded(pixels, Path(name).suffix[1:]))
    steps = write_pipeline(here).read_text()
    write_pipeline(here, steps.replace("def answer(", "def answer(crops: int, "), "wrong.py")
    (here / "token").write_text("abc\r\nmore\n")
    (here / "empty").write_text("\n")
    return here


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_line_is_one_error_line_and_leaves_nothing(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(line)
    if words[0] in ("train", "export", "demo") or "evil.pt" in words:
        pytest.importorskip("torch")
    before = contents(folder)
    ran = run(*words)
    assert (ran.code, ran.out) == (2, ""), ran
    assert REFUSED[line] in ran.err
    assert "\x1b" not in ran.error()
    assert "pw" not in ran.error()
    assert contents(folder) == before
    if words[0] == "build":  # it quantizes, but has names of its own for the options
        own = {name for option in COMMANDS["build"].params for name in option.opts} | {"--help"}
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", ran.err)) <= own, ran.err
