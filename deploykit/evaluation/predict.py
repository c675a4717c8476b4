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
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
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
    manifest_path,
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

_BLOCK = 4096  # rows of outputs at a time
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
    try:
        for name in files:
            if not Path(name).is_dir():
                check_readable(Path(name))
    except NotFound as exc:
        exc.hint = "give a sentence as `text`" if task and task.text else exc.hint
        raise
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
    found = [str(f) for path in files for f in _files_of(Path(path), suffixes, on_note)]
    names = [*found, *text]
    if not names:
        raise BadInput("there is nothing to predict", hint="give image files, or `text`")
    count = len(found)
    (opened,) = open_proven(artefact, device, trust=trust, on_note=on_note)
    answers: list[dict[str, Any]] = []
    failed: list[str] | None = None if path is None else []
    with opened, ExitStack() as stack:
        steps, started = TaskEngine(opened, task), time.perf_counter()
        keep = None if path is None else stack.enter_context(_answer_file(path, task.kind))
        for at in range(0, len(names), MOST_ROWS):  # the files of one call are in memory at a time
            some = range(at, min(at + MOST_ROWS, len(names)))
            items = [Path(names[n]) if n < count else names[n] for n in some]
            shown = [names[n] if n < count else f"text {n - count + 1}" for n in some]
            for n, one in zip(some, _answer(steps, items, shown, failed), strict=True):
                if keep is not None:
                    keep(names[n], one)
                else:
                    answers.append(one)
            on_progress(f"{some.stop}/{len(names)} items", some.stop / len(names))
        seconds = time.perf_counter() - started
    if failed:
        on_note(f"{len(failed)} of {len(names)} items could not be answered, such as {failed[0]}")
    asked, answered = tuple(names), tuple(answers)
    return Answered(artefact.path, task.kind, opened.device, asked, answered, path, seconds)


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
def _answer_file(out: Path, task: str) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """Yield a function that writes an item's answer: a line of JSON, or rows of a table.

    The table has a row for each box or segment; an item without any has one row.
    """
    with atomic_write(out) as tmp, tmp.open("w", encoding="utf-8", newline="") as handle:
        table = csv.DictWriter(handle, ("file", "error", *_COLUMNS[task]), extrasaction="ignore")
        if as_table := out.suffix.lower() == ".csv":
            table.writeheader()

        def write(name: str, one: dict[str, Any]) -> None:
            if not as_table:
                handle.write(json.dumps({"file": name, "answer": one}, ensure_ascii=False) + "\n")
                return
            for row in one.get("boxes") or one.get("segments") or [one]:
                corners = dict(zip(("x1", "y1", "x2", "y2"), row.get("box", ()), strict=False))
                table.writerow({"file": name, **row, **corners})

        yield write


def _files_of(path: Path, suffixes: Sequence[str], on_note: Callable[[str], None]) -> list[Path]:
    if not path.is_dir():
        return [path]
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
        parts = stack.enter_context(PartialOutputs(out, made_by, source, opened, restart=force))
        resumed = parts.samples
        if parts.dropped:
            on_note(f"{parts.folder}: begun anew: {parts.dropped} changed")
        elif resumed:
            on_note(f"{out}: goes on after the {resumed} samples that an earlier run has done")
        run = (
            partial(_on_ray, artefact, opened, trust=trust) if on == "ray" else partial(map, opened)
        )
        started = time.perf_counter()
        _append_all(parts, source, size, run, on_progress)
        seconds = time.perf_counter() - started
        outputs = parts.arrays()
        write_npz(out, outputs, kind=PREDICTIONS)
        parts.finish()
        _note_nan(outputs, on_note)
        accuracy, note = _accuracy(source, next(iter(outputs.values()), None))
        where = f"ray, {opened.device}" if on == "ray" else opened.device
        return Predicted(out, source.count, seconds, where, accuracy, note, resumed)


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


class SampleAxes:
    """Finds the axis of samples of each output by its name, or its shape for the first samples.

    `axes`: those of the inputs.
    """

    def __init__(self, engine: Engine, axes: Mapping[str, int | None]) -> None:
        batch = [each.shape[n] for each in engine.inputs if (n := axes[each.name]) is not None]
        names = [size for size in batch if isinstance(size, str)]
        self._shapes = {spec.name: spec.shape for spec in (*engine.inputs, *engine.outputs)}
        self._named = batch_places(engine.outputs, names)
        self._free = bool(names)
        self.known: dict[str, int] = {}

    def find(self, name: str, shape: Sequence[int] = (), samples: int = 0) -> int:
        """Return the axis of an output that has this shape for so many samples.

        Without a name of its own, as an axis 0 that is `N` for want of one, it is the only one of
        their number that may have another size; else axis 0.
        """
        if name not in self.known:
            declared = self._shapes.get(name, ())
            sizes = zip(declared, shape, strict=False)
            places = [
                place
                for place, (own, size) in enumerate(sizes)
                if size == samples and isinstance(own, str) is self._free
            ]
            place = places[0] if len(places) == 1 else 0
            named = self._named.get(name)
            self.known[name] = place if named is None or declared[named] == BATCH else named
        return self.known[name]


