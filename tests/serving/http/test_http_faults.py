"""HTTP under faults: slow readers, no file descriptors, large bodies, a lost device."""

from __future__ import annotations

import itertools
import os
import resource
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from deploykit.engines.cuda.errors import DeviceLost
from deploykit.serving.http.head import HttpLimits
from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server, run
from tests.support.fake_engine import FakeEngine
from tests.support.serving.running import (
    WAIT_S,
    GatedEngine,
    Raw,
    Running,
    binary_request,
    free_axis,
    infer_json,
    request,
    running,
)

INFER = "/v2/models/m/infer"
PATIENT = HttpLimits(header_s=600, stall_s=600, idle_s=600)  # this machine may be busy
GOOD = request("POST", INFER, infer_json([1, 2, 3, 4], [1, 4]))


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def good(server: Running) -> int:
    return server.ask("POST", INFER, infer_json([1, 2, 3, 4], [1, 4])).status


# -- bodies


@pytest.mark.parametrize("count", [1, 15_000, 16_384, 100_000, 500_000])
def test_a_body_of_any_size_split_anywhere_arrives_whole(count: int) -> None:
    """From one packet to many; a body after its head is received directly into its buffer."""
    rows = np.random.default_rng(count).random((1, count), dtype=np.float32)
    data = binary_request(rows)
    with running({"m": free_axis()}, PATIENT) as server:
        raw = server.connect()
        raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        cuts = sorted(
            {0, 7, 150, len(data) // 2, len(data) - 1, len(data)} & set(range(len(data) + 1))
        )
        for begin, end in itertools.pairwise(cuts):
            raw.send(data[begin:end])
        pipelined = data + GOOD + data
        sender = threading.Thread(target=raw.send, args=(pipelined,))
        sender.start()
        for expected in (rows, rows, None, rows):
            reply = raw.reply()
            assert reply.status == 200
            if expected is not None:
                size = int(reply.headers["inference-header-content-length"])
                found = np.frombuffer(reply.body[size:], np.float32)
                np.testing.assert_array_equal(found, expected[0] * 2 + 1)
        sender.join()


def test_a_large_body_reaches_the_engine_without_a_copy() -> None:
    """The engine gets an aligned view of the received buffer, not a joined copy."""
    seen: list[np.ndarray] = []

    class Seeing(FakeEngine):
        def __call__(self, feeds):
            seen.append(feeds["x"])
            return super().__call__(feeds)

    engine = Seeing(width=500_000)
    rows = np.random.default_rng(0).random((1, 500_000), dtype=np.float32)
    with running({"m": engine}, max_batch=1) as server:
        raw = server.connect()
        for name in ("", "a", "bb", "ccc"):  # the values then begin at any byte of the body
            reply = raw.ask(binary_request(rows, id=name))
            assert reply.status == 200
            feed = seen[-1]
            assert feed.flags.aligned
            assert origin(feed).nbytes > rows.nbytes  # the buffer holds the JSON part too
            np.testing.assert_array_equal(feed, rows)


def origin(array: np.ndarray) -> np.ndarray:
    """The array that owns this one's memory."""
    base: object = array
    while isinstance(base, memoryview) or (isinstance(base, np.ndarray) and base.base is not None):
        base = base.obj if isinstance(base, memoryview) else base.base
    assert isinstance(base, np.ndarray)
    return base


def test_a_content_length_without_a_body_allocates_nothing() -> None:
    with running(max_body_bytes=1 << 30) as server:
        before = rss_bytes()
        raws = [server.connect() for _ in range(20)]
        for raw in raws:
            raw.send(request("POST", INFER, Content_Length=str(1 << 30)) + b"{")
        assert good(server) == 200
        assert rss_bytes() - before < 64 << 20


@pytest.mark.parametrize("length", ["123456789012345678x", "9" * 5000, "x"])
def test_a_wrong_length_of_the_json_before_a_body_in_pieces_is_refused(length: str) -> None:
    with running() as server:
        raw = server.connect()
        raw.send(request("POST", INFER, Content_Length="4", Inference_Header_Content_Length=length))
        reply = raw.ask(b"{}  ")
        assert reply.status == 400
        assert "Inference-Header-Content-Length is" in reply.json["error"]


def test_answers_keep_the_order_of_requests_after_a_large_json_body() -> None:
    """A body that takes long to decode does not overtake or delay other connections."""
    count = 200_000
    body = infer_json([0.5] * count, [1, count])
    assert len(body) > 256 << 10
    with running({"m": free_axis()}) as server:
        raw = server.connect()
        raw.send(request("POST", INFER, body) + GOOD + request("GET", "/v2/health/live"))
        assert good(server) == 200  # on another connection
        replies = [raw.reply() for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 200]
        assert replies[0].json["outputs"][0]["shape"] == [1, count]
        assert replies[1].json["outputs"][0]["data"] == [3, 5, 7, 9]
        assert replies[2].json == {"live": True}


# -- slow clients


def test_clients_that_never_read_a_large_answer_are_disconnected(
    eventually: Callable[[Callable[[], bool]], None],
) -> None:
    """F13, with a deadline of half a second."""
    rows = np.zeros((1, 2_000_000), np.float32)
    data = binary_request(rows)
    with running({"m": free_axis()}, HttpLimits(stall_s=0.5)) as server:
        assert good(server) == 200
        before = rss_bytes()
        raws = []
        for _ in range(30):
            raw = server.connect()
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.send(data)
            raws.append(raw)
        assert good(server) == 200
        connections = server.server._listener.connections
        eventually(lambda: len(connections) <= 2)  # the two good ones
        assert good(server) == 200
        assert rss_bytes() - before < 640 << 20  # 30 requests and answers of 8 MB are 480


# -- file descriptors


def test_a_server_may_open_as_many_files_as_the_system_allows() -> None:
    """A soft limit of 1024, as many systems have, was the limit of connections."""

    def ready(*_: object) -> None:
        found.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        raise KeyboardInterrupt

    found: list[int] = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        with pytest.raises(KeyboardInterrupt):
            run(Server({"m": FakeEngine()}, ServeOptions(http_port=0)), ready)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found == [min(before[1], 1 << 14)]


def test_what_needs_a_file_descriptor_can_be_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was a 500, with a traceback in the log."""
    with running() as server:
        raw = server.connect()
        raw.ask(request("GET", "/v2/health/live"))
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
        try:
            refused = raw.ask(request("GET", "/docs"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert refused.status == 503
        assert refused.headers["retry-after"] == "1"
        assert "Too many open files" in refused.json["error"]
        assert "Traceback" not in caplog.text
        assert server.ask("GET", "/docs").status == 200


# -- the device is lost (F9)


class Lost(GatedEngine):
    def __call__(self, feeds):
        if self.warm:
            raise DeviceLost("CUDA error 700 in the engine")
        return super().__call__(feeds)


def test_a_lost_device_stops_the_server_with_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploykit.serving.server.DRAIN_S", 3600.0)  # it waits for nothing
    engine = Lost()
    server = Server({"m": engine}, ServeOptions(http_port=0))
    caught: list[BaseException] = []
    ready = threading.Event()

    def serve() -> None:
        try:
            server.run(lambda *_: ready.set())
        except DeviceLost as exc:
            caught.append(exc)

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(WAIT_S)
    engine.warm = True
    raw = Raw(server.port)
    reply = raw.ask(GOOD)
    assert reply.status == 503
    assert "retry-after" in reply.headers
    raw.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert len(caught) == 1
    assert getattr(caught[0], "exit_code", None) == 3
