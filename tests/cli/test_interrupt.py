"""Ctrl-C in the middle of each verb: exit 130, no partial file, the previous output as it was."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.files import read_toml
from tests.support.cli.terminal import DEPLOYKIT
from tests.support.onnx_zoo import mnist_like, save
from tests.support.serving.faults import until

LIMIT_S = 120.0
BEFORE = b"what was there before"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough samples that going through them takes seconds."""
    path = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(path, x=np.random.default_rng(0).random((20_000, 1, 28, 28), dtype=np.float32))
    return path


@pytest.fixture
def place(tmp_path: Path, data: Path) -> Path:
    """A folder with a model and the samples."""
    save(mnist_like(), tmp_path / "model.onnx")
    (tmp_path / "data.npz").hardlink_to(data)
    return tmp_path


MAPPED = "'onnxruntime_pybind11_state' in Path('/proc/self/maps').read_text()"  # it is at work
INTERRUPTING = """
import os, runpy, signal, sys, threading, time
from pathlib import Path

def interrupt():
    while not ({when}):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
runpy.run_module("deploykit", run_name="__main__", alter_sys=True)
"""


def interrupted(
    place: Path,
    words: list[str],
    when: str = "False",
    working: Callable[[], bool] | None = None,
) -> tuple[int, str]:
    """Run a command that gets SIGINT at its work; its exit code and stderr.

    It sends the signal to itself once the expression `when` is true: seen from here, it might have
    ended meanwhile. Where it would work for minutes, it gets it from here, once `working()` is.
    """
    log = place / "stderr.txt"
    program = INTERRUPTING.format(when=when)
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *words],
            cwd=place,
            stdout=subprocess.DEVNULL,
            stderr=stream,
        )
        try:
            if working is not None:
                until(lambda: working() or process.poll() is not None, LIMIT_S)
                assert process.poll() is None, log.read_text()
                process.send_signal(signal.SIGINT)
            code = process.wait(timeout=LIMIT_S)
        finally:
            process.kill()
            process.wait()
    said = log.read_text()
    log.unlink()
    return code, said


WITH_ONNX = {
    "quantize": "quantize model.onnx --to int8 --calib data.npz -o out --force",
    "build": "build model.onnx --profile cpu --precision int8 --calib data.npz -o out --force",
    "compare": "compare model.onnx model.onnx --data data.npz",
    "predict": "predict model.onnx data.npz -o out --force --batch 1",
    "bench": "bench model.onnx -o report",
}


@pytest.mark.parametrize("verb", WITH_ONNX)
def test_ctrl_c_leaves_nothing_half_done(place: Path, verb: str) -> None:
    if verb != "compare":
        (place / "out").write_bytes(BEFORE)
    before = {path: path.read_bytes() for path in place.iterdir() if path.name != "data.npz"}
    code, said = interrupted(place, WITH_ONNX[verb].split(), MAPPED)
    assert (code, "Traceback" in said) == (130, False), said
    parts = place / "out.parts"  # those of `predict`, from which the same command goes on
    files = (
        path
        for path in place.rglob("*")
        if path.is_file() and path.name != "data.npz" and parts not in path.parents
    )
    assert {path: path.read_bytes() for path in files} == before
    assert not (place / "report").exists()


@pytest.mark.torch
@pytest.mark.slow
def test_ctrl_c_while_training(place: Path) -> None:
    pytest.importorskip("torch")
    (place / "out.pt").write_bytes(BEFORE)
    pytest.importorskip("sklearn")
    recipe = str(Path(__file__).resolve().parents[2] / "examples/own_recipe.py")  # a quick epoch
    words = ["train", recipe, "--epochs", "100000", "-o", "out.pt", "--force"]
    code, said = interrupted(place, words, "'epoch ' in Path('stderr.txt').read_text()")
    assert (code, "Traceback" in said) == (130, False), said
    assert (place / "out.pt").read_bytes() == BEFORE
    assert sorted(path.name for path in place.iterdir()) == ["data.npz", "model.onnx", "out.pt"]


