"""Pipelines served over HTTP, with real models: answers, errors, limits and time."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.runtimes.tiles import page, png, write_pipeline
from tests.support.serving.pipelines import (
    WAIT_S,
    Client,
    form,
    outcomes,
    served,
    serving_words,
)

pytest.importorskip("onnxruntime")
pytest.importorskip("PIL")

FIELD = b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n'
SLOW = """
def {1}({0}: str) -> str:
    time.sleep(0.1)
    return {0}
"""
TWO_FIELDS = FIELD + FIELD + b"--XX--\r\n"


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("tiles")
    with served(write_pipeline(folder), max_batch=32) as client:
        yield client


def test_an_image_is_answered_as_its_bytes_and_as_a_form(tiles: Client) -> None:
    data = png(page("red", "", "blue"))
    assert tiles.predict("tiles", data, Content_Type="image/png") == (200, ["red", "blue"])
    body, kind = form("page", data)
    assert tiles.predict("tiles", body, Content_Type=kind) == (200, ["red", "blue"])


def test_no_crop_is_an_empty_answer_and_200_crops_are_7_batches(tiles: Client) -> None:
    assert tiles.predict("tiles", png(page(""))) == (200, [])
    label = {"model": "tiles.colours"}
    before = tiles.metric("nv_inference_exec_count", **label)
    rows = tiles.metric("nv_inference_count", **label)
    assert tiles.predict("tiles", png(page(*["green"] * 200))) == (200, ["green"] * 200)
    assert tiles.metric("nv_inference_count", **label) - rows == 200
    assert tiles.metric("nv_inference_exec_count", **label) - before == 7


def test_many_clients_get_their_own_answers(tiles: Client) -> None:
    names = ["red", "green", "blue"]
    pages = [[names[(n * k) % 3] for k in range(n % 7)] for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: tiles.predict("tiles", png(page(*each))), pages))
    assert found == [(200, each) for each in pages]


def test_metadata_ready_and_unknown_routes(tiles: Client) -> None:
    status, about = tiles.ask("/v2/models/tiles")
    assert (status, about["platform"]) == (200, "deploykit_pipeline")
    assert about["inputs"] == [{"name": "page", "datatype": "BYTES", "shape": [1]}]
    assert about["parameters"]["stages"] == "crops, colours, answer"
    assert tiles.ask("/v2/models/tiles/ready") == (200, {"name": "tiles", "ready": True})
    assert tiles.ask("/v2/models/tiles/nothing", b"{}")[0] == 404


def test_tritonclient_asks_a_pipeline_over_http_as_over_grpc(tiles: Client) -> None:
    triton = pytest.importorskip("tritonclient.http")
    image = png(page("red", "blue"))
    item = triton.InferInput("page", [1], "BYTES")
    item.set_data_from_numpy(np.array([image], object))
    with triton.InferenceServerClient(tiles.place) as client:
        for coding in (None, "gzip"):
            given = {"request_compression_algorithm": coding, "request_id": "7"}
            found = client.infer("tiles", [item], **given)
            assert json.loads(found.as_numpy("answer")[0]) == ["red", "blue"]
            assert found.get_response()["id"] == "7"
        other = triton.InferInput("other", [1], "BYTES")
        other.set_data_from_numpy(np.array([image], object))
        with pytest.raises(triton.InferenceServerException, match="unknown input 'other'"):
            client.infer("tiles", [other])


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        (b"no image", "", 400, "stage 'page': the image"),
        (b"", "", 400, "'page' is needed"),
        (b"--XX\r\n", "multipart/form-data; boundary=XX", 400, "ends before"),
        (b"data", "multipart/form-data", 400, "has no boundary"),
        (b"data", "multipart/form-data; boundary=XX", 400, "does not begin with the boundary"),
        (b"paeg=x", "application/x-www-form-urlencoded", 400, "has 1 fields, one 'page' is"),
        (b"a", "text/plain; charset=klingon", 415, "the charset 'klingon' is not offered"),
        (TWO_FIELDS, "multipart/form-data; boundary=XX", 400, "has 2 fields, one 'page' is"),
    ],
)
def test_bodies_that_cannot_be_read(
    tiles: Client, body: bytes, kind: str, status: int, message: str
) -> None:
    got, error = tiles.predict("tiles", body, Content_Type=kind)
    assert got == status
    assert message in error["error"]


@pytest.fixture
def words(tmp_path: Path) -> Iterator[Client]:
    with serving_words(tmp_path) as client:
        yield client


def test_two_pipelines_at_once(words: Client) -> None:
    body = json.dumps({"row": [1, 2, 3, 4], "id": "a"}).encode()
    status, found = words.predict("echo", body)
    assert (status, found["id"], len(found["y"])) == (200, "a", 3)
    assert words.predict("words", b"two words") == (200, {"done": ["two", "words"]})
    assert words.predict("words", b'"json"', Content_Type="application/json") == (
        200,
        {"done": ["json"]},
    )
    assert words.predict("words", b"bytes") == (200, "%PDF")
    status, error = words.predict("echo", b'{"row": "a", "id": 1}')
    assert (status, error["error"]) == (500, "stage 'row' failed: ValueError")
    status, error = words.predict("echo", b"[1]")
    assert (status, error["error"]) == (
        400,
        "stage 'request': the input is a JSON list of int, dict is needed",
    )


@pytest.mark.parametrize(
    ("body", "status", "message", "stage"),
    [
        (b"raise", 500, "stage 'slow' failed: ValueError", "slow"),
        (b"exit", 500, "stage 'slow' failed: SystemExit", "slow"),
        (b"string", 500, "stage 'slow' gave str, its annotation is int", "slow"),
        (b"refuse", 400, "stage 'slow': no such word", "slow"),
        (b"set", 500, "stage 'answer': a set has no JSON form", "answer"),
        (b"long", 500, "stage 'answer' failed: TypeError", "answer"),
        (b"\xff", 400, "stage 'text': the text is not UTF-8", "text"),
    ],
)
def test_an_error_names_its_stage_and_nothing_else(
    words: Client,
    caplog: pytest.LogCaptureFixture,
    body: bytes,
    status: int,
    message: str,
    stage: str,
) -> None:
    got, error = words.predict("words", body)
    assert got == status
    assert message in error["error"]
    assert "secret" not in error["error"]
    assert outcomes(words, stage, "failed" if status == 500 else "bad_request") == 1
    if body == b"raise":
        (line,) = [each for each in caplog.messages if "slow" in each]
        assert "a secret of the server (words.py, line" in line
        assert "Traceback" not in caplog.text
    assert words.predict("words", b"again") == (200, {"done": ["again"]})


def test_a_huge_answer_arrives_whole(words: Client) -> None:
    assert words.predict("words", b"huge") == (200, "x" * (8 << 20))


@pytest.fixture
def brief(tmp_path: Path) -> Iterator[Client]:
    """The stage `brief` has a limit that it may also miss when this machine is busy."""
    with serving_words(tmp_path, brief_ms=50) as client:
        yield client


def test_a_stage_that_hangs_is_answered_in_time_and_the_rest_is_not_run(brief: Client) -> None:
    words = brief
    status, error = words.predict("words", b"hang")
    assert (status, error["error"].partition(";")[0]) == (
        504,
        "stage 'brief': not ended within its time limit of 50 ms",
    )
    assert outcomes(words, "brief", "expired") == 1
    assert outcomes(words, "answer", "success") == 0


def test_a_request_that_hangs_is_answered_in_time(tmp_path: Path) -> None:
    def hangs_in_slow() -> bool:  # on a busy machine its time may be over before that
        status, error = words.predict("words", b"wait")
        assert status == 504
        assert "not ended within the request's time limit of 200 ms" in error["error"]
        return "stage 'slow': " in error["error"]

    with serving_words(tmp_path, timeout_ms=200) as words:
        hanging = {"name": "deploykit_pipeline_stage_in_flight", "stage": "slow"}
        words.until(lambda: hangs_in_slow() and words.metric(**hanging))
        assert words.metric("deploykit_pipeline_in_flight", pipeline="words") == 0


def test_stages_that_are_slow_together_are_answered_in_time(tmp_path: Path) -> None:
    """None of them takes as long as a request may."""
    path = tmp_path / "steps.py"
    steps = [("text", "a"), ("a", "b"), ("b", "c"), ("c", "d")]
    path.write_text("import time\n" + "".join(SLOW.format(*names) for names in steps))
    with served(path, timeout_ms=300) as client:
        status, error = client.predict("steps", b"x")
        assert status == 504
        assert "not ended within the request's time limit of 300 ms" in error["error"]
        name = "deploykit_pipeline_stage_requests_total"
        assert client.metric(name, stage="d", outcome="success") == 0
        client.until(lambda: client.metric("deploykit_pipeline_stage_in_flight") == 0)


def test_what_a_late_stage_gives_is_not_used(brief: Client) -> None:
    words = brief
    assert words.predict("words", b"hang")[0] == 504
    words.until(lambda: words.predict("words", b"open") == (200, {"done": ["open"]}))
    name = "deploykit_pipeline_stage_in_flight"
    words.until(lambda: words.metric(name, pipeline="words", stage="brief") == 0)
    assert outcomes(words, "brief", "success") == outcomes(words, "answer", "success") == 1


def test_the_time_of_a_stage_ends_with_it(brief: Client) -> None:
    brief.until(lambda: brief.predict("words", b"late") == (200, {"done": ["late"]}))


def test_a_full_stage_refuses_at_once(words: Client) -> None:
    name = "deploykit_pipeline_stage_in_flight"
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(words.predict, "words", b"wait") for _ in range(2)]
        words.until(lambda: words.metric(name, pipeline="words", stage="slow") == 2)
        status, error = words.predict("words", b"third")
        assert status == 503
        assert "stage 'slow' has 2 requests in flight, its limit" in error["error"]
        assert outcomes(words, "slow", "rejected") == 1
        words.predict("words", b"free")
        assert [each.result()[0] for each in waiting] == [200, 200]


def test_a_client_that_leaves_ends_its_request_before_the_next_stage(words: Client) -> None:
    host, _, port = words.place.partition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as left:
        head = (
            "POST /v2/models/words/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n"
        )
        left.sendall(head.encode() + b"wait")
        name = "deploykit_pipeline_in_flight"
        words.until(lambda: words.metric(name, pipeline="words") == 1)
    cancelled = {"pipeline": "words", "outcome": "cancelled"}
    words.until(lambda: words.metric("deploykit_pipeline_requests_total", **cancelled) == 1)
    assert words.metric(name, pipeline="words") == 0
    assert outcomes(words, "answer", "success") == 0


def test_a_traceback_is_in_the_log_when_it_is_asked_for(
    words: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        words.predict("words", b"raise")
    assert "Traceback" in caplog.text
    assert "a secret of the server" in caplog.text


def test_every_metric_of_a_stage_is_there(tiles: Client) -> None:
    _, text = tiles.ask("/metrics")
    stages = set(re.findall(r'deploykit_pipeline_stage_seconds_count\{.*stage="(\w+)"', text))
    assert stages == {"page", "crops", "colours", "answer"}


@pytest.mark.parametrize("workers", [1, "shared:2"])
def test_functions_alone_are_served(tmp_path: Path, workers: int | str) -> None:
    """As `predict` runs them; the server said that there is no model."""
    path = tmp_path / "louder.py"
    path.write_text("def louder(text: str) -> str: return text.upper()\n")
    with served(path, workers=workers) as client:
        assert client.predict("louder", b"abc") == (200, "ABC")
        assert client.ask("/v2/health/ready")[0] == 200
        (stats,) = client.ask("/v2/models/stats")[1]["model_stats"]
        assert stats["name"] == "louder"
