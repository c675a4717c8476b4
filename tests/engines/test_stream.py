"""A stream gives the samples that `read_samples` reads, whatever the files, a batch at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.tensors import TensorSpec
from deploykit.engines.data.samples import SampleStream, find_source, read_ahead, read_samples
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
