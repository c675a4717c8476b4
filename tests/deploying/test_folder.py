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
from deploykit.deploying.folder import is_bundle_tar, read_bundle, staged_folder, verify
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


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_a_changed_bit_of_any_file_is_found_and_the_file_named(folder: Path) -> None:
    for path in [each for each in folder.rglob("*") if each.is_file()]:
        before = path.read_bytes()
        flip(path)
        with pytest.raises(dk.BadInput, match=r"bundle\.json|SHA256SUMS|" + path.name):
            verify(folder)
        path.write_bytes(before)
    verify(folder)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: (f / "README.md").unlink(), "README.md: is missing"),
    "truncated": (lambda f: os.truncate(f / "README.md", 10), "README.md: has 10 bytes"),
    "added": (lambda f: (f / "more").write_text(""), "more: is not a file of this bundle"),
    "added below": (lambda f: (f / "model" / "x").touch(), "model/x: is not a file"),
    "empty folder": (lambda f: (f / "extra").mkdir(), "extra: is an empty folder"),
    "link": (lambda f: (f / "a").symlink_to("/etc/passwd"), "a: is a symbolic link"),
    "linked folder": (lambda f: (f / "a").symlink_to("/etc"), "a: is a symbolic link"),
    "pipe": (lambda f: os.mkfifo(f / "a"), "a: is not a regular file"),
    "no bundle.json": (
        lambda f: (f / "bundle.json").unlink(),
        "is no bundle: it has no bundle.json",
    ),
    "no sums": (lambda f: (f / "SHA256SUMS").unlink(), "SHA256SUMS: is missing"),
    "not JSON": (lambda f: (f / "bundle.json").write_text("{"), "bundle.json: is not valid JSON"),
    "a list": (
        lambda f: (f / "bundle.json").write_text("[]"),
        "bundle.json: is not that of a bundle",
    ),
    "no version": (lambda f: (f / "bundle.json").write_text("{}"), "is not that of a bundle"),
    "deep": (lambda f: (f / "bundle.json").write_text("[" * 99_999), "is not valid JSON"),
    "huge": (lambda f: os.truncate(f / "bundle.json", 1 << 30), "is larger than any bundle"),
    "not text": (lambda f: (f / "bundle.json").write_bytes(b"\xff\xfe"), "is not a text file"),
    "version": (lambda f: edit(f / "bundle.json", lambda d: d.update(bundle=2)), "reads version 1"),
    "wrong version": (lambda f: edit(f / "bundle.json", lambda d: d.update(bundle="2")), "is not"),
    "no files": (lambda f: edit(f / "bundle.json", lambda d: d.pop("files")), "not a complete"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_one_clear_line(
    damage: Callable[[Path], object], message: str, folder: Path
) -> None:
    damage(folder)
    with pytest.raises(dk.BadInput) as found:
        verify(folder)
    assert message in found.value.message


def test_a_newer_bundle_names_the_deploykit_to_install(folder: Path) -> None:
    edit(folder / "bundle.json", lambda d: d.update(bundle=2, deploykit="9.1.0"))
    with pytest.raises(dk.BadInput) as found:
        read_bundle(folder)
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


@pytest.mark.parametrize(
    "change",
    [{"model": "../x"}, {"name": "../x"}, {"name": ""}],
    ids=str,
)
def test_a_bundle_names_nothing_outside_itself(change: dict[str, str], folder: Path) -> None:
    edit(folder / "bundle.json", lambda d: d.update(change))
    with pytest.raises(dk.BadInput, match=r"bundle\.json"):
        read_bundle(folder)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../b", "a//b", "./a", "a\\b", "a\nb", ""]
)
def test_a_name_outside_the_folder_is_refused(name: str, folder: Path) -> None:
    edit(folder / "bundle.json", lambda d: d["files"].update({name: d["files"]["README.md"]}))  # type: ignore[attr-defined,index]
    with pytest.raises(dk.BadInput, match="names a file outside the bundle"):
        verify(folder)


def test_names_that_differ_in_case_alone_are_refused(folder: Path) -> None:
    edit(folder / "bundle.json", lambda d: d["files"].update(ReadMe=d["files"]["README.md"]))  # type: ignore[attr-defined,index]
    edit(folder / "bundle.json", lambda d: d["files"].update(README=d["files"]["README.md"]))  # type: ignore[attr-defined,index]
    with pytest.raises(dk.BadInput, match="'README' and 'ReadMe' differ only in case"):
        verify(folder)


def test_an_image_holds_the_model_alone(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name not in ("bundle.json", "SHA256SUMS", "model"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert verify(folder, whole=False).name == "tiny"
    with pytest.raises(dk.BadInput, match="is missing"):
        verify(folder)
    flip(folder / "model" / "tiny.onnx")
    with pytest.raises(dk.BadInput, match="tiny"):
        verify(folder, whole=False)


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
