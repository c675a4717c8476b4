"""The routes of the protocol and their errors, and the metrics of many clients."""

from __future__ import annotations

import asyncio
import gzip
import logging
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from deploykit.core.tensors import TensorSpec
from deploykit.serving.http import routes as scrapes
from deploykit.serving.http.routes import Scrapes
from deploykit.serving.observe.metrics import Sample
from deploykit.serving.transport.connection import Head
from deploykit.serving.workers.group import ServerGroup
from tests.support.fake_engine import FakeEngine
from tests.support.serving.grpc_cases import frames, infer_bytes
from tests.support.serving.memory import Seen
from tests.support.serving.running import Running, infer_json, running

GOOD = infer_json([1, 2, 3, 4], [1, 4])
INFER = "/v2/models/m/infer"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        ("/v2/models/m/ready", {"name": "m", "ready": True}),
        ("/v2/models/m/versions/1/ready", {"name": "m", "ready": True}),
        ("/v2/health/live?verbose=1", {"live": True}),
    ],
)
def test_health_and_readiness_routes_answer(server: Running, target: str, expected: object) -> None:
    reply, head = (server.ask(method, target) for method in ("GET", "HEAD"))
    assert (reply.status, reply.json) == (200, expected)
    assert (head.status, int(head.headers["content-length"])) == (200, len(reply.body))


def test_a_model_with_a_fixed_first_axis_is_not_batched() -> None:
    engine = FakeEngine()
    engine.inputs = (TensorSpec("x", "float32", (2, 4)),)
    engine.outputs = (TensorSpec("y", "float32", (2, 4)),)
    with running({"m": engine}) as server:
        config = server.ask("GET", "/v2/models/m/config").json
        assert config["max_batch_size"] == 0
        assert config["input"][0]["dims"] == [2, 4]
        assert "dynamic_batching" not in config
        assert server.ask("POST", INFER, infer_json([0] * 8, [2, 4])).status == 200
        assert server.ask("POST", INFER, infer_json([0] * 4, [1, 4])).status == 400


def test_max_batch_is_limited_by_the_engine() -> None:
    with running({"m": FakeEngine(max_batch=3)}) as server:
        assert server.ask("GET", "/v2/models/m/config").json["max_batch_size"] == 3
        reply = server.ask("POST", INFER, infer_json([0] * 16, [4, 4]))
        assert reply.status == 400
        assert "batch 4 is above 3" in reply.json["error"]


def test_infer_returns_the_id_and_the_outputs(server: Running) -> None:
    reply = server.ask("POST", INFER, infer_json([1, 2, 3, 4], [1, 4], id="a\n\u001b[2Jé"))
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json == {
        "model_name": "m",
        "model_version": "1",
        "id": "a\n\u001b[2Jé",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [3, 5, 7, 9]}],
    }


NOT_ALLOWED = "is not allowed here"


@pytest.mark.parametrize(
    ("method", "target", "status", "says"),
    [
        (
            "GET",
            "/v2/models/m/versions/2/ready",
            404,
            "'m' has no version '2'; served here: m ",
        ),
        ("GET", "/v2/models/other", 404, "there is no model 'other'"),
        ("GET", "/v2/models/a/../b/infer", 404, "there is no model 'a'"),
        *(("GET", each, 404, "no route") for each in ("/v3", "/v2/health", "/docs/", "*", "//")),
        *(("GET", each, 404, "no route") for each in ("/v2/models/m/x", "/page.py")),
        ("DELETE", "/v2", 405, NOT_ALLOWED),
        ("PUT", "/metrics", 405, NOT_ALLOWED),
        ("POST", "/v2/health/live", 405, NOT_ALLOWED),
        ("GET", "/v2/models/m/predict", 405, NOT_ALLOWED),
        ("GET", "/v2/repository/index", 405, NOT_ALLOWED),
    ],
)
def test_what_is_not_there_or_not_allowed_is_refused(
    server: Running, method: str, target: str, status: int, says: str
) -> None:
    reply = server.ask(method, target)
    assert reply.status == status
    assert says in reply.json["error"]
    allow = {404: None, 405: "POST" if method == "GET" else "GET, HEAD"}[status]
    assert reply.headers.get("allow") == allow


READY = b'{"ready":true}'


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"", {"Content_Type": "text/plain; charset=latin1"}, 200),
        (READY + b" " * ((64 << 10) - len(READY)), {}, 200),
        (READY + b" " * (64 << 10), {}, 413),  # 30 MB stopped the event loop for a second
        (gzip.compress(READY), {"Content_Encoding": "gzip"}, 200),
        (READY, {"Content_Type": "text/plain; charset=ISO-8859-1"}, 200),  # Java's default
        ('{"ready":true, "x":"é"}'.encode("latin-1"), {"Content_Type": "a/b; charset=latin1"}, 415),
        (READY.decode().encode("utf-16"), {"Content_Type": "a/json; charset=utf-16"}, 415),
        (READY, {"Content_Encoding": "br"}, 415),
        (gzip.compress(bytes(1 << 20)), {"Content_Encoding": "gzip"}, 413),
    ],
    ids=["empty", "64 KiB", "large", "gzip", "java", "latin-1", "utf-16", "br", "gzip-too-large"],
)
def test_the_repository_index_reads_any_small_body_as_its_headers_say(
    server: Running, body: bytes, headers: dict[str, str], status: int
) -> None:
    reply = server.ask("POST", "/v2/repository/index", body, **headers)
    assert reply.status == status
    if status == 200:
        assert reply.json == [{"name": "m", "version": "1", "state": "READY", "reason": ""}]
    elif status == 413:
        assert "65536 bytes" in reply.json["error"]


