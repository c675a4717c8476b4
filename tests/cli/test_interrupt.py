"""Ctrl-C in the middle of each verb: exit 130, no partial file, the previous output as it was."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.files import read_toml
from scripts.fuzz_commands import TINY
from tests.support.installed import needs
from tests.support.onnx_zoo import mnist_like, save

LIMIT_S = 120.0
BEFORE = b"what was there before"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough samples that going through them takes seconds; next to them is a recipe."""
    path = tmp_path_factory.mktemp("data") / "data.npz"
    path.with_name("tiny.py").write_text(RECIPE)
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
import json, os, runpy, signal, sys, threading, time
from urllib.request import urlopen
from pathlib import Path

def interrupt():
    while not ({when}):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
runpy.run_module("deploykit", run_name="__main__", alter_sys=True)
"""


def interrupted(place: Path, words: list[str], when: str) -> tuple[int, str]:
    """Run a command that sends itself SIGINT once `when` is true; its exit code and stderr.

    Seen from here, it might have ended meanwhile.
    """
    log = place / "stderr.txt"
    command = [sys.executable, "-c", INTERRUPTING.format(when=when), *words]
    with log.open("wb") as stream:
        done = subprocess.run(
            command, cwd=place, stdout=subprocess.DEVNULL, stderr=stream, timeout=LIMIT_S
        )
    shown = log.read_text()
    log.unlink()
    return done.returncode, shown


RECIPE = f"""{TINY}
import dataclasses, os

def metric(*values):  # at the end of an epoch
    os.environ["TRAINED"] = "1"
    return top1_per_sample(*values)

RECIPE = dataclasses.replace(RECIPE, metric=metric)
"""
TRAINED = "'TRAINED' in os.environ"
CALIBRATED = "--precision int8 --calib data.npz"
VERBS = {  # the command line, when it is interrupted, what it needs
    "build": (f"build model.onnx --profile cpu {CALIBRATED} -o out --force", MAPPED, ()),
    "compare": ("compare model.onnx model.onnx --data data.npz", MAPPED, ()),
    "predict": ("predict model.onnx data.npz -o out --force --batch 1", MAPPED, ()),
    "bench": ("bench model.onnx -o report", MAPPED, ()),
    "train": ("train RECIPE --epochs 100000 -o out --force", TRAINED, ("torch",)),
    "export": ("export m.pt -o out --force", "any(Path().glob('.out.*'))", ("torch",)),
}


@pytest.mark.parametrize(
    "verb",
    [
        pytest.param(verb, marks=[pytest.mark.torch, pytest.mark.slow] if packages else [])
        for verb, (*_, packages) in VERBS.items()
    ],
)
def test_ctrl_c_leaves_nothing_half_done(place: Path, data: Path, verb: str) -> None:
    line, when, packages = VERBS[verb]
    needs(*packages)
    (place / "out").write_bytes(BEFORE)
    if verb == "export":
        from deploykit.core.recipe import load_recipe
        from deploykit.engines.torch.open import save_checkpoint

        recipe = load_recipe("mnist-cnn")
        save_checkpoint(place / "m.pt", recipe.build(), "mnist-cnn", recipe)
    before = {path: path.read_bytes() for path in place.iterdir() if path.name != "data.npz"}
    words = line.replace("RECIPE", str(data.with_name("tiny.py"))).split()
    code, shown = interrupted(place, words, when)
    assert (code, "Traceback" in shown) == (130, False), shown
    parts = place / "out.parts"  # those of `predict`, from which the same command goes on
    files = (
        path
        for path in place.rglob("*")
        if path.is_file() and path.name != "data.npz" and parts not in path.parents
    )
    assert {path: path.read_bytes() for path in files} == before
    assert not (place / "report").exists()


def test_ctrl_c_ends_a_server_and_a_load_on_it(place: Path) -> None:
    words = ["serve", "m=model.onnx", "--http-port=0", "--grpc-port=none"]
    command = [sys.executable, "-m", "deploykit", *words]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            url = "http://" + json.loads(server.stdout.readline())["http"]
            stats = f"json.load(urlopen('{url}/v2/models/m/stats'))['model_stats'][0]"
            busy = f"{stats}['inference_count'] > 100"
            code, shown = interrupted(place, ["load", url, "--duration", "600"], busy)
            assert (code, "Traceback" in shown) == (130, False), shown
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=LIMIT_S) == 130
        finally:
            server.kill()


NATIVE = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:  # as the loader of a native module does
    pass
"""
RUNNING = """
import atexit, signal, time
from pathlib import Path
from deploykit.cli import main
from deploykit.core.errors import BadInput

def twice(number):
    try:
        signal.raise_signal(number)
    finally:  # what cleans up
        signal.raise_signal(number)
        Path("cleaned").touch()

def at_exit():
    atexit.register(signal.raise_signal, signal.SIGINT)

def run(_words):
    {body}
    return 0

main._run = run
main.main()
"""


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        # `timeout` sends it to the process and to its group, which is the same process
        ("twice(signal.SIGINT)", 130, "interrupted\n"),
        ("twice(signal.SIGTERM)", 143, ""),
        # as a module does that defines a dataclass: `python -m` would end by the signal itself
        ("exec('signal.raise_signal(signal.SIGINT)')", 130, "interrupted\n"),
        ("import native; time.sleep(3)", 130, "interrupted\n"),
        ("at_exit()", 0, ""),  # at the end of Python it changes neither output nor code
        ("at_exit(); raise BadInput('no')", 2, "error: no\n"),
    ],
)
def test_a_signal_at_any_moment_has_its_exit_code_and_lets_the_clean_up_end(
    tmp_path: Path, body: str, code: int, error: str
) -> None:
    (tmp_path / "native.py").write_text(NATIVE)
    (tmp_path / "running.py").write_text(RUNNING.format(body=body))
    command = [sys.executable, "-m", "running"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (code, error)
    assert (tmp_path / "cleaned").exists() == body.startswith("twice")


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
