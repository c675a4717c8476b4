"""Process and machine faults (F1, F4, F5, F14, F18, F20), with the real command.

F2 is in test_shutdown_load.py and test_shutdown.py, F15 in test_http_faults.py.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

from tests.support.onnx_zoo import linear, save
from tests.support.serving.faults import (
    BROKEN,
    LIMIT_S,
    REAL,
    REFUSED,
    Clients,
    Process,
    binary,
    quiet_port,
    until,
)
from tests.support.serving.serve_faulty import POISON

BATCHED = {"FAULT_LATENCY_S": "0.05", "FAULT_ROWS": "8"}


def engine(folder: Path) -> Path:
    return save(linear(), folder / "m.onnx")


def test_f1_a_killed_server_leaves_no_files_and_a_free_port(tmp_path: Path) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    port = quiet_port()
    for wait_s in (0.0, 0.07):  # within a batch, and between two
        env = {**BATCHED, "TMPDIR": str(scratch), "HOME": str(scratch)}
        with Process(tmp_path, port=port, env=env) as server, Clients(port, 8) as clients:
            until(lambda clients=clients: len(clients.outcomes) > 8)
            threading.Event().wait(wait_s)
            assert server.shared() == []
            server.popen.kill()
            server.wait()
            counts = clients.stop()  # `Clients` checks each 200
        assert counts.keys() <= {200, BROKEN, REFUSED}
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["stderr.txt", "tmp"]
    with Process(tmp_path, port=port) as server:
        assert server.infer(1) == (200, [3.0])


def test_f4_a_damaged_or_deleted_model_file_does_not_end_the_server(tmp_path: Path) -> None:
    path, noise = engine(tmp_path), tmp_path / "noise"
    noise.write_bytes(bytes(range(256)))
    faults = (lambda: os.truncate(path, 0), lambda: noise.replace(path), path.unlink)
    with Process(tmp_path, command=REAL, engine="m=m.onnx") as server:
        before = server.infer(1, 2, 3)
        assert before[0] == 200

        def rejected() -> int:
            return sum("the new file was rejected" in line for line in server.log_lines())

        for count, damage in enumerate(faults, 1):
            damage()
            until(lambda count=count: server.infer(1, 2, 3) == before and rejected() == count)
            assert server.gauge("deploykit_reload_failed") == 1
            assert server.status("/v2/health/ready") == 200


def test_f5_a_new_model_file_is_loaded_without_a_failed_request(tmp_path: Path) -> None:
    path = engine(tmp_path)
    model = linear()
    weights = model.graph.initializer[0]
    new = save(scaled(model, weights.name), tmp_path / "new.onnx")
    with Process(tmp_path, command=REAL, engine="m=m.onnx") as server:
        before = server.infer(1)
        new.replace(path)
        answers = [before]
        until(lambda: answers.append(server.infer(1)) or answers[-1] != before)
        assert {status for status, _ in answers} == {200}
        assert server.infer(1) == answers[-1]
        until(lambda: server.gauge("deploykit_reloads_total"))  # counted after it is in use
        assert server.gauge("deploykit_reloads_total") == 1


def scaled(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """`model` with one of its weights doubled."""
    for number, tensor in enumerate(model.graph.initializer):
        if tensor.name == name:
            doubled = numpy_helper.from_array(2 * numpy_helper.to_array(tensor), name)
            model.graph.initializer[number].CopyFrom(doubled)
    return model


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>

static long shift(void) {  /* seconds: an hour on or back, while the file FAULT_CLOCK says so */
    struct stat found;
    const char *path = getenv("FAULT_CLOCK");
    if (!path || stat(path, &found)) return 0;
    return found.st_size == 1 ? 3600 : -3600;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += shift();
    return code;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to move the clock")
def test_f14_a_jump_of_the_wall_clock_fails_no_request(tmp_path: Path) -> None:
    source, library, jump = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "jump"
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    env = {**BATCHED, "LD_PRELOAD": str(library), "FAULT_CLOCK": str(jump)}
    with Process(tmp_path, env=env) as server, Clients(server.port, 4) as clients:
        idle = socket.create_connection(("127.0.0.1", server.port), LIMIT_S)
        hours = {}
        for content in (b"", b"+", b"--", b"+"):  # now, an hour on, an hour back, on again
            if content:
                jump.write_bytes(content)
            done = len(clients.outcomes)
            until(lambda done=done: len(clients.outcomes) > done + 20)
            hours[content] = server.ask("GET", "/v2/health/live")[1]["date"]
            text = server.ask("GET", "/metrics")[2].decode()
            numbers = [line.rpartition(" ")[2] for line in text.splitlines() if line[0] != "#"]
            assert not [number for number in numbers if number.startswith("-")]
        assert hours[b"+"] != hours[b"--"]  # the clock did move
        assert set(clients.stop()) == {200}
        idle.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(12) == b"HTTP/1.1 200"
        idle.close()


def test_f18_the_server_runs_without_home_and_shared_memory(tmp_path: Path) -> None:
    engine(tmp_path)
    bare = ["env", "-u", "HOME"]
    alone = ["unshare", "--mount", "sh", "-c", 'umount -l /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0:
        bare = [*alone, *bare]
    with Process(tmp_path, command=[*bare, *REAL], engine="m=m.onnx") as server:
        assert server.infer(1)[0] == 200


def test_f20_a_full_log_pipe_does_not_block_the_server(tmp_path: Path) -> None:
    """Each failed row is a log line: far more than this pipe holds, and nobody reads it."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    try:
        with Process(tmp_path, stderr=write) as server:
            for _ in range(300):
                assert server.infer(POISON)[0] == 500
            assert server.infer(1) == (200, [3.0])
            server.popen.send_signal(signal.SIGTERM)
            assert server.wait() == 0
    finally:
        os.close(read)
        os.close(write)


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
