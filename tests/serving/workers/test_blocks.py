"""Tensors in shared memory: blocks do not overlap, and arrays come back as they were."""

from __future__ import annotations

import asyncio
import random
from mmap import mmap

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.tensors import TensorSpec
from deploykit.serving.options import ServeOptions
from deploykit.serving.workers import blocks as exchange
from deploykit.serving.workers.blocks import RECORD, BlockAllocator, TensorCodec, rounded
from deploykit.serving.workers.engine import FrontEnd
from tests.support.serving.linked import Closing, Linked, linked, values

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


# -- What a front end sends that is no request: it alone is disconnected


@pytest.mark.parametrize("seed", range(4))
def test_what_is_no_record_disconnects_its_front_end_and_nothing_else(seed: int) -> None:
    """Any bytes: the loop, the queue and the other front end live on."""
    rng = random.Random(seed)

    async def test(found: Linked) -> None:
        link, sent = found.links[0], list[bytes]()
        link.connection.write = sent.append
        for number in range(4):
            found.ask(0, [1.0] * (number + 1), "w" * number)
        good = b"".join(sent)
        disconnected = 0
        for _ in range(400):
            data = bytearray(good)
            for _ in range(rng.randint(1, 3)):
                at = rng.choice([rng.randrange(len(data)), rng.randrange(RECORD.size)])
                data[at] = rng.randrange(256)
            if rng.random() < 0.2:
                data = bytearray(rng.randbytes(rng.randrange(300)))
            end = FrontEnd(found.models, found.ends[0].memory, lambda _: None)
            transport = end.transport = Closing()
            end.data_received(bytes(data))
            disconnected += transport.aborted
            end.connection_lost(None)
            await asyncio.sleep(0)
        assert disconnected > 100
        assert values(await found.ask(1, [1.0])[1]) == ("ba", [2.0])
        assert all(model.waiting == 0 for model in found.repository.models.values())

    linked(test)


@pytest.mark.parametrize(
    ("field", "value"),
    [(0, exchange.DONE), (0, 77), (2, 9), (4, 2), (6, 1 << 15), (6, 1 << 40), (7, 64), (11, 500)],
    ids=["an answer", "kind", "model", "rows", "other half", "outside", "size", "traceparent"],
)
def test_a_request_that_says_another_thing_than_its_tensors_is_refused(
    field: int, value: int
) -> None:
    async def test(found: Linked) -> None:
        end, sent = found.ends[0], list[bytes]()
        found.links[0].connection.write = sent.append
        found.ask(0, [1.0] * 100)
        (data,) = sent
        numbers = list(RECORD.unpack_from(data))
        wrong = RECORD.pack(*numbers[:field], value, *numbers[field + 1 :]) + data[RECORD.size :]
        real, transport = end.transport, Closing()
        end.transport = transport
        end.data_received(wrong)
        assert transport.aborted
        transport.aborted = False
        end.data_received(data)
        assert not transport.aborted
        end.data_received(data)  # the same number twice
        assert transport.aborted
        transport.aborted = False
        end.data_received(RECORD.pack(exchange.READ, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0))
        assert transport.aborted  # so many answers there were not
        end.transport = real

    linked(test, ServeOptions(max_batch=8, max_delay_us=60_000_000))


def test_records_arrive_whole_in_pieces_of_any_length() -> None:
    class Kept(exchange.RecordConnection):
        def __init__(self) -> None:
            super().__init__(mmap(-1, 4096), 0, 4096)
            self.found: list[tuple[int, bytes]] = []

        def take(self, record: exchange.Record, more: bytes) -> None:
            self.found.append((record[3], more))

    async def run() -> None:
        rng, sender = random.Random(1), Kept()
        sent = [(n, rng.randbytes(rng.choice([0, 8, 500]))) for n in range(300)]
        for number, more in sent:
            sender.send(exchange.DONE, number, more=more)
        data, receiver = b"".join(sender._out), Kept()
        while data:
            length = rng.randint(1, 700)
            receiver.data_received(data[:length])
            data = data[length:]
        assert receiver.found == sent
        receiver.transport = Closing()
        claims = RECORD.pack(exchange.DONE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1 << 31)
        receiver.data_received(claims)  # gigabytes, which are not waited for
        assert receiver.transport.aborted

    asyncio.run(run())