def _append_all(
    parts: PartialOutputs,
    source: DataSource,
    size: int,
    run: Callable[[Iterator[Arrays]], Iterator[Arrays]],
    on_progress: Progress,
) -> None:
    """Run the remaining samples in order, while the next batches are read."""
    count, resumed, started = source.count, parts.samples, time.perf_counter()
    feeds = read_ahead(read_batches(source, size, resumed))
    for answer in run(feeds) if resumed < count else ():
        parts.append(answer, min(size, count - parts.samples))
        done = parts.samples
        rate = (done - resumed) / max(time.perf_counter() - started, 1e-9)
        left = str(timedelta(seconds=round((count - done) / rate)))
        on_progress(f"{done}/{count} samples, {rate:,.0f}/s, {left} left", done / count)


def _note_nan(outputs: Mapping[str, np.ndarray], on_note: Callable[[str], None]) -> None:
    """Pass on a note for each output that is NaN somewhere; it may be larger than the memory."""
    for name, values in outputs.items():
        rows, others = [], tuple(range(1, values.ndim))
        for at in range(0, len(values) if values.dtype.kind in "fc" else 0, _BLOCK):
            block = values[at : at + _BLOCK]
            rows += (at + np.flatnonzero(np.isnan(block).any(others))).tolist()
        if rows:
            what = f"{len(rows)} of {len(values)} rows, first in {rows[0]}"
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


def _on_ray(
    artefact: Artefact, opened: Engine, batches: Iterator[Arrays], *, trust: bool
) -> Iterator[Arrays]:
    """Yield each batch's outputs; `opened` has shown that the file is the one in its manifest."""
    from deploykit.evaluation.ray_data import predict_batches

    path, files = artefact.path, [artefact.path]
    if artefact.manifest is not None:
        evidence = artefact.manifest.evidence
        files.append(manifest_path(path))
        files += [path.with_name(e.file) for e in (evidence.weights, evidence.golden) if e]
    kind = opened.device.partition(":")[0]
    contents = {file.name: file.read_bytes() for file in files}
    open_engine = partial(_open_on_node, device=kind, trust=trust)
    return predict_batches(contents, open_engine, batches, gpu=kind == "cuda")


def _open_on_node(path: Path, device: str, trust: bool) -> Engine:
    """Open the engine of one actor, which has one CPU core or one GPU."""
    (engine,) = open_proven(path, device, threads=1 if device == "cpu" else None, trust=trust)
    return engine


_EVERY_S = 10.0  # between two states
_STATE, _KIND = "state.json", "deploykit predictions"
_UNSAVED = f".{_STATE}."  # a killed run's, while it wrote its state


