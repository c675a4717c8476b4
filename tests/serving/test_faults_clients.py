"""Client faults (F3, F12, F13, F16), briefly; benchmarks/serve/soak.py runs them for hours."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.serving.faults import (
    LIMIT_S,
    REAL,
    ROOT,
    Clients,
    Process,
    binary,
    leaves_nothing,
    posted,
    request,
    sent,
    until,
)


def test_f3_requests_of_disconnected_clients_are_cancelled_and_freed(tmp_path: Path) -> None:
    data = posted(request(1))

    def leave() -> None:
        for _ in range(100):
            sent(server, data).close()
        until(lambda: server.gauge("deploykit_requests_in_flight") == 1)

    with Process(tmp_path, "--max-batch", "1") as server:
        assert server.infer(1) == (200, [3.0])
        ran = server.gauge("nv_inference_count")
        server.hold()
        with sent(server, data) as first:
            until(server.in_engine)
            leave()  # one-time allocations
            leaves_nothing(server, lambda: [leave() for _ in range(8)], 8 << 20)
            server.release()
            assert first.recv(12) == b"HTTP/1.1 200"
        until(lambda: server.gauge("deploykit_requests_in_flight") == 0)
        cancelled = 'deploykit_requests_total{model="m",outcome="cancelled",version="1"}'
        assert server.ask("GET", "/metrics")[2].decode().count(cancelled) == 1
        assert server.gauge("nv_inference_count") == ran + 1  # they never reached the engine
        assert server.infer(2) == (200, [5.0])


def load(server: Process, rate: float) -> dict[str, Any]:
    """`deploykit load`, open loop, for a second."""
    words = ("load", f"http://127.0.0.1:{server.port}", "--rate", str(rate), "--duration", "1")
    found = subprocess.run(
        [*REAL, *words, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    result: dict[str, Any] = json.loads(found.stdout)
    return result


def test_f12_an_overloaded_server_refuses_and_computes_nothing_in_vain(tmp_path: Path) -> None:
    """20 requests a second is all it can, 400 come; benchmarks/serve measures the goodput."""
    slow = {"FAULT_LATENCY_S": "0.05"}
    with Process(tmp_path, "--queue", "4", "--max-batch", "1", env=slow) as server:
        result = load(server, 400)
        assert result["failed"] == 0, result
        assert result["refused"] > 0, result
        assert result["ok"] > 0, result
        until(lambda: server.gauge("deploykit_requests_in_flight") == 0)
        text = server.ask("GET", "/metrics")[2].decode()
        (answered,) = re.findall(r'_requests_total{.*outcome="success".*} (.*)', text)
        assert float(answered) == server.gauge("nv_inference_count")
        assert server.infer(1) == (200, [3.0])  # back to normal


def test_f12_a_refusal_has_a_retry_after_header(tmp_path: Path) -> None:
    with Process(tmp_path, "--queue", "1", "--max-batch", "1") as server, ExitStack() as stack:
        server.hold()
        stack.enter_context(sent(server, posted(request(1))))
        until(server.in_engine)
        stack.enter_context(sent(server, posted(request(1))))
        until(lambda: server.gauge("deploykit_queue_depth") == 1)
        status, headers, body = server.ask("POST", "/v2/models/m/infer", request(1))
        assert status == 503
        assert headers["retry-after"].isdigit()
        assert b"the queue of model 'm' is full" in body


def test_f13_clients_that_never_read_are_disconnected_and_freed(tmp_path: Path) -> None:
    width = 1 << 20
    env = {"FAULT_WIDTH": str(width), "FAULT_LIMITS": json.dumps({"write_s": 1.0})}
    body, head = binary(1.0, width)
    with Process(tmp_path, "--max-batch", "1", env=env) as server:
        before = server.holds()[0]

        def wave() -> None:
            with ExitStack() as stack:
                readers = [stack.enter_context(sent(server, head + body)) for _ in range(20)]
                until(lambda: server.gauge("deploykit_requests_in_flight") == 0)
                for each in readers:  # the answer has begun: the client does not read on
                    assert each.recv(12) == b"HTTP/1.1 200"
                until(lambda: server.holds()[0] < before + 5)  # while the sockets are still open

        wave()  # one-time allocations
        leaves_nothing(server, wave, 32 << 20)  # of 80 MiB
        assert server.status("/v2/health/ready") == 200


def test_idle_connections_keep_no_request_or_answer(tmp_path: Path) -> None:
    """The last request and its answer are freed although the connection stays open."""
    width = 1 << 20
    body, head = binary(1.0, width)
    with Process(tmp_path, env={"FAULT_WIDTH": str(width)}) as server, ExitStack() as stack:
        rss = 0
        for number in range(24):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(head + body)
            left = 4 * width  # at least: the head is a little more
            while left > 0:
                left -= len(client.recv(1 << 20))
            if number == 3:  # warm-up of one-time allocations
                rss = server.rss_bytes()
        assert server.rss_bytes() - rss < 32 << 20  # it was 160


def test_f16_bad_requests_leave_no_files_or_memory_behind(tmp_path: Path) -> None:
    bad = [
        b"",
        b"{",
        b"[" * 5000,
        b'{"inputs": []}',
        json.dumps({"inputs": [{"name": "x", "shape": [1, 5], "datatype": "FP32"}]}).encode(),
        request(1).replace(b"FP32", b"INT8"),
    ]
    with Process(tmp_path) as server, Clients(server.port, 2) as clients:
        asked = 0

        def ask() -> None:
            nonlocal asked
            asked += 100
            for _ in range(100):
                for body in bad:
                    assert server.ask("POST", "/v2/models/m/infer", body)[0] == 400

        until(lambda: len(clients.outcomes) > 10)
        ask()  # one-time allocations
        leaves_nothing(server, ask, 4 << 20)
        assert set(clients.stop()) == {200}
        assert server.gauge("deploykit_requests_in_flight") == 0
        text = server.ask("GET", "/metrics")[2].decode()
        counts = dict(re.findall(r'_requests_total{.*outcome="(\w+)".*} (.*)', text))
        assert float(counts["bad_request"]) == len(bad) * asked
        assert float(counts["success"]) == len(clients.outcomes)
        assert float(counts["failed"]) == 0
