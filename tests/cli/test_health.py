"""`health`: exit 0 only from a server that is ready, and one line that says why not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import deploykit as dk
from tests.support.cli.command import Run
from tests.support.http_server import Handler, http_server


class NotReady(Handler):
    """Answers every request with 503 and the protocol's error document."""

    def reply(self) -> None:
        self.answer(503, b'{"error": "model \'digits\' is loading\\u0007"}')


@pytest.fixture
def not_ready() -> Iterator[str]:
    with http_server(NotReady) as url:
        yield url


def test_a_server_that_is_ready_is_exit_0(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dk.serve(model, http_port=0, grpc_port=None) as server:
        assert json.loads(run("health", server.url, "--json").out) == {
            "url": server.url,
            "ready": True,
        }
        # as the health check of a container calls it
        monkeypatch.setenv("DEPLOYKIT_HTTP_PORT", server.url.rpartition(":")[2])
        assert run("health").code == 0


def test_a_server_that_is_not_ready_is_exit_1_with_its_reason(run: Run, not_ready: str) -> None:
    ran = run("health", not_ready)
    assert ran.code == 1
    assert (
        ran.error() == f"error: {not_ready}: not ready: it answered 503: model 'digits' is loading"
    )


def test_no_server_is_exit_1(run: Run) -> None:
    ran = run("health", "http://127.0.0.1:1")
    assert ran.code == 1
    assert "http://127.0.0.1:1: no server answers there: Connection refused" in ran.error()


@pytest.mark.parametrize(
    "url",
    ["ftp://x", "8000", "http://", "http://x:port", "http://a b"],
)
def test_what_is_not_a_servers_url_is_exit_2(run: Run, url: str) -> None:
    ran = run("health", url)
    assert ran.code == 2
    assert url in ran.error()


def test_a_url_with_a_password_is_exit_2_and_the_password_is_not_repeated(run: Run) -> None:
    ran = run("health", "http://user:pw@x")
    assert ran.code == 2
    assert "'http://x' is not a server's URL" in ran.error()
    assert "user" not in ran.error()
    assert "pw" not in ran.error()
