"""The one place where a verb's output is checked, before any work: no file of a user's is lost.

An output is none of the command's inputs, its name does not promise another kind of file, and what
it replaces was written by deploykit, unless `force` is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from deploykit.core.artefact import Artefact, sniff
from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.files import StrPath, check_writable, make_folder, manifest_path, new_folder
from deploykit.core.manifest import load_manifest
from deploykit.core.runtime import RUNTIMES
from deploykit.core.task import TOKENIZER
from deploykit.engines.onnxruntime.file import external_files
from deploykit.evaluation.bundle_folder import BUNDLE_FILE, is_bundle_tar, verify

PREDICTIONS, SPLIT = "predictions", "split"  # what an .npz of deploykit's holds
ANSWERS = "answers"  # JSON Lines of a pipeline: a file and its answer
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
}
_FIRST_LINE = 64 << 20  # bytes of an answer at most
_OTHERS = ".safetensors .pt2 .npy .json .csv .txt .md .html .toml .yaml .py .zip .png .jpg .jpeg"
_KNOWN = {end for ends in _ENDS.values() for end in ends} | set(_OTHERS.split())


def claim(out: StrPath, kind: str, inputs: Iterable[object], *, force: bool = False) -> Path:
    """The path of an output that may be written, with what is written next to it.

    `kind`: "onnx", "tensorrt", "torch", PREDICTIONS, SPLIT or ANSWERS. `inputs`: all that
    the command reads: paths and artefacts; what is neither is skipped. Raises BadInput.
    """
    place = Path(out)
    end = place.suffix.lower()
    if end in _KNOWN - set(_ENDS[kind]):
        raise BadInput(
            f"{place}: the name says {end}, and the file would be {_ENDS[kind][0]}",
            hint=f"`out` {place.with_suffix(_ENDS[kind][0])}",
        )
    check_writable(place)
    archive = kind in (PREDICTIONS, SPLIT, ANSWERS)
    written = (place,) if archive else (place, rejected(place), *_other_rejected(place, kind))
    given = tuple(_paths(inputs))
    for each in written:
        files = (each,) if archive else (each, *_next_to(each))
        ours = _archive(each, kind) if archive else _artefact(each, kind)
        _check_inputs(files, given, keeps=not archive and each.name in ours)
        _check_owned(files, ours, force)
    return place


def claim_report(
    folder: StrPath,
    inputs: Iterable[object],
    *,
    force: bool = False,
    keys: Collection[str] = ("report", "machine", "verdict"),
) -> Path:
    """The folder of a report, which can be made or written to; `keys`: of its JSON.

    It is not there yet where it was missing, so that an interrupted command leaves none. Raises
    BadInput.
    """
    with new_folder(Path(folder)) as place:
        files = tuple(place / name for name in REPORT)
        _check_inputs(files, tuple(_paths(inputs)), keeps=False)
        _check_owned(files, _json_with(files[0], set(keys), REPORT), force)
    return place


def claim_splits(folder: StrPath, inputs: Iterable[object], *, force: bool = False) -> list[Path]:
    """Where `train` saves its calibration and test data; the folder is made. Raises BadInput."""
    place, given = make_folder(Path(folder)), tuple(inputs)
    return [claim(place / f"{n}.npz", SPLIT, given, force=force) for n in ("calibration", "test")]


def claim_run(
    inputs: Iterable[object],
    *,
    checkpoint: Path | None = None,
    tensorboard: Path | None = None,
) -> None:
    """Check what a training run writes next to its model. Raises BadInput.

    `checkpoint` may be there: what it holds is checked by the run that goes on from it.
    """
    given = tuple(inputs)
    if checkpoint is not None:
        if checkpoint.suffix.lower() in _KNOWN - {".ckpt"}:
            raise BadInput(
                f"`checkpoint` {checkpoint}: the name says {checkpoint.suffix}",
                hint=f"`checkpoint` {checkpoint.with_suffix('.ckpt')}",
            )
        check_writable(checkpoint)
        _check_inputs((checkpoint,), tuple(_paths(given)), keeps=False)
        for each in filter(None, given):
            if checkpoint.resolve() == Path(str(each)).resolve():
                raise BadInput(
                    f"`checkpoint` {checkpoint}: is another file of this command",
                    hint="give it a file of its own, such as run.ckpt",
                )
    if tensorboard is not None:
        make_folder(tensorboard)


def claim_bundle(
    folder: StrPath, inputs: Iterable[object], *, tar: bool, force: bool = False
) -> Path:
    """The folder of a bundle, and FOLDER.tar; only their parents are made. Raises BadInput.

    `force` replaces a bundle that somebody changed, never a folder that is not one.
    """

    place = Path(os.path.abspath(folder))  # noqa: PTH100 - a link to a folder stays one
    given = tuple(_paths(inputs))
    if place.is_symlink() or (os.path.lexists(place) and not place.is_dir()):
        raise BadInput(f"{place}: exists, and is not a folder", hint="choose another `out`")
    if not place.name:
        raise BadInput(f"{place}: cannot be the folder of a bundle", hint="choose another `out`")
    make_folder(place.parent)
    archive = place.with_name(f"{place.name}.tar")
    for each in given:
        if place in (each.resolve(), *each.resolve().parents):
            raise BadInput(
                f"{each}: is an input of this command, and would be overwritten",
                hint="choose another `out`",
            )
    if place.is_dir() and any(place.iterdir()):
        _check_bundle(place, force)
    if tar and os.path.lexists(archive):
        _check_inputs((archive,), given, keeps=False)
        _check_owned((archive,), {archive.name} if is_bundle_tar(archive) else (), force)
    return place


def _check_bundle(place: Path, force: bool) -> None:

    if not (place / BUNDLE_FILE).is_file():
        raise BadInput(
            f"{place}: is a folder with other files, and no bundle",
            hint="choose another `out`, or remove the folder",
        )
    if not force:
        try:
            verify(place)
        except DeploykitError as exc:
            raise BadInput(
                f"{place}: is not as deploykit wrote it: {exc.message}",
                hint="choose another `out`, or replace the bundle with `force`",
            ) from exc


def named_files(*references: str | None) -> list[str]:
    """The files that options name which also take other words: `file.py:name`, `FILE.toml`."""
    files = [each.rpartition(":")[0] if ".py:" in each else each for each in references if each]
    return [each for each in files if each.endswith((".py", ".toml"))]


def rejected(place: Path) -> Path:
    """Where a file goes that was written and fails its gate."""
    return place.with_name(f"{place.stem}.rejected{place.suffix}")


def _other_rejected(place: Path, kind: str) -> tuple[Path, ...]:
    """The graph that an engine would have been built from is kept too when it fails its gate."""
    return (rejected(place.with_suffix(".onnx")),) if kind == "tensorrt" else ()


def _next_to(place: Path) -> tuple[Path, ...]:
    names = (place.with_name(place.name + suffix) for suffix in SIDECARS.values())
    return (manifest_path(place), *names)


def _paths(inputs: Iterable[object]) -> Iterator[Path]:
    """The files and folders that are read, with a model's weights and what is next to it."""
    for each in inputs:
        if not isinstance(each, (str, os.PathLike, Artefact)):
            continue
        path = Path(each)
        with contextlib.suppress(OSError, ValueError):
            if path.is_dir():
                yield path
            elif path.is_file():
                yield path
                yield from filter(Path.is_file, _next_to(path))
                yield from _weights(path)


