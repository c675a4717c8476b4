"""A bundle's folder: `bundle.json`, `SHA256SUMS` and the files that these name, and no others.

The same inputs give the same bytes. SHA-256 finds damage and careless edits; it is not a signature.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from deploykit import __version__
from deploykit.core.artefact import Artefact, Manifest, write_manifest
from deploykit.core.errors import BadInput, DeploykitError, NotFound, quote
from deploykit.core.files import (
    StrPath,
    check_readable,
    make_folder,
    read_errors,
    read_json,
    sha256,
    temporary_folder,
    write_errors,
)
from deploykit.core.json_value import Record, from_json
from deploykit.core.profile import Profile
from deploykit.core.task import TOKENIZER
from deploykit.engines.data.samples import INPUTS, read_npz
from deploykit.evaluation.artefacts import (
    check_inputs,
    check_owned,
    copy_checked,
    overwrites,
    paths,
)
from deploykit.graph.parse import external_files

# The name is also part of the names of files, a systemd unit and a container image.
SERVED_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Contents:
    """The parts of a bundle. `model`: typed ONNX, with manifest and samples. `name`: as served.

    `batch`: the smallest, usual and largest. `wheels`: include those that `pip` installs on the
    target. `release`: that of the target's host, "jetpack-6.2" or "cuda-13"; None for the profile's
    usual one. `axes`: sizes of other dynamic axes, "T=16,128,512".
    """

    model: Artefact
    profile: Profile
    name: str
    batch: tuple[int, int, int]
    wheels: bool = False
    release: str | None = None
    axes: tuple[str, ...] = ()

    @property
    def manifest(self) -> Manifest:
        """Return the model's manifest. Raises BadInput if there is none."""
        if self.model.manifest is None:
            raise BadInput(f"{self.model}: has no manifest next to it")
        return self.model.manifest

    @property
    def extras(self) -> tuple[str, ...]:
        """Return the extras that must be installed where the model is served."""
        task = self.manifest.task
        return () if task is None else (task.extra,)

    def copy_model(self, out: Path) -> None:
        """Copy the model and its files, named after `out`. Raises BadInput for a changed one."""
        evidence = self.manifest.evidence
        named: dict[str, Any] = {"weights": ".data", "golden": ".golden.npz"}
        known = {evidence.weights.file} if evidence.weights else set()
        if others := set(external_files(self.model.path)) - known:
            raise BadInput(
                f"{self.model}: has weights in {min(others)}, which its manifest does not name",
                hint="without its manifest `bundle` copies all of them",
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.model.path, out)
        moved = {}
        for key, suffix in named.items():
            found = getattr(evidence, key)
            if found is not None:
                copy_checked(self.model.path, found.file, found.sha256, Path(f"{out}{suffix}"))
                moved[key] = replace(found, file=f"{out.name}{suffix}")
        if evidence.weights is not None and evidence.weights.file != f"{out.name}.data":
            from deploykit.graph.storage import point_to

            point_to(out, f"{out.name}.data")
        copied = replace(self.manifest, sha256=sha256(out), evidence=replace(evidence, **moved))
        task = self.manifest.task
        if task is not None and (text := task.text) is not None:
            copy_checked(self.model.path, text.tokenizer, text.sha256, Path(f"{out}{TOKENIZER}"))
        write_manifest(out, replace(copied, task=task and task.named_after(out.name)))


def sample_rows(contents: Contents, model: Path, *, joined: bool) -> dict[str, np.ndarray]:
    """Return the golden samples next to the copied `model`: one row if `joined`, else all."""
    arrays = read_npz(Path(f"{model}.golden.npz"))
    inputs = {spec.name: arrays[INPUTS + spec.name] for spec in contents.manifest.inputs}
    return {name: array[:1] for name, array in inputs.items()} if joined else inputs


def fill_templates(kind: str, folder: Path, contents: Contents, more: Mapping[str, str]) -> None:
    """Write the files of `templates/KIND` into `folder`, with a value in place of each @KEY@.

    `@?KEY ` keeps the rest of its line if the value is not empty. A program's name ends in ".in".
    """
    on_gpu = contents.profile.device == "cuda"
    known = {
        "NAME": contents.name,
        "PROFILE": contents.profile.name,
        "VERSION": __version__,
        "GPU": "yes" if on_gpu else "",
        "CPU": "" if on_gpu else "yes",
        **more,
    }
    for template in sorted((Path(__file__).parent / "templates" / kind).iterdir()):
        lines = []
        for line in template.read_text(encoding="utf-8").splitlines():
            condition = re.match(r"@\?([A-Z_]+) ?", line)
            if condition is None or known[condition[1]]:
                lines.append(line[condition.end() :] if condition else line)
        name = _fill(template.name.removesuffix(".in"), known)
        (folder / name).write_text(_fill("\n".join(lines), known) + "\n", encoding="utf-8")


def _fill(text: str, known: Mapping[str, str]) -> str:
    return re.sub(r"@([A-Z0-9_]+)@", lambda match: known[match[1]], text)


