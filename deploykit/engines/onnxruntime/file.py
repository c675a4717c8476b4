"""Prepare an `.onnx` file for ONNX Runtime: external weights, mapped copies, exact sums."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, Unsupported, os_reason, quote
from deploykit.core.files import check_data_file, open_readable
from deploykit.core.machine import cpu_features, file_text
from deploykit.graph.parse import SCALED_IN_EACH_CALL, dtype_name, onnx_files, read_facts

_NUMBER = re.compile(r"[0-9]{1,18}")


def external_weights(path: Path) -> dict[str, np.ndarray]:
    """Read the bytes of each external weights file, by its location in the model.

    ONNX Runtime would map the file, and truncating a mapped file ends the process (SIGBUS).
    """
    found = {}
    facts = read_facts(path)
    if facts.twice:
        raise BadInput(
            f"{path}: two initializers have the name '{facts.twice}'",
            hint="which of them counts is not defined: rename one, or export it again",
        )
    for value in facts.inputs:
        if value.shape is None and value.dtype != dtype_name(0):  # to ONNX Runtime, a scalar
            raise Unsupported(
                f"{path}: the input '{value.name}' has no shape",
                hint="export it again with a shape; an axis of any size has a name: ['N', 4]",
            )
    # ONNX Runtime 1.23 reads any file, later versions follow hard links
    for location, offset, length in facts.external:
        where = f"{path}: its weights"
        size = check_data_file(path, location, where).st_size
        numbers = [offset or "0", length or "0"]
        if not all(_NUMBER.fullmatch(each) for each in numbers) or sum(map(int, numbers)) > size:
            raise BadInput(
                f"{where}: {quote(location)} has {size} bytes, the model wants offset "
                f"{quote(offset)}, length {quote(length)}"
            )
        if location in found:
            continue
        try:
            with open_readable(path.parent / location) as handle:
                found[location] = np.fromfile(handle, np.uint8)
        except OSError as exc:
            raise BadInput(f"{where}: {location}: {os_reason(exc)}") from exc
    return found


# ONNX Runtime gives each session its own weights, packed for its kernels. If it saved a model
# optimised and packed, with the weights in another file, it maps that file. Such a copy fits only
# this CPU and this version: a server makes it when it starts and removes it when it ends.

LEAST_BYTES = 4 << 20  # a smaller model is not worth a copy
_LEAST_TENSOR_BYTES = 1024  # smaller tensors stay in the graph
_PREFIX = "deploykit-weights-"
_MODEL, _WEIGHTS = "model.onnx", "weights"


@contextlib.contextmanager
def copies_folder() -> Iterator[Path | None]:
    """A folder for copies, removed at the end; None where no temporary file can be written.

    Those of servers that were killed are removed first. Mapped files stay in memory without it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*-*"):
        number, started, _ = left.name.removeprefix(_PREFIX).split("-", 2)
        if started != _started(number):
            shutil.rmtree(left, ignore_errors=True)
    folder = None
    with contextlib.suppress(OSError):
        own = os.getpid()
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{own}-{_started(own)}-"))
    try:
        yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _started(process: int | str) -> str:
    """Return a process's start in ticks since boot: in a container each server has number 1."""
    return " ".join(file_text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()[19:20])


@contextlib.contextmanager
def use_copies(folder: Path | None) -> Iterator[None]:
    """Use the folder of the parent process; at the end, remove it if the parent was killed."""
    parent = os.getppid()
    try:
        yield
    finally:
        if folder is not None and os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)


def mapped_copy(path: Path, folder: Path, write: Callable[[Path], object]) -> Path:
    """Return the copy of the model `path` in `folder`; the first process to ask must `write` it.

    Raises OSError, and what `write` raises.
    """
    stats = [each.stat() for each in onnx_files(path)]
    known = [(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in stats]
    model, version = (
        hashlib.sha256(repr(each).encode()).hexdigest()[:16] for each in (path, known)
    )
    place = folder / f"{model}-{version}"
    with (folder / "writing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            new = folder / "new"  # a killed process may have left one
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            try:
                write(new / _MODEL)
                for old in folder.glob(f"{model}-*"):  # mapped ones stay in memory
                    shutil.rmtree(old, ignore_errors=True)
                new.rename(place)
            finally:
                shutil.rmtree(new, ignore_errors=True)
    return place / _MODEL


def is_large(path: Path) -> bool:
    """Return whether the model's files are large enough for a copy."""
    return sum(each.stat().st_size for each in onnx_files(path) if each.is_file()) >= LEAST_BYTES


def save_at(copy: Path, options: Any) -> None:
    """Make the session with these `options` write `copy` and, next to it, its weights."""
    options.optimized_model_filepath = str(copy)
    optimised = "session.optimized_model_external_initializers"
    for name, value in (
        (f"{optimised}_file_name", _WEIGHTS),
        (f"{optimised}_min_size_in_bytes", str(_LEAST_TENSOR_BYTES)),
        ("session.save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(name, value)


# x86-64 without VNNI or AMX adds pairs of uint8 x int8 products in 16 bits, which saturate. With
# this option, ONNX Runtime stores the weights as uint8 there when it optimises (seen on AVX2:
# 17 dB -> exact, 1.35 x the time). 1.32.0 does so also on CPUs with VNNI, whose sums are exact
# without it: there it cost ResNet-18 2.1 x the time for the same bits. Source: its
# onnxruntime_session_options_config_keys.h and "Quantize ONNX Models", "U8U8".
EXACT_INTEGERS = "session.x64quantprecision"
UNSHARED = "ONNX Runtime runs them in float32, or rounds their sums, on a CPU without VNNI"
# Older versions are inexact for activations scaled in each call (9 to 31 dB with 1.23 to 1.29).
_EXACT_FOR_ALL = (1, 30)


def cuts_sums(version: str) -> bool:
    """Return whether ONNX Runtime `version` adds MatMulInteger's products in 16 bits here."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    return numbers < _EXACT_FOR_ALL and not adds_exactly()


def rounds_sums(options: Any) -> bool:
    """Return whether a session lacks the option that exact sums need on this CPU."""
    return bool(options.get_session_config_entry(EXACT_INTEGERS) == "0") and not adds_exactly()


def adds_exactly() -> bool:
    """Return whether this CPU can add 8-bit products without a sum in 16 bits."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    features = cpu_features(file_text(Path("/proc/cpuinfo")))
    return not {"avx512_vnni", "avx_vnni"}.isdisjoint(features)


def check_sums(path: Path, version: str) -> None:
    """Raise Unsupported for a model whose integer sums would be wrong on this CPU."""
    if cuts_sums(version) and not read_facts(path).operators.isdisjoint(SCALED_IN_EACH_CALL):
        raise Unsupported(
            f"{path}: ONNX Runtime {version} cuts the sums of this model's INT8 products "
            "on a CPU without VNNI",
            hint="pip install 'onnxruntime>=1.30' (from Python 3.11 on)",
        )
