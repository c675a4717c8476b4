"""Rows, and what hostile files of data are made of, for the tests of data."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deploykit.core.tensors import TensorSpec

X = TensorSpec("x", "float32", ("N", 3))
B = TensorSpec("b", "int64", ("N",))


def rows(count: int) -> np.ndarray:
    return np.arange(count * 3, dtype=np.float32).reshape(count, 3)


class Payload:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (str(self.marker),))


@contextlib.contextmanager
def memory_grows_by_at_most(limit_bytes: int) -> Iterator[None]:
    """Linux keeps each process's largest resident size, and resets it when told to."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = peak_memory_bytes()
    yield
    assert peak_memory_bytes() - before <= limit_bytes


def peak_memory_bytes() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert match is not None
    return int(match[1]) * 1024


def header(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
