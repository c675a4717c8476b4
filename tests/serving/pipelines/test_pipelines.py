"""Pipelines served over HTTP and gRPC, with real models: answers, errors, limits and time."""

from __future__ import annotations

import gc
import gzip
import json
import logging
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

import deploykit as dk
from tests.support.installed import needs
from tests.support.onnx_zoo import linear, save
from tests.support.runtimes.tiles import STEPS, mean_model, page, png, write_pipeline
from tests.support.serving.pipelines import (
    WAIT_S,
    Client,
    form,
    outcomes,
    served,
    serving_words,
    write_words,
)

needs("PIL", "onnxruntime", "grpc", "tritonclient")

import grpc  # noqa: E402
import tritonclient.grpc as triton  # noqa: E402

from deploykit.core.json_value import MOST_JSON_BYTES, MOST_JSON_VALUES, ONE_JSON  # noqa: E402
from deploykit.pipelines.file import read_pipeline  # noqa: E402
from deploykit.pipelines.stages import connect_engines  # noqa: E402
from deploykit.serving.models.pipelines import _json_parts  # noqa: E402

IN_FLIGHT = "deploykit_pipeline_in_flight"
STAGE_IN_FLIGHT = "deploykit_pipeline_stage_in_flight"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """All pipelines; nothing waits in it."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "say.py").write_text("def said(data: bytes) -> bytes: return data[::-1]\n")
    files = [write_pipeline(folder), *write_words(folder), folder / "say.py"]
    with served(*files, grpc_port=0, max_batch=32) as client:
        yield client


@pytest.fixture
def words(tmp_path: Path) -> Iterator[Client]:
    with serving_words(tmp_path, grpc_port=0) as client:
        yield client


@pytest.fixture
def brief(tmp_path: Path) -> Iterator[Client]:
    """The stage `brief` has a limit that it may also miss when this machine is busy."""
    with serving_words(tmp_path, brief_ms=50) as client:
        yield client


@pytest.fixture(params=["http", "grpc"])
def kit(request: pytest.FixtureRequest) -> ModuleType:
    """NVIDIA's client library of a protocol."""
    return triton if request.param == "grpc" else pytest.importorskip("tritonclient.http")


def connect(kit: ModuleType, server: Client) -> Any:
    return kit.InferenceServerClient(server.grpc if kit is triton else server.place)


def given(name: str, value: Any, kit: ModuleType = triton) -> Any:
    """One BYTES element, or an image as a tensor."""
    array = value if isinstance(value, np.ndarray) else np.array([value], object)
    kind = "UINT8" if array.dtype == np.uint8 else "BYTES"
    found = kit.InferInput(name, list(array.shape), kind)
    found.set_data_from_numpy(array)
    return found


def ask(server: Client, model: str, name: str, value: Any, **options: Any) -> Any:
    """The answer over gRPC."""
    with connect(triton, server) as client:
        reply = client.infer(model, [given(name, value)], **{"client_timeout": WAIT_S, **options})
    (output,) = reply.get_response().outputs
    found = reply.as_numpy(output.name)
    assert found.shape == (1,)
    return found[0]


def refused(server: Client, *what: Any, **options: Any) -> tuple[str, str]:
    """The status and the message of an error over gRPC."""
    with pytest.raises(triton.InferenceServerException) as caught:
        ask(server, *what, **options)
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


def test_an_image_is_answered_in_every_form(server: Client) -> None:
    pixels = page("red", "", "blue")
    data = png(pixels)
    body, kind = form("page", data)
    for sent, content_type in ((data, "image/png"), (body, kind)):
        found = server.predict("tiles", sent, Content_Type=content_type)
        assert found == (200, ["red", "blue"])
    for image in (data, pixels):
        assert json.loads(ask(server, "tiles", "page", image)) == ["red", "blue"]


def test_no_crop_is_an_empty_answer_and_200_crops_are_7_batches(server: Client) -> None:
    assert server.predict("tiles", png(page(""))) == (200, [])
    label = {"model": "tiles.colours"}
    before = server.metric("nv_inference_exec_count", **label)
    rows = server.metric("nv_inference_count", **label)
    assert server.predict("tiles", png(page(*["green"] * 200))) == (200, ["green"] * 200)
    assert server.metric("nv_inference_count", **label) - rows == 200
    assert server.metric("nv_inference_exec_count", **label) - before == 7
    _, text = server.ask("/metrics")
    stages = set(
        re.findall(r'deploykit_pipeline_stage_seconds_count\{.*"tiles".*stage="(\w+)"', text)
    )
    assert stages == {"page", "crops", "colours", "answer"}


