"""A server whose event loop does not run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deploykit.serving.options import ServeOptions
from deploykit.serving.server import Server
from tests.support.fake_engine import FakeEngine


@pytest.fixture
def idle() -> Iterator[Server]:
    options = ServeOptions(http_port=0, grpc_port=0, max_held_bytes=1 << 40, stall_s=32, idle_s=74)
    found = Server({"m": FakeEngine()}, options)
    yield found
    found.repository.close(drain=False)
    found._offload.close()
    found._release()
