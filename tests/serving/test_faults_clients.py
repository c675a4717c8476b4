"""Client faults (F3, F12, F13, F16), briefly; benchmarks/serve/soak.py runs them for hours."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.serving.faults import (
    LIMIT_S,
    REAL,
    ROOT,
    Clients,
    Process,
    binary,
    posted,
    request,
    sent,
    until,
)

BATCHED = {"FAULT_LATENCY_S": "0.05", "FAULT_ROWS": "8"}
CAPACITY_PER_S = 160.0  # eight rows each 50 ms


def test_f3_requests_of_disconnected_clients_are_cancelled_and_freed(tmp_path: Path) -> None:
    data = posted(request(1))
    with Process(tmp_path, env=BATCHED) as server:
        assert server.infer(1) == (200, [3.0])
        for _ in range(100):  # warm-up of one-time allocations
            sent(server, data).close()
        until(lambda: server.gauge("deploykit_requests_in_flight") == 0)
        descriptors, rss = server.holds(), server.rss_bytes()
        for _ in range(1500):
            sent(server, data).close()
        until(lambda: server.gauge("deploykit_requests_in_flight") == 0)
        until(lambda: server.holds() <= descriptors)
        assert server.rss_bytes() - rss < 8 << 20
        cancelled = 'deploykit_requests_total{model="m",outcome="cancelled",version="1"}'
        assert server.ask("GET", "/metrics")[2].decode().count(cancelled) == 1
        assert server.gauge("nv_inference_count") < 800  # most never reached the engine
        assert server.infer(2) == (200, [5.0])


def load(server: Process, rate: float) -> dict[str, object]:
    """`deploykit load`, open loop, for three seconds."""
    words = ("load", f"http://127.0.0.1:{server.port}", "--rate", str(rate), "--duration", "3")
    found = subprocess.run(
        [*REAL, *words, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    result: dict[str, object] = json.loads(found.stdout)
    return result


@pytest.mark.parametrize(("times", "goodput"), [(2, 0.8), (10, 0.6)])
def test_f12_an_overloaded_server_keeps_its_goodput(
    tmp_path: Path, times: int, goodput: float
) -> None:
    """Measured on a quiet machine: 95 % and 80 %; the bounds allow for a shared one."""
    with Process(tmp_path, "--queue", "32", env=BATCHED) as server:
        result = load(server, times * CAPACITY_PER_S)
        assert result["failed"] == 0, result
        assert result["refused"] > 0, result
        assert result["ok"] >= goodput * CAPACITY_PER_S * 3, result
        refused = server.gauge("deploykit_queue_depth")
        assert refused <= 32
        assert server.infer(1) == (200, [3.0])  # back to normal


def test_f12_a_refusal_has_a_retry_after_header(tmp_path: Path) -> None:
    slow = {"FAULT_LATENCY_S": "2"}
    with (
        Process(tmp_path, "--queue", "1", "--max-batch", "1", env=slow) as server,
        ExitStack() as stack,
    ):
        stack.enter_context(sent(server, posted(request(1))))
        until(lambda: server.gauge("deploykit_requests_in_flight") == 1)
        until(lambda: server.gauge("deploykit_queue_depth") == 0)  # the engine has it
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
        for wave in range(3):  # the first wave is a warm-up
            with ExitStack() as stack:
                readers = [stack.enter_context(sent(server, head + body)) for _ in range(20)]
                until(lambda: server.gauge("deploykit_requests_in_flight") == 0)
                for each in readers:  # the answer has begun: the client does not read on
                    assert each.recv(12) == b"HTTP/1.1 200"
                until(lambda: server.holds()[0] < before + 5)  # while the sockets are still open
            if wave == 0:
                descriptors, rss = server.holds(), server.rss_bytes()
        assert server.holds()[1] <= descriptors[1]
        assert server.rss_bytes() - rss < 32 << 20  # two waves of 80 MiB have passed
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
        for rounds in (100, 300):  # the first round is a warm-up
            until(lambda: len(clients.outcomes) > 10)
            descriptors, rss = server.holds(), server.rss_bytes()
            for _ in range(rounds):
                for body in bad:
                    assert server.ask("POST", "/v2/models/m/infer", body)[0] == 400
        assert set(clients.stop()) == {200}
        until(lambda: server.holds()[0] <= descriptors[0])
        assert server.holds()[1] == descriptors[1]
        assert server.rss_bytes() - rss < 8 << 20
        assert server.gauge("deploykit_requests_in_flight") == 0
        text = server.ask("GET", "/metrics")[2].decode()
        counts = dict(re.findall(r'_requests_total{.*outcome="(\w+)".*} (.*)', text))
        assert float(counts["bad_request"]) == len(bad) * 400
        assert float(counts["success"]) == len(clients.outcomes)
        assert float(counts["failed"]) == 0