def test_a_pipeline_is_described_as_models_are(server: Client) -> None:
    status, about = server.ask("/v2/models/tiles")
    assert (status, about["platform"]) == (200, "deploykit_pipeline")
    assert about["inputs"] == [{"name": "page", "datatype": "BYTES", "shape": [1]}]
    assert about["parameters"]["stages"] == "crops, colours, answer"
    assert server.ask("/v2/models/tiles/ready") == (200, {"name": "tiles", "ready": True})
    assert server.ask("/v2/models/tiles/nothing", b"{}")[0] == 404
    with connect(triton, server) as client:
        (item,) = client.get_model_metadata("tiles").inputs
        assert (item.name, item.datatype, item.shape) == ("page", "BYTES", [1])
        assert client.get_model_config("tiles").config.max_batch_size == 0
        ready = [client.is_model_ready("tiles", version) for version in ("", "1", "2")]
        assert ready == [True, True, False]
        assert "has no version '2'" in refused(server, "tiles", "page", b"", model_version="2")[1]
        states = {each.name: each.state for each in client.get_model_repository_index().models}
        assert states.items() >= {"tiles": "READY", "tiles.colours": "READY"}.items()

        def count() -> int:
            (found,) = client.get_inference_statistics("tiles").model_stats
            return int(found.inference_stats.success.count)

        before = count()
        ask(server, "tiles", "page", png(page("red")))
        assert count() == before + 1
    with grpc.insecure_channel(server.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"\x0a\x05tiles", timeout=WAIT_S) == b"\x08\x01"  # SERVING


def test_tritonclient_asks_a_pipeline_over_http_as_over_grpc(server: Client) -> None:
    http, image = pytest.importorskip("tritonclient.http"), png(page("red", "blue"))
    with connect(http, server) as client:
        for coding in (None, "gzip"):
            options = {"request_compression_algorithm": coding, "request_id": "7"}
            found = client.infer("tiles", [given("page", image, http)], **options)
            assert json.loads(found.as_numpy("answer")[0]) == ["red", "blue"]
            assert found.get_response()["id"] == "7"
        with pytest.raises(triton.InferenceServerException, match="unknown input 'other'"):
            client.infer("tiles", [given("other", image, http)])


FORM = "multipart/form-data; boundary=XX"
FIELD = b'--XX\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n'


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        (b"no image", "", 400, "stage 'page': the image"),
        (b"", "", 400, "'page' is needed"),
        (b"--XX\r\n", FORM, 400, "does not end with"),
        (b"data", "multipart/form-data", 400, "has no boundary"),
        (b"data", FORM, 400, "does not end with the boundary"),
        (b"a", "text/plain; charset=klingon", 415, "the charset 'klingon' is not offered"),
        (FIELD * 2 + b"--XX--\r\n", FORM, 400, "has 2 fields, one 'page' is"),
        (b"E=mc2", "application/x-www-form-urlencoded", 400, "has 1 fields, one 'page' is"),
    ],
)
def test_bodies_that_cannot_be_read(
    server: Client, body: bytes, kind: str, status: int, message: str
) -> None:
    got, error = server.predict("tiles", body, Content_Type=kind)
    assert got == status
    assert message in error["error"]


@pytest.mark.parametrize(
    ("pipeline", "name", "value", "code", "message"),
    [
        ("words", "txt", "a", "INVALID_ARGUMENT", "unknown input 'txt'"),
        ("words", "text", np.zeros((2, 2, 3), np.uint8), "INVALID_ARGUMENT", "is BYTES, got"),
        ("tiles", "page", np.zeros((2, 2), np.uint8), "INVALID_ARGUMENT", "uint8[H,W,3]"),
        ("tiles", "page", np.zeros((0, 2, 3), np.uint8), "INVALID_ARGUMENT", "has no pixels"),
        ("tiles", "page", np.array([b"a", b"b"], object), "INVALID_ARGUMENT", "[2]"),
        ("tile", "page", "", "NOT_FOUND", "there is no model 'tile'"),
    ],
)
def test_a_wrong_request_is_refused(
    server: Client, pipeline: str, name: str, value: Any, code: str, message: str
) -> None:
    failed = {"pipeline": pipeline, "outcome": "bad_request"}
    before = server.metric("deploykit_pipeline_requests_total", **failed)
    found = refused(server, pipeline, name, value)
    assert (found[0], message in found[1]) == (code, True), found
    after = server.metric("deploykit_pipeline_requests_total", **failed)
    assert after == before + (code == "INVALID_ARGUMENT")


