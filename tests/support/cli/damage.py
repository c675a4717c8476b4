"""Files that are damaged, and one that runs code when it is unpickled."""

from __future__ import annotations

from pathlib import Path

import numpy as np


class Bomb:
    """Unpickling this writes a file: proof that code in a checkpoint ran."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.write_text, (self.marker, "ran"))


def damaged(kind: str, folder: Path, good: Path) -> Path:
    """A file that is wrong in the way its name says."""
    path = folder / f"{kind}{good.suffix}"
    content = good.read_bytes()
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(
            {
                "empty": b"",
                "half": content[: len(content) // 2],
                "one-byte": content[:1],
                "last-byte-missing": content[:-1],
                "noise": np.random.default_rng(0).bytes(100_000),
                "page": b"<!DOCTYPE html><html>404 not found</html>",
                "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            }[kind]
        )
    return path
