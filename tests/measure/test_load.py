"""The load generator against a stand-in server whose every answer the test decides."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from deploykit.core.errors import BadInput, NotFound
from deploykit.core.tensors import TensorSpec
from deploykit.measure.client import NO_ANSWER, Client
from deploykit.measure.load import LoadResult, result_of, run_load
from deploykit.measure.remote import RemoteModel, error_text, make_requests

IMAGE = {"name": "image", "datatype": "FP32", "shape": [-1, 2, 3]}
QUICK = {"warmup_s": 0.0, "duration_s": 0.3}
Infer = Callable[["StandIn", int], object]  # (server, how many inferences came before this one)


def reply(status: int, body: object, extra: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\n{extra}Content-Length: {len(data)}\r\n\r\n".encode() + data


class StandIn:
    """An Open Inference Protocol server of one model. `infer` decides each inference's answer.

    It returns bytes to send, None to close the connection without an answer, or an awaitable of
    either. `bodies` are the inference requests as they came, JSON part and tensors apart.
    """

    def __init__(
        self,
        infer: Infer = lambda _server, _n: reply(200, {"outputs": []}),
        models: Sequence[str] = ("m",),
        inputs: Sequence[dict[str, object]] = (IMAGE,),
        other: Callable[[str], bytes | None] = lambda _path: None,
    ) -> None:
        self.infer, self.models, self.inputs, self.other = infer, models, inputs, other
        self.bodies: list[tuple[dict[str, object], bytes]] = []
        self.connections = 0
        self.writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                answer = await self.answer(head[0].split(" ")[1], fields, body)
                if answer is None:
                    break
                writer.write(answer)
                if b"Connection: close" in answer or fields.get("connection") == "close":
                    break
        self.writers.discard(writer)
        writer.close()

    async def answer(self, path: str, fields: dict[str, str], body: bytes) -> bytes | None:
        if (other := self.other(path)) is not None:
            return other
        if path == "/v2/repository/index":
            return reply(
                200, [{"name": name, "version": "1", "state": "READY"} for name in self.models]
            )
        if path.endswith("/infer"):
            split = int(fields["inference-header-content-length"])
            self.bodies.append((json.loads(body[:split]), body[split:]))
            found = self.infer(self, len(self.bodies) - 1)
            return await found if asyncio.iscoroutine(found) else found  # type: ignore[return-value]
        if path == f"/v2/models/{self.models[0]}":
            return reply(200, {"name": self.models[0], "inputs": list(self.inputs), "outputs": []})
        return reply(404, {"error": f"no {path}"})

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve from a thread of its own; gives the URL."""
        ready: threading.Event = threading.Event()

        async def main() -> None:
            self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
            self.listener = await asyncio.start_server(self.serve, "127.0.0.1", 0)
            self.port = self.listener.sockets[0].getsockname()[1]
            ready.set()
            await self.stop.wait()
            self.die()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        assert ready.wait(10)
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            self.loop.call_soon_threadsafe(self.stop.set)
            thread.join(10)
            assert not thread.is_alive()

    def die(self) -> None:
        """Stop to listen and drop every connection."""
        self.listener.close()
        for writer in list(self.writers):
            writer.transport.abort()


def test_closed_loop_counts_every_request_once() -> None:
    server = StandIn()
    with server.running() as url:
        result = run_load(url, concurrency=4, warmup_s=0.0, duration_s=0.5)
    assert result.model == "m"
    assert (result.mode, result.concurrency, result.rate_per_s) == ("closed", 4, None)
    assert result.sent == result.ok == len(server.bodies) - 1  # one more was the probe
    assert result.latency is not None
    assert result.latency.samples == result.ok > 4
    assert result.achieved_per_s.low <= result.achieved_per_s.value <= result.achieved_per_s.high
    assert result.achieved_per_s.value == pytest.approx(result.ok / 0.5, abs=4 / 0.5)
    assert (result.refused, result.expired, result.failed) == (0, 0, 0)
    assert result.first_error is None
    assert result.same_machine


def test_connections_are_kept() -> None:
    server = StandIn()
    with server.running() as url:
        run_load(url, concurrency=3, **QUICK)
    assert server.connections <= 3 + 4  # three of the run; reachable?, index, metadata, probe


