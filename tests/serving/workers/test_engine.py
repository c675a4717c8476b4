"""Front ends and the process of the engines, connected within one process: no request is lost."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from deploykit.core.errors import BadInput, DeploykitError, Expired, Overloaded
from deploykit.serving.batching.batcher import monotonic_us
from deploykit.serving.batching.queue import BatchRun, Pending, Watcher
from deploykit.serving.batching.runner import EngineFailed
from deploykit.serving.oip.request import Request
from deploykit.serving.options import ServeOptions
from deploykit.serving.workers.front import RemoteEngine
from tests.support.serving.linked import Linked, linked, values


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
