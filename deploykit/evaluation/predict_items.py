"""Answer images or sentences with a model that has a task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.core.arguments import checked
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput
from deploykit.core.files import StrPath, check_readable
from deploykit.core.json_value import Record
from deploykit.engines.tasks.engine import MOST_ROWS, TaskEngine
from deploykit.evaluation.verify import open_proven

log = logging.getLogger(__name__)

_IMAGE_FILES, _TEXT_FILES = (".jpg", ".jpeg", ".png", ".webp"), (".txt",)


@dataclass(frozen=True)
class Answered(Record):
    """The answers by item: a file's path, or the text itself; their form depends on the task."""

    engine: Path
    task: str
    device: str
    items: tuple[str, ...]
    answers: tuple[dict[str, Any], ...]


@checked
def predict_items(
    engine: ArtefactLike,
    files: Sequence[StrPath] = (),
    *,
    text: Sequence[str] = (),
    device: str = "auto",
    trust: bool = False,
    on_note: Callable[[str], None] = log.warning,
) -> Answered:
    """Decode `files`, images or text files, run them through `engine` and read its answers.

    A folder stands for the images in it, or for its text files, as the model takes. `text`:
    sentences. The answers are those of `POST /v2/models/M/predict`. `trust`: see `open_proven`.
    Raises BadInput for a model without a task and for an item that it does not take, naming it.
    """

    artefact = Artefact.open(engine)
    task = artefact.task
    if task is None:
        raise BadInput(
            f"{artefact}: has no task, so it takes only tensors",
            hint="export it with `task`; or give its inputs as an .npz file, and `out`",
        )
    suffixes = _IMAGE_FILES if task.image else _TEXT_FILES
    names = [*(str(file) for each in files for file in _files_of(Path(each), suffixes)), *text]
    if not names:
        raise BadInput("there is nothing to predict", hint="give image files, or `text`")
    count = len(names) - len(text)
    for name in names[:count]:
        check_readable(Path(name))
    (opened,) = open_proven(artefact, device, trust=trust, on_note=on_note)
    answers: list[dict[str, Any]] = []
    with opened:
        steps = TaskEngine(opened, task)
        for at in range(0, len(names), MOST_ROWS):  # the files of one call are in memory at a time
            some = range(at, min(at + MOST_ROWS, len(names)))
            answers += steps.predict(
                [
                    check_readable(Path(names[n])).read_bytes() if n < count else names[n]
                    for n in some
                ],
                names=[names[n] if n < count else f"text {n - count + 1}" for n in some],
            )
        return Answered(artefact.path, task.kind, opened.device, tuple(names), tuple(answers))


def _files_of(path: Path, suffixes: Sequence[str]) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(each for each in path.iterdir() if each.suffix.lower() in suffixes)
    if not found:
        raise BadInput(f"{path}: holds no file that ends in {', '.join(suffixes)}")
    return found
