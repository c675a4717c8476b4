"""Write an artefact to a temporary path, then keep it, or reject it as `NAME.rejected.EXT`.

A rejected artefact leaves the previous file as it was. Weights (`NAME.data`) and golden samples
move with it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from deploykit.core.artefact import Artefact, Manifest, write_manifest
from deploykit.core.errors import BadInput, DeploykitError, GateFailed
from deploykit.core.evidence import (
    Drop,
    Evaluation,
    Evidence,
    Interval,
    Parity,
    SearchRecord,
    WeightsFile,
)
from deploykit.core.files import StrPath, check_inside, sha256, temporary_folder
from deploykit.core.json_value import Record
from deploykit.core.machine import tool_versions
from deploykit.core.task import TOKENIZER, Task
from deploykit.evaluation.outputs import SIDECARS, claim, rejected
from deploykit.evaluation.parity import DRAW_NONE, DRAWS_NUMBERS

if TYPE_CHECKING:
    from deploykit.graph.graph import Graph

Progress = Callable[[str, float], None]  # the current step, share done 0..1


def no_progress(what: str, share: float) -> None:
    """Ignore progress."""


def span(progress: Progress, start: float, end: float) -> Progress:
    """Report a step that takes the whole from share `start` to share `end`."""
    return lambda what, share: progress(what, start + (end - start) * share)


@dataclass(frozen=True)
class Made(Record):
    """An artefact that was written, its manifest, and notes for the user."""

    path: Path
    manifest: Manifest
    notes: tuple[str, ...] = ()

    shown: ClassVar[tuple[str, ...]] = ("parity", "accuracy", "drop", "evaluation", "search")
    in_notebook = ("path", "notes", "parity", "evaluation", "search")

    @property
    def evidence(self) -> Evidence:
        return self.manifest.evidence

    @property
    def parity(self) -> Parity | None:
        """The comparison with what it was made from."""
        return self.evidence.parity

    @property
    def accuracy(self) -> Interval | None:
        """The score of a trained checkpoint on its test split."""
        return self.evidence.training.score if self.evidence.training else None

    @property
    def evaluation(self) -> Evaluation | None:
        """Return the evaluation of a lower precision."""
        return self.evidence.accuracy

    @property
    def drop(self) -> Drop | None:
        """Return the loss of a lower precision on labelled data."""
        return self.evaluation.drop if self.evaluation else None

    @property
    def search(self) -> SearchRecord | None:
        """The steps of `auto`."""
        return self.evidence.search


def destination(
    model: Artefact,
    out: StrPath | None,
    suffix: str,
    inputs: Iterable[object],
    *,
    kind: str = "onnx",
    force: bool = False,
) -> Path:
    """Return `out`, or else a path next to the model. Raises BadInput as `claim` does."""
    place = Path(out) if out is not None else model.path.with_suffix(suffix)
    return claim(place, kind, (model, *inputs), force=force)


@contextlib.contextmanager
def stage(out: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder next to `out`, on its disk: keeping it is a rename.

    An error names a file without the folder, which is gone by then; for a full disk it names `out`.
    """
    with temporary_folder(out) as folder:
        try:
            yield folder / out.name
        except DeploykitError as exc:

            def shown(text: str) -> str:  # others there are steps on the way to it
                text = text.replace(f"{folder}/{out.name}: no space", f"{out}: no space")
                text = text.replace(f"{folder}/{out.name}", out.name)
                return re.sub(re.escape(f"{folder}/") + r"[^\s:]*", out.name, text)

            exc.message, exc.hint = shown(exc.message), exc.hint and shown(exc.hint)
            exc.args = (exc.message,)
            raise


def keep(tmp: Path, made: Made) -> Made:
    """Move `tmp` to `made.path`: weights and samples first, the manifest last."""
    for suffix in SIDECARS.values():
        source = tmp.with_name(tmp.name + suffix)
        target = made.path.with_name(made.path.name + suffix)
        if source.exists():
            source.replace(target)
        else:
            target.unlink(missing_ok=True)  # left by the previous file
    tmp.replace(made.path)
    write_manifest(made.path, made.manifest)
    return made


def reject(tmp: Path, made: Made) -> Made:
    """Move `tmp` next to `made.path`, as NAME.rejected.EXT."""
    place = rejected(made.path)
    if tmp.with_name(f"{tmp.name}.data").exists():
        from deploykit.graph.storage import point_to

        point_to(tmp, f"{place.name}.data")
        made = replace(made, manifest=replace(made.manifest, sha256=sha256(tmp)))
    moved = {
        name: replace(found, file=place.name + suffix)
        for name, suffix in SIDECARS.items()
        if (found := getattr(made.evidence, name, None)) is not None
    }
    evidence = replace(made.evidence, **moved)
    task = made.manifest.task and made.manifest.task.named_after(place.name)
    made = replace(made, manifest=replace(made.manifest, evidence=evidence, task=task))
    return keep(tmp, replace(made, path=place))


def carry_task(source: Artefact, to: Path) -> Task | None:
    """Return the task of `source` for the file at `to`, and copy its tokenizer next to that.

    Raises BadInput where the tokenizer is not the one that the manifest names.
    """
    task = source.task
    if task is not None and task.text is not None:
        tokenizer = Path(f"{to}{TOKENIZER}")
        copy_checked(source.path, task.text.tokenizer, task.text.sha256, tokenizer)
    return task and task.named_after(to.name)


def copy_checked(model: Path, name: str, digest: str, out: Path) -> None:
    check_inside(model.parent, name, str(model))
    source = model.with_name(name)
    shutil.copyfile(source, out)
    if sha256(out) != digest:
        raise BadInput(f"{source}: is not the file that the manifest of {model.name} describes")


def keep_if_equal(tmp: Path, made: Made, parity: Parity) -> Made:
    if parity.passed:
        return keep(tmp, made)
    made = reject(tmp, made)
    try:
        parity.raise_if_over()
    except GateFailed as exc:
        hint = DRAW_NONE if DRAWS_NUMBERS in made.notes else exc.hint
        raise GateFailed(
            f"{exc.message}; the file is kept as {made.path}", hint=hint, result=made
        ) from None
    return made


def onnx_manifest(
    graph: Graph,
    sources: Sequence[str],
    *,
    tools: Sequence[str],
    evidence: Evidence,
    built_on: dict[str, str] | None = None,
    task: Task | None = None,
) -> Manifest:
    path = graph.path
    data = path.with_name(f"{path.name}.data")
    weights = WeightsFile(data.name, sha256(data)) if data.exists() else None
    return Manifest(
        format="onnx",
        inputs=graph.inputs,
        outputs=graph.outputs,
        precision=graph.precision,
        sha256=sha256(path),
        made_from=tuple(sources),
        made_with=tool_versions(*tools),
        built_on=built_on or {},
        evidence=replace(evidence, weights=weights),
        task=task,
    )
