"""A stream gives the samples that `read_samples` reads, whatever the files, a batch at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.tensors import TensorSpec, parse_spec
from deploykit.engines.data.samples import (
    Samples,
    SampleStream,
    check_calibration,
    find_source,
    overlap,
    read_ahead,
    read_samples,
)
from tests.support.runtimes.data_files import B, X, rows

IDS = np.arange(50)


def in_files(folder: Path) -> Path:
    for name, part in (("a", slice(0, 7)), ("b", slice(7, 8)), ("c", slice(8, 50))):
        np.savez(folder / f"{name}.npz", x=rows(50)[part], b=IDS[part])
    return folder


def saved(save: Callable[..., None] = np.savez, **arrays: np.ndarray) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        save(folder / "d.npz", **{"x": rows(50), "b": IDS, **arrays})
        return folder / "d.npz"

    return make


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "stored": saved(),
    "compressed": saved(np.savez_compressed),
    "several files": in_files,
    "by columns": saved(x=np.asfortranarray(rows(50))),
    "big-endian": saved(x=rows(50).astype(">f4"), b=IDS.astype(">i8")),
    "labelled": saved(labels=IDS),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_batches_are_the_samples_and_the_digest_does_not_depend_on_them(
    tmp_path: Path, layout: str
) -> None:
    path = LAYOUTS[layout](tmp_path)
    whole, source = read_samples(path, (X, B)), find_source(path, (X, B))
    for size in (1, 8, 50, 1000):
        with SampleStream(source) as stream:
            batches = list(stream.batches(size))
            labels = stream.read_labels()
        assert [each.samples for each in batches[:-1]] == [size] * (len(batches) - 1)
        for name, array in whole.inputs.items():
            joined = np.concatenate([each.feeds[name] for each in batches])
            np.testing.assert_array_equal(joined, array, strict=True)
        np.testing.assert_array_equal(labels, whole.labels)
    with SampleStream(source) as one, SampleStream(source) as other:
        assert [each.digest for each in one.batches(4)][9] == other.skip(40)
        (left,) = other.batches(100)
        assert (left.samples, left.feeds["x"][0, 0]) == (10, 120.0)


def test_a_changed_value_changes_the_digest(tmp_path: Path) -> None:
    digests = set()
    for at in (None, 0, 19, 20):
        x = rows(50)
        if at is not None:
            x[at, 1] += 1
        with SampleStream(find_source(saved(x=x)(tmp_path), (X, B))) as stream:
            digests.add(stream.skip(20))
    assert len(digests) == 3  # sample 20 is not one of the first 20


def test_rows_without_values_have_their_number(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((5, 0), np.float32))
    spec = TensorSpec("x", "float32", ("N", "T"))
    with SampleStream(find_source(tmp_path / "d.npz", (spec,))) as stream:
        assert [each.feeds["x"].shape for each in stream.batches(3)] == [(3, 0), (2, 0)]


@pytest.mark.parametrize("at", [0.3, 0.9])
def test_damage_in_the_middle_names_the_file(tmp_path: Path, at: float) -> None:
    def read_all(path: Path) -> None:
        with SampleStream(find_source(path, (X,))) as stream:
            for _ in stream.batches(64):
                pass

    x = np.random.default_rng(0).standard_normal((5000, 3)).astype(np.float32)
    np.savez_compressed(tmp_path / "d.npz", x=x)
    content = bytearray((tmp_path / "d.npz").read_bytes())
    content[int(len(content) * at)] ^= 0x15
    (tmp_path / "d.npz").write_bytes(content)
    with pytest.raises(BadInput, match=r"d\.npz: is not a readable \.npz file"):
        read_all(tmp_path / "d.npz")


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


LAST = np.s_[:, 2]
FIRST = np.s_[..., 0]


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
        (constant(GOOD, LAST, 0.5), ["calib: channel 2 of 'x' is 0.5 everywhere"]),
        (constant(PIXELS, FIRST, 0), ["calib: channel 0 of 'x' is 0 everywhere"]),
        (PIXELS * 0, ["99 of 100 samples are duplicates", *["is 0 everywhere"] * 3]),
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
