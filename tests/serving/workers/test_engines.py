"""Front ends and the process of the engines, connected within one process: no request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from mmap import mmap
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import uvloop

from deploykit.core.errors import Expired, Overloaded
from deploykit.core.evidence import RowIndependence
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Engine
from deploykit.serving.batching.batcher import Loop, deliver_inline, monotonic_us
from deploykit.serving.batching.queue import BatchRun, Pending, Watcher
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip.request import Request
from deploykit.serving.options import ServeOptions
from deploykit.serving.workers.engines import (
    BlockAllocator,
    EngineLink,
    FrontEnd,
    RemoteEngine,
    TensorCodec,
)
from deploykit.serving.workers.link import Link, Message

LIMIT_S = 60  # against hanging
LATER = ServeOptions(max_batch=8, max_delay_us=60_000_000)  # a batch runs once it has 8 rows
SIZE = 1 << 16

# -- Tensors in shared memory: blocks do not overlap, and arrays come back as they were

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


@pytest.mark.parametrize("seed", range(3))
def test_no_two_blocks_overlap_and_all_memory_comes_back(seed: int) -> None:
    rng, arena = random.Random(seed), BlockAllocator(128, SIZE)
    taken: list[tuple[int, int]] = []
    for _ in range(2000):
        if taken and rng.random() < 0.5:
            arena.give(*taken.pop(rng.randrange(len(taken))))
            continue
        size = rng.choice([1, 64, 65, 3136, rng.randrange(1, SIZE)])
        at = arena.take(size)
        if at is not None:
            assert 128 <= at <= at + size <= SIZE
            assert all(at + size <= other or other + n <= at for other, n in taken)
            taken.append((at, size))
    for block in taken:
        arena.give(*block)
    assert arena.take(SIZE - 128) == 128
    assert arena.take(1) is None


@pytest.mark.parametrize("specs", [PLAIN, MIXED], ids=["numbers", "strings"])
@pytest.mark.parametrize(("rows", "length"), [(3, 5), (0, 2), (2, 0)])
def test_arrays_come_back_as_they_were(
    specs: tuple[TensorSpec, ...], rows: int, length: int
) -> None:
    writer, reader, memory = TensorCodec(specs), TensorCodec(specs), mmap(-1, SIZE)
    given = arrays(rows, length)
    for at in (0, 64, SIZE // 2):
        shapes = writer.shapes(given)
        strings = writer.write(memory, at, writer.layout(shapes), given)
        found = reader.read(memory, at, reader.layout(shapes), strings, copy=True)
        assert list(found) == [spec.name for spec in specs]
        for name, array in found.items():
            np.testing.assert_array_equal(array, given[name])
            assert array.dtype == given[name].dtype
        # a pipeline's stage may read numbers in the other byte order
        writer.write(memory, at, writer.layout(shapes), {**given, "x": given["x"].astype(">f4")})
        found = reader.read(memory, at, reader.layout(shapes), strings, copy=True)
        np.testing.assert_array_equal(found["x"], given["x"])


# -- Two front ends, and a process with two models


class Words(Engine):
    """Reverses words and adds 1 to numbers of any length."""

    device, runtime, steady = "cpu", "fake", True
    batching = RowIndependence(True, "by construction", (1 << 20,))
    inputs = (TensorSpec("word", "string", ("N",)), TensorSpec("x", "float32", ("N", "T")))
    outputs = (TensorSpec("drow", "string", ("N",)), TensorSpec("y", "float32", ("N", "T")))

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        words = [each[::-1] for each in feeds["word"]]
        return {"drow": np.array(words, object), "y": feeds["x"] + np.float32(1)}

    def close(self) -> None: ...


class Shapeless(Words):
    """Leaves the shapes of its outputs out, as a file may."""

    outputs = (TensorSpec("drow", "string", ()), TensorSpec("y", "float32", ()))


class Linked:
    """Three models in the process of the engines, and front ends, each with its memory."""

    def __init__(self, options: ServeOptions, size: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.size = size
        self.repository = ModelRepository(
            {"a": Words(), "b": Words(), "c": Shapeless()},
            options,
            Loop(
                partial(self.loop.call_soon_threadsafe, deliver_inline),
                call_soon=self.loop.call_soon,
            ),
        )
        for model in self.repository.models.values():
            model.batcher.inline_max_rows = 1 << 20
        self.models = list(self.repository.models.values())
        self.memories = [mmap(-1, size), mmap(-1, size)]
        self.fronts: set[FrontEnd] = set()
        self.welcomed: list[int] = []  # a 1 for each front end that said which one it is
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind("")
        self.links = [
            EngineLink(number, memory, self.listener.getsockname())
            for number, memory in enumerate(self.memories, 1)
        ]
        models = self.repository.models.items()
        self.described = {name: RemoteEngine.of(model) for name, model in models}
        engines = {name: [engine] for name, engine in self.described.items()}
        self.served = [
            ModelRepository(engines, options, make_model=link.make_model) for link in self.links
        ]

    async def connect(self) -> None:
        describe = lambda: self.welcomed.append(1) or self.described  # noqa: E731
        accept = partial(FrontEnd, self.models, self.memories, self.fronts, describe)
        self.server = await self.loop.create_unix_server(accept, sock=self.listener)
        self.connecting = [asyncio.ensure_future(e.stay_connected(print)) for e in self.links]
        await asyncio.gather(*(link.ran.wait() for link in self.links))

    def ask(
        self, front: int, x: list[float], word: str = "ab", *, model: str = "a", **more: Any
    ) -> tuple[Pending, asyncio.Future[Pending]]:
        """One row for that front end to answer."""
        answered: asyncio.Future[Pending] = self.loop.create_future()
        feeds = {"word": np.array([word], object), "x": np.array([x], np.float32)}
        key = (("word", "BYTES", ()), ("x", "FP32", (len(x),)))
        request = Request(feeds, 1, key, (), **more)
        pending = self.served[front].find(model).submit(request, answered.set_result)
        return pending, answered

    async def waiting(self, count: int) -> None:
        """Return when so many requests wait for model `a`."""
        while self.repository.find("a").batcher.waiting != count:
            await asyncio.sleep(0)

    async def answered(self) -> None:
        """Return when the first front end has no request open."""
        while self.links[0].open:
            await asyncio.sleep(0)

    async def close(self) -> None:
        for each in self.connecting:
            each.cancel()
        for front in self.fronts:
            front.transport.close()
        self.server.close()
        self.repository.close()
        for each in self.served:
            each.close()


def linked(
    options: ServeOptions | None = None, size: int = SIZE
) -> Callable[[Callable[[Linked], Awaitable[None]]], Callable[[], None]]:
    """Run a test with front ends that are connected."""

    def decorate(test: Callable[[Linked], Awaitable[None]]) -> Callable[[], None]:
        def run_test() -> None:
            async def run() -> None:
                found = Linked(options or ServeOptions(), size)
                await found.connect()
                try:
                    await asyncio.wait_for(test(found), LIMIT_S)
                finally:
                    await found.close()

            asyncio.run(run())

        return run_test

    return decorate


def values(pending: Pending) -> tuple[str, list[float]]:
    assert pending.error is None, pending.error
    return pending.outputs["drow"][0], pending.outputs["y"][0].tolist()


@linked()
async def test_strings_and_any_length_come_back_to_the_front_end_that_asked(found: Linked) -> None:
    asked = [
        (found.ask(n % 2, [float(n)] * (n % 3 + 1), f"wörd {n}", model="abc"[n % 3])[1], n)
        for n in range(60)
    ]
    for answered, n in asked:
        assert values(await answered) == (f"wörd {n}"[::-1], [n + 1.0] * (n % 3 + 1))


@linked(ServeOptions(queue=2, max_batch=8, max_delay_us=60_000_000))
async def test_the_queue_of_all_front_ends_is_one_and_bounded(found: Linked) -> None:
    held = [found.ask(n % 2, [1.0])[1] for n in range(2)]
    await found.waiting(2)
    refused = (await found.ask(1, [1.0])[1]).error
    assert type(refused) is Overloaded
    assert "the queue of model 'a' is full (2 requests)" in refused.message
    assert refused.hint
    found.repository.close()  # answers what waits
    assert [values(await each) for each in held] == [("ba", [2.0])] * 2


@linked(LATER)
async def test_a_request_past_its_deadline_is_answered_though_it_waits(found: Linked) -> None:
    _, answered = found.ask(0, [1.0], timeout_us=1)
    while not answered.done():
        found.repository.expire()
        await asyncio.sleep(0.001)
    assert isinstance((await answered).error, Expired)


@linked(LATER)
async def test_a_process_that_hangs_does_not_make_clients_wait_for_ever(found: Linked) -> None:
    pending, answered = found.ask(0, [1.0])
    model = found.served[0].find("a")
    model.batcher.expire()
    assert not answered.done()
    pending.give_up_us = monotonic_us() - 10_000_000
    model.batcher.expire()
    assert isinstance((await answered).error, Expired)
    assert model.metrics.status()["outcomes"]["expired"] == 1
    model.batcher.expire()


@linked(LATER)
async def test_a_cancelled_request_leaves_the_queue_and_its_memory(found: Linked) -> None:
    pending, answered = found.ask(0, [1.0])
    model = found.served[0].find("a")
    await found.waiting(1)
    assert model.batcher.cancel(pending)
    assert not model.batcher.cancel(pending)
    await found.waiting(0)
    await found.answered()
    assert not answered.done()
    assert found.repository.find("a").metrics.status()["outcomes"]["cancelled"] == 1
    asked = [found.ask(0, [1.0])[1] for _ in range(8)]  # the blocks are free again
    assert values(await asked[0]) == ("ba", [2.0])


@linked(ServeOptions(max_batch=500, max_delay_us=60_000_000), 1 << 13)
async def test_memory_that_is_full_refuses_and_serves_again(found: Linked) -> None:
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
        found.served[0].find("a").batcher.cancel(pending)
    await found.answered()
    assert len([found.ask(0, [1.0] * 100) for _ in held]) == len(held)


@linked(size=1 << 13)
async def test_an_answer_that_does_not_fit_is_an_error_and_no_memory_is_lost(found: Linked) -> None:
    for _ in range(50):
        error = (await found.ask(0, [1.0], "\n" * 1500)[1]).error  # longer as an answer: no
        assert error is None
        asked = [found.ask(0, [1.0], "x" * 900)[1] for _ in range(4)]
        errors = [(await each).error for each in asked]
        assert all(error is None or isinstance(error, Overloaded) for error in errors)


@linked(LATER)
async def test_when_the_process_of_the_engines_ends_requests_get_503_and_a_new_one_answers(
    found: Linked,
) -> None:
    asked = [found.ask(0, [1.0])[1] for _ in range(5)]
    other = found.ask(1, [1.0])[1]
    await found.waiting(6)
    next(front for front in found.fronts if len(front._open) == 5).transport.abort()
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
    await found.waiting(1)  # they left the queue
    while model.why_not_ready() is not None:
        await asyncio.sleep(0.01)
    asked = [found.ask(0, [1.0])[1] for _ in range(7)]
    assert [values(await each) for each in [*asked, other]] == [("ba", [2.0])] * 8


@linked()
async def test_what_a_request_says_of_itself_reaches_the_batch(found: Linked) -> None:
    seen: list[Pending] = []

    class Seen(Watcher):
        def record_run(self, run: BatchRun) -> None:
            seen.extend(run.requests)

    found.repository.find("a").watch(Seen())
    answered = found.loop.create_future()
    feeds = {"word": np.array(["ab"], object), "x": np.ones((1, 1), np.float32)}
    request = Request(feeds, 1, (("x", "FP32", (1,)),), (), priority=1 << 63)
    found.served[0].find("a").submit(request, answered.set_result, trace="00-ab-cd-01")
    sent = await answered
    (ran,) = seen
    same = ("trace", "priority", "arrived_us", "deadline_us", "give_up_us", "decode_us", "rows")
    assert [getattr(ran, n) for n in same] == [getattr(sent, n) for n in same]


@linked()
async def test_a_request_for_another_model_disconnects_its_front_end_alone(found: Linked) -> None:
    found.links[0].models["a"].batcher.inputs = TensorCodec(PLAIN)
    feeds, answered = arrays(1, 2), found.loop.create_future()
    found.served[0].find("a").submit(Request(feeds, 1, (), ()), answered.set_result)
    error = (await answered).error
    assert isinstance(error, Overloaded)
    assert values(await found.ask(1, [1.0])[1]) == ("ba", [2.0])


def test_messages_arrive_whole_in_pieces_of_any_length() -> None:
    async def run() -> None:
        found, data = list[Message](), bytearray()
        rng, wire = random.Random(1), SimpleNamespace(is_closing=bool, write=data.extend)
        sender, receiver = Link(print, print), Link(found.extend, print)
        sender.connection_made(cast("Any", wire))
        sent = [(n, rng.randbytes(rng.choice([0, 8, 500]))) for n in range(300)]
        for message in sent:
            sender.send(*message)
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        while data:
            length = rng.randint(1, 700)
            receiver.data_received(bytes(data[:length]))
            del data[:length]
        assert found == sent

    asyncio.run(run())


def test_the_engines_read_nothing_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be unpickled: every user of the machine can find the address."""

    async def run() -> None:
        found = Linked(ServeOptions(), SIZE)
        await found.connect()
        monkeypatch.setattr("os.geteuid", lambda: -1)
        data = pickle.dumps([("front", 1)])
        with socket.socket(socket.AF_UNIX) as other:
            other.settimeout(LIMIT_S)
            other.connect(found.listener.getsockname())
            other.sendall(len(data).to_bytes(4, "little") + data)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(other.recv, 1) == b""
        assert len(found.welcomed) == 2
        await found.close()
        await asyncio.sleep(0.1)  # uvloop closes its handles in later turns

    uvloop.run(run())  # as the engines do
