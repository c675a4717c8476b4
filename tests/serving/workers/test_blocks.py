"""Tensors in shared memory: blocks do not overlap, and arrays come back as they were."""

from __future__ import annotations

import random
from mmap import mmap

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.tensors import TensorSpec
from deploykit.serving.workers.blocks import BlockAllocator, TensorCodec, rounded

SIZE = 1 << 16


MIXED = (
    TensorSpec("x", "float32", ("N", 3)),
    TensorSpec("flags", "bool", ("N", "T")),
    TensorSpec("half", "bfloat16", ("N",)),
    TensorSpec("words", "string", ("N", "T")),
)
PLAIN = MIXED[:3]


def arrays(rows: int, length: int) -> dict[str, np.ndarray]:
    words = [[f"ä{row}" * (column + 1) for column in range(length)] for row in range(rows)]
    return {
        "x": np.arange(rows * 3, dtype=np.float32).reshape(rows, 3),
        "flags": np.arange(rows * length).reshape(rows, length) % 2 == 0,
        "half": np.full(rows, 1.5, np.float32),
        "words": np.array(words, object).reshape(rows, length),
    }


@pytest.mark.parametrize("seed", range(5))
def test_no_two_blocks_overlap_and_all_memory_comes_back(seed: int) -> None:
    rng, arena = random.Random(seed), BlockAllocator(128, SIZE)
    taken: list[tuple[int, int]] = []
    for _ in range(2000):
        if taken and rng.random() < 0.5:
            arena.give(*taken.pop(rng.randrange(len(taken))))
            continue
        size = rounded(rng.choice([0, 1, 64, 65, 3136, rng.randrange(SIZE)]))
        at = arena.take(size)
        if at is not None:
            assert at >= 128
            assert at + size <= SIZE
            assert all(at + size <= other or other + n <= at for other, n in taken)
            taken.append((at, size))
    for block in taken:
        arena.give(*block)
    assert arena.take(SIZE - 4096) == 128


def test_memory_in_use_is_not_given_twice_and_used_blocks_come_first() -> None:
    arena = BlockAllocator(0, SIZE)
    first, second = arena.take(1024), arena.take(1024)
    assert first is not None
    assert first != second
    assert arena.take(SIZE) is None
    arena.give(first, 1024)
    assert arena.take(1024) == first  # whose pages are in memory already


@pytest.mark.parametrize("specs", [PLAIN, MIXED], ids=["numbers", "strings"])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 5), (0, 2), (2, 0)])
def test_arrays_come_back_as_they_were(
    specs: tuple[TensorSpec, ...], rows: int, length: int
) -> None:
    writer, reader, memory = TensorCodec(specs), TensorCodec(specs), mmap(-1, SIZE)
    given = arrays(rows, length)
    for at in (0, 64, SIZE // 2):
        layout, strings = writer.encode(given)
        writer.write(memory, at, layout, given, strings)
        found = reader.read(memory, at, reader.parse(layout.head, layout.size), copy=True)
        assert list(found) == [spec.name for spec in specs]
        for name, array in found.items():
            np.testing.assert_array_equal(array, given[name])
            assert array.dtype == given[name].dtype


def test_requests_of_one_shape_share_one_key() -> None:
    """The queue looks at its identity first."""
    reader = TensorCodec(PLAIN)
    keys = []
    for rows in (1, 2):
        layout, _ = TensorCodec(PLAIN).encode(arrays(rows, 4))
        keys.append(reader.parse(layout.head, layout.size).key)
    assert (
        keys[0] is keys[1] == (("x", "FP32", (3,)), ("flags", "BOOL", (4,)), ("half", "BF16", ()))
    )


def test_an_array_of_another_dtype_or_rank_is_refused_not_converted() -> None:
    writer, given = TensorCodec(PLAIN), arrays(2, 2)
    layout, strings = writer.encode(given)
    with pytest.raises(BadInput, match="'x' is float32, got float64"):
        writer.write(
            mmap(-1, SIZE), 0, layout, {**given, "x": given["x"].astype(np.float64)}, strings
        )
    with pytest.raises(BadInput, match=r"'half' is half:bfloat16\[N\], got shape \[2, 1\]"):
        writer.encode({**given, "half": given["half"][:, None]})


@pytest.mark.parametrize("specs", [PLAIN, MIXED], ids=["numbers", "strings"])
def test_a_head_that_was_damaged_is_refused_or_stays_within_its_block(
    specs: tuple[TensorSpec, ...],
) -> None:
    """Bit flips, extreme numbers, other lengths: the reader never looks beyond the block."""
    rng = random.Random(7)
    layout, _ = TensorCodec(specs).encode(arrays(2, 3))
    extremes = [0, 1, 255, 1 << 31, (1 << 63) - 1, (1 << 64) - 1]
    refused = 0
    for _ in range(3000):
        head = bytearray(layout.head)
        what = rng.randrange(3)
        if what == 0:
            head[rng.randrange(len(head))] ^= 1 << rng.randrange(8)
        elif what == 1:
            at = 8 * rng.randrange(len(head) // 8)
            head[at : at + 8] = rng.choice(extremes).to_bytes(8, "little")
        else:
            head = head[: rng.randrange(len(head))]
        reader = TensorCodec(specs)
        try:
            found = reader.parse(bytes(head), layout.size)
        except ValueError:
            refused += 1
        else:
            assert found.size == layout.size
            for place in found.places:
                assert 0 <= place.at <= place.at + place.size <= layout.size
    assert refused > 1500
