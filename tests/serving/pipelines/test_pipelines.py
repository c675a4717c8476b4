"""Pipelines served over HTTP, with real models: answers, errors, limits, time and reload."""

from __future__ import annotations

import http.client
import json
import logging
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import deploykit as dk
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.tiles import STEPS, mean_model, page, png, write_pipeline

pytest.importorskip("onnxruntime")
pytest.importorskip("PIL")
WAIT_S = 30  # against hanging


class Client:
    def __init__(self, url: str) -> None:
        self.place = urlsplit(url).netloc

    def ask(self, target: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        """The status, and the body as JSON or as text."""
        connection = http.client.HTTPConnection(self.place, timeout=WAIT_S)
        method = "GET" if body is None else "POST"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, target, body, named)
        reply = connection.getresponse()
        data = reply.read()
        connection.close()
        text = data.decode()
        return reply.status, json.loads(text) if text[:1] in ("[", "{", '"') else text

    def predict(self, name: str, body: bytes, **headers: str) -> tuple[int, Any]:
        return self.ask(f"/v2/models/{name}/predict", body, **headers)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels."""
        _, text = self.ask("/metrics")
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if all(w in line for w in wanted)
        )

    def until(self, reached: Callable[[], Any]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not reached():
            assert time.monotonic() < end_s
            threading.Event().wait(0.01)


FIELD = b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n'
TWO_FIELDS = FIELD + FIELD + b"--XX--\r\n"


@contextmanager
def served(*files: Path, **options: Any) -> Iterator[Client]:
    pipelines = {path.stem: path for path in files}
    with dk.serve(pipelines=pipelines, grpc_port=None, device="cpu", **options) as server:
        yield Client(server.url)


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("tiles")
    with served(write_pipeline(folder), max_batch=32) as client:
        yield client


def form(name: str, data: bytes) -> tuple[bytes, str]:
    head = f'--XX\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"\r\n'
    body = head.encode() + b"Content-Type: image/png\r\n\r\n" + data + b"\r\n--XX--\r\n"
    return body, "multipart/form-data; boundary=XX"


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
    assert tiles.ask("/v2/models/tiles/infer", b"{}")[0] == 404


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        (b"no image", "", 400, "stage 'page': the image"),
        (b"", "", 400, "'page' is needed"),
        (b"--XX\r\n", "multipart/form-data; boundary=XX", 400, "ends before"),
        (b"data", "multipart/form-data", 400, "has no boundary"),
        (b"data", "multipart/form-data; boundary=XX", 400, "does not begin with the boundary"),
        (TWO_FIELDS, "multipart/form-data; boundary=XX", 400, "has 2 fields, one 'page' is"),
    ],
)
def test_bodies_that_cannot_be_read(
    tiles: Client, body: bytes, kind: str, status: int, message: str
) -> None:
    got, error = tiles.predict("tiles", body, Content_Type=kind)
    assert got == status
    assert message in error["error"]


STAGES = '''
import threading
from deploykit import BadInput

IN_FLIGHT = {"slow": 2}
TIMEOUT_MS = {"brief": 50}
GATE = threading.Event()
DONE = []


def asked(text: str) -> list[str]:
    """What to do, word by word."""
    return text.split()


def slow(asked: list[str]) -> int:
    if "wait" in asked:
        GATE.wait(20)
    if "raise" in asked:
        raise ValueError("a secret of the server")
    if "refuse" in asked:
        raise BadInput("no such word")
    if "exit" in asked:
        exit(3)
    return "one" if "string" in asked else 1


def brief(asked: list[str], slow: int) -> int:
    if "hang" in asked:
        GATE.wait(20)
    return slow


def answer(brief: int, asked: list[str]) -> object:
    DONE.append(asked)
    if "open" in asked:
        GATE.set()
    if "late" in asked:
        threading.Event().wait(0.15)
    if "huge" in asked:
        return "x" * (8 << 20)
    if "bytes" in asked:
        return b"%PDF"
    if "set" in asked:
        return {1}
    if "long" in asked:
        return 1 << 70
    return {"done": asked}


'''
ECHO = """
import numpy as np
linear = {"model": "linear.onnx", "x": "row"}
def row(request: dict) -> np.ndarray: return np.array(request["row"], np.float32)
def answer(linear: np.ndarray, request: dict) -> dict: return {"y": linear, "id": request["id"]}
"""


@pytest.fixture
def words(tmp_path: Path) -> Iterator[Client]:
    """A pipeline of functions, next to one with a model."""
    path = tmp_path / "words.py"
    path.write_text(STAGES)
    other = tmp_path / "echo.py"
    other.write_text(ECHO)
    save(linear(), tmp_path / "linear.onnx")
    with served(path, other, timeout_ms=2000) as client:
        yield client
        client.predict("words", b"open")  # no thread stays


def outcomes(client: Client, stage: str, outcome: str) -> float:
    name = "deploykit_pipeline_stage_requests_total"
    return client.metric(name, pipeline="words", stage=stage, outcome=outcome)


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


def test_a_stage_that_hangs_is_answered_in_time_and_the_rest_is_not_run(words: Client) -> None:
    status, error = words.predict("words", b"hang")
    assert (status, error["error"].partition(";")[0]) == (
        504,
        "stage 'brief': not ended within its time limit of 50 ms",
    )
    assert outcomes(words, "brief", "expired") == 1
    assert outcomes(words, "answer", "success") == 0
    status, error = words.predict("words", b"wait")
    assert status == 504
    assert "stage 'slow': not ended within the request's time limit of 2000 ms" in error["error"]
    assert words.metric("deploykit_pipeline_in_flight", pipeline="words") == 0
    assert words.metric("deploykit_pipeline_stage_in_flight", stage="slow") == 1  # it hangs


def test_what_a_late_stage_gives_is_not_used(words: Client) -> None:
    assert words.predict("words", b"hang")[0] == 504
    assert words.predict("words", b"open") == (200, {"done": ["open"]})
    name = "deploykit_pipeline_stage_in_flight"
    words.until(lambda: words.metric(name, pipeline="words", stage="brief") == 0)
    assert outcomes(words, "brief", "success") == outcomes(words, "answer", "success") == 1


def test_the_time_of_a_stage_ends_with_it(words: Client) -> None:
    assert words.predict("words", b"late") == (200, {"done": ["late"]})


def test_a_full_stage_refuses_at_once(words: Client) -> None:
    name = "deploykit_pipeline_stage_in_flight"
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(words.predict, "words", b"wait") for _ in range(2)]
        words.until(lambda: words.metric(name, pipeline="words", stage="slow") == 2)
        status, error = words.predict("words", b"third")
        assert status == 503
        assert "stage 'slow' has 2 requests in flight, its limit" in error["error"]
        assert [each.result()[0] for each in waiting] == [504, 504]
    assert outcomes(words, "slow", "rejected") == 1


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


def test_a_hung_stage_does_not_keep_the_server_from_ending(tmp_path: Path) -> None:
    path = tmp_path / "hang.py"
    path.write_text(
        "import threading\nlinear = 'linear.onnx'\n"
        "def x(n: int) -> __import__('numpy').ndarray: threading.Event().wait()\n"
    )
    save(linear(), tmp_path / "linear.onnx")
    with served(path, timeout_ms=50) as client:
        assert client.predict("hang", b"1")[0] == 504
        assert client.predict("hang", b"1")[0] == 504
        client.until(lambda: client.ask("/v2/models/hang/ready")[0] == 503)
        _, error = client.ask("/v2/models/hang/ready")
        assert "stage 'x' does not return" in error["error"]


def test_the_model_of_a_pipeline_is_reloaded(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path)
    with served(path) as client:
        body = png(page("red", "blue"))
        assert client.predict("tiles", body) == (200, ["red", "blue"])
        negative = mean_model()
        negative.graph.node[0].output[0] = "positive"
        node = type(negative.graph.node[0])(
            op_type="Neg", name="neg", input=["positive"], output=["mean"]
        )
        negative.graph.node.insert(1, node)
        save(negative, tmp_path / "new.onnx")
        shutil.move(tmp_path / "new.onnx", tmp_path / "mean.onnx")
        client.until(lambda: client.predict("tiles", body)[1] == ["green", "red"])


def test_a_model_that_is_served_already_is_shared(tmp_path: Path) -> None:
    one, two = write_pipeline(tmp_path), write_pipeline(tmp_path, STEPS, "more.py")
    pipelines = {"one": one, "two": two}
    with dk.serve(
        {"mean": tmp_path / "mean.onnx"}, pipelines=pipelines, grpc_port=None, device="cpu"
    ) as server:
        assert server.models == ("mean", "one", "two")
        client = Client(server.url)
        for name in pipelines:
            assert client.predict(name, png(page("blue"))) == (200, ["blue"])
        assert client.metric("nv_inference_count", model="mean") == 2
    with pytest.raises(dk.BadInput, match="'one' is that of a model and of a pipeline"):
        dk.serve({"one": tmp_path / "mean.onnx"}, pipelines={"one": two})


def test_requests_of_a_pipeline_join_those_of_the_model(tiles: Client) -> None:
    """The same batcher runs both."""
    item = {"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [0.5] * 192}
    before = tiles.metric("nv_inference_count", model="tiles.colours")
    status, found = tiles.ask(
        "/v2/models/tiles.colours/infer", json.dumps({"inputs": [item]}).encode()
    )
    assert status == 200
    assert np.allclose(found["outputs"][0]["data"], 0.5)
    assert tiles.predict("tiles", png(page("red")))[0] == 200
    assert tiles.metric("nv_inference_count", model="tiles.colours") == before + 2


def test_every_metric_of_a_stage_is_there(tiles: Client) -> None:
    _, text = tiles.ask("/metrics")
    stages = set(re.findall(r'deploykit_pipeline_stage_seconds_count\{.*stage="(\w+)"', text))
    assert stages == {"page", "crops", "colours", "answer"}