def _weights(path: Path) -> Iterator[Path]:
    """The files that hold the weights of an ONNX model."""
    with contextlib.suppress(DeploykitError):
        if sniff(path) == "onnx":
            yield from (path.parent / name for name in external_files(path))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a model names files of any length for its weights
        return False


def _check_inputs(files: Iterable[Path], inputs: Iterable[Path], *, keeps: bool) -> None:
    """Raise BadInput where a file is an input. `keeps`: an input folder may hold it already."""
    for file in filter(Path.exists, files):
        for given in filter(_exists, inputs):
            inside = not keeps and given.is_dir() and given.resolve() in file.resolve().parents
            if inside or given.samefile(file):
                raise BadInput(
                    f"{file}: is an input of this command, and would be overwritten",
                    hint="choose another `out`",
                )


def _check_owned(files: Iterable[Path], ours: Collection[str], force: bool) -> None:
    for file in files:
        if not force and os.path.lexists(file) and file.name not in ours:
            raise BadInput(
                f"{file}: exists, and is not what deploykit wrote there",
                hint="choose another `out`, or replace the file with `force`",
            )


# What deploykit wrote there, by the names of the files


def _artefact(place: Path, kind: str) -> set[str]:
    """A model file that nobody has changed since, or that is gone, and what its manifest names."""
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


def _archive(place: Path, kind: str) -> set[str]:
    if kind == ANSWERS:
        with contextlib.suppress(OSError, ValueError, RecursionError), place.open() as lines:
            first = json.loads(lines.readline(_FIRST_LINE))
            return {place.name} if set(first) == {"file", "answer"} else set()
        return set()
    damaged = contextlib.suppress(OSError, ValueError, zipfile.BadZipFile)
    with damaged, zipfile.ZipFile(place) as archive:
        if archive.comment == f"deploykit {kind}".encode():
            return {place.name}
    return set()


def _json_with(path: Path, keys: set[str], names: Collection[str]) -> Collection[str]:
    """`names`, where the JSON document has the `keys` of one that deploykit wrote."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and keys <= set(found):
            return names
    return ()
