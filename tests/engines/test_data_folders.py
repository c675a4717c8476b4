"""Folders of data: joined in order, or refused with the name of what is wrong."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput, NotFound
from deploykit.core.tensors import TensorSpec
from deploykit.engines.data.samples import read_samples, write_npz
from tests.support.runtimes.data_files import X, header, peak_memory_grows_by_at_most, rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "data"
    found.mkdir()
    return found


def test_arrays_of_a_folder_are_joined_in_the_order_of_their_names(folder: Path) -> None:
    parts = {
        "b.npz": (rows(3), [1, 2, 3]),
        "a.npz": (rows(2) + 50, [8, 9]),
        "c.npz": (rows(1), [4]),
    }
    for name, (array, labels) in parts.items():
        write_npz(folder / name, {"x": array, "labels": np.array(labels)})
    (folder / ".DS_Store").write_bytes(b"hidden")
    samples = read_samples(folder, (X,))
    expected = np.concatenate([parts[name][0] for name in sorted(parts)])
    np.testing.assert_array_equal(samples.inputs["x"], expected)
    assert samples.labels is not None
    assert samples.labels.tolist() == [8, 9, 1, 2, 3, 4]


def test_single_arrays_of_a_folder_are_joined(folder: Path) -> None:
    np.save(folder / "a.npy", rows(2))
    np.save(folder / "b.npy", rows(1))
    assert len(read_samples(folder, (X,))) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"x": rows(2)[:, :2]},
        {"x": rows(2).astype("f8")},
        {"y": rows(2)},
        {"x": rows(2), "z": rows(2)},
        {"x": np.float32(3)},
    ],
    ids=["axis", "dtype", "name", "more", "scalar"],
)
def test_arrays_that_cannot_be_joined_are_named(folder: Path, other: dict[str, np.ndarray]) -> None:
    write_npz(folder / "a.npz", {"x": rows(2)})
    write_npz(folder / "b.npz", other)
    with pytest.raises(BadInput, match=r"b\.npz: has .*; a\.npz has x:float32\[N,3\]"):
        read_samples(folder, (X,))


def test_a_folder_that_unpacks_beyond_the_memory_is_refused(folder: Path) -> None:
    count = 25 * 10**12
    content = header(f"({count}, 3)")
    write_npz(folder / "a.npz", {"x": rows(2)})
    with zipfile.ZipFile(folder / "b.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content + bytes(4096))
        archive.filelist[0].file_size = len(content) + 12 * count
    says = "data: contains 300000 GB of arrays"
    with peak_memory_grows_by_at_most(64 << 20), pytest.raises(BadInput, match=says):
        read_samples(folder, (X,))


def test_an_empty_folder_is_refused(folder: Path) -> None:
    with pytest.raises(BadInput, match="data: the folder is empty"):
        read_samples(folder, (X,))
    (folder / ".hidden").touch()
    with pytest.raises(BadInput, match="data: the folder is empty"):
        read_samples(folder, (X,))


def test_a_file_that_is_not_data_is_named_not_ignored(folder: Path) -> None:
    write_npz(folder / "a.npz", {"x": rows(2)})
    (folder / "README.txt").write_text("these are samples", encoding="utf-8")
    with pytest.raises(BadInput, match=r"README\.txt: is not a data file"):
        read_samples(folder, (X,))


def test_files_mixed_with_folders_and_deeper_folders_are_refused(folder: Path) -> None:
    (folder / "class").mkdir()
    write_npz(folder / "a.npz", {"x": rows(2)})
    with pytest.raises(BadInput, match=r"both files \(a\.npz\) and folders \(class\)"):
        read_samples(folder, (X,))
    (folder / "a.npz").rename(folder / "class" / "a.npz")
    with pytest.raises(BadInput, match=r"a\.npz: is not a data file"):  # arrays hold their labels
        read_samples(folder, (X,))
    (folder / "class" / "a.npz").unlink()
    with pytest.raises(BadInput, match="class: the class folder is empty"):
        read_samples(folder, (X,))
    (folder / "class" / "deeper").mkdir()
    with pytest.raises(BadInput, match="deeper: is a folder; a class folder contains images only"):
        read_samples(folder, (X,))


@pytest.mark.parametrize("name", ["a.npz", "a.npy", "a.png", "a.jpg"])
def test_a_pipe_a_link_loop_and_a_missing_path_are_refused_at_once(folder: Path, name: str) -> None:
    if name.endswith("g"):
        pytest.importorskip("PIL")
    spec = TensorSpec("x", "uint8", ("N", 2, 2, 3))
    os.mkfifo(folder / name)
    with pytest.raises(BadInput, match=rf"{name}: is not a regular file"):
        read_samples(folder, (spec,))
    (folder / name).unlink()
    (folder / name).symlink_to(folder / name)
    with pytest.raises(BadInput, match=rf"{name}: cannot be read: Too many levels"):
        read_samples(folder, (spec,))
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "gone")
    with pytest.raises(NotFound, match=rf"{name}: no such file"):
        read_samples(folder, (spec,))
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(BadInput, match=rf"{name}: is not a regular file"):
        read_samples(folder, (spec,))


def test_a_folder_that_holds_itself_is_refused(folder: Path) -> None:
    (folder / "again").symlink_to(folder)
    with pytest.raises(BadInput, match="again/again: is a folder"):
        read_samples(folder, (X,))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_cannot_be_read_is_named(folder: Path) -> None:
    write_npz(folder / "a.npz", {"x": rows(2)})
    (folder / "a.npz").chmod(0)
    with pytest.raises(BadInput, match=r"a\.npz: cannot be read: Permission denied"):
        read_samples(folder, (X,))
    folder.chmod(0)
    try:
        with pytest.raises(BadInput, match="data: cannot be read: Permission denied"):
            read_samples(folder, (X,))
        with pytest.raises(BadInput, match=r"a\.npz: cannot be read: Permission denied"):
            read_samples(folder / "a.npz", (X,))
    finally:
        folder.chmod(0o700)


def test_images_mixed_with_arrays_are_refused(folder: Path) -> None:
    write_npz(folder / "a.npz", {"x": rows(2)})
    (folder / "b.PNG").write_bytes(b"not looked at")
    with pytest.raises(BadInput, match=r"both images \(b\.PNG\) and arrays \(a\.npz\)"):
        read_samples(folder, (X,))
