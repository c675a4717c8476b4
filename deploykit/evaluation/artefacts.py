"""The output of a command: checked before any work, written to a temporary path, kept or rejected.

An output is none of the command's inputs, its name does not promise another kind of file, and what
it replaces was written by deploykit and not changed since, unless `force` is set: no file of the
user's is lost. A rejected artefact is kept as `NAME.rejected.EXT`, and the previous file stays as
it was. Weights (`NAME.data`) and golden samples move with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from deploykit.core.artefact import Artefact, Manifest, load_manifest, sniff, write_manifest
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
from deploykit.core.files import (
    StrPath,
    check_inside,
    check_utf8,
    check_writable,
    make_folder,
    manifest_path,
    new_folder,
    sha256,
    temporary_folder,
    write_errors,
)
from deploykit.core.json_value import Record
from deploykit.core.machine import tool_versions
from deploykit.core.runtime import RUNTIMES
from deploykit.core.task import TOKENIZER, Task
from deploykit.evaluation.parity import DRAW_NONE, DRAWS_NUMBERS
from deploykit.graph.parse import external_files

if TYPE_CHECKING:
    from deploykit.graph.graph import Graph

PREDICTIONS, SPLIT = "predictions", "split"  # kinds of .npz that deploykit writes
ANSWERS = "answers"  # JSON Lines: a file and its answer
ANSWER_TABLE = "answer table"  # the same as CSV
CHECKPOINT = "checkpoint"  # the state of a training run
REPORT = ("report.json", "report.md", "report.html")
SIDECARS: Mapping[str, str] = {  # evidence, or "tokenizer" of the task -> suffix
    "weights": ".data",
    "golden": ".golden.npz",
    "tokenizer": TOKENIZER,
}
_ENDS: Mapping[str, tuple[str, ...]] = {  # kind -> how the names of its files end
    **{each.opens[0]: (Path(each.suffix).suffix,) for each in RUNTIMES.values() if each.builder},
    "tensorrt": (".trt", ".plan", ".engine"),
    "torch": (".pt", ".pth", ".ckpt"),
    PREDICTIONS: (".npz",),
    SPLIT: (".npz",),
    ANSWERS: (".jsonl",),
    ANSWER_TABLE: (".csv",),
    CHECKPOINT: (".ckpt",),
}
_MARKS = {  # kind -> what the first or the last bytes of a file of deploykit's hold
    PREDICTIONS: b"deploykit predictions",
    SPLIT: b"deploykit split",
    ANSWERS: b'", "answer": ',
    ANSWER_TABLE: b"file,error,",
    CHECKPOINT: b"",  # any: the run that resumes checks its contents
}
_OTHERS = ".safetensors .pt2 .npy .json .csv .txt .md .html .toml .yaml .py .zip .png .jpg .svg"
_KNOWN = {end for ends in _ENDS.values() for end in ends} | {".jpeg", *_OTHERS.split()}


def claim(out: StrPath, kind: str, inputs: Iterable[object], *, force: bool = False) -> Path:
    """Return the path of an output once it, and the files next to it, may be written.

    `kind`: one of `_ENDS`. `inputs`: all that the command reads: paths and artefacts; anything else
    is skipped. Raises BadInput.
    """
    place, end = Path(out), Path(out).suffix.lower()
    option = {SPLIT: "save_splits", CHECKPOINT: "checkpoint"}.get(kind, "out")
    if end in _KNOWN - set(_ENDS[kind]):
        raise BadInput(
            f"{place}: the name says {end}, and the file would be {_ENDS[kind][0]}",
            hint=f"`{option}` {place.with_suffix(_ENDS[kind][0])}",
        )
    check_writable(place)
    given = tuple(paths(inputs))
    if kind in _MARKS:
        check_inputs((place,), given)
        check_owned((place,), {place.name} if _marked(place, kind) else (), force, option)
        return place
    check_utf8(place)
    written = [place, rejected(place)]
    if kind == "tensorrt":  # the graph that fails its gate before it is built
        written.append(rejected(place.with_suffix(".onnx")))
    with write_errors(place):  # the names of the files next to it may be too long
        for file in written:
            ours = _artefact(file, kind)
            check_inputs((file, *_next_to(file)), given, keeps=file.name in ours)
            check_owned((file, *_next_to(file)), ours, force)
    return place


def claim_report(
    folder: StrPath,
    inputs: Iterable[object],
    *,
    force: bool = False,
    keys: Collection[str] = ("report", "machine", "verdict"),
) -> Path:
    """Return the folder of a report, which can be made or written to; `keys`: of its JSON.

    A missing folder is not made yet, so that an interrupted command leaves none. Raises
    BadInput.
    """
    with new_folder(Path(folder)) as place:
        files = tuple(place / name for name in REPORT)
        check_inputs(files, tuple(paths(inputs)))
        ours: Collection[str] = ()
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(files[0].read_text(encoding="utf-8"))
            ours = REPORT if isinstance(found, dict) and set(keys) <= set(found) else ()
        check_owned(files, ours, force)
    return place


def claim_splits(folder: StrPath, inputs: Iterable[object], *, force: bool = False) -> list[Path]:
    """Return the files of calibration and test data; the folder is made. Raises BadInput."""
    place, given = make_folder(Path(folder)), tuple(inputs)
    return [claim(place / f"{n}.npz", SPLIT, given, force=force) for n in ("calibration", "test")]


def claim_run(
    inputs: Iterable[object], *, checkpoint: Path | None = None, tensorboard: Path | None = None
) -> None:
    """Check what a training run writes next to its model. Raises BadInput.

    `checkpoint` may exist: the run that resumes from it checks its contents.
    """
    if checkpoint is not None:
        given = [Path(each) for each in inputs if isinstance(each, (str, os.PathLike))]
        claim(checkpoint, CHECKPOINT, given)
        if checkpoint.resolve() in (each.resolve() for each in given):
            raise overwrites(checkpoint)
    if tensorboard is not None:
        make_folder(tensorboard)


def named_files(*references: str | None) -> list[str]:
    """Return the files in options that also take other values: `file.py:name`, `FILE.toml`."""
    files = [each.rpartition(":")[0] if ".py:" in each else each for each in references if each]
    return [each for each in files if each.endswith((".py", ".toml"))]


def rejected(place: Path) -> Path:
    """Return the path of a file that was written and fails its gate."""
    return place.with_name(f"{place.stem}.rejected{place.suffix}")


def _next_to(place: Path) -> tuple[Path, ...]:
    names = (place.with_name(place.name + suffix) for suffix in SIDECARS.values())
    return (manifest_path(place), *names)


def paths(inputs: Iterable[object]) -> Iterator[Path]:
    """Yield the files and folders that are read, with a model's weights and sidecars."""
    for each in inputs:
        if not isinstance(each, (str, os.PathLike, Artefact)):
            continue
        path = Path(each)
        with contextlib.suppress(OSError, ValueError, DeploykitError):
            if path.is_dir():
                yield path
            elif path.is_file():
                yield path
                others = list(_next_to(path))
                if sniff(path) == "onnx":
                    others += [path.parent / name for name in external_files(path)]
                yield from filter(os.path.isfile, others)


