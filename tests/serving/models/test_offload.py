"""Work on other threads: whatever one client sends, another's is next."""

from __future__ import annotations

import asyncio
import gc
import io
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.engines.tasks import TaskSteps
from deploykit.pipelines.threads import FairThreads, Peer, _Share
from deploykit.serving.models.offload import ThreadOffload
from tests.support.installed import needs
from tests.support.serving.faults import until
from tests.support.serving.running import WAIT_S, Reply, Running, running

needs("PIL")

from PIL import Image  # noqa: E402

from deploykit.evaluation.verify import open_proven  # noqa: E402
from tests.support.runtimes.pictures import encoded  # noqa: E402
from tests.support.serving.task_models import write_task_model  # noqa: E402

LIGHT, DARK = (encoded(np.full((32, 48, 3), level, np.uint8)) for level in (255, 0))


class Work:
    """Work that takes `seconds` by its own clock, once the gate is open."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.gate = threading.Event()
        self.done: list[str] = []

    def __call__(self, name: str, seconds: float = 1.0) -> Callable[[], None]:
        def run() -> None:
            assert self.gate.wait(WAIT_S)
            self.now_s += seconds
            self.done.append(name)

        return run


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def threads(work: Work) -> Iterator[FairThreads]:
    with FairThreads(1, "test", lambda: work.now_s) as threads:
        yield threads
        work.gate.set()


def finish(work: Work, count: int) -> list[str]:
    work.gate.set()
    until(lambda: len(work.done) == count)
    return work.done


@pytest.mark.parametrize(
    ("sent", "order"),
    [
        ("a1:5 b1:2 c1:1", "a1 b1 c1 a1 b1 a1 a1 a1"),
        # more connections of an address bring it no more turns, and share those that it has
        ("a1:2 a2:2 a3:2 b1:3", "a1 b1 a2 b1 a3 b1 a1 a2 a3"),
    ],
)
def test_clients_take_turns_whatever_one_has_queued(
    threads: FairThreads, work: Work, sent: str, order: str
) -> None:
    jobs = [name for each in sent.split() for name in [each[:2]] * int(each[3:])]
    for name in jobs:
        threads.submit(work(name), Peer(*name))
    assert finish(work, len(jobs)) == order.split()


def test_time_is_not_forgotten_between_two_requests_nor_saved(
    threads: FairThreads, work: Work
) -> None:
    """A client that always sends its next request late has no more turns than one that queues."""

    def again(left: int) -> None:
        work("late", 3.0)()
        if left:
            threads.submit(partial(again, left - 1), Peer("b"))

    for n in range(8):
        threads.submit(work(f"a{n}"), Peer("a"))
    threads.submit(partial(again, 2), Peer("b"))
    order = " ".join(finish(work, 11))
    assert order == "a0 late a1 a2 late a3 a4 a5 late a6 a7"


def test_new_clients_do_not_come_before_one_that_comes_back(
    threads: FairThreads, work: Work
) -> None:
    """A client may open a connection for each request."""

    def new(number: int) -> None:
        work("new")()
        if number < 100:
            threads.submit(partial(new, number + 4), Peer("a", number + 4))

    def again(left: int) -> None:
        work("again", 0.1)()
        if left:
            threads.submit(partial(again, left - 1), Peer("a", "again"))

    for n in range(4):
        threads.submit(partial(new, n), Peer("a", n))
    threads.submit(partial(again, 9), Peer("a", "again"))
    order = finish(work, 114)
    assert order[:60].count("again") == 10


def test_a_client_does_not_pay_while_its_work_waits_for_others() -> None:
    """Else a small request that waited for a lock would be last for as long."""
    order: list[str] = []

    def spend(name: str) -> None:
        order.append(name)
        end_s = time.thread_time() + 0.02
        while time.thread_time() < end_s:
            pass

    def wait() -> None:
        order.append("waits")
        time.sleep(0.3)

    with FairThreads(1, "test") as threads:
        threads.submit(wait, Peer("a"))
        for _ in range(5):
            threads.submit(partial(spend, "b"), Peer("b"))
        threads.submit(partial(order.append, "a"), Peer("a"))
        until(lambda: len(order) == 7)
    assert order[:3] in (["waits", "b", "a"], ["waits", "a", "b"])


@pytest.mark.parametrize("peers", [lambda n: Peer(n, n), lambda n: Peer("a", n)])
def test_thousands_of_clients_are_forgotten(
    threads: FairThreads, work: Work, peers: Callable[[int], Peer]
) -> None:
    def shares() -> int:
        gc.collect()
        return sum(type(each) is _Share for each in gc.get_objects())

    work.gate.set()
    before = shares()
    for n in range(20_000):  # a look at each of them took minutes
        threads.submit(partial(work.done.append, "a"), peers(n))
    finish(work, 20_000)
    until(lambda: shares() <= before + 1)


def test_close_drops_what_waits(work: Work) -> None:
    threads = FairThreads(1, "test")
    for name in "ab":
        threads.submit(work(name))
    until(lambda: threads.waiting == 1)
    threads.close()
    assert finish(work, 1) == ["a"]
    with pytest.raises(RuntimeError):
        threads.submit(work("c"))


def test_a_peer_is_an_address_or_a_network() -> None:
    for one, other, same in (
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),  # one client may have a network
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::1%eth0", True),
    ):
        first, second = (Peer.of((name, 1, 0, 0), None) for name in (one, other))
        assert (first == second) is same


def test_threads_wait_for_a_loop_that_falls_behind() -> None:
    """Else many small items of one client keep it from the work of the others."""
    begun: list[int] = []
    taken: list[int] = []

    async def flood() -> int:
        offload = ThreadOffload(asyncio.get_running_loop(), 2)
        for n in range(200):
            offload(partial(begun.append, n), lambda _: taken.append(0))
        time.sleep(0.3)  # the loop is busy
        ahead = len(begun)
        while len(taken) < 200:
            await asyncio.sleep(0.001)
        offload.close()
        return ahead

    ahead = asyncio.run(asyncio.wait_for(flood(), WAIT_S))
    assert 2 < ahead <= 32 < len(begun) == len(taken) == 200


def form(count: int) -> bytes:
    """So many images of one request, all of them LIGHT."""
    head = b'--BB\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    return (head + LIGHT + b"\r\n") * count + b"--BB--\r\n"


MANY, ONE = "multipart/form-data; boundary=BB", "image/png"


def send(server: Running, body: bytes, kind: str) -> Reply:
    return server.ask("POST", "/v2/models/m/predict", body, Content_Type=kind)


def test_many_images_of_one_client_do_not_fill_the_queue_of_the_engine(tmp_path: Path) -> None:
    """Else another client's image waits for all of them, or is refused."""
    engine = open_proven(write_task_model(tmp_path, "classify"), threads=1)[0]
    real, gate, rows = type(engine).__call__, threading.Semaphore(0), list[int]()

    def slow(self: Any, feeds: Any) -> Any:
        rows.append(len(feeds["image"]))
        assert gate.acquire(timeout=WAIT_S)
        return real(self, feeds)

    with (
        running({"m": engine}, max_batch=8) as server,
        ThreadPoolExecutor(9) as pool,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(type(engine), "__call__", slow)
        model = server.server.repository.find("m")
        model.batcher.inline_max_rows = 0
        most = model.items._free
        assert 64 <= most <= 512  # as many as take 0.2 s
        greedy = [pool.submit(send, server, form(100), MANY) for _ in range(8)]
        until(lambda: model.unanswered == most)
        other = pool.submit(send, server, DARK, ONE)
        until(lambda: model.items._queue.waiting == 8 * 100 - most + 1)
        begun = len(rows)
        while not other.done():  # one batch after another
            gate.release()
            until(lambda: gate._value == 0 or other.done())
        assert other.result(WAIT_S).json["label"] == "dark"
        assert len(rows) - begun <= most // 8 + 8  # of 100 batches
        gate.release(1000)
        assert {each.result(WAIT_S).status for each in greedy} == {200}


def test_an_image_that_waited_for_others_past_its_time_limit_is_not_decoded(tmp_path: Path) -> None:
    engine = open_proven(write_task_model(tmp_path, "classify"), threads=1)[0]
    with running({"m": engine}, timeout_ms=50) as server, ThreadPoolExecutor(1) as pool:
        gate = server.server.repository.find("m").items
        gate._free = 0
        sent = pool.submit(send, server, LIGHT, ONE)
        until(lambda: gate._queue.waiting == 1)
        late_s = time.monotonic() + 0.05
        until(lambda: time.monotonic() > late_s)
        server.server._loop.call_soon_threadsafe(gate._leave, lambda _: None)
        reply = sent.result(WAIT_S)
    assert reply.status == 504
    assert "1 of 1 images waited for others past the time limit" in reply.json["error"]


def test_an_image_is_bounded_by_its_pixels_times_its_scans(tmp_path: Path) -> None:
    engine: Any = open_proven(write_task_model(tmp_path, "classify"), threads=1)[0]
    steps = TaskSteps(engine.source.manifest.task, engine.inputs, engine.outputs, tmp_path)

    def jpeg(side: int, scans: int) -> bytes:
        file, start = io.BytesIO(), b"\xff\xda\0"
        Image.new("RGB", (side, side)).save(file, "JPEG", progressive=True, quality=10)
        data = file.getvalue()
        scan = data[data.rfind(start) : -2]
        return data[:-2] + scan * (scans - data.count(start)) + b"\xff\xd9"

    assert steps.read(jpeg(500, 100)).placed is not None
    with pytest.raises(BadInput, match=r"has 60 scans of 3000x3000, a JPEG has 55"):
        steps.read(jpeg(3000, 60))
