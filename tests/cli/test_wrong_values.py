"""Every option of every command with values that users mistype: never exit 70, never a traceback.

The options come from the commands themselves, so that a new one is met here too.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import typer

from deploykit.cli.main import app
from tests.support.campaign import CAMPAIGN, rounds
from tests.support.cli.command import Run

ROOT_FOLDER = Path(__file__).parents[2]
ROOT: Any = typer.main.get_command(app)
# a call of each command that ends soon, as it is or with one more option
CALLS = {
    "train": ("./tiny.py", "-o", "out.pt"),
    "export": ("tiny.pt", "--arch", "./tiny.py", "-o", "out.onnx"),
    "quantize": ("model.onnx", "--to", "fp16", "-o", "out.onnx"),
    "build": ("model.onnx", "--profile", "cpu", "-o", "out.onnx"),
    "plan": ("model.onnx", "--profile", "l4", "--batches", "1"),
    "compare": ("model.onnx", "model.onnx"),
    "inspect": ("model.onnx",),
    "predict": ("model.onnx", "samples.npz", "-o", "out.npz"),
    "bench": ("model.onnx", "--seconds", "0.001", "--batches", "1"),
    "serve": ("model.onnx", "--http-port", "TAKEN"),
    "load": ("http://127.0.0.1:1", "--duration", "0.01"),
    "health": ("http://127.0.0.1:1",),
    "bundle": ("model.onnx", "--profile", "cpu", "-o", "out"),
    "boot": ("bundle", "--cache", "cache", "--http-port", "TAKEN"),
    "doctor": (),
    "profiles": (),
    "demo": ("-o", "samples.npz"),
}
NUMBERS = ("nan", "inf", "-inf", "-1", "0", "1e308", "5e-324", "9" * 30, "٣", "0x10", "1_0", " 1")
TEXTS = (
    *("", " ", "-", "=", "=1", "a=", "a=1,a=2", ",", ":", "a:b:c", "../..", "http://", "\udcff"),
    *("é", "\x1b[2J", "{}", "%s", "x" * 5000, "model.onnx", "0", "nan", "1,2,3", "./tiny.py"),
)
FILES = (
    *("", "nowhere", "nowhere/x.onnx", "folder", "empty.onnx", "noise.onnx", "noise.npz", "."),
    *("noise.toml", "x.png", "\udcff.onnx", "x" * 240 + ".onnx", "x" * 300, "/dev/null", "/"),
    *("/dev/full", "/proc/x.pt", "fifo", "loop.onnx", "model.onnx", "samples.npz", "bundle", "~"),
    *("a\nb.onnx", "tiny.py"),
)
NEEDS = {  # what a command is called on -> the command that makes it
    "export": ("train", "./tiny.py", "-o", "tiny.pt"),
    "boot": ("bundle", "model.onnx", "--profile", "cpu", "-o", "bundle"),
}
NO_FOLDER = ("empty.onnx", "x" * 300, "/dev/null", "/dev/full", "/proc/x.pt", "fifo", "loop.onnx")
TINY = """
import numpy as np
from torch import nn
from deploykit import Recipe, Split, Splits, parse_spec
from deploykit.training.data import top1_per_sample

def data(path):
    part = Split({"x": np.eye(4, dtype=np.float32)}, np.arange(4) % 2)
    return Splits(part, part, part, source="four samples")

