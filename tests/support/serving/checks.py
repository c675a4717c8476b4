"""What the process that checks a replaced file may do; another process imports these."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np


def passes(path: Path) -> None:
    pass


def hangs_on_bad(path: Path) -> None:
    """For ever, unless the file is small, as a good model is here."""
    if path.stat().st_size > 1000:
        path.with_name("checking").write_text(str(os.getpid()))
        threading.Event().wait()


def dies(path: Path) -> None:
    os.abort()


def prints(path: Path) -> None:
    os.write(1, b"[1]\nnull\n" * 1000)
    os.write(2, b"x" * 200_000)


def fills_memory(path: Path) -> None:
    kept: list[np.ndarray] = []
    while len(kept) < 4096:
        kept.append(np.empty(1 << 30, np.uint8))  # reserved, not touched


def leaves_at_once(path: Path) -> None:
    os._exit(3)
