"""The Dockerfiles that come with deploykit, and the digests of the images that they start from."""

from __future__ import annotations

import re
from pathlib import Path

from deploykit.core import paths
from deploykit.core.errors import BadInput

LOCK = "Dockerfile.lock"
UNPINNED = "unpinned"
_ROW = re.compile(rf"(?P<image>\S+:\S+) (?P<digest>sha256:[0-9a-f]{{64}}|{UNPINNED})")


def container_file(name: str) -> Path:
    """`Dockerfile.x86`, `Dockerfile.jetson`, `Dockerfile.lock` or `.dockerignore`."""
    packaged = paths.folder("containers") / name
    return packaged if packaged.is_file() else Path(paths.__file__).parents[2] / name


def read_digests(path: Path) -> dict[str, str | None]:
    """`repository:tag` of each row -> its digest `sha256:...`; None: nobody has looked it up yet.

    Raises BadInput on a row that is not `IMAGE:TAG DIGEST`, and on a second row for one image.
    """
    found: dict[str, str | None] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        row = _ROW.fullmatch(line)
        if row is None or row["image"] in found:
            raise BadInput(
                f"{path.name}: line {number}: '{line}' is not IMAGE:TAG sha256:... of a new image",
                hint="write it with: python scripts/pin_bases.py",
            )
        found[row["image"]] = None if row["digest"] == UNPINNED else row["digest"]
    return found


def pin(image: str) -> str:
    """`image` with its digest, `repository:tag@sha256:...`, where the lock file has one."""
    digest = read_digests(container_file(LOCK)).get(image)
    return f"{image}@{digest}" if digest else image
