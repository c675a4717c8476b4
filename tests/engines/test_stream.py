"""A stream gives the samples that `read_samples` reads, whatever the files, a batch at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.engines.data.samples import SampleStream, find_source, read_ahead, read_samples
from tests.support.runtimes.data_files import B, X, rows

IDS = np.arange(50)
Make = Callable[[Path], Path]


def saved(name: str, save: Callable[..., None] = np.savez, **arrays: np.ndarray) -> Make:
    def make(folder: Path) -> Path:
        save(folder / name, **arrays)
        return folder / name

    return make


def in_files(folder: Path) -> Path:
    for name, part in (("a", slice(0, 7)), ("b", slice(7, 8)), ("c", slice(8, 50))):
        np.savez(folder / f"{name}.npz", x=rows(50)[part], b=IDS[part])
    return folder


LAYOUTS: dict[str, Make] = {
    "stored": saved("d.npz", x=rows(50), b=IDS),
    "compressed": saved("d.npz", np.savez_compressed, x=rows(50), b=IDS),
    "several files": in_files,
    "by columns": saved("d.npz", x=np.asfortranarray(rows(50)), b=IDS),
    "big-endian": saved("d.npz", x=rows(50).astype(">f4"), b=IDS.astype(">i8")),
    "labelled": saved("d.npz", x=rows(50), b=IDS, labels=IDS),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 8, 50, 1000])
def test_the_batches_are_the_samples(tmp_path: Path, layout: str, size: int) -> None:
    path = LAYOUTS[layout](tmp_path)
    whole = read_samples(path, (X, B))
    with SampleStream(find_source(path, (X, B))) as stream:
        batches = list(stream.batches(size))
        labels = stream.read_labels()
    assert [each.samples for each in batches[:-1]] == [size] * (len(batches) - 1)
    for name, array in whole.inputs.items():
        joined = np.concatenate([each.feeds[name] for each in batches])
        assert joined.dtype == array.dtype
        np.testing.assert_array_equal(joined, array)
    np.testing.assert_array_equal(labels, whole.labels)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_digest_is_of_the_samples_however_they_are_cut(tmp_path: Path, layout: str) -> None:
    path = LAYOUTS[layout](tmp_path)
    source = find_source(path, (X, B))
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
        np.savez(tmp_path / "d.npz", x=x, b=IDS)
        with SampleStream(find_source(tmp_path / "d.npz", (X, B))) as stream:
            digests.add(stream.skip(20))
    assert len(digests) == 3  # sample 20 is not one of the first 20


def test_rows_without_values_have_their_number(tmp_path: Path) -> None:
    from deploykit.core.tensors import TensorSpec

    np.savez(tmp_path / "d.npz", x=np.zeros((5, 0), np.float32))
    spec = TensorSpec("x", "float32", ("N", "T"))
    with SampleStream(find_source(tmp_path / "d.npz", (spec,))) as stream:
        assert [each.feeds["x"].shape for each in stream.batches(3)] == [(3, 0), (2, 0)]


@pytest.mark.parametrize("at", [0.3, 0.6, 0.9])
def test_damage_in_the_middle_names_the_file(tmp_path: Path, at: float) -> None:
    x = np.random.default_rng(0).standard_normal((5000, 3)).astype(np.float32)
    np.savez_compressed(tmp_path / "d.npz", x=x)
    content = bytearray((tmp_path / "d.npz").read_bytes())
    content[int(len(content) * at)] ^= 0x15
    (tmp_path / "d.npz").write_bytes(content)
    with pytest.raises(BadInput, match=r"d\.npz: is not a readable \.npz file"):
        read_all(tmp_path / "d.npz")


def read_all(path: Path) -> None:
    with SampleStream(find_source(path, (X,))) as stream:
        for _ in stream.batches(64):
            pass


def test_what_is_read_ahead_comes_in_order_from_another_thread() -> None:
    threads = set()

    def items() -> Iterator[int]:
        for number in range(20):
            threads.add(threading.get_ident())
            yield number

    assert list(read_ahead(items())) == list(range(20))
    assert threading.get_ident() not in threads


def test_the_next_items_are_made_while_one_is_used() -> None:
    third = threading.Event()

    def items() -> Iterator[int]:
        yield from range(2)
        third.set()
        yield 2

    ahead = read_ahead(items())
    assert next(ahead) == 0
    assert third.wait(60)
    assert list(ahead) == [1, 2]


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise BadInput("the fourth")

    found = []
    with pytest.raises(BadInput, match="the fourth"):
        found += [each for each in read_ahead(items()) if found.append(each) is None]  # type: ignore[func-returns-value]
    assert found == [0, 1, 2]