BUNDLE_VERSION = 1
BUNDLE_FILE, SUMS_FILE = "bundle.json", "SHA256SUMS"
DEFAULT_EPOCH_S = 315_532_800  # 1980-01-01, the first day that a zip file can hold
_COMMENT = "deploykit bundle"
_WRITER = "deploykit bundle MODEL --profile NAME -o DIR writes one"


@dataclass(frozen=True)
class FileEntry(Record):
    """One file of a bundle."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Bundle(Record):
    """The contents of `bundle.json`. `bundle`: its version. `files`: by path in the folder.

    `model`: the path of the ONNX file. `batch`: the smallest, usual and largest. `axes`: the same
    for other dynamic axes, "T=16,128,512". `tensorrt_min` and `tensorrt_max`: first and last
    MAJOR.MINOR that the target takes, None for no limit.
    """

    bundle: int
    kind: str
    name: str
    profile: str
    runtime: str
    architecture: str
    model: str
    batch: tuple[int, ...]
    axes: tuple[str, ...]
    tensorrt_min: str | None
    tensorrt_max: str | None
    deploykit: str
    files: Mapping[str, FileEntry]


def epoch_s() -> int:
    """The time of every file in a bundle: `$SOURCE_DATE_EPOCH`, else 1980-01-01. Unix seconds."""
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not given:
        return DEFAULT_EPOCH_S
    if not given.isascii() or not given.isdigit() or not DEFAULT_EPOCH_S <= int(given) < 1 << 32:
        raise BadInput(
            f"SOURCE_DATE_EPOCH {quote(given)}: is not a time from 1980 to 2106 in Unix seconds"
        )
    return int(given)


def seal(folder: Path, contents: Contents, kind: str) -> Bundle:
    """Write `bundle.json` and `SHA256SUMS` for all that is in `folder`; set modes and times."""
    models = [path for path in _files(folder) if path.endswith(".onnx")]
    profile = contents.profile
    bundle = Bundle(
        bundle=BUNDLE_VERSION,
        kind=kind,
        name=contents.name,
        profile=f"{profile.name}@{profile.power_mode}" if profile.power_mode else profile.name,
        runtime=profile.runtime,
        architecture=profile.architecture,
        model=models[0] if models else "",
        batch=contents.batch,
        axes=contents.axes,
        tensorrt_min=profile.tensorrt_min,
        tensorrt_max=profile.tensorrt_max,
        deploykit=__version__,
        files={
            path: FileEntry(sha256(folder / path), (folder / path).stat().st_size)
            for path in _files(folder)
        },
    )
    text = json.dumps(bundle.to_dict(), indent=2, ensure_ascii=False) + "\n"
    (folder / BUNDLE_FILE).write_text(text, encoding="utf-8")
    (folder / SUMS_FILE).write_text(_sums(bundle, sha256(folder / BUNDLE_FILE)), encoding="utf-8")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.suffix == ".sh" or path.is_dir() else 0o644)
        os.utime(path, (epoch_s(), epoch_s()))
    return bundle


def _sums(bundle: Bundle, digest: str) -> str:
    lines = {path: entry.sha256 for path, entry in bundle.files.items()} | {BUNDLE_FILE: digest}
    return "".join(f"{lines[path]}  {path}\n" for path in sorted(lines))


def read_bundle(folder: Path) -> Bundle:
    """Read `bundle.json` without checking the files. Raises NotFound, BadInput."""
    path = folder / BUNDLE_FILE
    with read_errors(folder):
        if not folder.is_dir():
            why = "is not a folder" if folder.exists() else "no such folder"
            raise NotFound(f"{folder}: {why}", hint="unpack a .tar first: tar -xf")
        if not path.exists():
            raise NotFound(f"{folder}: is no bundle: it has no {BUNDLE_FILE}", hint=_WRITER)
    if check_readable(path).stat().st_size > 4 << 20:
        raise BadInput(f"{path}: is larger than any bundle's")
    values = read_json(path)
    version = values.get("bundle") if isinstance(values, dict) else None
    if version != BUNDLE_VERSION:
        if type(version) is not int or version < BUNDLE_VERSION:
            raise BadInput(f"{path}: is not that of a bundle", hint=_WRITER)
        raise BadInput(
            f"{path}: has version {quote(version)}, deploykit {__version__} reads version "
            f"{BUNDLE_VERSION}",
            hint=f"install deploykit {quote(values.get('deploykit', 'of a later release'))}",
        )
    found: Bundle = from_json(Bundle, values, str(path))
    _check_names(found, path)
    return found


def _check_names(bundle: Bundle, path: Path) -> None:
    """Raise BadInput for a name that leaves the folder."""
    if not SERVED_NAME.fullmatch(bundle.name):
        raise BadInput(f"{path}: its name {quote(bundle.name)} cannot be that of a model")
    if bundle.model and bundle.model not in bundle.files:
        raise BadInput(f"{path}: names {quote(bundle.model)}, which is not a file of this bundle")
    for name in bundle.files:
        parts = PurePosixPath(name).parts
        plain = name and name.isprintable() and "\\" not in name and name == "/".join(parts)
        if not plain or ".." in parts or name.startswith("/"):
            raise BadInput(f"{path}: names a file outside the bundle: {quote(name)}")


def verify(folder: Path, *, whole: bool = True) -> Bundle:
    """Check every byte of a bundle; raises NotFound or BadInput naming the first wrong file.

    `whole`: false in an image, which holds `model/` alone: other files may be missing.
    """
    bundle = read_bundle(folder)
    with read_errors(folder):
        listed, there = {*bundle.files, BUNDLE_FILE, SUMS_FILE}, set[str]()
        for name in _files(folder):
            if name not in listed:
                raise BadInput(f"{folder / name}: is not a file of this bundle")
            there.add(name)
        for name in sorted(listed - there):
            if whole or name not in bundle.files or name.startswith("model/"):
                raise BadInput(f"{folder / name}: is missing from this bundle")
        sums, expected = folder / SUMS_FILE, _sums(bundle, sha256(folder / BUNDLE_FILE))
        if sums.read_bytes() != expected.encode():
            raise BadInput(f"{sums}: does not fit {BUNDLE_FILE}: one of the two was changed")
        for name in sorted(there & bundle.files.keys()):
            path, entry = folder / name, bundle.files[name]
            size = path.stat().st_size
            if size != entry.bytes:
                raise BadInput(f"{path}: has {size} bytes, {BUNDLE_FILE} says {entry.bytes}")
            if sha256(path) != entry.sha256:
                raise BadInput(f"{path}: was changed (SHA-256 differs from {BUNDLE_FILE})")
    return bundle


def _files(folder: Path) -> Iterator[str]:
    """Yield the paths of all files, sorted. Raises BadInput for a link, a pipe or a device."""
    for path in sorted(folder.rglob("*")):  # which follows no link
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            yield path.relative_to(folder).as_posix()
        elif not stat.S_ISDIR(mode):
            raise BadInput(f"{path}: is a link or no regular file, which no bundle has")


def write_tar(folder: Path, out: Path, top: str) -> None:
    """Pack a bundle as `top/...`: sorted, owned by user 0, with the times that `seal` set."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    headers = {"comment": _COMMENT}
    with tarfile.open(out, "w", format=tarfile.PAX_FORMAT, pax_headers=headers) as archive:
        archive.add(folder, top, filter=plain)  # in the order of the names


