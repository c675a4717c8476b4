"""Large answers are not copied on the event loop's thread, and keep no more than their bytes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploykit.core.tensors import parse_spec
from deploykit.engines.oip.protobuf import MESSAGES
from deploykit.serving.batching.queue import Pending
from deploykit.serving.batching.runner import Splitter
from deploykit.serving.http.infer import InferRoute
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip import messages
from deploykit.serving.oip import request as requests
from deploykit.serving.options import ServeOptions
from deploykit.serving.transport.call import Head
from tests.support.fake_engine import FakeEngine
from tests.support.serving.grpc_cases import (
    STREAM,
    Echo,
    frames,
    infer_bytes,
    serving,
    unlimited_window,
)
from tests.support.serving.loops import KEY
from tests.support.serving.memory import Seen
from tests.support.serving.running import WAIT_S, GatedEngine, infer_json

WIDTH = 100_000  # float32: 400 kB a row
ALL_WINDOW = b"\0\4" + (1 << 30).to_bytes(4, "big")
Eventually = Callable[[Callable[[], bool]], None]


def test_a_large_answer_keeps_only_its_own_rows_of_a_batch() -> None:
    """Else one slow reader keeps the memory of all 32 answers, and 1/32 of it is counted."""
    whole = np.ones((3, WIDTH), np.float32)
    rows = {count: {"x": np.zeros((count, 1), np.float32)} for count in (1, 2)}
    batch = [Pending(feeds, count, KEY, print, 0, 0, 0) for count, feeds in rows.items()]
    Splitter((parse_spec("y:float32[N,W]"),), joined=True)(batch, {"y": whole})
    for request, count in zip(batch, rows, strict=True):
        found = request.outputs["y"]
        assert found.shape == (count, WIDTH)
        assert found.flags.owndata
        assert not np.shares_memory(found, whole)


@pytest.mark.parametrize("waits", ["body", "outputs"])
def test_the_bytes_of_a_disconnected_client_are_released_before_they_are_processed(
    eventually: Eventually, caplog: pytest.LogCaptureFixture, waits: str
) -> None:
    """They are no longer counted, and may wait for those of others for seconds."""
    offloaded: list[Any] = []
    width = 70_000  # as JSON below what is decoded on another thread
    repository = ModelRepository({"m": FakeEngine(width=width)}, ServeOptions())
    model = repository.find("m")
    try:
        infer = InferRoute(repository, model, lambda *job, **_: offloaded.append(job))
        if waits == "body":
            array = np.zeros(1 << 20, np.uint8)
            alive = weakref.ref(array)
            call = Seen(Head(encoding=b"gzip"), array.data)
            del array
        else:
            call = Seen(Head(), infer_json([0] * width, [1, width]))
        infer(call)
        eventually(lambda: len(offloaded) == 1)
        ((work, then),) = offloaded
        if waits == "outputs":
            alive = weakref.ref(work.__self__.pending.outputs["y"])
        assert alive() is not None
        call.gone = True
        assert call.cancel is not None
        call.cancel()
        eventually(lambda: alive() is None)
        then(work)
        assert call.status == 0
    finally:
        repository.close(drain=False)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def strings(element: bytes, count: int) -> bytes:
    message = MESSAGES["ModelInferRequest"](model_name="m")
    message.inputs.add(name="x", datatype="BYTES", shape=[1, count])
    message.raw_input_contents.append(element * count)
    data: bytes = message.SerializeToString()
    return data


def classified(width: int) -> bytes:
    message = MESSAGES["ModelInferRequest"].FromString(infer_bytes(width=width))
    wanted = message.outputs.add(name="y")
    wanted.parameters["classification"].int64_param = 3
    data: bytes = message.SerializeToString()
    return data


SHORT = b"\1\0\0\0a"
LETTERS = (200_000).to_bytes(4, "little") + b"a" * 200_000
SLOW = {  # the function that takes long, the server's model, the message; part of the answer
    "classes": ("classify", FakeEngine(width=WIDTH), classified(WIDTH), b"3.000000:0"),
    "few classes": ("classify", FakeEngine(width=100), classified(100), b"3.000000:0"),
    "short strings": (
        "to_bytes",
        Echo("string", "T"),
        strings(b"\1\0\0\0a", 40_000),
        b"\1\0\0\0a" * 99,
    ),
    "long strings": ("to_bytes", Echo("string", "T"), strings(LETTERS, 3), LETTERS),
}


@pytest.mark.parametrize("name", SLOW)
def test_what_takes_long_to_encode_is_encoded_on_another_thread(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Twelve clients that asked for 5 of 2 million values stopped the loop for 1.2 s."""
    function, engine, message, part = SLOW[name]
    threads: list[int] = []
    module = requests if function == "classify" else messages
    real = getattr(module, function)

    def seen(*args: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return real(*args, **options)

    monkeypatch.setattr(module, function, seen)
    with serving({"m": engine}) as server, unlimited_window(server.port) as client:
        answer = client.call(1, message)
        assert answer.status == 0
        assert part in answer.data
        assert threads
        assert (server.see(threading.get_ident) in threads) is (name == "few classes")


def test_a_stream_that_has_failed_takes_no_more_answers(
    eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    """Its slots are gone when the engine returns, and there is an answer that was not read."""
    steps = threading.Semaphore(0)
    engine = GatedEngine(width=WIDTH)
    engine.gate = SimpleNamespace(wait=lambda limit_s: steps.acquire(timeout=limit_s))  # type: ignore[assignment]
    with (
        serving({"m": engine}, max_batch=1) as server,
        frames(server.port, settings=b"\0\4\0\0\0\0") as client,
    ):
        engine.warm = True
        client.start(1, classified(WIDTH), STREAM, end=False)
        client.message(1, classified(WIDTH), end=False)
        model = server.repository.models["m"]
        eventually(lambda: server.see(lambda: model.unanswered) == 2)
        assert engine.entered.acquire(timeout=WAIT_S)
        steps.release()
        assert engine.entered.acquire(timeout=WAIT_S)
        (link,) = server.see(lambda: list(server.grpc.connections))
        eventually(lambda: link.answer_bytes > 0)
        (call,) = server.see(lambda: list(link.streams.values()))
        server.see(lambda: call.fail("DEADLINE_EXCEEDED", "in a test"))
        assert server.see(lambda: call.trailers is not None)
        steps.release()
        eventually(lambda: not server.see(lambda: model.unanswered))
        client.settle()
        client.send(4, 0, 0, ALL_WINDOW)
        assert client.answer(1).status == 4
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