class PartialOutputs:
    """Keeps outputs on disk so that a later run can resume. Use in `with`, one process at a time.

    `OUT.parts/` holds one file of raw values per output, and `state.json`: all that they depend on,
    `made_by` and the stamp of the samples so far, and where the files end. After a kill the files
    may be longer: the excess is dropped. `samples`: the number done. `dropped`: what has changed
    since an earlier run, so that its outputs were dropped.
    """

    def __init__(
        self,
        out: Path,
        made_by: Mapping[str, str],
        source: DataSource,
        engine: Engine,
        *,
        restart: bool = False,
    ) -> None:
        self.folder = out.with_name(f"{out.name}.parts")
        self.samples, self.dropped = 0, ""
        self._out, self._made_by, self._source, self._restart = out, made_by, source, restart
        self._axes = SampleAxes(engine, source.axes)
        self._kinds: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        self._files: dict[str, BinaryIO] = {}
        self._nbytes: dict[str, int] = {}
        self._scalars: dict[str, np.ndarray] = {}
        self._saved_s = time.monotonic()
        self._stack = ExitStack()

    def __enter__(self) -> PartialOutputs:
        with ExitStack() as stack:
            _lock(make_folder(self.folder), self._out, stack)
            state = self._read_state()
            try:
                self.dropped = self._resume(state) if state and not self._restart else ""
            except (KeyError, TypeError, ValueError, AttributeError):  # edited by hand
                self.samples, self.dropped = 0, "its state"
            if not self.samples:
                self._close()
                self._kinds, self._files, self._nbytes = {}, {}, {}
                self._axes.known.clear()
                with write_errors(self._out):
                    self._remove_files()
                self._save()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._stack:
            with contextlib.suppress(DeploykitError):  # such as a full disk, reported before
                self._save()
            self._close()
            if not self.samples:
                with contextlib.suppress(OSError):  # somebody else's file is in it
                    self._remove_files()
                    self.folder.rmdir()

    def append(self, outputs: Mapping[str, np.ndarray], samples: int) -> None:
        """Add the outputs of the next `samples`.

        A constant without axes, as a model's scale, is kept for each sample. Raises Unsupported
        on outputs that do not join to one array, and on a full disk.
        """
        rows: dict[str, np.ndarray] = {}
        for name, values in outputs.items():
            if np.ndim(values):
                axis = self._axes.find(name, values.shape, samples)
                rows[name] = np.moveaxis(values, axis, 0)
            elif self._scalars.setdefault(name, values) == values:
                rows[name] = np.full(samples, values)
            else:
                raise Unsupported(f"output '{name}' has no axis of samples, and is no constant")
            self._check(name, rows[name], samples)
        with write_errors(self._out):
            nbytes = dict(self._nbytes)
            for name, values in rows.items():
                content: Any = np.ascontiguousarray(values).data
                if values.dtype.hasobject:  # strings, one line of JSON for each sample
                    content = "".join(f"{json.dumps(row)}\n" for row in values.tolist()).encode()
                nbytes[name] = nbytes.get(name, 0) + self._files[name].write(content)
        self.samples, self._nbytes = self.samples + samples, nbytes
        if time.monotonic() - self._saved_s > _EVERY_S:
            self._save()

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all outputs by name, mapped from their files; strings are read."""
        self._save()
        found: dict[str, np.ndarray] = {}
        for name, (dtype, row) in self._kinds.items():
            path, size = self._files[name].name, self._nbytes[name]
            values: np.ndarray
            if dtype.hasobject:
                lines = Path(path).read_bytes()[:size].splitlines()
                values = np.array([json.loads(line) for line in lines], np.str_).reshape(-1, *row)
            elif size:
                shape = (size // math.prod(row, start=dtype.itemsize), *row)
                values = np.memmap(path, dtype, "r", shape=shape)
            else:  # an empty file cannot be mapped
                values = np.zeros((0 if math.prod(row) else self.samples, *row), dtype)
            found[name] = np.moveaxis(values, 0, self._axes.find(name))
        return found

    def finish(self) -> None:
        """Forget the parts: their outputs are in the final file."""
        self.samples = 0

    def _check(self, name: str, values: np.ndarray, samples: int) -> None:
        """Raise Unsupported unless these values can be appended to the earlier ones."""
        kind = (values.dtype, values.shape[1:])
        if name not in self._kinds:
            self._kinds[name] = kind
            self._open(name, "w+b")
        if self._kinds[name] != kind:
            (dtype, row), axes = self._kinds[name], list(values.shape[1:])
            raise Unsupported(
                f"output '{name}' is {values.dtype}{axes} for each of samples {self.samples} to "
                f"{self.samples + samples - 1}, and {dtype}{list(row)} for those before: its size "
                "depends on the data",
                hint="such outputs do not join to one array: call `dk.load(...)` from Python",
            )

    def _open(self, name: str, mode: str) -> None:
        path = self.folder / f"{list(self._kinds).index(name)}.bin"
        with write_errors(self._out):
            self._files[name] = open(path, mode)  # type: ignore[assignment] # noqa: PTH123, SIM115

    def _close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _save(self) -> None:
        """Sync what was appended to disk, so that it survives a crash of the machine."""
        with write_errors(self._out):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
        outputs = {
            name: {"dtype": dtype.str, "row": row, "axis": self._axes.find(name), "bytes": nbytes}
            for name, (dtype, row) in self._kinds.items()
            for nbytes in [self._nbytes.get(name, 0)]
        }
        state = {"kind": _KIND, "count": self.samples, "outputs": outputs}
        write_json(self.folder / _STATE, {**state, **self._depends_on(self.samples)})
        self._saved_s = time.monotonic()

    def _depends_on(self, samples: int) -> dict[str, str]:
        return {**self._made_by, "samples": self._source.stamp(samples)}

    def _read_state(self) -> dict[str, Any] | None:
        """Read what an earlier run left; None without one. Raises BadInput for other files."""
        if all(path.name.startswith(_UNSAVED) for path in self.folder.iterdir()):
            return None
        with contextlib.suppress(BadInput):
            state = read_json(self.folder / _STATE)
            if isinstance(state, dict) and state.get("kind") == _KIND:
                return state
        raise BadInput(
            f"{self.folder}: exists, and is not what deploykit wrote there",
            hint="it is for the outputs of an unfinished run: remove it, or choose another `out`",
        )

    def _resume(self, state: Mapping[str, Any]) -> str:
        """Resume an earlier run; return what has changed since, so that this is impossible."""
        depends_on = self._depends_on(state["count"]).items()
        changed = [name for name, value in depends_on if state[name] != value]
        for name, kind in state["outputs"].items() if not changed else ():
            self._kinds[name] = np.dtype(kind["dtype"]), tuple(kind["row"])
            self._axes.known[name], self._nbytes[name] = kind["axis"], kind["bytes"]
            self._open(name, "a+b")
            if self._files[name].tell() < kind["bytes"]:
                changed.append("its files")
            self._files[name].truncate(kind["bytes"])
        self.samples = 0 if changed else state["count"]
        return " and ".join(changed)

    def _remove_files(self) -> None:
        # the state last: without it a later run would not know the others for deploykit's
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name == _STATE):
            own = path.suffix == ".bin" and path.stem.isdecimal()
            if own or path.name.startswith((_STATE, _UNSAVED)):
                path.unlink()


def _lock(folder: Path, out: Path, stack: ExitStack) -> None:
    """Hold the folder until `stack` ends; without a lock where the file system has none."""
    number = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, number)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(f"{out}: another process is writing it") from None
    except OSError:
        return