def test_the_warm_up_is_not_counted() -> None:
    server = StandIn()
    with server.running() as url:
        result = run_load(url, concurrency=1, warmup_s=0.3, duration_s=0.3)
    assert 0 < result.ok < len(server.bodies) - 1


def test_requests_are_binary_tensors_of_the_metadata_s_shape_and_seeded() -> None:
    bodies = []
    for _ in range(2):
        server = StandIn()
        with server.running() as url:
            run_load(url, concurrency=1, batch=5, seed=7, **QUICK)
        bodies.append(server.bodies[:20])
    head, raw = bodies[0][0]
    assert head["parameters"] == {"binary_data_output": True}
    assert head["inputs"] == [
        {
            "name": "image",
            "datatype": "FP32",
            "shape": [5, 2, 3],
            "parameters": {"binary_data_size": 5 * 2 * 3 * 4},
        }
    ]
    assert np.isfinite(np.frombuffer(raw, "<f4")).all()
    shared = min(map(len, bodies))
    assert [raw for _, raw in bodies[0][:shared]] == [raw for _, raw in bodies[1][:shared]]
    assert len({raw for _, raw in bodies[0]}) > 1  # a cache would not have the answer


def test_open_loop_sends_what_was_drawn_whatever_the_server_does() -> None:
    sent = []
    for infer in (None, lambda _server, _n: reply(503, {"error": "full"})):
        server = StandIn() if infer is None else StandIn(infer)
        with server.running() as url:
            result = run_load(url, rate=200, seed=3, **QUICK)
        sent.append(result.sent)
        assert (result.mode, result.concurrency, result.rate_per_s) == ("open", None, 200)
        assert result.lag_p99_ms is not None
    assert sent[0] == sent[1] == pytest.approx(60, abs=40)


def test_refusals_expiries_and_failures_are_apart_and_have_no_latency() -> None:
    answers = [
        reply(200, {}),
        reply(503, {"error": "the queue is full"}),
        reply(504, {"error": "too late"}),
        reply(500, {"error": "broken"}),
    ]
    server = StandIn(lambda _server, n: answers[n % 4])
    with server.running() as url:
        result = run_load(url, concurrency=1, **QUICK)
    assert result.sent == result.ok + result.refused + result.expired + result.failed
    for kind in (result.ok, result.refused, result.expired, result.failed):
        assert kind == pytest.approx(result.sent / 4, abs=1)
    assert result.latency is not None
    assert result.latency.samples == result.ok
    assert set(result.errors) == {
        "503: the queue is full",
        "504: too late",
        "500: broken",
    }
    assert result.to_dict()["first_error"] == "503: the queue is full"


def test_a_server_that_closes_after_each_answer_fails_nothing() -> None:
    server = StandIn(lambda _server, _n: reply(200, {}, "Connection: close\r\n"))
    with server.running() as url:
        result = run_load(url, concurrency=2, **QUICK)
    assert result.failed == 0
    assert result.ok > 2


def test_a_connection_closed_before_the_answer_is_a_failure() -> None:
    server = StandIn(lambda _server, n: None if n % 2 else reply(200, {}))
    with server.running() as url:
        result = run_load(url, concurrency=1, **QUICK)
    assert result.failed > 0
    assert result.ok > 0
    assert result.first_error == "the server closed the connection before it answered"


def test_what_is_no_http_is_a_failure() -> None:
    server = StandIn(lambda _server, n: b"\0\1\2 nonsense\r\n\r\n" if n else reply(200, {}))
    with server.running() as url:
        result = run_load(url, concurrency=1, **QUICK)
    assert result.ok == 0
    assert result.latency is None
    assert result.first_error is not None
    assert result.first_error.startswith("not an HTTP answer")


@pytest.mark.parametrize("load", [{"concurrency": 3}, {"rate": 100.0}], ids=str)
def test_a_server_that_dies_leaves_a_result_with_failures(load: dict[str, float]) -> None:
    def infer(server: StandIn, n: int) -> bytes | None:
        if n < 10:
            return reply(200, {})
        server.die()
        return None

    with StandIn(infer).running() as url:
        result = run_load(url, warmup_s=0.0, duration_s=0.6, **load)  # type: ignore[arg-type]
    assert 0 < result.ok < 10
    assert result.failed > 0
    assert result.sent == result.ok + result.failed
    assert "cannot connect: Connection refused" in result.errors