def test_two_pipelines_at_once(server: Client) -> None:
    body = json.dumps({"row": [1, 2, 3, 4], "id": "a"})
    status, found = server.predict("echo", body.encode())
    assert (status, found["id"], len(found["y"])) == (200, "a", 3)
    assert json.loads(ask(server, "echo", "request", body)) == found
    assert server.predict("words", b"two words") == (200, {"done": ["two", "words"]})
    assert json.loads(ask(server, "words", "text", "two words")) == {"done": ["two", "words"]}
    as_json = {"Content_Type": "application/json"}
    assert server.predict("words", b'"json"', **as_json) == (200, {"done": ["json"]})
    assert server.predict("words", b"bytes") == (200, "%PDF")
    assert ask(server, "words", "text", "bytes") == b"%PDF"
    assert server.predict("words", b"huge") == (200, "x" * (8 << 20))


@pytest.mark.parametrize(
    ("pipeline", "body", "status", "code", "message"),
    [
        ("words", b"raise", 500, "INTERNAL", "stage 'slow' failed: ValueError"),
        ("words", b"exit", 500, "INTERNAL", "stage 'slow' failed: SystemExit"),
        ("words", b"string", 500, "INTERNAL", "stage 'slow' gave str, its annotation is int"),
        ("words", b"refuse", 400, "INVALID_ARGUMENT", "stage 'slow': no such word"),
        ("words", b"set", 500, "INTERNAL", "stage 'answer': a set has no JSON form"),
        ("words", b"long", 500, "INTERNAL", "stage 'answer': Integer exceeds 64-bit"),
        ("words", b"\xff", 400, "INVALID_ARGUMENT", "stage 'text': the text is not UTF-8"),
        ("echo", b'{"row": "a"}', 500, "INTERNAL", "stage 'row' failed: ValueError"),
        ("echo", b"[1]", 400, "INVALID_ARGUMENT", "stage 'request': the input is a JSON list of"),
    ],
)
def test_an_error_names_its_stage_and_nothing_else(
    server: Client,
    caplog: pytest.LogCaptureFixture,
    pipeline: str,
    body: bytes,
    status: int,
    code: str,
    message: str,
) -> None:
    name, stage = {"words": "text", "echo": "request"}[pipeline], message.split("'")[1]
    outcome = "failed" if status == 500 else "bad_request"
    before = outcomes(server, stage, outcome)
    got, error = server.predict(pipeline, body)
    assert got == status
    assert message in error["error"]
    assert "secret" not in error["error"]
    assert refused(server, pipeline, name, body) == (code, error["error"])
    if pipeline == "words":
        assert outcomes(server, stage, outcome) == before + 2
    if body == b"raise":
        lines = [each for each in caplog.messages if "slow" in each]
        assert all("a secret of the server (words.py, line" in line for line in lines)
        assert "Traceback" not in caplog.text
        with caplog.at_level(logging.DEBUG):
            server.predict("words", b"raise")
        assert "Traceback" in caplog.text
    assert server.predict("words", b"again") == (200, {"done": ["again"]})


def test_messages_of_a_stream_are_answered_in_their_order(server: Client) -> None:
    found: list[Any] = []
    done = threading.Event()

    def take(result: Any, error: Any) -> None:
        found.append(json.loads(result.as_numpy("answer")[0]) if result else str(error))
        if len(found) == 3:
            done.set()

    with connect(triton, server) as client:
        client.start_stream(take)
        for image in (page(*["red"] * 50), np.zeros((0, 1, 3), np.uint8), page("blue")):
            client.async_stream_infer("tiles", [given("page", image)])
        assert done.wait(WAIT_S)
        client.stop_stream()
    assert found[0] == ["red"] * 50
    assert "has no pixels" in found[1]
    assert found[2] == ["blue"]