TOKEN = "0123456789abcdef"


def test_refusals_before_a_model_are_counted_logged_and_traced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guesses of a token and wrong paths left no trace; the model traces its own failures."""
    key = {"Authorization": f"Bearer {TOKEN}"}
    grpc_key = {"authorization": key["Authorization"]}
    failures: list[tuple[str, str, str | None]] = []
    with running(token=TOKEN, grpc_port=0, access_log=True) as server:
        server.server.trace_failures(
            lambda asked, status, _, trace: failures.append((asked, status, trace))
        )
        caplog.set_level(logging.INFO, "deploykit.access")
        assert server.ask("GET", "/v2", Traceparent="00-ab").status == 401
        assert server.ask("POST", INFER, GOOD, Traceparent="00-ab", **key).status == 200
        named = infer_json([1.0] * 8, [2, 4], id="order 7")
        assert server.ask("POST", INFER, named, **key).status == 200
        assert server.ask("POST", INFER, b"{}", **key).status == 400
        assert server.ask("POST", "/v2/models/n/infer", GOOD, **key).status == 404
        assert server.ask("DELETE", INFER, **key).status == 405
        with frames(server.server.grpc_port or 0) as client:
            assert client.call(1, infer_bytes()).status == 16
            assert client.call(3, infer_bytes(), **grpc_key).status == 0
            assert client.call(5, infer_bytes(model_name="n"), **grpc_key).status == 5
            assert client.call(7, b"\xff", **grpc_key).status == 3
        metrics = server.ask("GET", "/metrics", **key).body.decode()
    for code, count in {401: 1, 200: 2, 400: 1, 404: 1, 405: 1}.items():
        assert f'deploykit_http_responses_total{{code="{code}"}} {count}.0' in metrics
    for name in ("UNAUTHENTICATED", "OK", "NOT_FOUND", "INVALID_ARGUMENT"):
        assert f'deploykit_grpc_responses_total{{code="{name}"}} 1.0' in metrics
    method = "/inference.GRPCInferenceService/ModelInfer"
    assert failures == [
        ("GET /v2", "401", "00-ab"),
        ("POST /v2/models/n/infer", "404", None),
        (f"DELETE {INFER}", "405", None),
        *((method, status, None) for status in ("UNAUTHENTICATED", "NOT_FOUND")),
        (method, "INVALID_ARGUMENT", None),
    ]
    lines = [each.message for each in caplog.records if each.name == "deploykit.access"]
    assert all(line.isprintable() for line in lines)
    assert re.fullmatch(
        r"127\.0\.0\.1:\d+ POST /v2/models/m/infer 200 \d+\.\d ms rows=1 trace='00-ab'", lines[1]
    )
    assert lines[2].endswith(" ms rows=2 id='order 7'")
    assert f"{method} UNAUTHENTICATED" in lines[6]
    assert lines[7].endswith(" ms rows=1")


# -- However many clients ask for /metrics, they are written once for all that wait


def route_of(samples: Callable[[], list[Sample]], offload: Any) -> Scrapes:
    group = ServerGroup()
    group.offer({"samples": samples}, {})
    return Scrapes(group, offload)


def asked(route: Scrapes, count: int, accept: bytes | None = None) -> list[Seen]:
    calls = [Seen(Head(accept=accept), b"") for _ in range(count)]
    for call in calls:
        route(call)
    return calls


def test_scrapes_that_wait_share_one_that_began_after_them() -> None:
    counted: list[int] = []
    jobs: list[Callable[[], None]] = []

    def samples() -> list[Sample]:
        counted.append(1)
        return [Sample("deploykit_held_bytes", {}, len(counted))]

    def offload(work: Callable[[], Any], then: Any, **_: object) -> None:
        jobs.append(lambda: then(cache(work)))  # done when the test says so

    async def main() -> None:
        route = route_of(samples, offload)
        first = asked(route, 1)
        others = asked(route, 250) + asked(
            route, 50, b"application/openmetrics-text; version=1.0.0"
        )
        others += [asked(route, 1, b"text/plain;q=0.%d" % number)[0] for number in range(1, 9)]
        assert len(jobs) == 1
        jobs.pop()()
        assert [call.status for call in first] == [200]
        assert not any(call.status for call in others)  # what counts may have come since
        assert not jobs  # and not again at once
        while not jobs:
            await asyncio.sleep(scrapes._PAUSE_S)
        jobs.pop()()
        assert sum(call.status == 200 for call in others) == scrapes._REPLIES
        while not all(call.status == 200 for call in others):
            await asyncio.sleep(0)
        assert len(counted) == 2
        last = asked(route, 1)
        jobs.pop()()
        assert last[0].status == 200
        assert not jobs

    asyncio.run(main())


def test_metrics_are_compressed_for_a_client_that_takes_it(server: Running) -> None:
    packed = server.ask("GET", "/metrics", Accept_Encoding="gzip")
    assert packed.headers["content-encoding"] == "gzip"
    assert b"# TYPE deploykit_" in gzip.decompress(packed.body)


def test_an_error_is_a_reply_to_each() -> None:
    def broken() -> list[Sample]:
        raise ValueError

    async def main() -> None:
        route = route_of(broken, lambda work, then, **_: then(work))
        assert [call.status for call in asked(route, 2)] == [500, 500]

    asyncio.run(main())
