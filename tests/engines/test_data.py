"""Arrays as the samples of a model: read from files and folders, checked, and drawn at random."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput, NotFound, Unsupported
from deploykit.core.tensors import TensorSpec, parse_spec
from deploykit.engines.data.examples import Example
from deploykit.engines.data.samples import (
    Samples,
    check_calibration,
    check_finite,
    find_source,
    overlap,
    random_feeds,
    read_ahead,
    read_batches,
    read_npz,
    read_samples,
    write_npz,
)
from tests.support.runtimes.data_files import B, Payload, X, header, memory_grows_by_at_most, rows

FIXED, CHW = TensorSpec("x", "float32", (1, 3)), parse_spec("x:float32[N,3,8,9]")
ANY, HWC = parse_spec("x:float32[N,3,H,W]"), parse_spec("x:uint8[N,8,9,3]")


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    return tmp_path / "data.npz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "data"
    found.mkdir()
    return found


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": rows(2), "other": rows(5)},
        {"arr_0": rows(2)},  # the only one serves the only input
        {"x": rows(2).astype(">f4")},
        {"x": np.asfortranarray(rows(2))},
    ],
)
def test_arrays_are_read_with_their_labels(npz: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez_compressed(npz, **arrays, labels=np.array([1, 0], ">i8"))
    samples = read_samples(npz, (X,))
    assert samples.inputs.keys() == {"x"}
    assert samples.inputs["x"].dtype.isnative
    np.testing.assert_array_equal(samples.inputs["x"], rows(2))
    assert samples.labels is not None
    assert samples.labels.dtype.isnative
    assert samples.labels.tolist() == [1, 0]


LABELS = "3 samples but labels of shape"


@pytest.mark.parametrize(
    ("inputs", "arrays", "message", "hint"),
    [
        ([X, B], {"x": rows(2), "c": rows(2)}, r"data\.npz: no array 'b'", "x:float32[N,3], b:int"),
        ([X], {"x": rows(2)[:, :2]}, r"'x' is float32\[N,3\], got float32\[2,2\]", ""),
        ([FIXED], {"x": rows(2)[:, :2]}, r"'x' is float32\[N,3\], got float32\[2,2\]", ""),
        ([X], {"x": rows(2).astype("f8")}, r"got float64\[2,3\]", "x.astype('float32')"),
        ([X], {"x": np.float32(1)}, r"got float32\[\]", ""),
        ([X], {"x": rows(1)[0]}, r"one sample without its batch axis, which x\[None\] adds", ""),
        ([X, B], {"x": rows(3), "b": np.zeros(2, np.int64)}, r"have \[2, 3\] samples", ""),
        ([X], {"x": rows(0)}, "samples", ""),
        ([X], {"x": rows(3), "labels": np.zeros(4)}, LABELS, ""),
        ([X], {"x": rows(3), "labels": np.zeros((1, 3))}, LABELS, ""),
        ([CHW], {"x": np.zeros((2, 8, 9, 3), "f4")}, "looks like NHWC", "(0, 3, 1, 2)"),
        ([ANY], {"x": np.zeros((2, 8, 9, 3), "u1")}, "looks like NHWC", "(0, 3, 1, 2)"),
        ([HWC], {"x": np.zeros((2, 3, 8, 9), "u1")}, "looks like NCHW", "(0, 2, 3, 1)"),
        ([CHW], {"x": np.zeros((2, 3, 8, 9), "u1")}, "got uint8", "`preprocess`"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_with_what_they_look_like(
    npz: Path, inputs: list[TensorSpec], arrays: dict[str, np.ndarray], message: str, hint: str
) -> None:
    write_npz(npz, arrays)
    with pytest.raises(BadInput, match=message) as caught:
        read_samples(npz, tuple(inputs))
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("batches", "expected"), [(("N", "N"), (4, 7)), (("N", 3), (3, 6)), ((1, 1), (1, 7))], ids=str
)
def test_a_fixed_batch_decides_the_batch_size(
    batches: tuple[int | str, ...], expected: tuple[int, int]
) -> None:
    specs = [TensorSpec("x", "float32", (batch, 3)) for batch in batches]
    samples = Samples({"x": rows(7)}, np.arange(7), "d")
    assert samples.batching(4, specs) == expected
    with pytest.raises(BadInput, match="3 samples do not fill the model's fixed batch of 8"):
        samples.first(3).batching(4, [TensorSpec("x", "float32", (8, 3))])


# --- files ---


def test_written_arrays_come_back(npz: Path) -> None:
    arrays = {"x": rows(2), "/head/out:0": np.ones((), np.int8), "file": np.zeros(0)}
    write_npz(npz, {**arrays, "strings": np.array(["a", "bc"], object)})
    found = read_npz(npz)
    assert found.pop("strings").tolist() == ["a", "bc"]
    np.testing.assert_equal(found, arrays)
    with np.load(npz) as archive:  # by numpy too
        np.testing.assert_array_equal(archive["x"], rows(2))
    content = npz.read_bytes()
    write_npz(npz, read_npz(npz))
    assert npz.read_bytes() == content


@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
@pytest.mark.parametrize("bare", [False, True], ids=["array", "bare pickle"])
def test_objects_are_never_unpickled(tmp_path: Path, name: str, bare: bool) -> None:
    payload = Payload(tmp_path / "ran")
    if bare:
        (tmp_path / name).write_bytes(pickle.dumps(payload))
    else:
        save = np.save if name.endswith(".npy") else np.savez
        save(tmp_path / name, np.array([payload], object), allow_pickle=True)
    says = "is not a readable|is a" if bare else "contains Python objects"
    with pytest.raises(BadInput, match=says):
        read_samples(tmp_path / name, (X,))
    assert not (tmp_path / "ran").exists()


SHAPES = [f"({10**12},)", f"({10**9},)", f"({2**62}, 8)", "(-4,)", "(1.5,)", "'x'", "(" * 200]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
def test_an_absurd_header_is_refused_and_takes_no_memory(
    tmp_path: Path, name: str, shape: str
) -> None:
    path, content = tmp_path / name, header(shape) + bytes(72)
    path.write_bytes(content)
    if path.suffix == ".npz":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", content)
    with memory_grows_by_at_most(64 << 20), pytest.raises(BadInput, match=r"x\.np"):
        read_samples(path, (X,))


def test_an_archive_that_unpacks_beyond_the_memory_is_refused(npz: Path) -> None:
    """100 TB in 4 kB: the sizes in the directory are rewritten, the header agrees with them."""
    count = 25 * 10**12
    content = header(f"({count},)")
    with zipfile.ZipFile(npz, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content + bytes(4096))
        archive.filelist[0].file_size = len(content) + 4 * count
    says = "of 95,367,432 MiB: does not fit into memory"
    with memory_grows_by_at_most(64 << 20), pytest.raises(Unsupported, match=says):
        read_samples(npz, (parse_spec("x:float32[N]"),))


def test_an_archive_that_is_cut_off_or_has_a_flipped_byte_is_read_or_refused(npz: Path) -> None:
    np.savez_compressed(npz, x=rows(4))
    content = npz.read_bytes()
    for keep in (0.1, 0.5, 0.99):
        npz.write_bytes(content[: int(len(content) * keep)])
        with pytest.raises(BadInput, match=r"data\.npz: is not a readable \.npz file"):
            read_npz(npz)
    for at in range(len(content)):
        npz.write_bytes(content[:at] + bytes([content[at] ^ 0x15]) + content[at + 1 :])
        with contextlib.suppress(BadInput):
            read_npz(npz)


def test_another_file_is_refused_with_what_data_is(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "torch.npz", "w") as archive:
        archive.writestr("m/data.pkl", b"")
    (tmp_path / "a.csv").write_bytes(b"1,2,3\n4,5,6\n")
    (tmp_path / "m.onnx").write_bytes(b"\x08\x08\x12\x07pytorch")
    for name in ("a.csv", "m.onnx", "torch.npz"):
        with pytest.raises(BadInput, match=f"{name}: is not a readable|no array 'x'") as caught:
            read_samples(tmp_path / name, (X,))
        assert caught.value.hint


def test_what_is_no_archive_is_named(npz: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "labels.npy", rows(2))  # its name says nothing
    np.testing.assert_array_equal(read_samples(tmp_path / "labels.npy", (X,)).inputs["x"], rows(2))
    with pytest.raises(BadInput, match=r"single \.npy array"):
        read_npz(tmp_path / "labels.npy")
    with pytest.raises(BadInput, match=r"is a folder; an \.npz file is needed"):
        read_npz(tmp_path)
    with pytest.raises(NotFound):
        read_npz(tmp_path / "nothing.npz")
    np.savez(npz)
    with pytest.raises(BadInput, match="contains no arrays"):
        read_npz(npz)


def test_data_that_memory_has_no_room_for_are_not_called_damaged(
    npz: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(npz, x=np.zeros((4, 2), np.float32))

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 4.0 GiB for an array with shape (4,)")

    monkeypatch.setattr("numpy.lib.format.read_array", fail)
    with pytest.raises(Unsupported, match=r"data\.npz: does not fit into memory: 4\.0 GiB"):
        read_npz(npz)


# --- folders ---


FOLDERS: dict[str, tuple[list[str], str]] = {
    "empty": ([".hidden"], "data: the folder is empty"),
    "a text": (["README.txt"], r"README\.txt: is not an image"),
    "arrays": (["a.npy", "b.npy"], r"a\.npy: is not an image"),
    "images too": (["b.PNG", "c.npy"], r"c\.npy: is not an image"),
    "folders too": (["class/a.npy", "a.npy"], r"both files \(a\.npy\) and folders \(class\)"),
    "arrays of a class": (["class/a.npy"], r"a\.npy: is not an image"),
    "an empty class": (["class/.hidden"], "class: the class folder is empty"),
    "deeper folders": (["class/deeper/a.png"], "deeper: is a folder; a class folder contains im"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_of_anything_else_is_refused_by_name(folder: Path, case: str) -> None:
    names, says = FOLDERS[case]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / "x.npy", rows(2))
        (folder / "x.npy").rename(folder / name)
    with pytest.raises(BadInput, match=says):
        read_samples(folder, (X,))


# --- random feeds and examples ---

SPECS = tuple(
    parse_spec(text)
    for text in ("f:float32[N,T]", "h:float16[N]", "i:int64[N,2]", "q:int8[N]", "m:bool[N]")
)


def test_random_feeds_fit_their_specs_and_depend_on_the_seed_alone() -> None:
    first, again, other = (random_feeds(SPECS, {"N": 50, "T": 3}, seed) for seed in (1, 1, 2))
    assert {name: (array.dtype.name, array.shape) for name, array in first.items()} == {
        "f": ("float32", (50, 3)),
        "h": ("float16", (50,)),
        "i": ("int64", (50, 2)),
        "q": ("int8", (50,)),
        "m": ("bool", (50,)),
    }
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        assert not np.array_equal(first[name], other[name])


@pytest.mark.parametrize(
    ("spec", "least", "most"), [("i:int64[N]", 0, 9), ("pixels:uint8[N,8,8,3]", 0, 255)]
)
def test_random_integers_are_ids_or_pixels(spec: str, least: int, most: int) -> None:
    (values,) = random_feeds((parse_spec(spec),), {"N": 1000}).values()
    assert (values.min(), values.max()) == (least, most)


@pytest.mark.parametrize(
    ("specs", "name"),
    [
        ("x:float32[N,T,4] lengths:int64[N]", "lengths"),
        ("x:float32[T,N,4] src_lens:int32[N]", "src_lens"),
        ("x:int64[N,T] y:int64[N,U] x_len:int64[N]", "x_len"),
    ],
)
def test_random_lengths_are_those_that_rows_can_have(specs: str, name: str) -> None:
    parsed = tuple(map(parse_spec, specs.split()))
    found = random_feeds(parsed, {"N": 50, "T": 5, "U": 7})[name]
    assert set(found.tolist()) == {1, 2, 3, 4, 5}
    assert found[-1] == 5
    assert set(random_feeds((TensorSpec(name, "int64", ("N",)),), {"N": 90})[name]) == {*range(10)}


@pytest.mark.parametrize("spec", ["keep:bool", "src_key_padding_mask:bool", "mask:int64"])
def test_random_masks_hide_no_whole_row(spec: str) -> None:
    specs = (parse_spec(f"{spec}[N,T]"),)
    for length in (2, 3, 33):
        (values,) = random_feeds(specs, {"N": 50, "T": length}).values()
        assert set(np.unique(values)) == {0, 1}
        assert values.any(1).all()
        assert "bool" not in spec or not values.all(1).any()
    (weights,) = random_feeds((parse_spec("mask:int64[N,T,1]"),), {"N": 50, "T": 2}).values()
    assert weights.any(1).all()
    (alone,) = random_feeds(specs, {"N": 5, "T": 1}).values()
    assert (alone == (spec != "src_key_padding_mask:bool")).all()


def test_an_example_is_permuted_and_repeated_along_its_batch_alone() -> None:
    specs = [parse_spec("state:int64[2,N]"), parse_spec("x:float32[N,3]")]
    example = Example({"state": np.array([[1, 2, 3], [10, 20, 30]]), "x": rows(3)})
    for seed in range(9):
        found = example.feeds(specs, {"N": 6}, seed)["state"]
        assert sorted(found[0]) == [1, 1, 2, 2, 3, 3]
        assert (found[1] == 10 * found[0]).all()


# --- streams: the samples that `read_samples` reads, a batch at a time ---

IDS = np.arange(50)


def saved(save: Callable[..., None] = np.savez, **arrays: np.ndarray) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        save(folder / "d.npz", **{"x": rows(50), "b": IDS, **arrays})
        return folder / "d.npz"

    return make


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "stored": saved(),
    "compressed": saved(np.savez_compressed),
    "by columns": saved(x=np.asfortranarray(rows(50))),
    "big-endian": saved(x=rows(50).astype(">f4"), b=IDS.astype(">i8")),
    "labelled": saved(labels=IDS),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_batches_are_the_samples(tmp_path: Path, layout: str) -> None:
    path = LAYOUTS[layout](tmp_path)
    whole, source = read_samples(path, (X, B)), find_source(path, (X, B))
    for size, start in ((1, 0), (8, 0), (50, 0), (1000, 0), (9, 5), (4, 50)):
        batches = list(read_batches(source, size, start))
        assert {len(each["x"]) for each in batches[:-1]} <= {size}
        for name, array in whole.inputs.items():
            joined = np.concatenate([array[:0], *(each[name] for each in batches)])
            np.testing.assert_array_equal(joined, array[start:], strict=True)
    np.testing.assert_array_equal(source.read_labels(), whole.labels)


def test_a_replaced_file_changes_the_stamp(npz: Path) -> None:
    np.savez(npz, x=rows(50), b=IDS)
    before = find_source(npz, (X, B)).stamp(20)
    assert find_source(npz, (X, B)).stamp(20) == before
    np.savez(npz, x=rows(51)[1:], b=IDS)
    assert find_source(npz, (X, B)).stamp(20) != before


@pytest.mark.parametrize("at", [0.3, 0.9])
def test_damage_in_the_middle_names_the_file(tmp_path: Path, at: float) -> None:
    x = np.random.default_rng(0).standard_normal((5000, 3)).astype(np.float32)
    np.savez_compressed(tmp_path / "d.npz", x=x)
    content = bytearray((tmp_path / "d.npz").read_bytes())
    content[int(len(content) * at)] ^= 0x15
    (tmp_path / "d.npz").write_bytes(content)
    with pytest.raises(BadInput, match=r"d\.npz: is not a readable \.npz file"):
        list(read_batches(find_source(tmp_path / "d.npz", (X,)), 64))


def test_the_checksum_of_a_stored_array_is_checked(
    npz: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.13 on `seek` leaves it out."""
    x = rows(5000)
    np.savez(npz, x=x)
    monkeypatch.setattr(zipfile.ZipExtFile, "seek", pytest.fail)
    npz.write_bytes(npz.read_bytes().replace(x[4000].tobytes(), x[4001].tobytes()))
    with pytest.raises(BadInput, match=r"Bad CRC-32 for file 'x\.npy'"):
        read_samples(npz, (X,))


