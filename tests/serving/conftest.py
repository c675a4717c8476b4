"""Fixtures: a server shared by the tests of a file, certificates, waiting for other threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.serving.faults import until
from tests.support.serving.running import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One server with a FakeEngine called `m`, for tests that leave it as it was."""
    with running(max_body_bytes=100_000) as found:
        yield found


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], object]:
    """Wait until another thread or process has done something."""
    return until


@pytest.fixture
def shared() -> Iterator[str]:
    """The key of 64 bytes of system shared memory."""
    path = Path("/dev/shm") / f"test-{uuid4().hex}"
    path.write_bytes(bytes(64))
    yield f"/{path.name}"
    path.unlink(missing_ok=True)