@pytest.mark.torch
@pytest.mark.slow
def test_ctrl_c_while_exporting(place: Path) -> None:
    pytest.importorskip("torch")
    from deploykit.core.recipe import load_recipe
    from deploykit.engines.torch.open import save_checkpoint

    recipe = load_recipe("mnist-cnn")
    save_checkpoint(place / "m.pt", recipe.build(), "mnist-cnn", recipe.inputs, recipe.outputs)
    (place / "out.onnx").write_bytes(BEFORE)
    words = ["export", "m.pt", "-o", "out.onnx", "--force"]
    code, said = interrupted(place, words, "any(Path().glob('.out.onnx.*'))")
    assert (code, "Traceback" in said) == (130, False), said
    assert (place / "out.onnx").read_bytes() == BEFORE
    names = sorted(path.name for path in place.iterdir())
    assert names == ["data.npz", "m.pt", "model.onnx", "out.onnx"]


def test_ctrl_c_ends_a_server_and_a_load_on_it(place: Path) -> None:
    server = subprocess.Popen(
        [*DEPLOYKIT, "serve", "--engine", "m=model.onnx", "--http-port", "0", "--grpc-port=none"],
        cwd=place,
        stdout=subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        url = "http://" + json.loads(server.stdout.readline())["http"]
        words = ["load", url, "--duration", "600"]
        code, said = interrupted(place, words, working=lambda: busy(url))
        assert (code, "Traceback" in said) == (130, False), said
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=LIMIT_S) == 130
    finally:
        server.kill()
        server.communicate()


def test_ctrl_c_while_text_is_executed_is_130_too(tmp_path: Path) -> None:
    """A module that defines a dataclass does that: `python -m` would end by the signal itself."""
    (tmp_path / "interrupted.py").write_text(
        "import signal\n"
        "from deploykit.cli import main\n"
        "main._run = lambda words: exec('signal.raise_signal(signal.SIGINT)')\n"
        "main.script()\n"
    )
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


TWICE = """
import signal
from pathlib import Path
from deploykit.cli import main

def run(_words):
    try:
        signal.raise_signal({number})
    finally:  # what cleans up
        signal.raise_signal({number})
        Path("cleaned").touch()

main._run = run
main.script()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_is_sent_twice_lets_the_clean_up_end(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """`timeout` sends it to the process and to its group, which is the same process."""
    command = [sys.executable, "-c", TWICE.format(number=int(number))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert (tmp_path / "cleaned").exists()


@pytest.mark.parametrize("result", ["0", "raise BadInput('no')"], ids=["success", "error"])
def test_ctrl_c_at_the_end_of_python_changes_neither_output_nor_code(
    tmp_path: Path, result: str
) -> None:
    (tmp_path / "ending.py").write_text(
        "import atexit, signal\n"
        "from deploykit.cli import main\n"
        "from deploykit.core.errors import BadInput\n"
        "def run(words):\n"
        f"    {result}\n"
        "    return 0\n"
        "main._run = run\n"
        "atexit.register(signal.raise_signal, signal.SIGINT)\n"
        "main.script()\n"
    )
    command = [sys.executable, "-m", "ending"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    expected = (0, "") if result == "0" else (2, "error: no\n")
    assert (done.returncode, done.stderr) == expected


def test_ctrl_c_while_the_command_line_itself_loads_prints_one_line() -> None:
    program = (
        "import runpy, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "runpy.run_module('deploykit', run_name='__main__', alter_sys=True)\n"
    )
    command = [sys.executable, "-c", program, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_the_installed_command_starts_where_ctrl_c_is_heeded() -> None:
    project = read_toml(Path(__file__).parents[2] / "pyproject.toml")["project"]
    assert project["scripts"] == {"deploykit": "deploykit.__main__:main"}


def busy(url: str) -> bool:
    """Whether the server has answered inference requests."""
    import urllib.request

    with urllib.request.urlopen(f"{url}/v2/models/m/stats", timeout=LIMIT_S) as answer:
        stats = json.loads(answer.read())["model_stats"][0]
    return stats["inference_count"] > 100
