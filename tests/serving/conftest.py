"""Fixtures: a server shared by the tests of a file, certificates, waiting for other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.serving.running import WAIT_S, Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One server with a FakeEngine called `m`, for tests that leave it as it was."""
    with running(max_body_bytes=100_000) as found:
        yield found


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait until another thread or process has done something."""

    def wait(reached: Callable[[], bool]) -> None:
        pause = threading.Event()
        for _ in range(WAIT_S * 200):
            if reached():
                return
            pause.wait(0.005)
        pytest.fail("it never happened")

    return wait


@pytest.fixture
def shared() -> Iterator[str]:
    """The key of 64 bytes of system shared memory."""
    path = Path("/dev/shm") / f"test-{uuid4().hex}"
    path.write_bytes(bytes(64))
    yield f"/{path.name}"
    path.unlink()
