"""Write files completely or not at all, check paths before use, hash files.

A failure, a full disk or Ctrl-C leaves the old file in place: a temporary file replaces it only at
the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import platform
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, BinaryIO

from deploykit.core.errors import (
    BadInput,
    NotFound,
    Unsupported,
    causes,
    did_you_mean,
    first_line,
    os_error,
    os_reason,
    users_code,
)
from deploykit.core.extras import EXTRAS, missing


@contextlib.contextmanager
def atomic_write(out: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to `out`; on a clean exit fsync it and rename it to `out`.

    `durable`: false for a file that only this process reads, which needs no fsync. Raises BadInput
    when `out` cannot be written there, Unsupported when the disk is full.
    """
    check_writable(out)
    tmp = temporary_path(out)
    try:
        with write_errors(out, tmp):
            yield tmp
            if durable:
                with tmp.open("rb+") as handle:
                    os.fsync(handle.fileno())
            tmp.replace(out)
    finally:
        with contextlib.suppress(OSError):
            tmp.unlink()


_serial = itertools.count()


def temporary_path(out: Path) -> Path:
    """Return an unused path next to `out`, for a file or folder that is to take its place.

    Those that killed runs left there are removed first. The name tells this machine or container,
    in which alone a process number says something, and has only the beginning of a long `out`.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
        machine = boot + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        machine = platform.node()
    name = os.fsencode(out.name)[:100].decode("utf-8", "ignore")
    start = f".{name}.{zlib.crc32(machine.encode()):08x}-"
    with contextlib.suppress(OSError), os.scandir(out.parent) as entries:
        for left in [each for each in entries if each.name.startswith(start)]:
            process = left.name.removeprefix(start).partition("-")[0]
            if process.isdecimal() and not _runs(int(process)):
                remove = shutil.rmtree if left.is_dir(follow_symlinks=False) else os.unlink
                remove(left.path)
    return out.with_name(f"{start}{os.getpid()}-{next(_serial)}.tmp")


def _runs(process: int) -> bool:
    try:
        with contextlib.suppress(PermissionError):  # it is another user's
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True


@contextlib.contextmanager
def temporary_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder next to `out`, on its disk, and remove it at the end.

    Raises BadInput when it cannot be made there, Unsupported, naming `out`, on a full disk.
    """
    folder = temporary_path(out)
    with write_errors(out):
        folder.mkdir(mode=0o700)
    try:
        yield folder
    except OSError as exc:
        if isinstance(error := os_error(exc, out), Unsupported):
            raise error from exc
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def write_errors(out: Path, tmp: Path | None = None) -> Iterator[None]:
    """Map the errors of writing `out`, or its temporary file `tmp`, to errors that name `out`.

    Raises BadInput when it cannot be written, Unsupported when the disk is full.
    """
    try:
        yield
    except OSError as exc:
        error = os_error(exc, out)
        if isinstance(error, Unsupported):
            raise error from exc
        if tmp is None or exc.filename is None or str(exc.filename) == str(tmp):
            why = f"{out}: cannot be written: {os_reason(exc)}"
            raise BadInput(why, hint=error.hint) from exc
        raise