def test_an_input_copied_from_shared_memory_counts_in_the_budget(
    tmp_path: Path, kit: ModuleType
) -> None:
    text = b"wait " * 100_000
    data = len(text).to_bytes(4, "little") + text
    region = Path(f"/dev/shm/test-{uuid4().hex}")
    region.write_bytes(data)

    def wait(words: Client) -> None:
        with connect(kit, words) as client:
            client.register_system_shared_memory("text", f"/{region.name}", len(data))
            item = kit.InferInput("text", [1], "BYTES")
            item.set_shared_memory("text", len(data))
            client.infer("words", [item])

    try:
        with (
            serving_words(tmp_path, grpc_port=0, shared_memory=True) as words,
            ThreadPoolExecutor() as pool,
        ):
            waiting = pool.submit(wait, words)
            words.until(lambda: words.metric("deploykit_held_bytes") > 2 * len(text))
            words.predict("words", b"free")
            waiting.result(WAIT_S)
    finally:
        region.unlink()


# -- Time limits, and clients that leave: the other stages are not run


def test_a_stage_that_hangs_is_answered_in_time_and_the_rest_is_not_run(brief: Client) -> None:
    status, error = brief.predict("words", b"hang")
    assert (status, error["error"].partition(";")[0]) == (
        504,
        "stage 'brief': not ended within its time limit of 50 ms",
    )
    assert outcomes(brief, "brief", "expired") == 1
    assert outcomes(brief, "answer", "success") == 0
    # what a late stage gives is not used
    brief.until(lambda: brief.predict("words", b"open") == (200, {"done": ["open"]}))
    brief.until(lambda: brief.metric(STAGE_IN_FLIGHT, pipeline="words", stage="brief") == 0)
    assert outcomes(brief, "brief", "success") == outcomes(brief, "answer", "success") == 1
    # and the time of a stage ends with it
    brief.until(lambda: brief.predict("words", b"late") == (200, {"done": ["late"]}))


def test_a_request_may_have_a_timeout_of_its_own(words: Client, kit: ModuleType) -> None:
    def hangs_in_slow() -> bool:  # on a busy machine its time may be over before that
        with (
            connect(kit, words) as client,
            pytest.raises(triton.InferenceServerException) as caught,
        ):
            client.infer("words", [given("text", b"wait", kit)], timeout=50_000)
        assert "not ended within the request's time limit of 50 ms" in caught.value.message()
        return "stage 'slow': " in caught.value.message()

    words.until(hangs_in_slow)
    assert outcomes(words, "slow", "expired") == 1
    assert outcomes(words, "answer", "success") == 0


def leave_http(words: Client, in_flight: Callable[[], None]) -> None:
    host, _, port = words.place.partition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as left:
        head = "POST /v2/models/words/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4"
        left.sendall(f"{head}\r\n\r\nwait".encode())
        in_flight()


def cancel_grpc(words: Client, in_flight: Callable[[], None]) -> None:
    ended = threading.Event()
    with connect(triton, words) as client:
        done = {"callback": lambda **_: ended.set()}
        call = client.async_infer("words", [given("text", "wait")], **done)
        in_flight()
        call.cancel()
        assert ended.wait(WAIT_S)


@pytest.mark.parametrize("leave", [leave_http, cancel_grpc])
def test_a_client_that_leaves_ends_its_request_before_the_next_stage(
    words: Client, leave: Callable[[Client, Callable[[], None]], None]
) -> None:
    leave(words, lambda: words.until(lambda: words.metric(IN_FLIGHT, pipeline="words") == 1))
    cancelled = {"pipeline": "words", "outcome": "cancelled"}
    words.until(lambda: words.metric("deploykit_pipeline_requests_total", **cancelled) == 1)
    assert words.metric(IN_FLIGHT, pipeline="words") == 0
    assert outcomes(words, "answer", "success") == 0


def test_a_full_stage_refuses_at_once(words: Client) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(words.predict, "words", b"wait") for _ in range(2)]
        words.until(lambda: words.metric(STAGE_IN_FLIGHT, pipeline="words", stage="slow") == 2)
        status, error = words.predict("words", b"third")
        assert status == 503
        assert "stage 'slow' has 2 requests in flight, its limit" in error["error"]
        assert outcomes(words, "slow", "rejected") == 1
        words.predict("words", b"free")
        assert [each.result()[0] for each in waiting] == [200, 200]


