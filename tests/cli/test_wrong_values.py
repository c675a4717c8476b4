"""Every option of every command with values that users mistype: never exit 70, never a traceback.

The options come from the commands themselves, so that a new one is met here too.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
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
    "load": ("http://127.0.0.1:TAKEN", "--duration", "0.01"),
    "health": ("http://127.0.0.1:TAKEN",),
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
    kind = option.type.name
    if kind in ("integer", "float"):
        return (*NUMBERS, "", "x", "1.5")
    return FILES if kind in ("path", "file") else TEXTS


def parameters(command: str) -> list[Any]:
    return [each for each in ROOT.commands[command].params if each.name != "help"]


def lines_of(command: str, option: Any) -> Iterator[list[str]]:
    """Yield command lines with each value of the option; a flag, and each option, also twice."""
    base = list(CALLS[command])
    if option.param_type_name == "argument":
        for value in values_of(option):
            yield [*base[: 0 if option.nargs == 1 else len(base)], value, *base[1:]]
        return
    for name in (option.opts[0], *option.secondary_opts):
        yield [*base, name]
        yield [*base, name, name]
    if not option.is_flag:
        for value in values_of(option):
            yield [*base, f"{option.opts[0]}={value}" if option.opts[0][1] == "-" else option.opts[0], *([] if option.opts[0][1] == "-" else [value])]
        yield [*base, option.opts[0], "1", option.opts[0], "2"]


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