def test_answers_that_never_come_are_failures_and_do_not_hang() -> None:
    async def never() -> bytes:
        await asyncio.Event().wait()
        return b""

    server = StandIn(lambda _server, n: never() if n > 3 else reply(200, {}))
    with server.running() as url:
        result = run_load(url, concurrency=2, drain_s=0.1, **QUICK)
    assert (result.ok, result.failed) == (3, 2)
    assert result.first_error == "no answer within 0.1 s of the end"


def test_a_pause_of_the_server_is_seen_by_the_open_loop_and_hidden_by_the_closed() -> None:
    pause_s = 0.4

    def stalling() -> Infer:
        until: list[float] = []

        async def infer(server: StandIn, n: int) -> bytes:
            now = server.loop.time()
            if n == 20:  # the stall: whatever arrives in it is answered at its end
                until.append(now + pause_s)
            if until and now < until[0]:
                await asyncio.sleep(until[0] - now)
            return reply(200, {})

        return infer

    results: list[LoadResult] = []
    for load in ({"concurrency": 1}, {"rate": 150.0}):
        with StandIn(stalling()).running() as url:
            results.append(run_load(url, warmup_s=0.0, duration_s=1.0, **load))  # type: ignore[arg-type]
    closed, opened = (result.latency for result in results)
    assert closed is not None
    assert opened is not None
    assert closed.p90_ms is not None
    assert opened.p90_ms is not None
    assert closed.max_ms >= pause_s * 1e3 * 0.9  # it did happen, to one request of many
    # 40 % of the open loop's requests fall into the stall, a quarter of those in its first 100 ms
    assert opened.p90_ms.value > 100 > closed.p90_ms.value


def finished(lags_s: Sequence[float], busy: float, due: bool = True) -> Client:
    """A run that is over: 1000 answers after 2 ms each, the generator late by `lags_s`."""
    remote = RemoteModel("http://h", "h", "127.0.0.1", 80, "m", ())
    client = Client(
        remote,
        [b""],
        connections=1,
        due_s=[] if due else None,
        begin_s=0.0,
        end_s=10.0,
        drain_s=0.0,
    )
    client.busy = busy
    client.lags_s.extend(lags_s)
    for i in range(1000):
        client.starts_s.append(i * 0.01)
        client.ends_s.append(i * 0.01 + 0.002)
        client.statuses.append(200)
    return client


@pytest.mark.parametrize(
    ("lags_s", "limited"),
    [([0.0001] * 100, False), ([0.0009] * 100, False), ([0.0001] * 97 + [0.0012] * 3, True)],
    ids=["on time", "under 1 ms", "p99 over 1 ms"],
)
def test_a_generator_that_was_late_gives_no_verdict(lags_s: list[float], limited: bool) -> None:
    result = result_of(finished(lags_s, 0.1), "http://h", 100.0, batch=1, seed=0)
    assert result.generator_limited is limited
    assert result.lag_p99_ms == pytest.approx(np.percentile(lags_s, 99) * 1e3)


@pytest.mark.parametrize(("busy", "limited"), [(0.5, False), (0.97, True)])
def test_a_closed_loop_that_used_its_whole_core_gives_no_verdict(
    busy: float, limited: bool
) -> None:
    result = result_of(finished([], busy, due=False), "http://h", None, batch=1, seed=0)
    assert result.generator_limited is limited
    assert result.lag_p99_ms is None


def test_latency_is_of_the_measured_time_and_rate_of_answers_in_it() -> None:
    client = finished([], 0.1)
    client.begin_s, client.end_s = 2.0, 8.0
    client.statuses[300] = NO_ANSWER
    result = result_of(client, "http://h", 100.0, batch=1, seed=0)
    assert (result.sent, result.ok, result.failed) == (600, 599, 1)
    assert result.latency is not None
    assert result.latency.p50_ms is not None
    assert result.latency.p50_ms.value == pytest.approx(2.0)
    assert result.achieved_per_s.value == pytest.approx(599 / 6)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(BadInput, match="Connection refused") as caught:
            run_load(url, **QUICK)
    assert url in caught.value.message
    assert "deploykit serve" in str(caught.value.hint)


@pytest.mark.parametrize("page", [reply(404, b"<html>"), reply(200, b"<html>"), b"SSH-2.0\r\n\r\n"])
def test_another_kind_of_server_is_called_that(page: bytes) -> None:
    with (
        StandIn(other=lambda _path: page).running() as url,
        pytest.raises(BadInput, match="not an Open Inference Protocol server"),
    ):
        run_load(url, **QUICK)


