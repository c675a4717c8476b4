"""Faults of the engine, of the process and of the machine (F1-F20), with the real command.

F2 is in test_shutdown.py, F15 in http/test_http_faults.py; the batcher alone in batching/,
Ctrl-C in tests/cli/test_interrupt.py, atomic writes in tests/core/test_files.py.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from onnx import numpy_helper

from deploykit.core.artefact import Artefact
from deploykit.engines.engine import load
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.large_model import write_model
from tests.support.serving.faults import (
    BROKEN,
    LIMIT_S,
    REAL,
    REFUSED,
    ROOT,
    Clients,
    Process,
    binary,
    leaves_nothing,
    quiet_port,
    refused,
    request,
    until,
)
from tests.support.serving.serve_faulty import DTYPE, FEWER, HANG, LOST, MEMORY, POISON, SHAPE

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


def test_f8_out_of_memory_at_load_exits_with_3(tmp_path: Path) -> None:
    code, errors = refused(tmp_path, env={"FAULT_LOAD": "1"})
    assert code == 3
    assert "9.0 GiB needed, 1.0 GiB free" in errors
    assert "Traceback" not in errors


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


def test_f19_an_output_of_another_shape_than_declared_is_answered_and_logged_once(
    server: Process,
) -> None:
    lines = len(server.log_lines())
    assert [server.infer(value)[0] for value in (SHAPE, 1, SHAPE)] == [200, 200, 200]
    until(lambda: any("as declared" in line for line in server.log_lines()[lines:]))
    assert sum("as declared" in line for line in server.log_lines()[lines:]) == 1


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

QUANTIZE = ("quantize", "m.onnx", "--to", "fp16", "-o", "out/m.onnx", "--force")
BUILD = ("build", "m.onnx", "--profile", "cpu", "-o", "out/m.onnx", "--force")
FULL = "mount -t tmpfs -o size={size} none out && cp before out/m.onnx && "
KEPT = "cat out/m.onnx > after; ls -A out > left; exit $code"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a model of 5 MiB, and an older file."""
    write_model(tmp_path / "m.onnx")
    (tmp_path / "out").mkdir()
    (tmp_path / "before").write_bytes(b"what was there before")
    return tmp_path


def start(place: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "size"),
    [(BUILD, "1m"), (QUANTIZE, "1m"), (QUANTIZE, "4m")],  # 4m: fits, but not the proof's copy too
    ids=["build", "quantize", "quantize-proof"],
)
def test_f6_a_full_disk_exits_with_3_and_keeps_the_old_file(
    place: Path, words: Sequence[str], size: str
) -> None:
    alone, full = ["unshare", "--mount", "sh", "-c"], FULL.format(size=size)
    if subprocess.run([*alone, full + "true"], cwd=place, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    script = f'{full} {{ "$@"; code=$?; {KEPT}; }}'
    with start(place, [*alone, script, "sh", *REAL, *words]) as process:
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3, stderr
    assert "error: out/m.onnx: no space left on the disk" in stderr
    assert "Traceback" not in stderr
    assert (place / "after").read_bytes() == b"what was there before"
    assert (place / "left").read_text().split() == ["m.onnx"]


@pytest.mark.parametrize("written", ["*", "m.onnx"])
def test_f7_a_build_killed_at_any_time_leaves_a_whole_file_or_none(
    place: Path, written: str
) -> None:
    """Killed as soon as it has begun to write, or the file is there and its manifest may not be."""
    whole = place / "out" / "m.onnx"
    with start(place, [*REAL, *BUILD]) as process:
        until(lambda: any(whole.parent.glob(written)) or process.poll() is not None)
        process.kill()
        process.communicate()
    assert whole.exists() or written == "*"
    if whole.exists():
        load(whole, "cpu").close()
        manifest = Artefact(whole).manifest  # raises when it describes another file
        assert manifest is None or manifest.sha256 == hashlib.sha256(whole.read_bytes()).hexdigest()
    with start(place, [*REAL, *BUILD]) as process:
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert Artefact(whole).manifest is not None


# -- The process and the machine


def test_f1_a_killed_server_leaves_no_files_and_a_free_port(tmp_path: Path) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    port = quiet_port()
    env = {**BATCHED, "TMPDIR": str(scratch), "HOME": str(scratch)}
    with Process(tmp_path, port=port, env=env) as server, Clients(port, 8) as clients:
        until(lambda: len(clients.outcomes) > 8)
        assert server.shared() == []
        server.popen.kill()
        server.wait()
        counts = clients.stop()  # `Clients` checks each 200
    assert counts.keys() <= {200, BROKEN, REFUSED}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["stderr.txt", "tmp"]
    with Process(tmp_path, port=port) as server:
        assert server.infer(1) == (200, [3.0])


def test_f4_a_damaged_or_deleted_model_file_does_not_end_the_server(tmp_path: Path) -> None:
    """And F5: a new one is loaded without a failed request."""
    path, noise = save(linear(), tmp_path / "m.onnx"), tmp_path / "noise"
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
        model = linear()
        (weights, *_) = model.graph.initializer
        doubled = numpy_helper.from_array(2 * numpy_helper.to_array(weights), weights.name)
        weights.CopyFrom(doubled)
        save(model, tmp_path / "new.onnx").replace(path)
        answers = [before]
        until(lambda: answers.append(server.infer(1, 2, 3)) or answers[-1] != before)
        assert {status for status, _ in answers} == {200}
        assert server.infer(1, 2, 3) == answers[-1]
        until(lambda: server.gauge("deploykit_reloads_total") == 1)


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
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
    save(linear(), tmp_path / "m.onnx")
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
