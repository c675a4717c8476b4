"""Large JSON requests and answers: limited, read one at a time, and no delay for other clients."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from deploykit.core.json_value import MOST_JSON_VALUES, ONE_JSON
from deploykit.core.tensors import TensorSpec
from tests.support.fake_engine import FakeEngine
from tests.support.serving.memory import held_bytes
from tests.support.serving.running import Raw, Running, infer_json, request, running

WIDTH = 100_000  # as JSON above 256 KiB, which another thread reads
LARGE, SMALL = "/v2/models/large/infer", "/v2/models/m/infer"
ROW = infer_json([1, 2, 3, 4], [1, 4])
BIG = infer_json([0.123456] * WIDTH, [1, WIDTH])
BIG_GZIP = gzip.compress(BIG, 1)
Eventually = Callable[[Callable[[], bool]], None]


@contextmanager
def serving(**options: Any) -> Iterator[Running]:
    """A small model `m`, and `large`, which takes rows of any length."""
    engine = FakeEngine()
    engine.inputs = (TensorSpec("x", "float32", ("N", "T")),)
    engine.outputs = (TensorSpec("y", "float32", ("N", "T")),)
    with running({"m": FakeEngine(), "large": engine}, **options) as server:
        yield server


def in_work(server: Running, count: int, **headers: str) -> list[Raw]:
    """Clients whose large requests wait for a parser."""
    raws = [server.connect() for _ in range(count)]
    body = BIG_GZIP if headers else BIG
    for raw in raws:
        raw.send(request("POST", LARGE, body, **headers))
    return raws


@pytest.mark.parametrize("headers", [{}, {"Content_Encoding": "gzip"}], ids=["plain", "gzip"])
def test_small_requests_are_answered_while_large_ones_wait(headers: dict[str, str]) -> None:
    with serving() as server:
        with ONE_JSON:
            raws = in_work(server, 6, **headers)
            for accept in ("gzip, deflate, br", "identity", "*", "gzip;q=0"):
                assert server.ask("POST", SMALL, ROW, Accept_Encoding=accept).status == 200
            small = gzip.compress(ROW)
            assert server.ask("POST", SMALL, small, Content_Encoding="gzip").status == 200
            assert server.ask("GET", "/metrics").status == 200
        assert [reply and reply.status for reply in (raw.reply() for raw in raws)] == [200] * 6


def test_a_large_request_waits_for_its_time_limit_at_most(eventually: Eventually) -> None:
    with serving(timeout_ms=500) as server:
        with ONE_JSON:
            replies = [raw.reply() for raw in in_work(server, 4)]
        assert [reply and reply.status for reply in replies] == [504] * 4
        assert replies[0]
        assert "time limit" in replies[0].json["error"]
        eventually(lambda: held_bytes(server) == 0)


def test_the_clients_own_time_limit_includes_the_decoding() -> None:
    with serving() as server:
        body = infer_json([0.5] * WIDTH, [1, WIDTH], parameters={"timeout": 1})
        assert server.ask("POST", LARGE, body).status == 504


def test_a_thread_that_cannot_start_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with serving() as server:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        packed = gzip.compress(ROW)
        assert server.ask("POST", LARGE, BIG).status == 503
        assert server.ask("POST", SMALL, packed, Content_Encoding="gzip").status == 503
        assert server.ask("GET", "/metrics").status == 503
        assert server.ask("POST", SMALL, ROW).status == 200
        monkeypatch.undo()


@pytest.mark.parametrize("count", [1000, 150_000])
def test_an_answer_is_the_same_wherever_its_json_is_decoded(count: int) -> None:
    """On the event loop or in a thread, written in one part or in several."""
    body = infer_json([0.5] * count, [1, count])
    with serving() as server:
        plain = server.ask("POST", LARGE, body)
        packed = {"Content_Encoding": "gzip", "Accept_Encoding": "gzip"}
        small = server.ask("POST", LARGE, gzip.compress(body), **packed)
        wrong = server.ask("POST", LARGE, infer_json([0.5] * count, [1, count + 1]))
    assert plain.status == 200
    assert plain.json["outputs"][0]["data"] == [2.0] * count
    assert gzip.decompress(small.body) == plain.body
    assert (wrong.status, f"'data' has {count}" in wrong.json["error"]) == (400, True)


@pytest.mark.parametrize("text", ["1", "[1]", '{"a":1}'])
def test_json_of_more_values_than_a_parser_may_hold_is_refused(text: str) -> None:
    data = ",".join([text] * MOST_JSON_VALUES)
    body = f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[1,1],"data":[{data}]}}]}}'
    with serving() as server:
        refused = server.ask("POST", LARGE, body.encode())
        packed = server.ask("POST", LARGE, gzip.compress(body.encode()), Content_Encoding="gzip")
    assert (refused.status, packed.status) == (413, 413)
    assert f"more than {MOST_JSON_VALUES} values" in refused.json["error"]
    assert "binary_data_size" in refused.json["error"]


def test_binary_data_have_no_limit_of_values() -> None:
    count = 2 * MOST_JSON_VALUES
    values = np.ones((1, count), np.float32)
    head = {"name": "x", "datatype": "FP32", "shape": [1, count]}
    head["parameters"] = {"binary_data_size": values.nbytes}
    start = json.dumps({"inputs": [head]}).encode()
    length = {"Inference-Header-Content-Length": str(len(start))}
    with serving() as server:
        reply = server.ask("POST", LARGE, start + values.tobytes(), **length)
    assert reply.json["outputs"][0]["data"] == [3.0] * count


def test_a_body_being_decoded_at_shutdown_is_answered(eventually: Eventually) -> None:
    with serving() as server:
        with ONE_JSON:
            (raw,) = in_work(server, 1)
            eventually(lambda: server.server._listener.unanswered == 1)
            server.server.stop()
            eventually(lambda: server.server.repository.leaving)
        reply = raw.reply()
        assert reply is not None
        assert reply.status == 200
        assert raw.ended()
        assert server.stop() == 0