def test_an_unknown_model_lists_those_there_are() -> None:
    with (
        StandIn(models=("cnn", "bert")).running() as url,
        pytest.raises(NotFound, match="no model 'resnet'") as caught,
    ):
        run_load(url, model="resnet", **QUICK)
    assert caught.value.hint == "the models are: cnn, bert"


def test_of_several_models_one_must_be_named() -> None:
    with StandIn(models=("cnn", "bert")).running() as url:
        with pytest.raises(BadInput, match="serves 2 models: cnn, bert"):
            run_load(url, **QUICK)
        assert run_load(url, model="cnn", **QUICK).ok > 0


def test_a_server_without_an_index_needs_the_model_s_name() -> None:
    def other(path: str) -> bytes | None:
        if path == "/v2":
            return reply(200, {"name": "other", "version": "1", "extensions": []})
        return reply(501, {"error": "no"}) if path == "/v2/repository/index" else None

    with StandIn(other=other).running() as url:
        with pytest.raises(BadInput, match="does not list its models"):
            run_load(url, **QUICK)
        assert run_load(url, model="m", **QUICK).ok > 0
        with pytest.raises(NotFound, match="no model 'other'"):
            run_load(url, model="other", **QUICK)


def test_a_request_that_the_server_calls_wrong_ends_the_run_before_it_begins() -> None:
    server = StandIn(lambda _server, _n: reply(400, {"error": "batch 64 is above 8"}))
    with server.running() as url, pytest.raises(BadInput, match="400: batch 64 is above 8"):
        run_load(url, batch=64, **QUICK)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"name": "ids", "datatype": "INT64", "shape": [-1, -1]}, "axis 1 has no size"),
        ({"name": "text", "datatype": "BYTES", "shape": [-1]}, "text, a BYTES"),
        ({"name": "x", "datatype": "FP32", "shape": [1, 4]}, "no batch axis"),
        ({"name": "x", "datatype": "FP32", "shape": ["N"]}, "not an Open Inference"),
        ({"datatype": "FP32", "shape": [1]}, "not an Open Inference"),
    ],
)
def test_inputs_that_no_request_can_be_made_for_are_named(
    tensor: dict[str, object], message: str
) -> None:
    with StandIn(inputs=[tensor]).running() as url, pytest.raises(BadInput, match=message):
        run_load(url, batch=2, **QUICK)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "https://127.0.0.1",
        "http://",
        "http://h:99999",
        "http://u:p@h",
        "http://h/v2",
        "http://h?x",
        "http://a b",
        "http://[::1",
        "",
    ],
)
def test_what_is_no_url_of_a_host_is_refused(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        run_load(url)
    assert caught.value.hint == "write it as http://HOST:PORT"


@pytest.mark.parametrize(
    "options",
    [
        {"rate": 10.0, "concurrency": 2},
        {"concurrency": 0},
        {"concurrency": 10**6},
        {"rate": 0.0},
        {"rate": -1.0},
        {"rate": 1e9},
        {"rate": float("nan")},
        {"duration_s": 0.0},
        {"duration_s": float("inf")},
        {"duration_s": float("nan")},
        {"warmup_s": -1.0},
        {"batch": 0},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused_before_anything_is_sent(
    options: dict[str, float],
) -> None:
    server = StandIn()
    with server.running() as url, pytest.raises(BadInput):
        run_load(url, **options)  # type: ignore[arg-type]
    assert server.connections == 0


def test_several_requests_share_a_bound_on_memory() -> None:
    small = RemoteModel("u", "h", "127.0.0.1", 80, "m", (TensorSpec("x", "float32", ("N", 4)),))
    large = RemoteModel("u", "h", "127.0.0.1", 80, "m", (TensorSpec("x", "uint8", ("N", 1 << 20)),))
    assert len(make_requests(small, 1, 0)) == 8
    assert len(make_requests(large, 40, 0)) == 1


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": "two\\nlines\\u001b[31m"}', "two lines [31m"),
        (b"<html>\r\noops", "<html> oops"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", ""),
        (b'{"error": 3}', '{"error": 3}'),
    ],
)
def test_an_error_s_text_is_one_clean_line(body: bytes, text: str) -> None:
    assert error_text(body) == text
