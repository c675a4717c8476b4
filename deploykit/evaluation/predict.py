"""Answer images or sentences, or run every sample of a data set through an engine into a file."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from deploykit.core.arguments import checked
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput, DeploykitError, NotFound, Unsupported, quote
from deploykit.core.evidence import Interval
from deploykit.core.files import (
    StrPath,
    atomic_write,
    check_readable,
    make_folder,
    read_json,
    write_errors,
    write_json,
)
from deploykit.core.json_value import Record
from deploykit.core.task import CLASSIFY, DETECT, EMBED, SEGMENT, TEXT_CLASSIFY
from deploykit.core.tensors import BATCH, batch_places
from deploykit.engines.data.samples import (
    DataSource,
    Samples,
    find_source,
    read_ahead,
    read_batches,
    write_npz,
)
from deploykit.engines.engine import Arrays, Engine
from deploykit.engines.tasks import MOST_ROWS, TaskEngine
from deploykit.evaluation.accuracy import top1
from deploykit.evaluation.artefacts import (
    ANSWER_TABLE,
    ANSWERS,
    PREDICTIONS,
    Progress,
    claim,
    no_progress,
)
from deploykit.evaluation.feeds import rows_that_run
from deploykit.evaluation.statistics import proportion
from deploykit.evaluation.verify import open_proven

log = logging.getLogger(__name__)

_IMAGE_FILES, _TEXT_FILES = (".jpg", ".jpeg", ".png", ".webp"), (".txt",)


@dataclass(frozen=True)
class Answered(Record):
    """The answers by item: a file's path, or the text itself; their form depends on the task.

    `path`: the file that has the answers instead. `seconds`: decoding, the model and writing.
    """

    engine: Path
    task: str
    device: str
    items: tuple[str, ...]
    answers: tuple[dict[str, Any], ...]
    path: Path | None = None
    seconds: float = 0.0


@checked
def predict_items(
    engine: ArtefactLike,
    files: Sequence[StrPath] = (),
    *,
    text: Sequence[str] = (),
    out: StrPath | None = None,
    device: str = "auto",
    trust: bool = False,
    force: bool = False,
    on_progress: Progress = no_progress,
    on_note: Callable[[str], None] = log.warning,
) -> Answered:
    """Decode images or text files, run them through `engine` and read its answers.

    Args:
        engine: a model that has a task.
        files: paths; a folder stands for its images or text files, whichever the model takes.
        text: sentences.
        out: a .jsonl or .csv file for the answers, one item after another. A file that cannot be
            read then has its error there, and a note counts them; without `out` it is raised.
        device: "auto", "cpu", "cuda" or "cuda:N".
        trust: also run an engine that cannot be verified here.
        force: replace a file that deploykit did not write.
        on_progress: called with the step and the share done.
        on_note: called with each note.

    Returns:
        The answers of `POST /v2/models/M/predict`.

    Raises:
        BadInput: for a model without a task and for an item that it does not take, naming it.
    """
    artefact = Artefact.open(engine)
    task = artefact.task
    if task is None:
        raise BadInput(
            f"{artefact}: has no task, so it takes only tensors",
            hint="export it with `task`; or give its inputs as an .npz file, and `out`",
        )
    path = None if out is None else Path(out)
    if path is not None:
        kind = ANSWER_TABLE if path.suffix.lower() == ".csv" else ANSWERS
        path = claim(path, kind, (engine, *files), force=force)
    suffixes = _IMAGE_FILES if task.image else _TEXT_FILES
    try:
        paths = [file for name in files for file in _files_of(Path(name), suffixes, on_note)]
    except NotFound as exc:
        exc.hint = "give a sentence as `text`" if task.text else exc.hint
        raise
    items: list[Path | str] = [*paths, *text]
    if not items:
        raise BadInput("there is nothing to predict", hint="give image files, or `text`")
    names = tuple(map(str, items))
    shown = [*map(str, paths), *(f"text {n + 1}" for n in range(len(text)))]
    (opened,) = open_proven(artefact, device, trust=trust, on_note=on_note)
    answers: list[dict[str, Any]] = []
    failed: list[str] | None = None if path is None else []
    with opened, ExitStack() as stack:
        steps, started = TaskEngine(opened, task), time.perf_counter()
        write = stack.enter_context(answer_file(path, task.kind)) if path else None
        for at in range(0, len(items), MOST_ROWS):  # the files of one call are in memory at a time
            some = slice(at, min(at + MOST_ROWS, len(items)))
            found = _answer(steps, items[some], shown[some], failed)
            for name, one in zip(names[some], found, strict=True):
                if write is None:
                    answers.append(one)
                else:
                    write(name, one)
            on_progress(f"{some.stop}/{len(items)} items", some.stop / len(items))
        seconds = time.perf_counter() - started
    if failed:
        on_note(f"{len(failed)} of {len(items)} items could not be answered, such as {failed[0]}")
    device, given = opened.device, tuple(answers)
    return Answered(artefact.path, task.kind, device, names, given, path, seconds)


def _answer(
    steps: TaskEngine, items: Sequence[Path | str], names: Sequence[str], failed: list[str] | None
) -> list[dict[str, Any]]:
    """Answer files and strings; the errors of some go to `failed`, unless that is None."""
    try:
        read = [check_readable(i).read_bytes() if isinstance(i, Path) else i for i in items]
        return steps.predict(read, names=names)
    except BadInput as exc:
        if failed is None:
            raise
        if len(items) > 1:
            pairs = zip(items, names, strict=True)
            return [one for item, name in pairs for one in _answer(steps, [item], [name], failed)]
        failed.append(exc.message)
        return [{"error": exc.message}]


_COLUMNS = {
    CLASSIFY: ("label", "score"),
    TEXT_CLASSIFY: ("label", "score"),
    DETECT: ("label", "score", "x1", "y1", "x2", "y2"),
    SEGMENT: ("label", "pixels"),
    EMBED: ("embedding",),
}


@contextlib.contextmanager
def answer_file(out: Path, task: str = "") -> Iterator[Callable[[str, dict[str, Any]], object]]:
    """Yield a function that writes an item's answer: a line of JSON, or rows of a table.

    The table, which a `task` has, has a row for each box or segment; an item without any has one.
    """
    with atomic_write(out) as tmp, tmp.open("w", -1, "utf-8", "backslashreplace", "") as handle:
        columns = ("file", "error", *_COLUMNS.get(task, ()))
        table = csv.DictWriter(handle, columns, extrasaction="ignore")

        def write_rows(name: str, one: dict[str, Any]) -> None:
            for row in one.get("boxes") or one.get("segments") or [one]:
                corners = zip(("x1", "y1", "x2", "y2"), row.get("box", ()), strict=False)
                table.writerow({"file": name, **row, **dict(corners)})

        if out.suffix.lower() == ".csv":
            table.writeheader()
            yield write_rows
        else:
            yield lambda name, one: handle.write(
                json.dumps({"file": name, "answer": one}, ensure_ascii=False) + "\n"
            )


def _files_of(path: Path, suffixes: Sequence[str], on_note: Callable[[str], None]) -> list[Path]:
    if not path.is_dir():
        return [check_readable(path)]
    files = sorted(file for file in path.iterdir() if file.is_file() and file.name[0] != ".")
    found = [file for file in files if file.suffix.lower() in suffixes]
    if not found:
        raise BadInput(f"{path}: holds no file that ends in {', '.join(suffixes)}")
    if others := [file.name for file in files if file not in set(found)]:
        left = f"{len(others)} files that do not end in {', '.join(suffixes)} are left out"
        on_note(f"{path}: {left}: {others[0]}, …")
    return found


@dataclass(frozen=True)
class Predicted(Record):
    """The result of `predict`; `accuracy` is None without labels, or where `note` says why.

    `resumed`: the number of samples that an earlier, stopped run had done; `seconds` were
    spent on the others.
    """

    path: Path
    samples: int
    seconds: float
    device: str
    accuracy: Interval | None
    note: str = ""
    resumed: int = 0


@checked
def predict(
    engine: ArtefactLike,
    data: StrPath,
    out: StrPath,
    *,
    batch: int = 32,
    device: str = "auto",
    on: str = "local",
    trust: bool = False,
    force: bool = False,
    on_progress: Progress = no_progress,
    on_note: Callable[[str], None] = log.warning,
) -> Predicted:
    """Run every sample of an .npz or a folder through `engine` into an .npz of outputs by name.

    Samples are read as they are needed, and outputs kept in `OUT.parts` until all are there: after
    a run was stopped, the same call resumes it. It starts over, with a note, if engine, runtime,
    device, batch or the samples so far have changed.

    Args:
        engine: an artefact.
        data: an .npz or a folder.
        out: the .npz to write.
        batch: samples per call.
        device: "auto", "cpu", "cuda" or "cuda:N".
        trust: also run an engine that cannot be verified here.
        on: "local", or "ray" to spread the batches over a Ray cluster, that of $RAY_ADDRESS or one
            on this machine; the outputs are the same.
        force: start over, and replace a file that deploykit did not write.
        on_progress: called with the step and the share done.
        on_note: called with each note.
    """
    if batch < 1:
        raise BadInput(f"`batch` must be 1 or more, got {batch}")
    if on not in ("local", "ray"):
        raise BadInput(f"`on` {quote(on)}: is neither local nor ray")
    out = claim(out, PREDICTIONS, (engine, data), force=force)
    artefact = Artefact.open(engine)
    with ExitStack() as stack:
        (proven,) = open_proven(artefact, device, trust=trust)
        opened = stack.enter_context(proven)
        source = find_source(Path(data), opened.inputs, task=artefact.task)
        size = _samples_per_call(opened, source, batch, on_note)
        made_by = {"engine": artefact.sha256, "runtime": opened.runtime, "device": opened.device}
        made_by["batch"] = str(size)
        parts = PartialOutputs(out, made_by, source, opened)
        stack.enter_context(parts.opened(restart=force))
        resumed, count = parts.samples, source.count
        if parts.dropped:
            on_note(f"{parts.folder}: begun anew: {parts.dropped} changed")
        elif resumed:
            on_note(f"{out}: goes on after the {resumed} samples that an earlier run has done")
        started = time.perf_counter()
        batches = read_ahead(read_batches(source, size, resumed)) if resumed < count else iter(())
        answers: Iterator[Arrays] = map(opened, batches)
        if on == "ray" and resumed < count:
            from deploykit.evaluation.ray_data import predict_batches

            # `opened` has shown that the file is the one in its manifest
            answers = predict_batches(artefact, opened.device.partition(":")[0], trust, batches)
        for answer in answers:
            parts.append(answer, min(size, count - parts.samples))
            rate = (parts.samples - resumed) / max(time.perf_counter() - started, 1e-9)
            left = timedelta(seconds=round((count - parts.samples) / rate))
            step = f"{parts.samples}/{count} samples, {rate:,.0f}/s, {left} left"
            on_progress(step, parts.samples / count)
        seconds = time.perf_counter() - started
        outputs = parts.arrays()
        write_npz(out, outputs, kind=PREDICTIONS)
        parts.finish()
        _note_nan(outputs, on_note)
        accuracy, note = _accuracy(source, next(iter(outputs.values()), None))
        where = f"ray, {opened.device}" if on == "ray" else opened.device
        return Predicted(out, count, seconds, where, accuracy, note, resumed)


def _samples_per_call(
    engine: Engine, source: DataSource, most: int, on_note: Callable[[str], None]
) -> int:
    """Return the model's fixed batch, else `most`, or 1 where two samples do not run together.

    Raises BadInput if the last batch is not full.
    """
    first = Samples(next(read_batches(source, 2)), None, source.where, axes=source.axes)
    fixed = first.fixed_batch(engine.inputs)
    if fixed is None:
        size, notes = rows_that_run(engine, first, most)
        for note in notes:
            on_note(note)
        return size
    if left := source.count % fixed:
        raise BadInput(
            f"{source.where}: {source.count} samples, the model takes {fixed} at a time, no fewer",
            hint=f"add {fixed - left} or leave out {left}, or export with a batch of any size",
        )
    return fixed


def sample_axis(
    engine: Engine, axes: Mapping[str, int | None], name: str, shape: Sequence[int], samples: int
) -> int:
    """Return the axis of samples of the output `name`, which has this shape for so many samples.

    It is named as that of an input, whose `axes` are given. Without a name of its own, as an axis 0
    that is `N` for want of one, it is the only one of their number that may have another size; else
    axis 0.
    """
    places = [(spec.shape, axes[spec.name]) for spec in engine.inputs]
    names = [n for own, at in places if at is not None and isinstance(n := own[at], str)]
    declared = {spec.name: spec.shape for spec in engine.outputs}.get(name, ())
    place = batch_places(engine.outputs, names).get(name)
    if place is not None and declared[place] != BATCH:
        return place
    sizes = enumerate(zip(declared, shape, strict=False))
    free = bool(names)
    fitting = [at for at, (n, size) in sizes if size == samples and isinstance(n, str) is free]
    return fitting[0] if len(fitting) == 1 else 0


def _note_nan(outputs: Mapping[str, np.ndarray], on_note: Callable[[str], None]) -> None:
    """Pass on a note for each output that is NaN somewhere; it may be larger than the memory."""
    for name, values in outputs.items():
        if values.dtype.kind in "fc" and values.size:
            rows = np.flatnonzero(np.isnan(values.max(axis=tuple(range(1, values.ndim)))))
            if rows.size:
                what = f"{rows.size} of {len(values)} rows, first in {rows[0]}"
                on_note(f"output '{name}' is NaN in {what}")


def _accuracy(source: DataSource, answers: np.ndarray | None) -> tuple[Interval | None, str]:
    """Top-1 accuracy of the first output; None where there is none, and a note."""
    labels = source.read_labels()
    if labels is None or answers is None:
        names = ", ".join(map(quote, source.unused))
        why = f"no accuracy: run without {names}; labels are an array named 'labels'"
        return None, why if names else ""
    try:
        scores = top1(answers, labels, source.where)
        return proportion(round(scores.sum()), len(scores)), ""
    except BadInput as exc:  # labels of another kind: targets, tokens, masks
        return None, f"no accuracy: {exc.message}" + (f"; {exc.hint}" if exc.hint else "")


_EVERY_S = 10.0  # between two states
_STATE, _KIND = "state.json", "deploykit predictions"
_UNSAVED = f".{_STATE}."  # a killed run's, while it wrote its state


@dataclass
class _Column:
    """One output: the axis of its samples, the type and shape of one, and the file of all so far.

    `nbytes`: where the file ends for the samples that are done; after a kill it may be longer.
    """

    axis: int
    dtype: np.dtype
    row: tuple[int, ...]
    file: BinaryIO
    nbytes: int = 0


@dataclass
class PartialOutputs:
    """Outputs on disk: a file of raw values for each, and `state.json`, which names the others.

    The state holds all that they depend on, `made_by` and the stamp of the samples so far, and
    where the files end. They are in `OUT.parts/`. `samples`: the number done. `dropped`: what has
    changed since an earlier run, so that its outputs were dropped.
    """

    out: Path
    made_by: Mapping[str, str]
    source: DataSource
    engine: Engine
    samples: int = 0
    dropped: str = ""
    _columns: dict[str, _Column] = field(default_factory=dict)
    _constants: dict[str, np.ndarray] = field(default_factory=dict)
    _files: ExitStack = field(default_factory=ExitStack)
    _saved_s: float = 0.0

    @property
    def folder(self) -> Path:
        return self.out.with_name(f"{self.out.name}.parts")

    @contextlib.contextmanager
    def opened(self, *, restart: bool = False) -> Iterator[PartialOutputs]:
        """Take up what an earlier run left, unless `restart`; keep it unless it is finished.

        Raises BadInput where another process writes it, and for a folder of other files.
        """
        with ExitStack() as stack:
            lock = os.open(make_folder(self.folder), os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, lock)
            with contextlib.suppress(OSError):  # some file systems have no locks
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise BadInput(f"{self.out}: another process is writing it") from None
            state = self._read_state()
            if state is not None and not restart:
                try:
                    self.dropped = self._read_columns(state)
                except (KeyError, TypeError, ValueError, AttributeError):  # edited by hand
                    self.dropped = "its state"
            if not self.samples:
                with write_errors(self.out):
                    self._clear()
                self._save()
            stack.callback(self._close)
            yield self

    def _read_state(self) -> Any:
        """Return what an earlier run left; None without one. Raises BadInput for other files."""
        if all(path.name.startswith(_UNSAVED) for path in self.folder.iterdir()):
            return None
        with contextlib.suppress(BadInput):
            state = read_json(self.folder / _STATE)
            if isinstance(state, dict) and state.get("kind") == _KIND:
                return state
        raise BadInput(
            f"{self.folder}: exists, and is not what deploykit wrote there",
            hint="it is for an unfinished run: remove it, or choose another `out`",
        )

    def _close(self) -> None:
        with contextlib.suppress(DeploykitError):  # such as a full disk, reported before
            self._save()
        with contextlib.suppress(OSError):
            self._files.close()
        if not self.samples:
            with contextlib.suppress(OSError):  # somebody else's file is in it
                self._clear()
                self.folder.rmdir()

    def append(self, outputs: Mapping[str, np.ndarray], samples: int) -> None:
        """Add the outputs of the next `samples`.

        A constant without axes, as a model's scale, is kept for each sample. Raises Unsupported
        on outputs that do not join to one array, and on a full disk.
        """
        ends: list[tuple[_Column, int]] = []
        for name, values in outputs.items():
            column, rows = self._rows(name, values, samples)
            content: Any = np.ascontiguousarray(rows).data
            if rows.dtype.hasobject:  # strings, one line of JSON for each sample
                content = "".join(f"{json.dumps(row)}\n" for row in rows.tolist()).encode()
            with write_errors(self.out):
                ends.append((column, column.nbytes + column.file.write(content)))
        for column, nbytes in ends:
            column.nbytes = nbytes
        self.samples += samples
        if time.monotonic() - self._saved_s > _EVERY_S:
            self._save()

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all outputs by name, mapped from their files; strings are read."""
        self._save()
        found: dict[str, np.ndarray] = {}
        for name, column in self._columns.items():
            path, row, dtype = column.file.name, column.row, column.dtype
            values: np.ndarray
            if dtype.hasobject:
                lines = Path(path).read_bytes()[: column.nbytes].splitlines()
                values = np.array([json.loads(line) for line in lines], np.str_).reshape(-1, *row)
            elif column.nbytes:
                shape = (column.nbytes // math.prod(row, start=dtype.itemsize), *row)
                values = np.memmap(path, dtype, "r", shape=shape)
            else:  # an empty file cannot be mapped
                values = np.zeros((0 if math.prod(row) else self.samples, *row), dtype)
            found[name] = np.moveaxis(values, 0, column.axis)
        return found

    def finish(self) -> None:
        """Forget the parts: their outputs are in the final file."""
        self.samples = 0

    def _rows(self, name: str, values: np.ndarray, samples: int) -> tuple[_Column, np.ndarray]:
        """Return an output's column, and its values with the samples first. Raises Unsupported."""
        column, rows, axis = self._columns.get(name), values, 0
        if not values.ndim:
            if self._constants.setdefault(name, values) != values:
                raise Unsupported(f"output '{name}' has no axis of samples, and is no constant")
            rows = np.full(samples, values)
        else:
            axes, shape = self.source.axes, values.shape
            axis = column.axis if column else sample_axis(self.engine, axes, name, shape, samples)
            rows = np.moveaxis(values, axis, 0)
        if column is None:
            column = self._columns[name] = self._open(axis, rows.dtype, rows.shape[1:])
        if (column.dtype, column.row) != (rows.dtype, rows.shape[1:]):
            raise Unsupported(
                f"output '{name}' is {rows.dtype}{list(rows.shape[1:])} for each of samples "
                f"{self.samples} to {self.samples + samples - 1}, and {column.dtype}"
                f"{list(column.row)} for those before: its size depends on the data",
                hint="such outputs do not join to one array: call `dk.load(...)` from Python",
            )
        return column, rows

    def _open(self, axis: int, dtype: np.dtype, row: tuple[int, ...]) -> _Column:
        path = self.folder / f"{len(self._columns)}.bin"
        with write_errors(self.out):
            file = self._files.enter_context(path.open("a+b"))
        return _Column(axis, dtype, row, file)

    def _save(self) -> None:
        """Sync what was appended to disk, so that it survives a crash of the machine."""
        outputs = {}
        with write_errors(self.out):
            for name, column in self._columns.items():
                column.file.flush()
                os.fsync(column.file.fileno())
                kind = {"dtype": column.dtype.str, "row": column.row, "axis": column.axis}
                outputs[name] = {**kind, "bytes": column.nbytes}
        state = {"kind": _KIND, "count": self.samples, "outputs": outputs}
        write_json(self.folder / _STATE, {**state, **self._depends_on(self.samples)})
        self._saved_s = time.monotonic()

    def _depends_on(self, samples: int) -> dict[str, str]:
        return {**self.made_by, "samples": self.source.stamp(samples)}

    def _read_columns(self, state: Mapping[str, Any]) -> str:
        """Resume an earlier run; return what has changed since, so that this is impossible."""
        depends_on = self._depends_on(state["count"]).items()
        if changed := [name for name, value in depends_on if state[name] != value]:
            return " and ".join(changed)
        for name, kind in state["outputs"].items():
            column = self._open(kind["axis"], np.dtype(kind["dtype"]), tuple(kind["row"]))
            self._columns[name] = column
            column.nbytes = kind["bytes"]
            if column.file.tell() < column.nbytes:
                return "its files"
            column.file.truncate(column.nbytes)
        self.samples = state["count"]
        return ""

    def _clear(self) -> None:
        """Remove the files of this and an earlier run."""
        self._files.close()
        self._columns = {}
        # the state last: without it a later run would not know the others for deploykit's
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name == _STATE):
            own = path.suffix == ".bin" and path.stem.isdecimal()
            if own or path.name.startswith((_STATE, _UNSAVED)):
                path.unlink()
