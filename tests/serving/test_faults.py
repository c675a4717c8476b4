"""Faults of the engine, of the process and of the machine (F1-F20), with the real command.

F1 and F8 at the start are in workers/test_workers.py, F2 in test_shutdown.py, F4 and F5 in
models/test_reload.py, F7 in core/test_files.py, F15 in http/test_http_hostile.py, F20 in
observe/test_logs.py, Ctrl-C in cli/test_interrupt.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.large_model import write_model
from tests.support.serving.faults import (
    REAL,
    ROOT,
    Clients,
    Process,
    leaves_nothing,
    request,
    until,
)
from tests.support.serving.running import binary_request, running
from tests.support.serving.running import request as raw_request
from tests.support.serving.serve_faulty import DTYPE, FEWER, HANG, LOST, MEMORY, POISON

BATCHED = {"FAULT_LATENCY_S": "0.05", "FAULT_ROWS": "8"}

# -- The engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """For tests after which it serves as before."""
    with Process(tmp_path_factory.mktemp("engine"), env={"FAULT_ROWS": "8"}) as found:
        yield found


def infer_all(server: Process, *values: float) -> list[tuple[int, object]]:
    """One request per value: the first runs alone, the others as one batch."""
    with ThreadPoolExecutor(len(values)) as pool:
        server.hold()
        first = pool.submit(server.infer, values[0])
        until(server.in_engine)
        others = [pool.submit(server.infer, value) for value in values[1:]]
        until(lambda: server.gauge("deploykit_queue_depth") == len(others))
        server.release()
        return [each.result() for each in (first, *others)]


def test_f8_out_of_memory_in_a_batch_gets_503_and_the_next_succeeds(server: Process) -> None:
    status, headers, body = server.ask("POST", "/v2/models/m/infer", request(MEMORY))
    assert (status, b"memory" in body) == (503, True)
    assert headers["retry-after"].isdigit()
    assert server.infer(3) == (200, [7.0])
    assert server.status("/v2/health/ready") == 200


def test_f9_a_lost_gpu_ends_the_process_with_exit_code_3(tmp_path: Path) -> None:
    """A CUDA context does not recover: the supervisor has to restart the process."""
    with Process(tmp_path, env={"FAULT_ROWS": "2"}) as server:
        alone, *others = infer_all(server, 1, LOST, 2, 3, 4)
        assert alone == (200, [3.0])
        lost, *rest = [status for status, _ in others]  # which the server may read in any order
        assert lost == 503
        assert rest.count(503) >= 1  # in its batch, and in the queue
        assert set(rest) <= {200, 503}
        assert server.wait() == 3
        assert any("the GPU is lost" in line for line in server.log_lines())
        assert not any("Traceback" in line for line in server.log_lines())


def test_f10_a_hung_engine_gets_504_is_not_ready_and_can_be_stopped(tmp_path: Path) -> None:
    with Process(tmp_path, "--timeout-ms", "300") as server:
        until(lambda: server.infer(1) == (200, [3.0]))
        assert server.infer(HANG)[0] == 504
        assert server.infer(1)[0] == 504  # it is queued behind the hung request
        until(lambda: server.status("/v2/health/ready") == 503)
        assert server.status("/v2/models/m/ready") == 503
        assert server.status("/v2/health/live") == 200
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait() in (0, 1)


@pytest.mark.parametrize("fault", [DTYPE, FEWER], ids=["dtype", "fewer rows"])
def test_f19_an_output_of_wrong_type_or_rows_gets_500_for_its_request_only(
    server: Process, fault: int
) -> None:
    values, lines = (1, 2, fault, 3, 4, 5), len(server.log_lines())
    for value, (status, found) in zip(values, infer_all(server, *values), strict=True):
        if value == fault:
            assert (status, "the engine returned" in str(found)) == (500, True)
        else:
            assert (status, found) == (200, [2.0 * value + 1])
    until(lambda: any("the engine returned" in line for line in server.log_lines()[lines:]))
    assert server.status("/v2/health/ready") == 200


def test_hundreds_of_failed_requests_leak_nothing(server: Process) -> None:
    """File descriptors, threads and memory are as before, and the server still answers."""

    def fail() -> None:
        with Clients(server.port, 2) as clients:
            for fault in (POISON, DTYPE, FEWER, MEMORY) * 50:
                assert server.infer(fault)[0] in (500, 503)
            assert set(clients.stop()) <= {200, 503}  # 503: in one batch with MEMORY

    fail()  # one-time allocations
    leaves_nothing(server, fail, 3 << 20)
    assert server.infer(1) == (200, [3.0])
    assert not any("Traceback" in line for line in server.log_lines())


# -- The disk

FULL = "mount -t tmpfs -o size=1m none out && cp before out/m.onnx"
BUILD = '"$@" build m.onnx --profile cpu -o out/m.onnx --force'
KEPT = "cat out/m.onnx > after; ls -A out > left; exit $code"


def test_f6_a_full_disk_exits_with_3_and_keeps_the_old_file(tmp_path: Path) -> None:
    write_model(tmp_path / "m.onnx")
    (tmp_path / "out").mkdir()
    (tmp_path / "before").write_bytes(b"what was there before")
    alone = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*alone, FULL], cwd=tmp_path, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    script = f"{FULL} && {{ {BUILD}; code=$?; {KEPT}; }}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*alone, script, "sh", *REAL]
    done = subprocess.run(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, check=False)
    errors = done.stderr.decode()
    assert done.returncode == 3, errors
    assert "error: out/m.onnx: no space left on the disk" in errors
    assert "Traceback" not in errors
    assert (tmp_path / "after").read_bytes() == b"what was there before"
    assert (tmp_path / "left").read_text().split() == ["m.onnx"]


# -- The process and the machine


def test_f14_a_jump_of_the_wall_clock_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, body = time.time, request(1)
    with running() as server:
        idle = server.connect()
        days = set()
        for shift_s in (0, 86_400, -86_400, 86_400):
            monkeypatch.setattr(time, "time", lambda shift_s=shift_s: now_s() + shift_s)
            server.pass_time(0.2)
            for _ in range(20):
                reply = server.ask("POST", "/v2/models/m/infer", body)
                assert reply.status == 200
            days.add(reply.headers["date"][:10])
            text = server.ask("GET", "/metrics").body.decode()
            numbers = [line.rpartition(" ")[2] for line in text.splitlines() if line[0] != "#"]
            assert not [number for number in numbers if number.startswith("-")]
        assert len(days) == 3  # the clock did move
        assert idle.ask(raw_request("GET", "/v2/health/live")).status == 200


def test_f18_the_server_runs_without_home_and_shared_memory(tmp_path: Path) -> None:
    save(linear(), tmp_path / "m.onnx")
    bare = ["env", "-u", "HOME"]
    alone = ["unshare", "--mount", "sh", "-c", 'umount -l /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0:
        bare = [*alone, *bare]
    with Process(tmp_path, command=[*bare, *REAL], engine="m=m.onnx") as server:
        assert server.infer(1)[0] == 200


def test_idle_connections_keep_no_request_or_answer(tmp_path: Path) -> None:
    """The last request and its answer are freed although the connection stays open."""
    width = 1 << 20
    data = binary_request(np.ones((1, width), np.float32))
    with Process(tmp_path, env={"FAULT_WIDTH": str(width)}) as server, ExitStack() as stack:
        rss = 0
        for number in range(24):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(data)
            left = 4 * width  # at least: the head is a little more
            while left > 0:
                left -= len(client.recv(1 << 20))
            if number == 3:  # warm-up of one-time allocations
                rss = server.rss_bytes()
        assert server.rss_bytes() - rss < 32 << 20  # it was 160
