"""Work on other threads: whatever one client sends, another's is next."""

from __future__ import annotations

import asyncio
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
from deploykit.engines.tasks.engine import TaskSteps
from deploykit.serving.models.offload import FairQueue, Lane, ThreadOffload
from tests.support.installed import needs
from tests.support.serving.faults import until
from tests.support.serving.running import WAIT_S, running

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
def queue(work: Work) -> Iterator[FairQueue]:
    queue = FairQueue(1, "test", lambda: work.now_s)
    yield queue
    work.gate.set()
    queue.close()


def finish(work: Work, futures: list[Any]) -> list[str]:
    work.gate.set()
    for each in futures:
        each.result(WAIT_S)
    return work.done


def test_clients_take_turns_whatever_one_has_queued(queue: FairQueue, work: Work) -> None:
    futures = [queue.submit(work(f"a{n}"), "a") for n in range(5)]
    futures += [queue.submit(work(f"b{n}"), "b") for n in range(2)]
    futures += [queue.submit(work("c0"), "c")]
    assert finish(work, futures) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


def test_a_turn_costs_the_time_that_it_took(queue: FairQueue, work: Work) -> None:
    """One image of 100 scans is worth as many small ones."""
    futures = [queue.submit(work(f"long{n}", 3.0), "a") for n in range(2)]
    futures += [queue.submit(work(f"short{n}"), "b") for n in range(5)]
    order = finish(work, futures)
    assert order.index("long1") >= order.index("short2")


def test_a_client_that_was_idle_has_saved_no_time(queue: FairQueue, work: Work) -> None:
    """Else it could then take the threads for as long as it was away."""
    futures = [queue.submit(work(f"a{n}"), "a") for n in range(4)]
    futures[0].add_done_callback(lambda _: late.append(queue.submit(work("b0"), "b")))
    late: list[Any] = []
    work.gate.set()
    for each in futures:
        each.result(WAIT_S)
    late[0].result(WAIT_S)
    assert work.done.index("b0") <= 2


def test_clients_that_have_gone_are_forgotten(queue: FairQueue, work: Work) -> None:
    work.gate.set()
    futures = [queue.submit(lambda: work.done.append("a"), n) for n in range(1000)]
    assert len(finish(work, futures)) == 1000
    until(lambda: not queue._clients)


def test_cancelled_work_is_not_run_and_close_leaves_none(work: Work) -> None:
    queue = FairQueue(1, "test", lambda: work.now_s)
    first, second, third = (queue.submit(work(name), name) for name in "abc")
    assert second.cancel()
    work.gate.set()
    third.result(WAIT_S)
    assert work.done == ["a", "c"]
    assert first.done()
    queue.close()
    with pytest.raises(RuntimeError):
        queue.submit(work("d"), "d")


def form(images: list[bytes]) -> bytes:
    head = b'--BB\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    return b"".join(head + image + b"\r\n" for image in images) + b"--BB--\r\n"


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


def test_the_images_of_one_request_do_not_hold_up_those_of_another_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, gate, entered = TaskSteps.read, threading.Semaphore(0), threading.Semaphore(0)

    def slow(self: TaskSteps, item: Any, *more: Any, **options: Any) -> Any:
        if bytes(item) == LIGHT:
            entered.release()
            assert gate.acquire(timeout=WAIT_S)
        return read(self, item, *more, **options)

    monkeypatch.setattr(TaskSteps, "read", slow)
    engine = open_proven(write_task_model(tmp_path, "classify"), threads=1)[0]
    many = {"Content_Type": "multipart/form-data; boundary=BB"}
    target = "/v2/models/m/predict"
    with running({"m": engine}) as server, ThreadPoolExecutor(2) as pool:
        greedy = pool.submit(server.ask, "POST", target, form([LIGHT] * 30), **many)
        for _ in range(2):  # both threads are busy with its first images
            assert entered.acquire(timeout=WAIT_S)
        other = pool.submit(server.ask, "POST", target, DARK, Content_Type="image/png")
        until(lambda: len(server.server._offload._queues[Lane.SMALL]._clients) == 2)
        gate.release(2)
        assert other.result(WAIT_S).json["label"] == "dark"
        assert not greedy.done()
        gate.release(30)
        assert len(greedy.result(WAIT_S).json) == 30


@pytest.mark.parametrize(("side", "scans", "taken"), [(500, 100, True), (3000, 60, False)])
def test_an_image_is_bounded_by_its_pixels_times_its_scans(
    tmp_path: Path, side: int, scans: int, taken: bool
) -> None:
    data = io.BytesIO()
    Image.new("RGB", (side, side)).save(data, "JPEG", progressive=True, quality=10)
    jpeg, start = data.getvalue(), b"\xff\xda\0"
    scan = jpeg[jpeg.rfind(start) : -2]
    jpeg = jpeg[:-2] + scan * (scans - jpeg.count(start)) + b"\xff\xd9"
    engine = open_proven(write_task_model(tmp_path, "classify"), threads=1)[0]
    source = engine.source
    assert source
    assert source.manifest
    assert source.manifest.task
    steps = TaskSteps(source.manifest.task, engine.inputs, engine.outputs, tmp_path)
    if taken:
        assert steps.read(jpeg).placed is not None
    else:
        with pytest.raises(BadInput, match=rf"has {scans} scans of {side}x{side}, a JPEG has 55"):
            steps.read(jpeg)
