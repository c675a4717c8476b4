"""Every option of every command with values that users mistype: never exit 70, never a traceback.

The options come from the commands themselves, so that a new one is met here too.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import typer

from deploykit.cli.main import app
from tests.support.campaign import rounds
from tests.support.cli.command import Run

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
    "load": ("http://127.0.0.1:CLOSED", "--duration", "0.01"),
    "health": ("http://127.0.0.1:CLOSED",),
    "bundle": ("model.onnx", "--profile", "cpu", "-o", "out"),
    "boot": ("bundle", "--cache", "cache", "--http-port", "TAKEN"),
    "doctor": (),
    "profiles": (),
    "demo": ("-o", "samples.npz"),
}
NUMBERS = ("nan", "inf", "-inf", "-1", "0", "1e308", "5e-324", "9" * 30, "٣", "0x10", "1_0", " 1")
TEXTS = (
    "", " ", "-", "=", "=1", "a=", "a=1,a=2", ",", ":", "a:b:c", "../..", "http://", "\udcff", "é",
    "\x1b[2J", "{}", "%s", "x" * 5000, "model.onnx", "0", "nan", "1,2,3", "./tiny.py", "tiny:RECIPE",
)  # fmt: skip
FILES = (
    "", "nowhere", "nowhere/x.onnx", "folder", "empty.onnx", "noise.onnx", "noise.npz", "noise.toml",
    "x.png", "\udcff.onnx", "x" * 240 + ".onnx", "x" * 300, "/dev/null", "/dev/full", "/proc/x.pt",
    "fifo", "loop.onnx", "model.onnx", "samples.npz", "bundle", ".", "/", "~", "a\nb.onnx", "tiny.py",
)  # fmt: skip
DEMO_RUNS = {"", " "}
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
    base = list(CALLS[command])
    for option in ROOT.commands[command].params:
        if option.name == "help":
            continue
        if option.param_type_name == "argument":
            yield from ([value, *base[1:]] for value in values_of(option))
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
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.fixture
def here(tmp_path: Path, model: Path, samples: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
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
def test_no_value_of_an_option_is_a_bug(run: Run, here: Path, taken: str, command: str) -> None:
    if command == "train":
        pytest.importorskip("torch")
    before = sorted(here.rglob("*"))
    lines = list(lines_of(command))
    step = rounds(17, 1)
    for number in range(zlib.crc32(command.encode()) % step, len(lines), step):
        line = [word.replace("TAKEN", taken) for word in lines[number]]
        if command == "demo" and line[-1] in DEMO_RUNS:
            continue
        with time_limit(60, line):
            ran = run(command, *line)
        assert ran.code in (0, 1, 2, 3), (line, ran)
        if ran.code and (ran.code != 1 or "error:" in ran.err):
            ran.error()
        for path in set(here.rglob("*")) - set(before):
            if path.parent == here:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
