"""The gRPC port of a process that has run out of file descriptors."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving.faults import Process, until
from tests.support.serving.grpc_cases import Frames, first_value, infer_bytes
from tests.support.serving.running import Raw

FILES = 64
CROWD = 2 * FILES


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))

    with Process(tmp_path, "--grpc-port", "0", before=limit) as process:
        yield process


def waits(process: Process) -> bool:
    """Whether the log says that no connection can be accepted; both ports use one message."""
    return any("connections cannot be accepted" in line for line in process.log_lines())


def grpc_port(process: Process) -> int:
    return int(process.grpc.rpartition(":")[2])


def test_without_file_descriptors_open_connections_are_served_and_new_ones_accepted_later(
    process: Process,
) -> None:
    port = grpc_port(process)
    with contextlib.closing(Frames(port)) as first:
        assert first.call(1, infer_bytes(value=3)).status == 0
        crowd = [Frames(port) for _ in range(CROWD)]
        until(lambda: waits(process))
        began_s = process.cpu_s()
        threading.Event().wait(1.0)  # the CPU time of this second is measured
        assert process.cpu_s() - began_s < 0.5
        answer = first.call(3, infer_bytes(value=4))
        assert answer.status == 0
        assert first_value(answer) == 9
        last = crowd.pop()
        for client in crowd:
            client.close()
        answer = last.call(1, infer_bytes(value=5))
        assert answer.status == 0
        assert first_value(answer) == 11
        last.close()
    assert process.infer(1) == (200, [3.0])
    assert not [line for line in process.log_lines() if "Traceback" in line]


@pytest.mark.parametrize("crowded", ["grpc", "http"])
def test_too_many_connections_at_one_port_do_not_break_the_other(
    process: Process, crowded: str
) -> None:
    port = grpc_port(process)
    crowd = [Frames(port) if crowded == "grpc" else Raw(process.port) for _ in range(CROWD)]
    until(lambda: waits(process))
    waiting = Frames(port)
    for client in crowd:
        client.close()
    assert waiting.call(1, infer_bytes(value=1)).status == 0
    waiting.close()
    assert process.infer(1) == (200, [3.0])
    until(lambda: process.gauge("deploykit_held_bytes") == 0)


def test_a_server_without_file_descriptors_can_be_shut_down(process: Process) -> None:
    crowd = [Frames(grpc_port(process)) for _ in range(CROWD)]
    until(lambda: waits(process))
    process.popen.terminate()
    for client in crowd:
        client.close()
    assert process.wait() == 0
    assert not [line for line in process.log_lines() if "Traceback" in line]
