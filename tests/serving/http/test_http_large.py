"""Large JSON requests and answers: they are offloaded and do not delay other clients."""

from __future__ import annotations

import gc
import gzip
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from deploykit.core.errors import Overloaded, TooLarge
from deploykit.serving.models.worker import WorkerProcess
from tests.support.serving.running import Running, free_axis, infer_json, request, running

INFER = "/v2/models/m/infer"
LIVE = request("GET", "/v2/health/live")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running({"m": free_axis()}) as found:
        yield found


def zeros(count: int) -> bytes:
    """JSON of two bytes for each number."""
    item = f'"name":"x","datatype":"FP32","shape":[1,{count}],"data":[{",".join("0" * count)}]'
    wanted = '"outputs":[{"name":"y","parameters":{"binary_data":true}}]'
    return f'{{"inputs":[{{{item}}}],{wanted}}}'.encode()


@contextmanager
def stopped_worker(server: Running) -> Iterator[Callable[[], None]]:
    """The process that reads large JSON runs no more until the end, or the call."""
    assert server.ask("POST", INFER, zeros(600_000)).status == 200
    process = server.server._worker._process
    assert process is not None
    go_on = partial(process.send_signal, signal.SIGCONT)
    process.send_signal(signal.SIGSTOP)
    try:
        yield go_on
    finally:
        go_on()


def test_megabytes_of_json_do_not_delay_other_requests(server: Running) -> None:
    """B8: 30 MB in a thread of the server stopped it for 1.9 s, as JSON holds the GIL."""
    raw, large = server.connect(), server.connect()
    with stopped_worker(server) as go_on:
        large.send(request("POST", INFER, zeros(1_000_000)))
        for _ in range(20):
            reply = raw.ask(LIVE)
            assert reply.status == 200
        go_on()
        answer = large.reply()
    assert answer.status == 200
    assert len(answer.body) > 4_000_000


@pytest.mark.parametrize("count", [1000, 150_000, 600_000])
def test_an_answer_is_the_same_wherever_its_json_is_decoded(server: Running, count: int) -> None:
    """On the event loop, in a thread or in the JSON worker; plain and compressed."""
    body = infer_json([0.5] * count, [1, count])
    plain = server.ask("POST", INFER, body)
    assert plain.status == 200
    (output,) = plain.json["outputs"]
    assert output["data"] == [2.0] * count
    small = server.ask(
        "POST", INFER, gzip.compress(body), Content_Encoding="gzip", Accept_Encoding="gzip"
    )
    assert gzip.decompress(small.body) == plain.body


def test_an_error_is_the_same_wherever_the_json_is_decoded(server: Running) -> None:
    for count in (10, 150_000, 600_000):
        reply = server.ask("POST", INFER, infer_json([0.5] * count, [1, count + 1]))
        assert reply.status == 400
        assert f"'data' has {count}" in reply.json["error"]


def test_a_killed_worker_process_is_replaced(server: Running) -> None:
    body = zeros(600_000)
    assert server.ask("POST", INFER, body).status == 200
    process = server.server._worker._process
    assert process is not None
    process.kill()
    process.wait()
    broken = server.ask("POST", INFER, body)
    assert broken.status == 503
    assert "try again" in broken.json["error"]
    gc.collect()  # Python 3.11's crashed here when the body was a memoryview
    assert server.ask("POST", INFER, body).status == 200


def test_a_body_being_decoded_at_shutdown_is_answered(
    eventually: Callable[[Callable[[], bool]], None],
) -> None:
    with running({"m": free_axis()}) as server, stopped_worker(server) as go_on:
        raw = server.connect()
        raw.send(request("POST", INFER, zeros(600_000)))
        eventually(lambda: server.server._listener.unanswered == 1)
        server.server.stop()
        eventually(lambda: server.server.repository.draining)
        late = server.ask("POST", INFER, zeros(200_000))
        assert late.status == 503
        go_on()
        reply = raw.reply()
        assert reply.status == 200
        assert raw.ended()
        assert server.stop() == 0


def test_closing_the_worker_ends_its_process() -> None:
    with WorkerProcess() as worker:
        assert worker.run(60, sum, [1, 2, 3]) == 6
        process = worker._process
        assert process is not None
    assert process.returncode is not None
    with pytest.raises(Overloaded, match="shutting down"):
        worker.run(60, sum, [1])


def refuse(limit: int) -> None:
    raise TooLarge(f"above {limit}", hint="send less")


def test_an_error_in_the_worker_keeps_its_type_and_hint() -> None:
    with WorkerProcess() as worker:
        with pytest.raises(TooLarge, match="above 5") as caught:
            worker.run(60, refuse, 5)
        assert caught.value.hint == "send less"
