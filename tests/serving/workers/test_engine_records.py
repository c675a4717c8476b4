"""What a front end sends that is no request: it alone is disconnected."""

from __future__ import annotations

import asyncio
import random
from mmap import mmap

import pytest

from deploykit.serving.options import ServeOptions
from deploykit.serving.workers import blocks as exchange
from deploykit.serving.workers.blocks import RECORD
from deploykit.serving.workers.engine import FrontEnd
from tests.support.serving.linked import Closing, Linked, linked, values


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
