"""The load generator against a stand-in server: what is counted, what is timed, how it ends."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.tensors import TensorSpec
from deploykit.engines.data.samples import random_feeds
from deploykit.loadtest.client import run_plans
from deploykit.loadtest.load import load_test
from deploykit.loadtest.wire import NO_ANSWER, UNSENT
from tests.support.measure.loads import TRIES, at_least, client_of, load
from tests.support.stand_in import ANSWER, StandIn, reply

# hundreds of connections are open when the stand-in ends; its asyncio may leave some of them behind
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """What other tests of this process made stays: no collection below goes through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """What is left behind is collected in the test that left it, not in another."""
    yield
    gc.collect()


QUICK = {"warmup_s": 0.0, "duration_s": 0.3}


async def never() -> bytes:
    await asyncio.Event().wait()
    return b""


async def limited(server: StandIn) -> bytes:
    """10 at a time, 10 ms each."""
    gate = server.__dict__.setdefault("gate", asyncio.Semaphore(10))
    async with gate:
        await asyncio.sleep(0.01)
    return reply(200, ANSWER)


def test_closed_loop_counts_every_request_once() -> None:
    server = StandIn()
    with server.running() as url:
        enough = at_least(4)
        result = load(url, server.bodies, enough, concurrency=4, warmup_s=0.0, duration_s=0.5)
    assert result.model == "m"
    assert (result.mode, result.concurrency, result.rate_per_s) == ("closed", 4, None)
    assert result.sent == result.ok == len(server.bodies) - 1  # one more was the probe
    assert result.latency is not None
    assert result.latency.samples == result.ok >= 4
    assert result.achieved_per_s.low <= result.achieved_per_s.value <= result.achieved_per_s.high
    assert result.achieved_per_s.value == pytest.approx(result.ok / 0.5, abs=5 / 0.5)
    assert (result.refused, result.expired, result.failed) == (0, 0, 0)
    assert result.first_error is None
    assert result.same_machine
    # they are kept; others: reachable?, about, index, metadata, config, probe
    assert server.connections <= 4 + 6 * TRIES


def test_requests_are_binary_tensors_of_the_metadata_s_shape_and_seeded() -> None:
    bodies = []
    for _ in range(2):
        server = StandIn()
        with server.running() as url:
            load(url, server.bodies, at_least(8), concurrency=1, batch=5, seed=7, **QUICK)
        bodies.append(server.bodies[:20])
    head, raw = bodies[0][0]
    assert head["parameters"] == {"binary_data_output": True}
    item = {"name": "image", "datatype": "FP32", "shape": [5, 2, 3]}
    assert head["inputs"] == [{**item, "parameters": {"binary_data_size": 5 * 2 * 3 * 4}}]
    image = random_feeds((TensorSpec("image", "float32", ("N", 2, 3)),), {"N": 5}, 7)["image"]
    assert raw == image.astype("<f4").tobytes()
    shared = min(map(len, bodies))
    assert [raw for _, raw in bodies[0][:shared]] == [raw for _, raw in bodies[1][:shared]]
    assert len({raw for _, raw in bodies[0]}) > 1  # a cache would not have the answer


def test_refusals_expiries_and_failures_are_apart_and_have_no_latency() -> None:
    errors = {503: "the queue is full", 504: "too late", 500: "broken"}
    answers = [reply(200, ANSWER), *(reply(n, {"error": text}) for n, text in errors.items())]
    server = StandIn(lambda _server, n: answers[n % 4])
    with server.running() as url:
        result = load(url, server.bodies, at_least(8), concurrency=8, **QUICK)
    assert result.sent == result.ok + result.refused + result.expired + result.failed
    for kind in (result.ok, result.refused, result.expired, result.failed):
        assert kind == pytest.approx(result.sent / 4, abs=1)
    assert result.latency is not None
    assert result.latency.samples == result.ok
    assert set(result.errors) == {f"{status}: {text}" for status, text in errors.items()}
    assert result.to_dict()["first_error"] == "503: the queue is full"


ENDS: dict[str, tuple[bytes | None, str | None]] = {
    "closes after it": (reply(200, ANSWER, "Connection: close\r\n"), None),
    "closes before it": (None, "the server closed the connection before it answered"),
    "no HTTP": (
        b"\0 nonsense\r\n\r\n",
        "not an answer of this protocol: it begins with b'\\x00 nonsense'",
    ),
}


@pytest.mark.parametrize(("answer", "error"), ENDS.values(), ids=ENDS)
def test_a_connection_that_ends_is_followed_by_another(
    answer: bytes | None, error: str | None
) -> None:
    server = StandIn(lambda _server, n: answer if n % 2 else reply(200, ANSWER))
    with server.running() as url:
        result = load(url, server.bodies, at_least(3), concurrency=1, **QUICK)
    assert result.ok > 0
    assert (result.failed > 0, result.first_error) == (error is not None, error)