def test_what_is_read_as_a_whole_and_looked_for_nan_fits_into_memory(
    npz: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()
    monkeypatch.setattr("deploykit.engines.data.samples.check_fits", lambda _, n: asked.append(n))
    np.savez(npz, x=np.asfortranarray(np.zeros((1 << 20, 3), np.float32)))
    found = read_samples(npz, (X,))
    assert asked == [12 << 20, 24 << 20]  # the array and its rows
    with memory_grows_by_at_most(1 << 20):
        check_finite(found)


def test_a_file_that_is_cut_off_while_it_is_read_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", rows(50))
    source = find_source(tmp_path / "d.npy", (X,))
    os.truncate(tmp_path / "d.npy", 400)
    with pytest.raises(BadInput, match=r"d\.npy: .*ends before its last sample"):
        list(read_batches(source, 8))


def test_the_next_items_are_made_in_order_by_another_thread_while_one_is_used() -> None:
    third, threads = threading.Event(), set()

    def items() -> Iterator[int]:
        for number in range(20):
            threads.add(threading.get_ident())
            if number == 2:
                third.set()
            yield number

    ahead = read_ahead(items())
    assert next(ahead) == 0
    assert third.wait(60)
    assert list(ahead) == list(range(1, 20))
    assert threading.get_ident() not in threads


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise BadInput("the fourth")

    ahead = read_ahead(items())
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(BadInput, match="the fourth"):
        next(ahead)


# warnings of calibration data, and samples that two sets share


RNG = np.random.default_rng(0)
GOOD = RNG.standard_normal((100, 3, 4, 4)).astype(np.float32)
PIXELS = RNG.integers(0, 256, (100, 4, 4, 3), np.uint8)


def samples_of(array: np.ndarray, **others: np.ndarray) -> Samples:
    return Samples({"x": array, **others}, None, "calib")


def repeated(count: int) -> np.ndarray:
    return np.concatenate([GOOD[-1:]] * count + [GOOD[count:]])


def constant(array: np.ndarray, at: object, value: float) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array


@pytest.mark.parametrize(
    ("array", "warnings"),
    [
        (GOOD, []),
        (PIXELS, []),
        (GOOD[:99], ["calib: only 99 samples"]),
        (repeated(10), []),
        (repeated(11), ["calib: 11 of 100 samples are duplicates"]),
        (RNG.random((100, 3, 4, 4), np.float32), []),
        (255 * RNG.random((100, 3, 4, 4), np.float32), ["look unnormalised"]),
        (1000 * RNG.standard_normal((100, 8)).astype(np.float32), []),  # these are no pixels
        (PIXELS * 0, ["99 of 100 samples are duplicates"]),
        (constant(GOOD, 3, np.nan), []),  # a calibration refuses it
    ],
)
def test_what_is_odd_in_calibration_data_is_reported(
    array: np.ndarray, warnings: Sequence[str]
) -> None:
    shape = ",".join(map(str, ("N", *array.shape[1:])))
    found = check_calibration(samples_of(array), (parse_spec(f"x:{array.dtype}[{shape}]"),))
    assert len(found) == len(warnings)
    assert all(words in text for words, text in zip(warnings, found, strict=True)), found


def test_samples_repeat_only_where_all_their_inputs_do() -> None:
    samples = samples_of(np.repeat(GOOD[:1], 100, axis=0), mask=np.arange(100))
    specs = (parse_spec("x:float32[N,3,4,4]"), parse_spec("mask:int64[N]"))
    assert not any("duplicates" in text for text in check_calibration(samples, specs))


def test_overlap_counts_test_samples_that_were_also_calibrated_on() -> None:
    array = GOOD[:20]
    a, b = samples_of(array[:12]), samples_of(array[9:])
    assert overlap(a, b) == 3
    assert overlap(a, samples_of(array[12:])) == 0
    assert overlap(samples_of(array[::-1]), samples_of(np.asfortranarray(array))) == 20
    assert overlap(a, samples_of(np.repeat(array[:1], 4, axis=0))) == 4
    numbered = samples_of(array[:5], ids=np.arange(5))  # all inputs of a sample count
    assert overlap(numbered, samples_of(array[:5], ids=np.array([0, 1, 9, 9, 9]))) == 2
    assert overlap(numbered, samples_of(array[:5] + 1, ids=np.arange(5))) == 0
