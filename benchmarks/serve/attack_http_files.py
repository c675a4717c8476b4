"""Attacks on the file of a model that is being served, and on shared memory."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.serve.attack_http_setup import SMALL, Attacked, counted, write_scale
from benchmarks.serve.attack_http_shared import SHARED

SETTLES_S = 20.0


def load(server: Attacked, damage: Callable[[Path], object]) -> str:
    """Small requests while `damage(file)` is done again and again; then a good file replaces it."""
    path, ended = server.folder / "m.onnx", threading.Event()
    times = 0

    def run() -> None:
        nonlocal times
        while not ended.is_set():
            with contextlib.suppress(FileNotFoundError):
                damage(path)
            times += 1
            ended.wait(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        found = server.together(4, lambda _: server.once(SMALL))
    finally:
        ended.set()
        thread.join()
    return f"{counted(found)}; {times} times; {_restored(server, path)}"


def _restored(server: Attacked, path: Path) -> str:
    """Whether a good file, with another factor, is in use soon."""
    _remove(path)
    new = path.with_name("new.onnx")
    write_scale(new, 7.0)
    new.replace(path)
    end_s = time.monotonic() + SETTLES_S
    while time.monotonic() < end_s:
        if server.server.infer(1.0) == (200, [7.0]):
            return "then the good file is used"
        time.sleep(0.05)
    return f"**the good file is not used**: {server.server.infer(1.0)}"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _put(path: Path, make: Callable[[Path], object]) -> None:
    """Replace `path` by what `make` makes."""
    new = path.with_name("damage")
    _remove(new)
    make(new)
    _remove(path)
    new.rename(path)


def truncated(server: Attacked) -> str:
    """The file is cut in place, at any byte, and written again."""
    good = (server.folder / "m.onnx").read_bytes()

    def damage(path: Path) -> None:
        path.write_bytes(good)
        os.truncate(path, random.randrange(len(good)))
        time.sleep(0.3)

    return load(server, damage)


def growing(server: Attacked) -> str:
    """The file grows while it is read: a byte each 10 ms, then the rest."""
    write_scale(server.folder / "grown.onnx", 3.0, padding=8 << 20)
    good = (server.folder / "grown.onnx").read_bytes()

    def damage(path: Path) -> None:
        with path.open("wb") as handle:
            for at in range(0, len(good), len(good) // 60):
                handle.write(good[at : at + len(good) // 60])
                handle.flush()
                time.sleep(0.01)

    return load(server, damage)


def folder_renamed(server: Attacked) -> str:
    """The folder of the model is renamed away and back."""

    def damage(path: Path) -> None:
        away = path.parent.with_name(f"{path.parent.name}-away")
        path.parent.rename(away)
        time.sleep(random.random())
        away.rename(path.parent)

    return load(server, damage)


def links(server: Attacked) -> str:
    """Links replace the file: to itself, in a circle, to /dev/zero, /dev/full, /proc/self/mem."""
    targets = ["m.onnx", "damage", "/dev/zero", "/dev/full", "/proc/self/mem", "/nowhere", "/"]

    def damage(path: Path) -> None:
        _put(path, lambda new: new.symlink_to(random.choice(targets)))
        time.sleep(0.6)

    return load(server, damage)


def no_files(server: Attacked) -> str:
    """A FIFO, a socket-like device and a folder replace the file."""

    def damage(path: Path) -> None:
        _put(path, random.choice([os.mkfifo, Path.mkdir, lambda new: os.mkfifo(new, 0)]))
        time.sleep(0.6)

    return load(server, damage)


def not_permitted(server: Attacked) -> str:
    """Another file without any permission replaces it (as root this damages nothing)."""

    def damage(path: Path) -> None:
        write_scale(path.with_name("damage"), 3.0)
        path.with_name("damage").chmod(0)
        path.with_name("damage").replace(path)
        time.sleep(0.6)

    return load(server, damage)


def sparse(server: Attacked) -> str:
    """A file of 100 GB, all of it a hole, replaces it; with a good beginning in turn."""
    good = (server.folder / "m.onnx").read_bytes()

    def damage(path: Path) -> None:
        new = path.with_name("damage")
        new.write_bytes(random.choice([b"", good]))
        os.truncate(new, 100 << 30)
        new.replace(path)
        time.sleep(1)

    return load(server, damage)


def manifests(server: Attacked) -> str:
    """A manifest comes without its model, of another model, broken, of 100 MB, and goes."""
    bodies = [b"{", b"[]", b"\0" * 100_000_000, b'{"version": 2, "sha256": "' + b"0" * 64 + b'"}']

    def damage(path: Path) -> None:
        manifest = path.with_name(f"{path.name}.json")
        manifest.write_bytes(random.choice(bodies))
        write_scale(path.with_name("damage"), random.random())
        path.with_name("damage").replace(path)
        time.sleep(0.6)
        manifest.unlink()

    return load(server, damage)


def old_times(server: Attacked) -> str:
    """Replaced files have the same size and time, or times of 1901 and 2100, as clocks jump."""

    def damage(path: Path) -> None:
        write_scale(path.with_name("damage"), random.choice([3.0, 5.0]))
        os.utime(path.with_name("damage"), (0, random.choice([-(1 << 31), 0, 1, 1 << 32])))
        path.with_name("damage").replace(path)
        time.sleep(0.3)

    return load(server, damage)


def storm(server: Attacked) -> str:
    """The file is replaced each 10 ms, by good ones and by bytes of chance."""
    write_scale(server.folder / "good.onnx", 3.0)

    def damage(path: Path) -> None:
        new = path.with_name("damage")
        if random.random() < 0.5:
            shutil.copy(path.with_name("good.onnx"), new)
        else:
            new.write_bytes(random.randbytes(300))
        new.replace(path)

    return load(server, damage)


def other_models(server: Attacked) -> str:
    """Models with other inputs, and of 256 MB, replace the file."""

    def damage(path: Path) -> None:
        width, padding = random.choice([(5, 0), (4, 256 << 20), (1, 0)])
        write_scale(path.with_name("damage"), 3.0, width=width, padding=padding)
        path.with_name("damage").replace(path)
        time.sleep(1.5)

    return load(server, damage)


def flapping(server: Attacked) -> str:
    """The file goes and comes back unchanged, each second."""

    def damage(path: Path) -> None:
        path.rename(path.with_name("away"))
        time.sleep(0.7)
        path.with_name("away").rename(path)
        time.sleep(0.7)

    return load(server, damage)


FILES = (
    truncated,
    growing,
    folder_renamed,
    links,
    no_files,
    not_permitted,
    sparse,
    manifests,
    old_times,
    storm,
    other_models,
    flapping,
    *SHARED,
)
