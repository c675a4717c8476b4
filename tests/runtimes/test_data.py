from __future__ import annotations

import contextlib
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput, NotFound
from deploykit.core.tensors import TensorSpec, parse_spec
from deploykit.runtimes.data import Samples, random_feeds, read_npz, read_samples, write_npz

X = TensorSpec("x", "float32", ("N", 3))
B = TensorSpec("b", "int64", ("N",))


def rows(count: int) -> np.ndarray:
    return np.arange(count * 3, dtype=np.float32).reshape(count, 3)


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    return tmp_path / "data.npz"


class Payload:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (str(self.marker),))


def test_written_arrays_come_back(npz: Path) -> None:
    write_npz(npz, {"x": rows(2), "/head/out:0": np.ones((), np.int8), "file": np.zeros(0)})
    arrays = read_npz(npz)
    assert {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == {
        "x": ("float32", (2, 3)),
        "/head/out:0": ("int8", ()),
        "file": ("float64", (0,)),
    }
    np.testing.assert_array_equal(arrays["x"], rows(2))


def test_numpy_reads_what_we_write(npz: Path) -> None:
    write_npz(npz, {"x": rows(2)})
    with np.load(npz) as archive:
        np.testing.assert_array_equal(archive["x"], rows(2))


def test_compressed_and_fortran_arrays_are_read(npz: Path) -> None:
    np.savez_compressed(npz, x=np.asfortranarray(rows(4)))
    np.testing.assert_array_equal(read_npz(npz)["x"], rows(4))


def test_same_arrays_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        write_npz(tmp_path / name, {"x": rows(2)})
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_objects_are_never_unpickled(npz: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    objects = np.empty(1, dtype=object)
    objects[0] = Payload(marker)
    np.savez(npz, x=objects)
    with pytest.raises(BadInput, match=r"data\.npz: 'x' holds Python objects") as caught:
        read_npz(npz)
    assert caught.value.hint is not None
    assert not marker.exists()


def test_bare_pickle_is_never_unpickled(npz: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    npz.write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(BadInput):
        read_npz(npz)
    assert not marker.exists()


def test_objects_are_never_pickled(npz: Path) -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        write_npz(npz, {"x": np.array([None])})
    assert not npz.exists()


@contextlib.contextmanager
def peak_memory_grows_by_at_most(limit_bytes: int) -> Iterator[None]:
    """Linux keeps each process's largest resident size, and resets it when told to."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = peak_memory_bytes()
    yield
    assert peak_memory_bytes() - before <= limit_bytes


def peak_memory_bytes() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert match is not None
    return int(match[1]) * 1024


def header(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def test_header_that_claims_more_than_the_file_holds_takes_no_memory(npz: Path) -> None:
    with zipfile.ZipFile(npz, "w") as archive:
        archive.writestr("x.npy", header(f"({10**9},)") + bytes(72))
    says = r"'x' says it is float32\[1000000000\], but 72 bytes"
    with peak_memory_grows_by_at_most(64 << 20), pytest.raises(BadInput, match=says):
        read_npz(npz)


def test_absurd_header_is_refused(npz: Path) -> None:
    for shape in (f"({10**12},)", f"({2**62}, 8)", "(-4,)", "(1.5,)", "'x'", "(" * 200):
        with zipfile.ZipFile(npz, "w") as archive:
            archive.writestr("x.npy", header(shape) + bytes(72))
        with pytest.raises(BadInput, match=r"data\.npz"):
            read_npz(npz)


def test_archive_that_unpacks_beyond_the_memory_is_refused(npz: Path) -> None:
    """100 TB in 4 kB: the sizes in the directory are rewritten, the header agrees with them."""
    count = 25 * 10**12
    content = header(f"({count},)")
    with zipfile.ZipFile(npz, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content + bytes(4096))
        archive.filelist[0].file_size = len(content) + 4 * count
    says = "holds 100000 GB of arrays"
    with peak_memory_grows_by_at_most(64 << 20), pytest.raises(BadInput, match=says):
        read_npz(npz)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_truncated_file_is_refused(npz: Path, keep: float) -> None:
    np.savez_compressed(npz, x=np.random.default_rng(0).standard_normal((50, 3)))
    content = npz.read_bytes()
    npz.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(BadInput, match=r"data\.npz: is not a readable \.npz file"):
        read_npz(npz)


def test_any_flipped_byte_is_survived(npz: Path) -> None:
    """Refused, or read: never another exception."""
    np.savez_compressed(npz, x=rows(4))
    content = npz.read_bytes()
    for at in range(len(content)):
        npz.write_bytes(content[:at] + bytes([content[at] ^ 0x15]) + content[at + 1 :])
        with contextlib.suppress(BadInput):
            read_npz(npz)


def test_single_array_file_is_refused_by_name(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", rows(1))
    with pytest.raises(BadInput, match=r"single \.npy array"):
        read_npz(tmp_path / "one.npy")


def test_folder_missing_file_and_empty_archive_are_refused(npz: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is a folder"):
        read_npz(tmp_path)
    with pytest.raises(NotFound):
        read_npz(tmp_path / "nothing.npz")
    np.savez(npz)
    with pytest.raises(BadInput, match="holds no arrays"):
        read_npz(npz)


def test_only_array_serves_the_only_input_whatever_its_name(npz: Path) -> None:
    write_npz(npz, {"arr_0": rows(2), "labels": np.array([1, 0])})
    samples = read_samples(npz, (X,))
    np.testing.assert_array_equal(samples.inputs["x"], rows(2))
    assert samples.labels is not None
    assert samples.labels.tolist() == [1, 0]


def test_arrays_that_are_no_inputs_are_left_out(npz: Path) -> None:
    write_npz(npz, {"x": rows(2), "other": rows(5)})
    assert set(read_samples(npz, (X,)).inputs) == {"x"}


def test_missing_input_is_named_with_those_wanted(npz: Path) -> None:
    write_npz(npz, {"x": rows(2), "c": rows(2)})
    with pytest.raises(BadInput, match=r"data\.npz: no array 'b'") as caught:
        read_samples(npz, (X, B))
    assert caught.value.hint is not None
    assert "x:float32[N,3], b:int64[N]" in caught.value.hint


@pytest.mark.parametrize(
    ("array", "got"),
    [
        (rows(2)[:, :2], r"float32\[2,2\]"),
        (rows(2).astype(np.float64), r"float64\[2,3\]"),
        (rows(2)[0], r"float32\[3\]"),
        (np.float32(1), r"float32\[\]"),
    ],
    ids=["axis", "dtype", "rank", "scalar"],
)
@pytest.mark.parametrize("batch", ["N", 1])
def test_array_that_does_not_fit_is_refused(
    npz: Path, array: np.ndarray, got: str, batch: int | str
) -> None:
    write_npz(npz, {"x": array})
    with pytest.raises(BadInput, match=rf"'x' is float32\[N,3\], got {got}"):
        read_samples(npz, (TensorSpec("x", "float32", (batch, 3)),))


def test_model_of_a_fixed_batch_takes_any_number_of_samples(npz: Path) -> None:
    write_npz(npz, {"x": rows(5)})
    assert len(read_samples(npz, (TensorSpec("x", "float32", (1, 3)),))) == 5


def test_other_byte_order_is_turned(npz: Path) -> None:
    write_npz(npz, {"x": rows(2).astype(">f4")})
    array = read_samples(npz, (X,)).inputs["x"]
    assert array.dtype.isnative
    np.testing.assert_array_equal(array, rows(2))


def test_inputs_must_hold_as_many_samples(npz: Path) -> None:
    write_npz(npz, {"x": rows(3), "b": np.zeros(2, np.int64)})
    with pytest.raises(BadInput, match=r"hold \[2, 3\] samples"):
        read_samples(npz, (X, B))


def test_no_samples_are_refused(npz: Path) -> None:
    write_npz(npz, {"x": rows(0)})
    with pytest.raises(BadInput, match="samples"):
        read_samples(npz, (X,))


@pytest.mark.parametrize("labels", [np.zeros(4), np.zeros(()), np.zeros((1, 3))], ids=str)
def test_labels_must_be_as_many_as_samples(npz: Path, labels: np.ndarray) -> None:
    write_npz(npz, {"x": rows(3), "labels": labels})
    with pytest.raises(BadInput, match="3 samples but labels of shape"):
        read_samples(npz, (X,))


def test_labels_are_needed_only_where_asked_for(npz: Path) -> None:
    write_npz(npz, {"x": rows(3)})
    assert read_samples(npz, (X,)).labels is None
    with pytest.raises(BadInput, match="no array 'labels'"):
        read_samples(npz, (X,), labelled=True)


@pytest.mark.parametrize(("size", "sizes"), [(1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (9, [7])])
def test_batches_cover_all_samples_in_order(size: int, sizes: list[int]) -> None:
    samples = Samples({"x": rows(7), "b": np.arange(7)}, None, "data.npz")
    batches = list(samples.batches(size))
    assert [len(batch["x"]) for batch in batches] == sizes
    np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in batches]), rows(7))
    np.testing.assert_array_equal(np.concatenate([batch["b"] for batch in batches]), np.arange(7))


SPECS = tuple(
    parse_spec(text)
    for text in ("f:float32[N,T]", "h:float16[N]", "i:int64[N,2]", "q:int8[N]", "m:bool[N]")
)


def test_random_feeds_fit_their_specs() -> None:
    feeds = random_feeds(SPECS, {"N": 5, "T": 3})
    assert {name: (array.dtype.name, array.shape) for name, array in feeds.items()} == {
        "f": ("float32", (5, 3)),
        "h": ("float16", (5,)),
        "i": ("int64", (5, 2)),
        "q": ("int8", (5,)),
        "m": ("bool", (5,)),
    }


def test_random_feeds_depend_on_the_seed_alone() -> None:
    first, again, other = (random_feeds(SPECS, {"N": 50}, seed) for seed in (1, 1, 2))
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        assert not np.array_equal(first[name], other[name])


def test_random_whole_numbers_are_valid_ids() -> None:
    ids = random_feeds((parse_spec("i:int64[N]"),), {"N": 1000})["i"]
    assert ids.min() == 0
    assert ids.max() == 9