@pytest.mark.parametrize("options", [{"concurrency": 3}, {"rate": 100.0}], ids=str)
def test_a_server_that_dies_leaves_a_result_with_failures(options: dict[str, Any]) -> None:
    def infer(server: StandIn, n: int) -> object:
        return reply(200, ANSWER) if n < 10 else server.die()

    refused = "cannot connect: Connection refused"
    for _ in range(TRIES):  # until it died early enough for another attempt to connect
        with StandIn(infer).running() as url:
            result = load_test(url, warmup_s=0.0, duration_s=0.6, **options)
        assert result.sent == result.ok + result.failed
        if result.ok and refused in result.errors:
            break
    assert 0 < result.ok < 10
    assert result.failed > 0
    assert refused in result.errors


def test_a_pause_of_the_server_is_seen_by_the_open_loop_and_hidden_by_the_closed() -> None:
    """How many requests were open in it: one of a closed loop, all that were due in an open one."""
    pause_s = 0.4
    paused: list[float] = []  # from when to when, on the clock of both

    async def stalling(server: StandIn, n: int) -> bytes:
        now = server.loop.time()
        if n == 20:  # whatever arrives in the pause is answered at its end
            paused[:] = [now, now + pause_s]
        if paused and now < paused[1]:
            await asyncio.sleep(paused[1] - now)
        return reply(200, ANSWER)

    seen = []
    for due_s in (None, [i / 150 for i in range(150)]):
        for _ in range(TRIES):  # until a closed loop sent as many in its time
            paused.clear()
            with StandIn(stalling).running() as url:
                client = client_of(url, 1 if due_s is None else 20, due_s, end_s=1.0)
                outcome = client.run(time.perf_counter() + 0.01)
            if paused:
                break
        begun_s, over_s = (at - client._zero for at in paused)
        starts_s, ends_s = np.array(outcome.starts_s), np.array(outcome.ends_s)
        seen.append(int(((starts_s < over_s) & (ends_s > begun_s)).sum()))
        assert ends_s.max() > over_s - 0.02  # it did happen
    assert seen[0] == 1
    assert seen[1] >= 60 - 20  # due by the end of the pause, less those answered before it


@pytest.mark.parametrize("connections", [1, 40])
def test_latency_counts_from_when_a_request_was_due_not_from_when_it_was_sent(
    connections: int,
) -> None:
    async def slow() -> bytes:
        await asyncio.sleep(0.005)  # one connection cannot keep up with a request each 2 ms
        return reply(200, ANSWER)

    due_s = [0.002 * i for i in range(100)]
    with StandIn(lambda _server, _n: slow()).running() as url:
        outcome = client_of(url, connections, due_s, 0.2).run()
    assert sorted(outcome.starts_s) == due_s
    assert len(outcome.send_lags_s) == 100
    assert set(outcome.statuses) == {200}
    assert outcome.waited > 50 or connections > 1


@pytest.mark.parametrize("due_s", [None, [i / 100 for i in range(20)]], ids=["closed", "open"])
def test_processes_share_a_schedule_and_connections(due_s: Sequence[float] | None) -> None:
    with StandIn().running() as url:
        plan = client_of(url, 5, due_s, end_s=0.3).plan
        records = run_plans(plan.share(3))
    assert [each.opened for each in records] == [2, 2, 1]
    assert all(set(each.statuses) == {200} for each in records)
    if due_s is not None:
        assert sorted(start_s for each in records for start_s in each.starts_s) == due_s


def test_a_generator_that_used_up_its_core_tries_again_with_more_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deploykit.loadtest.load.usable_cores", lambda: 4)
    monkeypatch.setattr("deploykit.loadtest.load.BUSY_CORE", 0.0)
    with StandIn().running() as url:
        result = load_test(url, concurrency=4, **QUICK)
    assert (result.processes, result.connections) == (2, 4)


def test_a_bare_load_is_open_at_half_of_what_a_closed_loop_reaches() -> None:
    seen: list[str] = []
    with StandIn(lambda server, _n: limited(server)).running() as url:
        result = load_test(url, on_progress=lambda text, _share: seen.append(text), **QUICK)
    assert result.mode == "open"
    assert result.capacity_per_s is not None
    assert result.rate_per_s == result.capacity_per_s / 2
    # 10 at a time, 10 ms each, and what had been answered before but was read then
    assert 0 < result.capacity_per_s <= 1000 + 32 / 2
    assert any(text.startswith("capacity: ") and "p50 " in text for text in seen)
    broken = StandIn(lambda _server, _n: reply(500, {"error": "broken"}), pause_s=0.1)
    with (
        broken.running() as url,
        pytest.raises(BadInput, match="no request had a good answer in 2 s: 500: broken"),
    ):
        load_test(url, **QUICK)


def test_more_requests_than_connections_are_the_generator_s_own_limit() -> None:
    server = StandIn(lambda _server, _n: never())
    due_s = [0.001 * i for i in range(20)]
    for _ in range(TRIES):  # until it had sent what it could by the end
        server.bodies.clear()
        with server.running() as url:
            outcome = client_of(url, 3, due_s, 0.1, 0.05).run()
        if len(server.bodies) == 3:
            break
    assert sorted(outcome.statuses) == [UNSENT] * 17 + [NO_ANSWER] * 3
    assert outcome.waited == 17
    assert list(outcome.errors) == ["no answer within 0.05 s of the end"]
