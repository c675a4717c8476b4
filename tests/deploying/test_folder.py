"""A bundle's folder: every byte is covered, and it is written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import deploykit as dk
from deploykit.deploying.folder import is_bundle_tar, staged_folder, verify
from tests.support.bundles import proven_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime")
    top = tmp_path_factory.mktemp("made")
    dk.bundle(proven_model(top / "tiny.onnx"), "cpu", out=top / "out.tar")
    return top / "out"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "out"))


def edit(**changes: object) -> Callable[[Path], None]:
    """Set these keys of bundle.json; None removes one, and `files` is added to."""

    def change(folder: Path) -> None:
        document = json.loads((folder / "bundle.json").read_text())
        files = changes.pop("files", {})
        document.update(changes)
        if files is None:
            del document["files"]
        else:
            document["files"].update(dict.fromkeys(files, document["files"]["README.md"]))  # type: ignore[call-overload]
        (folder / "bundle.json").write_text(json.dumps(document))

    return change


def text(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "bundle.json").write_text(content)


OUTSIDE = "names a file outside the bundle"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: (f / "README.md").unlink(), "README.md: is missing"),
    "truncated": (lambda f: os.truncate(f / "README.md", 10), "README.md: has 10 bytes"),
    "added below": (lambda f: (f / "model" / "x").touch(), "model/x: is not a file of this bundle"),
    "empty folder": (lambda f: (f / "extra").mkdir(), "extra: is an empty folder"),
    "link": (lambda f: (f / "a").symlink_to("/etc"), "a: is a symbolic link"),
    "pipe": (lambda f: os.mkfifo(f / "a"), "a: is not a regular file"),
    "no bundle.json": (lambda f: (f / "bundle.json").unlink(), "is no bundle: it has no"),
    "no sums": (lambda f: (f / "SHA256SUMS").unlink(), "SHA256SUMS: is missing"),
    "not JSON": (text("{"), "bundle.json: is not valid JSON"),
    "deep": (text("[" * 99_999), "is not valid JSON"),
    "a list": (text("[]"), "bundle.json: is not that of a bundle"),
    "no version": (text("{}"), "is not that of a bundle"),
    "huge": (lambda f: os.truncate(f / "bundle.json", 1 << 30), "is larger than any bundle"),
    "not text": (lambda f: (f / "bundle.json").write_bytes(b"\xff\xfe"), "is not a text file"),
    "version": (edit(bundle=2, deploykit="9.1.0"), "reads version 1"),
    "wrong version": (edit(bundle="2"), "is not"),
    "no files": (edit(files=None), "not a complete"),
    "another model": (edit(model="../x"), "bundle.json"),
    "another name": (edit(name="../x"), "bundle.json"),
    "no name": (edit(name=""), "bundle.json"),
    **{
        name: (edit(files=[name]), OUTSIDE)
        for name in ("../x", "/etc/passwd", "a/../b", "a//b", "./a", "a\\b", "a\nb", "")
    },
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_one_clear_line(
    damage: Callable[[Path], object], message: str, folder: Path
) -> None:
    damage(folder)
    with pytest.raises(dk.BadInput) as found:
        verify(folder)
    assert message in found.value.message
    if message == "reads version 1":
        assert found.value.hint == "install deploykit '9.1.0'"


@pytest.mark.parametrize("place", ["is_dir", "read_bytes"])
def test_what_this_user_may_not_read_is_one_clear_line(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, place, refuse)  # root, who may run this, may read everything
    with pytest.raises(dk.BadInput, match="cannot be read: Permission denied"):
        verify(folder)


def test_the_tar_holds_the_folder_and_no_trace_of_its_writer(made: Path, tmp_path: Path) -> None:
    with tarfile.open(f"{made}.tar") as archive:
        members = archive.getmembers()
    subprocess.run(["tar", "-xf", f"{made}.tar", "-C", str(tmp_path)], check=True)
    assert {(m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, "", "")}
    assert {m.mode for m in members} == {0o755, 0o644}
    assert {m.mtime for m in members} == {315_532_800}
    assert [m.name for m in members] == sorted(m.name for m in members)
    verify(tmp_path / "out")
    assert is_bundle_tar(Path(f"{made}.tar"))
    assert not is_bundle_tar(made / "README.md")


def test_a_failure_leaves_the_old_folder_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()

    def fail() -> None:
        with staged_folder(out) as folder:
            (folder / "new").touch()
            raise dk.BadInput("no")

    with pytest.raises(dk.BadInput, match="no"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "old").exists()


def test_what_a_killed_run_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib; from deploykit.deploying.folder import staged_folder as s\n"
        "with s(pathlib.Path(sys.argv[1])) as f: (f / 'x').touch(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "out"], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    with staged_folder(tmp_path / "out"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_leaves_the_folder_of_another_run_alone(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out") as first:
        (first / "x").touch()
        with staged_folder(tmp_path / "out") as second:
            (second / "y").touch()
        assert (first / "x").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_is_replaced_where_the_system_cannot_exchange_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())  # macOS, an older glibc
    for name in ("old", "new"):
        with staged_folder(tmp_path / "out") as folder:
            (folder / name).touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
