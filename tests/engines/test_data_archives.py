"""Files of arrays, one or many: written, read back, and refused where they lie."""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput, NotFound
from deploykit.engines.data.samples import read_npz, read_samples, write_npz
from tests.support.runtimes.data_files import Payload, X, header, peak_memory_grows_by_at_most, rows


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    return tmp_path / "data.npz"


def test_written_arrays_come_back(npz: Path) -> None:
    write_npz(npz, {"x": rows(2), "/head/out:0": np.ones((), np.int8), "file": np.zeros(0)})
    arrays = read_npz(npz)
    assert {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == {
        "x": ("float32", (2, 3)),
        "/head/out:0": ("int8", ()),
        "file": ("float64", (0,)),
    }
    np.testing.assert_array_equal(arrays["x"], rows(2))
    with np.load(npz) as archive:  # by numpy too
        np.testing.assert_array_equal(archive["x"], rows(2))
    content = npz.read_bytes()
    write_npz(npz, arrays)
    assert npz.read_bytes() == content


def test_compressed_and_fortran_arrays_are_read(npz: Path) -> None:
    np.savez_compressed(npz, x=np.asfortranarray(rows(4)))
    np.testing.assert_array_equal(read_npz(npz)["x"], rows(4))


def write(path: Path, value: object) -> None:
    """Write objects as numpy does, or else a pickle."""
    if isinstance(value, np.ndarray):
        save = np.save if path.suffix == ".npy" else np.savez
        save(path, value, allow_pickle=True)
    else:
        path.write_bytes(pickle.dumps(value))


@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
@pytest.mark.parametrize("bare", [False, True], ids=["array", "bare pickle"])
def test_objects_are_never_unpickled(tmp_path: Path, name: str, bare: bool) -> None:
    payload = Payload(tmp_path / "ran")
    write(tmp_path / name, payload if bare else np.array([payload], object))
    says = "is not a readable|is a" if bare else "contains Python objects"
    with pytest.raises(BadInput, match=says):
        read_samples(tmp_path / name, (X,))
    assert not (tmp_path / "ran").exists()


SHAPES = [f"({10**12},)", f"({2**62}, 8)", "(-4,)", "(1.5,)", "'x'", "(" * 200]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
def test_an_absurd_header_is_refused(tmp_path: Path, name: str, shape: str) -> None:
    path, content = tmp_path / name, header(shape) + bytes(72)
    path.write_bytes(content)
    if path.suffix == ".npz":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", content)
    with peak_memory_grows_by_at_most(64 << 20), pytest.raises(BadInput, match=r"x\.np"):
        read_samples(path, (X,))


def test_objects_are_never_pickled(npz: Path) -> None:
    write_npz(npz, {"x": np.array(["a", "bc"], object)})
    assert np.load(npz, allow_pickle=False)["x"].tolist() == ["a", "bc"]


def test_header_that_claims_more_than_the_file_holds_takes_no_memory(npz: Path) -> None:
    with zipfile.ZipFile(npz, "w") as archive:
        archive.writestr("x.npy", header(f"({10**9},)") + bytes(72))
    says = r"'x': its header declares float32\[1000000000\], but the data has 72 bytes"
    with peak_memory_grows_by_at_most(64 << 20), pytest.raises(BadInput, match=says):
        read_npz(npz)


def test_archive_that_unpacks_beyond_the_memory_is_refused(npz: Path) -> None:
    """100 TB in 4 kB: the sizes in the directory are rewritten, the header agrees with them."""
    count = 25 * 10**12
    content = header(f"({count},)")
    with zipfile.ZipFile(npz, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content + bytes(4096))
        archive.filelist[0].file_size = len(content) + 4 * count
    says = "contains 100000 GB of arrays"
    with peak_memory_grows_by_at_most(64 << 20), pytest.raises(BadInput, match=says):
        read_npz(npz)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_truncated_file_is_refused(npz: Path, keep: float) -> None:
    np.savez_compressed(npz, x=np.random.default_rng(0).standard_normal((50, 3)))
    content = npz.read_bytes()
    npz.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(BadInput, match=r"data\.npz: is not a readable \.npz file"):
        read_npz(npz)


def test_an_archive_with_any_flipped_byte_is_read_or_refused(npz: Path) -> None:
    """Refused, or read: never another exception."""
    np.savez_compressed(npz, x=rows(4))
    content = npz.read_bytes()
    for at in range(len(content)):
        npz.write_bytes(content[:at] + bytes([content[at] ^ 0x15]) + content[at + 1 :])
        with contextlib.suppress(BadInput):
            read_npz(npz)


def test_folder_missing_file_and_empty_archive_are_refused(npz: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", rows(1))
    with pytest.raises(BadInput, match=r"single \.npy array"):
        read_npz(tmp_path / "one.npy")
    with pytest.raises(BadInput, match=r"is a folder; an \.npz file is needed"):
        read_npz(tmp_path)
    with pytest.raises(NotFound):
        read_npz(tmp_path / "nothing.npz")
    np.savez(npz)
    with pytest.raises(BadInput, match="contains no arrays"):
        read_npz(npz)


def test_a_single_array_file_serves_the_only_input(tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", rows(2))  # its name says nothing
    samples = read_samples(tmp_path / "labels.npy", (X,))
    np.testing.assert_array_equal(samples.inputs["x"], rows(2))
    assert samples.labels is None
