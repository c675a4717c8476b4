from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploykit.core.errors import BadInput, DeploykitError, NotFound, Unsupported
from deploykit.core.files import (
    atomic_write,
    cache_folder,
    check_readable,
    check_writable,
    make_folder,
    new_folder,
    sha256,
    temporary_folder,
    write_json,
    write_text,
    write_together,
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A file with earlier content, alone in its folder."""
    path = tmp_path / "out.bin"
    path.write_text("old", encoding="utf-8")
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_clean_exit_replaces_the_name_and_a_reader_of_the_old_file_is_not_disturbed(
    out: Path,
) -> None:
    with out.open(encoding="utf-8") as reader:
        with atomic_write(out) as tmp:
            tmp.write_text("new", encoding="utf-8")
            assert out.read_text(encoding="utf-8") == "old"
        assert reader.read() == "old"
    assert contents(out.parent) == {"out.bin": "new"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, FileNotFoundError])
def test_exception_leaves_the_old_file_and_nothing_else(
    out: Path, error: type[BaseException]
) -> None:
    def fail(tmp: Path) -> None:
        tmp.write_text("half", encoding="utf-8")
        if error is FileNotFoundError:  # about another file: it is passed on
            (out.parent / "elsewhere").read_text(encoding="utf-8")
        raise error

    with pytest.raises(error), atomic_write(out) as tmp:
        fail(tmp)
    assert contents(out.parent) == {"out.bin": "old"}


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no/out.bin", r"out\.bin: the folder .*no does not exist"),
        ("", "is a folder"),
        ("out.bin/deeper", "does not exist"),
        ("x" * 300, "File name too long"),
        ("/proc/x.bin", r"/proc/x\.bin: cannot be written"),
        ("/dev/null", "not a regular file"),  # a rename would take it away from the whole machine
    ],
    ids=str.split("no-folder folder file-as-folder long proc device"),
)
def test_a_place_that_cannot_be_written_is_refused(out: Path, path: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        check_writable(out.parent / path)
    if path.startswith("/"):
        with pytest.raises(BadInput, match=path), atomic_write(Path(path)) as tmp:
            tmp.write_text("new", encoding="utf-8")


@contextlib.contextmanager
def run(code: str, out: Path) -> Iterator[subprocess.Popen[str]]:
    """A program of its own; killed at the end if it has not ended by then."""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


FULL = """
import resource, sys
from pathlib import Path
from deploykit.core.errors import BadInput
from deploykit.core.files import write_together

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
folder = Path(sys.argv[1])
for path in (folder, folder / "new" / "report"):
    try:
        write_together(path, {"a": "new", "b": "new" * 1000, "c": "new"})
    except BadInput as error:
        print(error.message)
"""


def test_no_file_is_replaced_and_no_folder_made_where_one_cannot_be_written(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text("old", encoding="utf-8")
    with run(FULL, tmp_path) as process:
        shown, _ = process.communicate(timeout=60)
    assert shown.splitlines() == [
        f"{folder / 'b'}: cannot be written: File too large"
        for folder in (tmp_path, tmp_path / "new/report")
    ]
    assert contents(tmp_path) == dict.fromkeys("abc", "old")
    write_together(tmp_path / "deep/report", {"a": "1", "b": "2"})
    assert contents(tmp_path / "deep/report") == {"a": "1", "b": "2"}


def test_a_new_folder_stays_only_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for path in ("old", "old/a/b", "new/c"):
        with new_folder(tmp_path / path):
            assert (tmp_path / path).is_dir()
    assert [each.name for each in tmp_path.rglob("*")] == ["old"]
    with new_folder(tmp_path / "old" / "a" / "b"):
        (tmp_path / "old" / "a" / "file").touch()
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["a", "file", "old"]


HALFWAY = """
import signal, sys
from pathlib import Path
from deploykit.core.files import atomic_write

with atomic_write(Path(sys.argv[1])) as tmp:
    tmp.write_text("half")
    print("halfway", flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signal_in_the_middle_leaves_the_old_file_and_the_next_run_tidies_up(
    out: Path, number: signal.Signals
) -> None:
    with run(HALFWAY, out) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "halfway\n"
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode != 0
    assert out.read_text(encoding="utf-8") == "old"
    if number == signal.SIGKILL:
        assert len(names(out.parent)) == 2
        other = out.with_name(".out.bin.another-machine-1-1.tmp")
        other.touch()
        with atomic_write(out) as tmp, atomic_write(out) as second:  # two at once, in any process
            assert tmp != second
            tmp.write_text("new")
            second.write_text("newer")
        other.unlink()
    assert names(out.parent) == ["out.bin"]


def test_a_folder_that_a_killed_run_left_is_removed_by_the_next(out: Path) -> None:
    code = HALFWAY.replace("atomic_write", "temporary_folder").replace("tmp.", "(tmp / 'a').")
    with run(code, out) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with temporary_folder(out):  # that of a run that goes on stays
            assert len(names(out.parent)) == 3
        process.kill()
    with temporary_folder(out):
        assert len(names(out.parent)) == 2
    assert names(out.parent) == ["out.bin"]


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (errno.ENOSPC, Unsupported, "out.bin: no space left on the disk"),
        (errno.EDQUOT, Unsupported, "out.bin: no space left on the disk: your quota is used up"),
        (errno.EMFILE, Unsupported, "out.bin: too many open files"),
        (errno.EIO, BadInput, "out.bin: cannot be written: Input/output error"),
    ],
)
def test_what_the_system_refuses_is_an_error_that_names_the_output(
    out: Path, number: int, kind: type[DeploykitError], says: str
) -> None:
    """A library that writes for us raises it, about a file of its own too if the disk is full."""

    def fail(path: Path | None) -> None:
        raise OSError(number, os.strerror(number), path and str(path))

    with pytest.raises(kind) as caught, atomic_write(out) as tmp:
        fail(tmp)
    assert caught.value.message == f"{out.parent}/{says}"
    with pytest.raises((Unsupported, OSError)) as caught_there, temporary_folder(out) as folder:
        fail(folder / "weights")
    assert isinstance(caught_there.value, kind) == (kind is Unsupported)
    assert names(out.parent) == ["out.bin"]