@pytest.mark.parametrize("workers", [1, "shared:2"])
def test_functions_alone_are_served(tmp_path: Path, workers: int | str) -> None:
    path = tmp_path / "louder.py"
    path.write_text("def louder(text: str) -> str: return text.upper()\n")
    with served(path, workers=workers) as client:
        assert client.predict("louder", b"abc") == (200, "ABC")
        assert client.ask("/v2/health/ready")[0] == 200
        (stats,) = client.ask("/v2/models/stats")[1]["model_stats"]
        assert stats["name"] == "louder"


# -- JSON: its limit at every door, its memory in the budget, one parser at a time


ROW = json.dumps({"row": [1, 2, 3, 4], "id": "a"}).encode()
LARGE = b'{"row":[' + b"1," * MOST_JSON_VALUES + b"1]}"
LARGE_FORM, FORM_TYPE = form("request", LARGE)
LIMIT_MESSAGE = f"the JSON has more than {MOST_JSON_VALUES} values"
WAITING = """
import threading
GATE = threading.Event()
def count(request: list) -> int:
    if request == ["wait"]:
        GATE.wait(20)
    if request == ["open"]:
        GATE.set()
    return len(request)
"""


def test_json_above_the_limit_is_refused_with_the_other_formats(server: Client) -> None:
    for body, kind in ((LARGE, ""), (LARGE_FORM, FORM_TYPE)):
        for sent, coding in ((body, "identity"), (gzip.compress(body), "gzip")):
            headers = {"Content_Type": kind, "Content_Encoding": coding}
            status, answer = server.predict("echo", sent, **headers)
            assert status == 413
            assert answer["error"].startswith(f"stage 'request': {LIMIT_MESSAGE}")
            assert all(each in answer["error"] for each in ("str", "numpy.ndarray", ".npy"))
    code, message = refused(server, "echo", "request", LARGE)
    assert (code, message) == ("RESOURCE_EXHAUSTED", answer["error"])
    # a long document of few values, too: a parser holds the interpreter's lock for each byte
    gzipped = gzip.compress(b'["' + b"a" * MOST_JSON_BYTES + b'"]', 1)
    headers = {"Content_Type": "application/json", "Content_Encoding": "gzip"}
    status, answer = server.predict("echo", gzipped, **headers)
    assert (status, "the JSON is longer than 24 MiB" in answer["error"]) == (413, True)
    text = b'"' + b"," * (MOST_JSON_VALUES + 1) + b'"'  # a text has the limit as JSON only
    status, answer = server.predict("words", text, Content_Type="application/json")
    assert (status, LIMIT_MESSAGE in answer["error"]) == (413, True)
    assert server.predict("words", text) == (200, {"done": [text.decode()]})


def test_the_values_of_json_count_in_the_memory_budget(tmp_path: Path) -> None:
    path = tmp_path / "held.py"
    path.write_text(WAITING)
    lists = b"[" + b"[]," * 10_000 + b"1]"  # 30 kB, and 20 times as much in memory
    with served(path, max_held_bytes=500_000) as client:
        assert client.predict("held", lists) == (200, "10001")  # it is alone
        waiting = threading.Thread(target=client.predict, args=("held", b'["wait"]'))
        waiting.start()
        labels = {"pipeline": "held", "stage": "count"}
        client.until(lambda: client.metric("deploykit_pipeline_stage_in_flight", **labels))
        status, answer = client.predict("held", lists)
        assert (status, "holds too many bytes" in answer["error"]) == (503, True)
        assert client.predict("held", b'["open"]') == (200, "1")
        waiting.join()
        assert client.predict("held", lists) == (200, "10001")


def test_one_large_json_is_parsed_at_a_time_and_small_ones_do_not_wait(tmp_path: Path) -> None:
    blanks = b" " * 300_000
    with serving_words(tmp_path, timeout_ms=500) as words:
        with ONE_JSON:
            for status, more in ((504, blanks), (200, b"")):
                assert words.predict("echo", ROW + more)[0] == status
                text = b'"a"' + more
                assert words.predict("words", text, Content_Type="application/json")[0] == status
            assert words.ask("/v2/health/live")[0] == 200
        assert words.predict("echo", ROW + blanks)[0] == 200


