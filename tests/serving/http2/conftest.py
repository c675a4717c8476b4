"""One server for the tests of a file, and a connection of frames that it must survive."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.serving.grpc_cases import (
    Frames,
    Serving,
    first_value,
    frames,
    infer_bytes,
    serving,
)


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    """One server for this file; after each test it must still answer."""
    models = {"m": FakeEngine(), "wide": FakeEngine(width=1_000_000)}
    with serving(models, max_body_bytes=8 << 20) as running:
        yield running


@pytest.fixture
def client(served: Serving) -> Iterator[Frames]:
    with frames(served.port) as client:
        yield client
    with frames(served.port) as after:
        assert first_value(after.call(1, infer_bytes(value=20))) == 41