def test_text_is_utf_8_json_is_readable_and_any_path_can_be_named(tmp_path: Path) -> None:
    write_text(tmp_path / "t", "naïve")
    assert (tmp_path / "t").read_bytes() == "naïve".encode()
    assert sha256(tmp_path / "t") == hashlib.sha256("naïve".encode()).hexdigest()
    odd = os.fsdecode(b"/data/\xff.npz")
    write_json(tmp_path / "j", {"b": [1], "a": "ü", "data": odd})
    text = (tmp_path / "j").read_text(encoding="utf-8")
    assert text.startswith('{\n  "b": [')
    assert json.loads(text) == {"b": [1], "a": "ü", "data": odd}
    write_together(tmp_path, {"page.md": odd})
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == r"/data/\udcff.npz"


def test_make_folder_makes_the_parents_and_a_name_may_be_as_long_as_they_are(
    tmp_path: Path,
) -> None:
    for name in ("x" * 255, "é" * 127):
        with atomic_write(tmp_path / name) as tmp, temporary_folder(tmp_path / name):
            tmp.write_text("new")
    assert len(names(tmp_path)) == 2
    folder = tmp_path / "a" / "b"
    assert make_folder(folder) == make_folder(folder) == folder
    (folder / "file").touch()
    with pytest.raises(BadInput, match="file: cannot be used as a folder"):
        make_folder(folder / "file")


def test_what_cannot_be_read_is_refused_by_kind(out: Path) -> None:
    folder = out.parent
    (folder / "empty").touch()
    (folder / "loop").symlink_to("loop")
    for path, says in [
        (folder, "is a folder"),
        (folder / "empty", "the file is empty"),
        (Path("/dev/zero"), "is not a regular file"),
        (folder / "loop", "cannot be read"),
        (folder / ("x" * 300), "cannot be read"),
    ]:
        with pytest.raises(BadInput, match=says):
            check_readable(path)
    with pytest.raises(NotFound, match="no such file"):
        check_readable(folder / "nothing")


def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DEPLOYKIT_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("DEPLOYKIT_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "deploykit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "deploykit"


def test_an_output_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure could leave an empty file under a name that was there before."""
    out, named = tmp_path / "model.onnx", []
    monkeypatch.setattr(os, "fsync", lambda _descriptor: named.append(out.exists()))
    for content, durable in ((b"1", True), (b"2", False)):
        with atomic_write(out, durable=durable) as tmp:
            tmp.write_bytes(content)
        assert named == [False]