def check_inputs(files: Iterable[Path], inputs: Iterable[Path], *, keeps: bool = False) -> None:
    """Raise BadInput where a file is an input. `keeps`: an input folder may hold it already."""
    for file in filter(Path.exists, files):
        for given in inputs:
            inside = not keeps and given.is_dir() and given.resolve() in file.resolve().parents
            if inside or given.samefile(file):
                raise overwrites(file)


def overwrites(file: Path) -> BadInput:
    message = f"{file}: is an input of this command, and would be overwritten"
    return BadInput(message, hint="choose another `out`")


def check_owned(
    files: Iterable[Path], ours: Collection[str], force: bool, option: str = "out"
) -> None:
    """Raise BadInput for a file whose name is not among `ours`, those that deploykit wrote."""
    for file in files:
        if not force and os.path.lexists(file) and file.name not in ours:
            raise BadInput(
                f"{file}: exists, and is not what deploykit wrote there",
                hint=f"choose another `{option}`, or replace the file with `force`",
            )


def _artefact(place: Path, kind: str) -> set[str]:
    """Return the names of a model file, if it is unchanged or gone, and of its sidecars."""
    with contextlib.suppress(DeploykitError, OSError):
        there = os.path.lexists(place)
        found = Artefact(place).manifest if there else load_manifest(place)
        if found is not None and (found.format == kind or not there):
            sidecars = (getattr(found.evidence, name, None) for name in SIDECARS)
            names = {s.file for s in sidecars if s}
            text = found.task.text if found.task else None
            names |= {text.tokenizer} if text else set()
            return {place.name, manifest_path(place).name, *names}
    return set()


def _marked(place: Path, kind: str) -> bool:
    """Return whether a file begins or ends like those that deploykit writes."""
    with contextlib.suppress(OSError), place.open("rb") as file:
        head = file.read(1 << 16)
        file.seek(-min(64, file.seek(0, os.SEEK_END)), os.SEEK_END)
        return _MARKS[kind] in head or _MARKS[kind] in file.read()
    return False


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
    place, manifest = rejected(made.path), made.manifest
    if tmp.with_name(f"{tmp.name}.data").exists():
        from deploykit.graph.storage import point_to

        point_to(tmp, f"{place.name}.data")
        manifest = replace(manifest, sha256=sha256(tmp))
    moved = {
        name: replace(found, file=place.name + suffix)
        for name, suffix in SIDECARS.items()
        if (found := getattr(manifest.evidence, name, None)) is not None
    }
    task = manifest.task and manifest.task.named_after(place.name)
    evidence = replace(manifest.evidence, **moved)
    manifest = replace(manifest, evidence=evidence, task=task)
    return keep(tmp, replace(made, path=place, manifest=manifest))


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


def find_sources(path: Path, manifest: Manifest) -> Iterator[Path]:
    """Yield the ONNX files next to `path` that it was made from, then the sources of these."""
    hashes, wanted = {}, list(manifest.made_from)
    for file in sorted(path.parent.glob("*.onnx")) if wanted else ():
        with contextlib.suppress(DeploykitError):  # it cannot be read
            hashes[sha256(file)] = file
    while wanted:
        if (found := hashes.pop(wanted.pop(0), None)) is not None:
            yield found
            before = Artefact(found).manifest
            wanted += before.made_from if before else ()
