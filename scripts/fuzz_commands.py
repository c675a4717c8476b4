"""Every option of every command with values that users mistype, and in places that are odd.

    python -m scripts.fuzz_commands FOLDER [--all]

The options come from the commands themselves, so that a new one is met here too. Prints BUG lines:
an exit code or output of a bug, and lost files. Without `--all` it takes a sample of the lines.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import typer

from deploykit.cli.main import app, main
from tests.support.onnx_zoo import mnist_like, save

ROOT_FOLDER = Path(__file__).resolve().parents[1]
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
    "boot": ("bundle", "--cache", "cache", "--serve-config", "taken.toml"),
    "doctor": (),
    "profiles": (),
    "demo": ("-o", "samples.npz"),
}
NUMBERS = ("nan", "inf", "-inf", "-1", "0", "1e308", "5e-324", "9" * 30, "٣", "0x10", "1_0", " 1")
TEXTS = (
    *("", " ", "-", "=", "=1", "a=", "a=1,a=2", ",", ":", "a:b:c", "../..", "http://"),
    *("é", "\x1b[2J", "{}", "%s", "x" * 5000, "model.onnx", "0", "nan", "1,2,3", "./tiny.py"),
)
FILES = (
    *("", "nowhere", "nowhere/x.onnx", "folder", "empty.onnx", "noise.onnx", "noise.npz", "."),
    *("noise.toml", "x.png", "x" * 240 + ".onnx", "x" * 300, "/dev/null", "/"),
    *("/dev/full", "/proc/x.pt", "fifo", "model.onnx", "samples.npz", "bundle", "~"),
    *("a\nb.onnx", "tiny.py"),
)
NEEDS = {  # what a command is called on -> the command that makes it
    "export": ("train", "./tiny.py", "-o", "tiny.pt"),
    "boot": ("bundle", "model.onnx", "--profile", "cpu", "-o", "bundle"),
}
STEPS = {"bench": 200, "train": 200}  # of their lines, one of so many
NO_FOLDER = ("empty.onnx", "x" * 300, "/dev/null", "/dev/full", "/proc/x.pt", "fifo")
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


def late(*_: object) -> None:
    raise TimeoutError


def run(command: str, *line: str) -> tuple[Any, str]:
    """The exit code and stderr of one command line in this process, which takes 60 s at most."""
    sys.argv = ["deploykit", command, *line]
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in range(2)]
    code: Any = "no exit"
    signal.alarm(60)
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            main()
    except SystemExit as ended:
        code = ended.code
    except BaseException as exc:  # noqa: BLE001 - all that is not an exit code is a bug
        code = repr(exc)
    finally:
        signal.alarm(0)
    streams[1].seek(0)
    return code, streams[1].read()


def prepare() -> None:
    """Write into the current folder what the command lines name."""
    save(mnist_like(), Path("model.onnx"))
    images = np.random.default_rng(0).random((60, 1, 28, 28), dtype=np.float32)
    np.savez("samples.npz", image=images, labels=np.arange(60) % 10)
    Path("tiny.py").write_text(TINY)
    Path("folder").mkdir()
    Path("empty.onnx").touch()
    for end in ("onnx", "npz", "toml"):
        Path(f"noise.{end}").write_bytes(os.urandom(999))
    os.mkfifo("fifo")


def fuzz_values(command: str, port: str, step: int) -> Iterator[str]:
    """Yield what is wrong with each `step`-th line of a command."""
    here = Path()
    kept, lines = set(here.iterdir()), list(lines_of(command))
    for number in range(zlib.crc32(command.encode()) % step, len(lines), step):
        line = [word.replace("TAKEN", port) for word in lines[number]]
        code, err = run(command, *line)
        errors = [each for each in err.splitlines() if each.startswith("error: ")]
        if code not in (0, 1, 2, 3) or "Traceback" in err or (code > 1 and len(errors) != 1):
            yield f"{command} {line}: {code} {err[-300:]!r}"
        if not kept <= set(here.iterdir()):
            yield f"{command} {line}: a file is lost"
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


def fuzz_place(command: str, port: str, place: str) -> Iterator[str]:
    """Yield what is wrong with a command in an odd place."""
    words = [each.replace("TAKEN", port) for each in CALLS[command]]
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
    odd = "Traceback" in done.stderr or "Exception ignored" in done.stderr
    if done.returncode not in (0, 1, 2, 3) or odd:
        yield f"{command}, {place}: {done.returncode} {done.stderr[-300:]!r}"


def fuzz(port: str, *, whole: bool) -> Iterator[str]:
    for command in ROOT.commands:
        if command in NEEDS:
            assert run(*NEEDS[command])[0] == 0
        yield from fuzz_values(command, port, 1 if whole else STEPS.get(command, 60))
        places = PLACES if whole and command != "demo" else ()
        for place in places or ("no stderr",) * (command == "boot"):
            yield from fuzz_place(command, port, place)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    signal.signal(signal.SIGALRM, late)
    prepare()
    with socket.create_server(("127.0.0.1", 0)) as listener:  # and none answers there
        taken = str(listener.getsockname()[1])
        Path("taken.toml").write_text(f"http_port = {taken}")
        for bug in fuzz(taken, whole="--all" in sys.argv):
            print("BUG", bug, flush=True)
    print("DONE")
