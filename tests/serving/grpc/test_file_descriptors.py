"""The gRPC port of a process that has no file descriptors left."""

from __future__ import annotations

import contextlib
import resource
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

    with Process(tmp_path, "--grpc", "--grpc-port", "0", before=limit) as process:
        yield process


def waits(process: Process) -> bool:
    """Whether it has found that it can accept nobody; both ports say it in the same words."""
    return any("connections cannot be accepted" in line for line in process.said())


def grpc_port(process: Process) -> int:
    return int(process.grpc.rpartition(":")[2])


def test_who_was_accepted_is_served_and_who_waits_is_accepted_later(process: Process) -> None:
    port = grpc_port(process)
    with contextlib.closing(Frames(port)) as first:
        assert first.call(1, infer_bytes(value=3)).status == 0
        crowd = [Frames(port) for _ in range(CROWD)]
        until(lambda: waits(process))
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
    assert not [line for line in process.said() if "Traceback" in line]


@pytest.mark.parametrize("crowded", ["grpc", "http"])
def test_a_crowd_at_one_port_is_survived_by_the_other(process: Process, crowded: str) -> None:
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


def test_a_shutdown_while_it_waits_ends(process: Process) -> None:
    crowd = [Frames(grpc_port(process)) for _ in range(CROWD)]
    until(lambda: waits(process))
    process.popen.terminate()
    for client in crowd:
        client.close()
    assert process.wait() == 0
    assert not [line for line in process.said() if "Traceback" in line]
