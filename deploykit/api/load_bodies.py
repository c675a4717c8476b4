"""Read what a load test sends to /predict: files, sentences, or files with their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.core.errors import BadInput
from deploykit.core.files import check_readable

if TYPE_CHECKING:
    from deploykit.measure.load.bodies import Bodies, Body

MOST_BODIES = 256  # different requests
MOST_BYTES = 64 << 20  # of all
_TYPES = {
    **dict.fromkeys((".jpg", ".jpeg"), "image/jpeg"),
    **{f".{kind}": f"image/{kind}" for kind in ("png", "webp")},
    ".txt": "text/plain",
    ".json": "application/json",
}
_TENSORS = (".npz", ".npy")
_SHOWN = 20  # characters of a sentence, in the report


def find_bodies(
    data: Path | None, text: Sequence[str], expect: Path | None
) -> Callable[[], Bodies] | None:
    """What reads them, once they are wanted; None for arrays, and where nothing is given.

    Raises BadInput for two of the three.
    """
    if text and (data or expect):
        raise BadInput("`text` and `data` or `expect` exclude each other")
    given = [each for each in (data, expect) if each and each.suffix not in _TENSORS]
    return partial(_read_all, data, text, expect) if text or given else None


def _read_all(data: Path | None, text: Sequence[str], expect: Path | None) -> Bodies:
    from deploykit.measure.load.bodies import Bodies, Body
    from deploykit.measure.load.check import one_line
    from deploykit.pipelines.files import input_files, read_answers

    if expect is not None:
        lines = read_answers(expect)[:MOST_BODIES]
        return Bodies([_read(file) for file, _ in lines], [answer for _, answer in lines])
    found = [Body(one_line(each[:_SHOWN]), "text/plain", each.encode()) for each in text]
    size = 0
    for file in [] if data is None else input_files([data]):
        size += file.stat().st_size
        if found and (size > MOST_BYTES or len(found) >= MOST_BODIES):
            break
        found.append(_read(file))
    return Bodies(found)


def _read(file: Path) -> Body:
    from deploykit.measure.load.bodies import Body

    if check_readable(file).stat().st_size > MOST_BYTES:
        raise BadInput(f"{file}: is above the {MOST_BYTES:,} bytes that can be sent")
    kind = _TYPES.get(file.suffix.lower(), "application/octet-stream")
    return Body(file.name, kind, file.read_bytes())