def test_numbers_of_many_digits_do_not_hold_up_other_threads(tmp_path: Path) -> None:
    path = tmp_path / "count.py"
    path.write_text("def count(request: list) -> int: return len(request)")
    graph = connect_engines(read_pipeline(path), {})
    body = b"[" + b",".join([b"9" * 4200] * 3000) + b"]"  # 0.2 s
    with ThreadPoolExecutor() as pool:
        reading, turns = pool.submit(graph.read, body), 0
        while not reading.done():
            threading.Event().wait(0.001)
            turns += 1
        assert len(reading.result()) == 3000
    assert turns > 5  # 1 where the parser holds the interpreter's lock throughout


def test_a_refused_input_is_freed_without_the_garbage_collector(server: Client) -> None:
    count = 4321
    gc.disable()
    try:
        assert server.predict("echo", json.dumps([0.5] * count).encode())[0] == 400
        server.until(lambda: not any(type(x) is list and len(x) == count for x in gc.get_objects()))
    finally:
        gc.enable()


LONG = 1 << 18


@pytest.mark.parametrize(
    "answer",
    [
        [[0.5] * LONG, []],
        [[1, 2]] * LONG,
        {1: ["x"] * LONG, "b": {"c": [], "d": None}, "e": {}},
        np.linspace(0, 1, 2 * LONG, dtype=np.float16).reshape(-1, 2, 4)[::2],
        np.where(np.arange(LONG) % 3, np.inf, np.nan)[None],
        [np.zeros((LONG, 1), bool), {"a": np.ones((1, LONG), np.uint8)}, np.arange(3, dtype=">i4")],
    ],
    ids=lambda each: str(each)[:12],
)
def test_a_long_answer_is_written_in_steps_and_is_one_document(
    tmp_path: Path, answer: object
) -> None:
    path = tmp_path / "a.py"
    path.write_text("def a(x: dict) -> object: return x")
    graph = connect_engines(read_pipeline(path), {})
    parts = list(_json_parts(answer))
    assert json.loads(b"".join(parts)) == graph.answer_json(answer)
    assert max(map(len, parts)) < 0.4 * sum(map(len, parts))


# -- What a server says of its pipelines: OpenAPI, examples, the dashboard; and dk.client


def test_the_page_shows_how_to_ask_a_pipeline(server: Client) -> None:
    _, text = server.ask("/docs")
    assert "pipeline: crops → colours → answer" in text
    assert f"curl http://{server.place}/v2/models/tiles/predict -F page=@photo.jpg" in text


def test_the_dashboard_gets_a_pipeline_as_it_gets_models(server: Client) -> None:
    def models() -> dict[str, Any]:
        return {each["name"]: each for each in server.ask("/status")[1]["models"]}

    assert server.predict("tiles", png(page("red"))) == (200, ["red"])
    before = models()["tiles"]
    assert server.predict("tiles", png(page("red"))) == (200, ["red"])
    found = models()
    assert next(iter(found)) == "tiles"  # which the page opens with
    tiles, model = found["tiles"], found["tiles.colours"]
    assert model.keys() <= tiles.keys()
    assert tiles["task"] == {
        "stages": "crops, colours, answer", "takes": "image", "gives": "list[str]"
    }  # fmt: skip
    assert tiles["outcomes"]["success"] == before["outcomes"]["success"] + 1
    assert sum(tiles["request"]["counts"]) == sum(before["request"]["counts"]) + 1
    stages_us = {name: us - before["stages_us"][name] for name, us in tiles["stages_us"].items()}
    assert list(stages_us) == ["crops", "colours", "answer", "page"]
    assert 0 < sum(stages_us.values()) <= tiles["request"]["us"] - before["request"]["us"]


def test_the_python_client_asks_a_pipeline_item_by_item(server: Client, tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    path.write_bytes(png(page("blue")))
    with dk.client(f"http://{server.place}") as client:
        assert client.predict([path, png(page("red"))], "tiles") == [["blue"], ["red"]]
        assert client.predict("two words", "words") == {"done": ["two", "words"]}
        assert client.predict(b"abc", "say") == b"cba"
        found = client.predict(json.dumps({"row": [1, 2, 3, 4], "id": "a"}), "echo")
        assert found["id"] == "a"
        with pytest.raises(dk.DeploykitError, match="stage 'slow' failed: ValueError"):
            client.predict("raise", "words")


# -- The models of a served pipeline: shared and reloaded; and its end


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