def is_bundle_tar(path: Path) -> bool:
    """Return whether `write_tar` wrote a tar file."""
    try:
        with tarfile.open(path, "r:") as archive:
            return archive.pax_headers.get("comment") == _COMMENT
    except (OSError, tarfile.TarError, ValueError):
        return False


def claim_bundle(
    folder: StrPath, inputs: Iterable[object], *, tar: bool, force: bool = False
) -> Path:
    """Check the folder of a bundle, and FOLDER.tar; only their parents are made. Raises BadInput.

    `force` replaces a bundle that somebody changed, never a folder that is not one.
    """
    place = Path(os.path.abspath(folder))  # noqa: PTH100 - a link to a folder stays one
    given, other = tuple(paths(inputs)), "choose another `out`"
    if not place.name or place.is_symlink() or (os.path.lexists(place) and not place.is_dir()):
        raise BadInput(f"{place}: exists, and is not a folder", hint=other)
    make_folder(place.parent)
    for each in given:
        if place in (each.resolve(), *each.resolve().parents):
            raise overwrites(each)
    if place.is_dir() and any(place.iterdir()):
        if not (place / BUNDLE_FILE).is_file():
            raise BadInput(f"{place}: is a folder with other files, and no bundle", hint=other)
        try:
            if not force:
                verify(place)
        except DeploykitError as exc:
            raise BadInput(
                f"{place}: is not as deploykit wrote it: {exc.message}",
                hint=f"{other}, or replace the bundle with `force`",
            ) from exc
    archive = place.with_name(f"{place.name}.tar")
    if tar and os.path.lexists(archive):
        check_inputs((archive,), given)
        check_owned((archive,), {archive.name} if is_bundle_tar(archive) else (), force)
    return place


_AT_FDCWD, _EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


@contextlib.contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder next to `out`; on a clean exit it replaces `out`."""
    with write_errors(out), temporary_folder(out) as work:
        folder = work / "folder"
        folder.mkdir(mode=0o755)
        yield folder
        for path in (*folder.rglob("*"), folder):
            sync(path)
        _put(folder, out)
        sync(out.parent)


def _put(folder: Path, out: Path) -> None:
    """Rename `folder` to `out`; the old `out` ends up at `folder`, or next to it."""
    if os.path.lexists(out):
        exchange = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux with glibc 2.28 or later
        new, old = os.fsencode(folder), os.fsencode(out)
        if exchange and exchange(_AT_FDCWD, new, _AT_FDCWD, old, ctypes.c_uint(_EXCHANGE)) == 0:
            return
        out.rename(folder.with_name("old"))  # without exchange a kill leaves no `out`
    folder.rename(out)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