def write_text(out: Path, text: str) -> None:
    """Write `text` as UTF-8 through `atomic_write`.

    A byte of a path that is no UTF-8 is written as an escape, which JSON has, too.
    """
    with atomic_write(out) as tmp:
        tmp.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(out: Path, document: object) -> None:
    """Write `document` as indented JSON through `atomic_write`."""
    write_text(out, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def write_together(folder: Path, contents: Mapping[str, str]) -> None:
    """Write `contents` into `folder` by name, in UTF-8; no file is replaced before all are whole.

    The last file is replaced last. A `folder` that was created is removed again on failure.
    """
    with new_folder(folder), contextlib.ExitStack() as files:
        for name, text in reversed([*contents.items()]):  # unwinding turns the order round
            tmp = files.enter_context(atomic_write(folder / name))  # it maps the errors of writing
            tmp.write_text(text, encoding="utf-8", errors="backslashreplace")


def check_writable(out: Path) -> None:
    """Raise BadInput unless a file can be written at `out`; call it before long work."""
    folder = out.parent
    try:
        if not folder.is_dir():
            raise BadInput(f"{out}: the folder {folder} does not exist", hint=f"mkdir -p {folder}")
        if out.is_dir():
            raise BadInput(f"{out}: is a folder; a file name is needed")
        if out.exists() and not out.is_file():  # a rename would replace /dev/null
            raise BadInput(f"{out}: is not a regular file, so it is not replaced")
        with tempfile.TemporaryFile(dir=folder):  # /proc seems writable but refuses files
            pass
    except OSError as exc:
        raise BadInput(f"{out}: cannot be written: {os_reason(exc)}") from exc


def check_utf8(path: Path) -> Path:
    """Raise BadInput for a path that is no UTF-8."""
    if any("\udc80" <= letter <= "\udcff" for letter in str(path)):  # from os.fsdecode
        raise BadInput(
            f"{path}: the path is not UTF-8, which the libraries that open models need",
            hint="rename the file or its folder",
        )
    return path


def make_folder(folder: Path) -> Path:
    """Create `folder` and its parents. Raises BadInput on failure."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise BadInput(f"{folder}: cannot be used as a folder: {os_reason(exc)}") from exc
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"{folder}: the folder cannot be written to")
    return folder


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Create folders as `make_folder` does; at the end, remove those that are still empty."""
    missing = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        yield make_folder(folder)
    finally:
        for each in missing:
            with contextlib.suppress(OSError):
                each.rmdir()


@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Map the system's errors of reading `path` to NotFound or BadInput."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file") from None
    except OSError as exc:
        raise BadInput(f"{path}: cannot be read: {os_reason(exc)}") from exc


def read_text(path: Path) -> str:
    """Return a text file's content. Raises NotFound or BadInput."""
    try:
        with read_errors(path):
            return check_readable(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise BadInput(f"{path}: is not a text file in UTF-8") from exc


def _read(path: Path, kind: str, loads: Callable[[str], Any]) -> Any:
    text = read_text(path)
    try:
        return loads(text)
    except (ValueError, RecursionError) as exc:
        raise BadInput(f"{path}: is not valid {kind}: {exc}") from exc


def read_toml(path: Path) -> Any:
    """Return the values of a TOML file by key. Raises NotFound or BadInput."""
    if sys.version_info >= (3, 11):
        import tomllib  # late: `--help` does not need it
    else:
        import tomli as tomllib
    return _read(path, "TOML", tomllib.loads)


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises NotFound or BadInput."""
    return _read(path, "JSON", json.loads)


def check_readable(path: Path) -> Path:
    """Raise NotFound or BadInput unless `path` is a non-empty regular file that can be read."""
    with read_errors(path):
        info = path.stat()
    if stat.S_ISDIR(info.st_mode):
        raise BadInput(f"{path}: is a folder; a file is needed")
    if not stat.S_ISREG(info.st_mode):
        raise BadInput(f"{path}: is not a regular file")
    if info.st_size == 0:
        raise BadInput(f"{path}: the file is empty")
    if not os.access(path, os.R_OK):
        raise BadInput(f"{path}: cannot be read: Permission denied")
    return path


def open_readable(path: Path) -> BinaryIO:
    """Open `path` to read it. Raises as `check_readable`."""
    with read_errors(path):
        return check_readable(path).open("rb")


def sha256(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal. Raises as `check_readable`."""
    digest = hashlib.sha256()
    with open_readable(path) as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def manifest_path(artefact: Path) -> Path:
    """Return the path that the manifest of `artefact` has, if there is one."""
    return artefact.parent / f"{artefact.name}.json"  # `with_name` fails for "."


def cache_folder() -> Path:
    """Return the cache folder: `$DEPLOYKIT_CACHE`, else `deploykit` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DEPLOYKIT_CACHE") or Path(base) / "deploykit")


def check_inside(folder: Path, location: str, where: str) -> os.stat_result:
    """Raise BadInput unless `location` is a regular file below `folder` without links to it.

    A model may name files for its weights; without this check it could read any file of the user.
    `where` begins the error message. Returns the file's status.
    """
    parts = PurePosixPath(location).parts
    if not parts or location.startswith("/") or "\\" in location or ".." in parts:
        raise BadInput(f"{where}: its data file is outside the model's folder: '{location}'")
    file = folder
    try:
        for part in parts:
            file = file / part
            info = file.lstat()
            if stat.S_ISLNK(info.st_mode):
                raise BadInput(
                    f"{where}: its data file is behind a symbolic link, {file}",
                    hint="copy the files that are linked into one folder: cp -L MODEL DATA FOLDER",
                )
    except (OSError, ValueError) as exc:
        reason = os_reason(exc) if isinstance(exc, OSError) else first_line(exc)
        name = location if len(location) <= 200 else f"{location[:197]}..."
        raise BadInput(
            f"{where}: its data file {name} cannot be read: {reason}",
            hint="copy or move a model together with its data files",
        ) from exc
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
        raise BadInput(
            f"{where}: its data file {file} is not a regular file without hard links (links: "
            f"{info.st_nlink})",
            hint="copy it: a hard link may lead to a file that the model must not read",
        )
    return info


def check_data_file(model: Path, location: str, where: str) -> os.stat_result:
    """Check a weights file as `check_inside` does; it must not be the model itself.

    Both may be links to files of one folder, as every file of a snapshot of Hugging Face's is.
    """
    if PurePosixPath(location) == PurePosixPath(model.name):
        raise BadInput(f"{where}: its data file is the model itself")
    linked = model.parent / location
    if "\0" not in location and model.is_symlink() and linked.is_symlink():
        own, target = model.resolve(), linked.resolve()
        if target.parent == own.parent and target != own:
            return check_inside(own.parent, target.name, where)
    return check_inside(model.parent, location, where)


StrPath = str | os.PathLike[str]
_PACKAGE = Path(__file__).resolve().parent.parent
LOOK = Path(__file__).with_name("assets") / "look.css"  # of reports and of the dashboard


def folder(name: str) -> Path:
    """Return the folder `profiles` or `models`, in an installed wheel or next to the package."""
    packaged = _PACKAGE / "_data" / name
    return packaged if packaged.is_dir() else _PACKAGE.parent / name


def import_object(reference: str) -> object:
    """Return the object named by `pkg.mod:attr` or `./file.py:attr`.

    This runs the module's code: pass only what the user typed or what a pipeline's TOML holds.
    Raises NotFound if there is no such module or attribute, MissingExtra if it needs an
    optional package that is not installed, BadInput if importing it fails.
    """
    where, separator, attribute = reference.rpartition(":")
    named = where.endswith(".py") or "/" not in where
    if not separator or not where or not named or not attribute.isidentifier():
        raise BadInput(f"'{reference}' is not of the form pkg.mod:name or ./file.py:name")
    try:
        with users_code(f"'{reference}': importing it failed"):
            module = load_py(where) if where.endswith(".py") else importlib.import_module(where)
            found: object = getattr(module, attribute)  # a lazy library imports only now
    except BadInput as exc:
        chain = list(causes(exc))[1:]
        absent = [each.name or "" for each in chain if isinstance(each, ModuleNotFoundError)]
        for name in absent:
            if name.partition(".")[0] in EXTRAS:
                raise missing(name.partition(".")[0]) from exc
            if where == name or where.startswith(f"{name}."):
                raise NotFound(
                    f"'{reference}': no module '{name}'",
                    hint="a file is named by its path: ./file.py:name",
                ) from exc
        if chain and isinstance(chain[-1], AttributeError) and chain[-1].name == attribute:
            raise NotFound(
                f"'{reference}': {where} has no '{attribute}'",
                hint=did_you_mean(attribute, dir(sys.modules.get(where))),
            ) from exc
        raise
    return found


def load_py(path: StrPath) -> ModuleType:
    """Run a Python file as a module of its own."""
    name = f"_deploykit_file_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, check_readable(Path(path)).resolve())
    if spec is None or spec.loader is None:
        raise BadInput(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look the module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
