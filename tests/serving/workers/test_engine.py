"""Front ends and the process of the engines, connected within one process: no request is lost."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from mmap import mmap
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, DeploykitError, Expired, Overloaded
from deploykit.core.evidence import RowIndependence
from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.engine import BaseEngine
from deploykit.serving.batching.delivery import deliver_inline, monotonic_us
from deploykit.serving.batching.policy import BatchRun, Pending, Watcher
from deploykit.serving.batching.stacking import EngineFailed
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip.request import Request
from deploykit.serving.options import ServeOptions
from deploykit.serving.workers import exchange
from deploykit.serving.workers.engine import EngineProcessModel, FrontEnd
from deploykit.serving.workers.exchange import RECORD
from deploykit.serving.workers.front import EngineLink, RemoteEngine

LIMIT_S = 60  # against hanging
ROWS = RowIndependence(True, "by construction", (1 << 20,))


class Words(BaseEngine):
    """Reverses words and adds 1 to numbers of any length; -1 is what it cannot bear."""

    device, runtime, batching, steady = "cpu", "fake", ROWS, True
    inputs = (TensorSpec("word", "string", ("N",)), TensorSpec("x", "float32", ("N", "T")))
    outputs = (TensorSpec("drow", "string", ("N",)), TensorSpec("y", "float32", ("N", "T")))

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        if (feeds["x"] == -1).any():
            raise RuntimeError("a row it cannot bear")
        self.batches.append(len(feeds["x"]))
        words = [each[::-1] for each in feeds["word"]]
        return {"drow": np.array(words, object), "y": feeds["x"] + np.float32(1)}

    def close(self) -> None: ...


class Linked:
    """Two models in the process of the engines, and front ends, each with its memory."""

    def __init__(self, options: ServeOptions, fronts: int = 2, size: int = 1 << 16) -> None:
        self.loop = asyncio.get_running_loop()
        self.options = options
        self.engines = {"a": Words(), "b": Words()}
        self.repository = ModelRepository(
            dict(self.engines),
            options,
            deliver=lambda run: self.loop.call_soon_threadsafe(deliver_inline, run),
            call_soon=self.loop.call_soon,
        )
        for model in self.repository.models.values():
            model.batcher.inline_max_rows = 1 << 20
        self.models = [EngineProcessModel(each) for each in self.repository.models.values()]
        self.links: list[EngineLink] = []
        self.ends: list[FrontEnd] = []
        self.served = []
        for _ in range(fronts):
            link = EngineLink()
            described = {n: [RemoteEngine.of(m)] for n, m in self.repository.models.items()}
            served = ModelRepository(described, options, make_model=link.make_model)
            self.served.append(served)
            self.links.append(link)
        self.size = size

    async def connect(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(False)
        memory = mmap(-1, self.size)
        end = FrontEnd(self.models, memory, lambda _: None)
        self.ends.append(end)
        await self.loop.create_unix_connection(lambda: end, sock=theirs)
        await self.links[number].connect(ours, memory)

    def ask(
        self, front: int, x: list[float], word: str = "ab", *, model: str = "a", **more: Any
    ) -> tuple[Pending, asyncio.Future[Pending]]:
        """One row for each front end to answer."""
        answered: asyncio.Future[Pending] = self.loop.create_future()
        feeds = {"word": np.array([word], object), "x": np.array([x], np.float32)}
        key = (("word", "BYTES", ()), ("x", "FP32", (len(x),)))
        request = Request(feeds, 1, key, (), **more)
        pending = self.served[front].find(model).submit(request, answered.set_result)
        return pending, answered

    async def close(self) -> None:
        for end in self.ends:
            if end.transport is not None:
                end.transport.close()
        while any(link.connection is not None for link in self.links):
            await asyncio.sleep(0)
        self.repository.close()
        for each in self.served:
            each.close()


def linked(
    test: Callable[[Linked], Awaitable[None]],
    options: ServeOptions | None = None,
    **more: Any,
) -> None:
    """Run `test` with front ends that are connected."""

    async def run() -> None:
        found = Linked(options or ServeOptions(), **more)
        for number in range(len(found.links)):
            await found.connect(number)
        try:
            await asyncio.wait_for(test(found), LIMIT_S)
        finally:
            await found.close()

    asyncio.run(run())


def values(pending: Pending) -> tuple[str, list[float]]:
    assert pending.error is None, pending.error
    return pending.outputs["drow"][0], pending.outputs["y"][0].tolist()


def test_strings_and_any_length_come_back_to_the_front_end_that_asked() -> None:
    async def test(found: Linked) -> None:
        asked = [
            (found.ask(n % 2, [float(n)] * (n % 3 + 1), f"wörd {n}", model="ab"[n % 2])[1], n)
            for n in range(60)
        ]
        for answered, n in asked:
            assert values(await answered) == (f"wörd {n}"[::-1], [n + 1.0] * (n % 3 + 1))

    linked(test)


def test_requests_of_two_front_ends_run_as_one_batch() -> None:
    """The queue waits for eight rows: neither front end has so many."""

    async def test(found: Linked) -> None:
        asked = [found.ask(n % 2, [1.0])[1] for n in range(8)]
        for answered in asked:
            assert values(await answered) == ("ba", [2.0])
        assert found.engines["a"].batches == [8]

    linked(test, ServeOptions(max_batch=8, max_delay_us=60_000_000))


def test_an_error_of_the_engine_stays_what_it_is() -> None:
    async def test(found: Linked) -> None:
        failed = (await found.ask(0, [-1.0])[1]).error
        assert isinstance(failed, EngineFailed)
        assert "the engine failed on this request" in failed.message

    linked(test)


def test_the_queue_of_all_front_ends_is_one_and_bounded() -> None:
    async def test(found: Linked) -> None:
        held = [found.ask(n % 2, [1.0])[1] for n in range(2)]
        while found.repository.find("a").waiting < 2:
            await asyncio.sleep(0)
        refused = (await found.ask(1, [1.0])[1]).error
        assert isinstance(refused, Overloaded)
        assert "the queue of model 'a' is full (2 requests)" in refused.message
        found.repository.close()  # answers what waits
        assert [values(await each) for each in held] == [("ba", [2.0])] * 2

    linked(test, ServeOptions(queue=2, max_batch=8, max_delay_us=60_000_000))


def test_a_request_past_its_deadline_is_answered_though_it_waits() -> None:
    async def test(found: Linked) -> None:
        _, answered = found.ask(0, [1.0], timeout_us=1)
        while not answered.done():
            found.repository.expire()
            await asyncio.sleep(0.001)
        assert isinstance((await answered).error, Expired)

    linked(test, ServeOptions(max_batch=8, max_delay_us=60_000_000))


def test_a_cancelled_request_leaves_the_queue_and_its_memory() -> None:
    async def test(found: Linked) -> None:
        pending, answered = found.ask(0, [1.0])
        model, queue = found.served[0].find("a"), found.repository.find("a")
        while not queue.waiting:
            await asyncio.sleep(0)
        assert model.cancel(pending)
        assert not model.cancel(pending)
        while queue.waiting or found.links[0].connection._open:
            await asyncio.sleep(0)
        assert not answered.done()
        assert queue.metrics.status()["outcomes"]["cancelled"] == 1
        asked = [found.ask(0, [1.0])[1] for _ in range(8)]  # the blocks are free again
        assert values(await asked[0]) == ("ba", [2.0])

    linked(test, ServeOptions(max_batch=8, max_delay_us=60_000_000))


def test_memory_that_is_full_refuses_and_serves_again() -> None:
    async def test(found: Linked) -> None:
        held, refused = [], []
        for _ in range(50):
            try:
                held.append(found.ask(0, [1.0] * 100))
            except Overloaded as exc:
                refused.append(exc.message)
        assert len(held) > 3
        assert set(refused) == {"the memory shared with the process of the engines is full"}
        assert found.served[0].find("a").metrics.status()["outcomes"]["rejected"] == len(refused)
        found.ask(1, [1.0] * 100)  # the other one has its own
        for pending, _ in held:
            found.served[0].find("a").cancel(pending)
        while found.links[0].connection._open:
            await asyncio.sleep(0)
        assert len([found.ask(0, [1.0] * 100) for _ in held]) == len(held)

    linked(test, ServeOptions(max_batch=500, max_delay_us=60_000_000), size=1 << 13)


def test_an_answer_that_does_not_fit_is_an_error_and_no_memory_is_lost() -> None:
    async def test(found: Linked) -> None:
        for _ in range(50):
            error = (await found.ask(0, [1.0], "\n" * 1500)[1]).error  # longer as an answer: no
            assert error is None
            asked = [found.ask(0, [1.0], "x" * 900)[1] for _ in range(4)]
            errors = [(await each).error for each in asked]
            assert all(error is None or isinstance(error, Overloaded) for error in errors)

    linked(test, size=1 << 13)


def test_when_the_process_of_the_engines_ends_requests_get_503_and_a_new_one_answers() -> None:
    async def test(found: Linked) -> None:
        asked = [found.ask(0, [1.0])[1] for _ in range(5)]
        other = found.ask(1, [1.0])[1]
        while found.repository.find("a").waiting < 6:
            await asyncio.sleep(0)
        first = found.ends[0]
        assert first.transport is not None
        first.transport.abort()
        for each in asked:
            error = (await each).error
            assert isinstance(error, Overloaded)
            assert "is being replaced" in error.message
        model = found.served[0].find("a")
        assert model.why_not_ready() is not None
        with pytest.raises(Overloaded, match="is being replaced"):
            found.ask(0, [1.0])
        outcomes = model.metrics.status()["outcomes"]
        assert (outcomes["failed"], outcomes["rejected"]) == (5, 1)
        assert not other.done()
        while found.repository.find("a").waiting > 1:  # they left the queue
            await asyncio.sleep(0)
        await found.connect(0)
        assert model.why_not_ready() is None
        asked = [found.ask(0, [1.0])[1] for _ in range(7)]
        assert [values(await each) for each in [*asked, other]] == [("ba", [2.0])] * 8

    linked(test, ServeOptions(max_batch=8, max_delay_us=60_000_000))


def test_a_process_that_hangs_does_not_make_clients_wait_for_ever() -> None:
    async def test(found: Linked) -> None:
        pending, answered = found.ask(0, [1.0])
        model = found.served[0].find("a")
        model.expire()
        assert not answered.done()
        pending.give_up_us = monotonic_us() - 10_000_000
        model.expire()
        assert isinstance((await answered).error, Expired)
        assert model.metrics.status()["outcomes"]["expired"] == 1
        model.expire()

    linked(test, ServeOptions(max_batch=8, max_delay_us=60_000_000))


def test_what_a_request_says_of_itself_reaches_the_batch() -> None:
    seen: list[Pending] = []

    class Seen(Watcher):
        def record_run(self, run: BatchRun) -> None:
            seen.extend(run.requests)

    async def test(found: Linked) -> None:
        found.repository.find("a").watch(Seen())
        answered = found.loop.create_future()
        feeds = {"word": np.array(["ab"], object), "x": np.ones((1, 1), np.float32)}
        request = Request(feeds, 1, (("x", "FP32", (1,)),), (), priority=1 << 63)
        found.served[0].find("a").submit(request, answered.set_result, trace="00-ab-cd-01")
        sent = await answered
        (ran,) = seen
        assert (ran.trace, ran.priority) == ("00-ab-cd-01", 0)
        same = ("arrived_us", "deadline_us", "give_up_us", "decode_us", "rows")
        assert [getattr(ran, n) for n in same] == [getattr(sent, n) for n in same]

    linked(test)


def test_tensors_of_another_dtype_are_refused_and_their_memory_is_free_again() -> None:
    async def test(found: Linked) -> None:
        feeds = {"word": np.array(["ab"], object), "x": np.ones((1, 100), np.float64)}
        for _ in range(100):
            with pytest.raises(BadInput, match="'x' is float32, got float64"):
                found.served[0].find("a").submit(Request(feeds, 1, (), ()), lambda _: None)

    linked(test, size=1 << 13)


def test_other_models_are_noticed_and_other_facts_are_taken_over() -> None:
    async def test(found: Linked) -> None:
        link = found.links[0]
        described = {n: RemoteEngine.of(m) for n, m in found.repository.models.items()}
        assert link.describe(described)
        later = described["a"].in_use._replace(generation=7)
        changed = RemoteEngine(**{**vars(described["a"]), "notes": ("new",), "in_use": later})
        assert link.describe({**described, "a": changed})
        model = found.served[0].find("a")
        assert (model.notes, model.in_use.generation) == (("new",), 7)
        assert model.metadata()["parameters"]["generation"] == "7"
        other = RemoteEngine(**{**vars(described["a"]), "inputs": described["a"].outputs})
        assert not link.describe({**described, "a": other})
        assert not link.describe({"a": described["a"]})

    linked(test)


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


class Closing:
    """A transport that takes anything."""

    aborted = False

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None:
        self.aborted = True


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


def test_an_error_of_a_class_of_its_own_is_still_an_error() -> None:
    async def test(found: Linked) -> None:
        def refuse(_: Pending) -> None:
            raise Overloaded("no", hint="later")

        found.repository.find("a").batcher.submit = refuse
        error = (await found.ask(0, [1.0])[1]).error
        assert type(error) is Overloaded
        assert isinstance(error, DeploykitError)
        assert (error.message, error.hint) == ("no", "later")

    linked(test)