RECIPE = Recipe(
    build=lambda: nn.Linear(4, 2), data=data, inputs=(parse_spec("x:float32[N,4]"),),
    outputs=(parse_spec("logits:float32[N,2]"),), loss=nn.functional.cross_entropy,
    metric=top1_per_sample, metric_name="accuracy", epochs=1, batch_size=4, learning_rate=0.1,
)
"""


def values_of(option: Any) -> tuple[str, ...]:
    """Return wrong and odd values for the type of an option or argument."""
    kind = str(option.type_descriptor.annotation)
    if "int" in kind or "float" in kind:
        return (*NUMBERS, "", "x", "1.5")
    return FILES if "Path" in kind else TEXTS


def lines_of(command: str) -> Iterator[list[str]]:
    """Yield command lines: each option and argument with each value; each option twice."""
    for option in ROOT.commands[command].params:
        base = list(CALLS[command])
        if option.name == "help":
            continue
        if option.param_type_name == "argument":
            yield from ([value, *base[1:]] for value in values_of(option))
            continue
        if option.name == "http_port":  # some are free
            base[0] = "noise.onnx"
        if command == "demo" and option.name == "out":
            yield from ([f"--out={value}"] for value in FILES if value in NO_FOLDER)
            continue
        for name in (*option.opts, *option.secondary_opts):
            yield [*base, name]
            yield [*base, name, name]
        if option.is_flag:
            continue
        name = option.opts[-1]
        yield [*base, f"{name}=1", f"{name}=2"]
        yield from ([*base, f"{name}={value}"] for value in values_of(option))


@contextmanager
def time_limit(seconds: int, line: list[str]) -> Iterator[None]:
    def late(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(line)

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that another program listens on, and none answers at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.fixture
def here(tmp_path: Path, model: Path, samples: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what the command lines name; `model` and `samples` are in it."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(TINY)
    Path("folder").mkdir()
    Path("empty.onnx").touch()
    for end in ("onnx", "npz", "toml"):
        Path(f"noise.{end}").write_bytes(os.urandom(999))
    Path("loop.onnx").symlink_to("loop.onnx")
    os.mkfifo("fifo")
    return tmp_path


@pytest.mark.parametrize("command", ROOT.commands)
def test_no_value_is_a_bug(run: Run, here: Path, taken: str, command: str) -> None:
    if command in ("train", "export"):
        pytest.importorskip("torch")
    if command in NEEDS:
        assert run(*NEEDS[command]).code == 0
    kept, lines = set(here.iterdir()), list(lines_of(command))
    step = rounds(200 if command in ("bench", "train") else 60, 1)
    for number in range(zlib.crc32(command.encode()) % step, len(lines), step):
        line = [word.replace("TAKEN", taken) for word in lines[number]]
        with time_limit(60, line):
            ran = run(command, *line)
        assert ran.code in (0, 1, 2, 3), (line, ran)
        if ran.code > 1:
            ran.error()
        assert kept <= set(here.iterdir()), line
        for path in set(here.iterdir()) - kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def limit(which: int, most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(which, (most, most))


def close(stream: int) -> Callable[[], None]:
    return lambda: os.close(stream)


def leave() -> None:
    """Run in a folder that is no longer there."""
    folder = Path("gone").absolute()
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()


# name -> what the process does before the command starts, or its variables, or its redirection
PLACES: dict[str, Callable[[], object] | dict[str, str] | str] = {
    "no stdin": close(0),
    "no stdout": close(1),
    "no stderr": close(2),
    "closed pipe": "| head -c 1 > /dev/null",
    "full stdout": "> /dev/full",
    "full stderr": "2> /dev/full",
    "no home": {"HOME": "/proc/nowhere"},
    "no TMPDIR": {"TMPDIR": "/nowhere"},
    "narrow": {"COLUMNS": "20", "TERM": "dumb"},
    "odd width": {"COLUMNS": "0", "LINES": "x"},
    "locale C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ASCII": {"PYTHONIOENCODING": "ascii:strict"},
    "full disk": limit(resource.RLIMIT_FSIZE, 1000),
    "fuller disk": limit(resource.RLIMIT_FSIZE, 0),
    "few files": limit(resource.RLIMIT_NOFILE, 20),
    "little memory": limit(resource.RLIMIT_AS, 700 << 20),
    "more memory": limit(resource.RLIMIT_AS, 1500 << 20),
    "no folder": leave,
    "odd threads": {"OMP_NUM_THREADS": "x"},
    "no cache": {"DEPLOYKIT_CACHE": "/proc/x"},
    "file as cache": {"XDG_CACHE_HOME": "/dev/null"},
    "odd mask": lambda: os.umask(0o777),
    "odd options": {"DEPLOYKIT_HTTP_PORT": "x", "DEPLOYKIT_CONFIG": "/nowhere"},
    "half of torchrun": {"WORLD_SIZE": "2", "RANK": "x"},
    "no PATH": {"PATH": ""},
}
PAIRS = [(each, place) for each in CALLS if each != "demo" for place in PLACES]


@pytest.mark.parametrize(("command", "place"), PAIRS if CAMPAIGN else [("boot", "no stderr")])
def test_no_place_is_a_bug(run: Run, here: Path, taken: str, command: str, place: str) -> None:
    if command in ("train", "export"):
        pytest.importorskip("torch")
    if command in NEEDS:
        assert run(*NEEDS[command]).code == 0
    words = [each.replace("TAKEN", taken) for each in CALLS[command]]
    line, how = [sys.executable, "-m", "deploykit", command, *words], PLACES[place]
    if isinstance(how, str):
        line = ["bash", "-o", "pipefail", "-c", f'"$@" {how}', "bash", *line]
    own = how if isinstance(how, dict) else {}
    done = subprocess.run(
        line,
        env={**os.environ, "PYTHONPATH": str(ROOT_FOLDER), **own},
        preexec_fn=how if callable(how) else None,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=240,
        check=False,
    )
    assert done.returncode in (0, 1, 2, 3), done
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
