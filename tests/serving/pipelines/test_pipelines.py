"""Pipelines served over HTTP and gRPC, with real models: answers, errors, limits and time."""

from __future__ import annotations

import json
import logging
import re
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

from tests.support.installed import needs
from tests.support.runtimes.tiles import page, png, write_pipeline
from tests.support.serving.pipelines import (
    WAIT_S,
    Client,
    form,
    outcomes,
    served,
    serving_words,
)

needs("PIL", "onnxruntime", "grpc", "tritonclient")

import grpc  # noqa: E402
import tritonclient.grpc as triton  # noqa: E402

from deploykit.core.json_value import MOST_JSON_VALUES  # noqa: E402
from deploykit.engines.oip.protobuf import MESSAGES  # noqa: E402

INFER = "/inference.GRPCInferenceService/ModelInfer"
IN_FLIGHT = "deploykit_pipeline_in_flight"
STAGE_IN_FLIGHT = "deploykit_pipeline_stage_in_flight"


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path = write_pipeline(tmp_path_factory.mktemp("tiles"))
    with served(path, grpc_port=0, max_batch=32) as client:
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


def test_an_image_is_answered_in_every_form(tiles: Client) -> None:
    pixels = page("red", "", "blue")
    data = png(pixels)
    body, kind = form("page", data)
    for sent, content_type in ((data, "image/png"), (body, kind)):
        found = tiles.predict("tiles", sent, Content_Type=content_type)
        assert found == (200, ["red", "blue"])
    for image in (data, pixels):
        assert json.loads(ask(tiles, "tiles", "page", image)) == ["red", "blue"]


def test_the_image_may_be_in_typed_contents_large_ones_too(tiles: Client) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (400, 400, 3), np.uint8)
    noise[:8, :8] = (255, 0, 0)
    noise[8:] = noise[:, 8:] = 255
    with grpc.insecure_channel(tiles.grpc) as channel:
        call = channel.unary_unary(INFER, None, MESSAGES["ModelInferResponse"].FromString)
        for image in (png(page("green")), png(noise) + bytes(300 << 10)):
            message = MESSAGES["ModelInferRequest"](model_name="tiles", id="seven")
            item = message.inputs.add(name="page", datatype="BYTES", shape=[1])
            item.contents.bytes_contents.append(image)
            reply = call(message.SerializeToString(), timeout=WAIT_S)
            assert reply.id == "seven"
            assert json.loads(reply.raw_output_contents[0][4:]) in (["green"], ["red"])


def test_no_crop_is_an_empty_answer_and_200_crops_are_7_batches(tiles: Client) -> None:
    assert tiles.predict("tiles", png(page(""))) == (200, [])
    label = {"model": "tiles.colours"}
    before = tiles.metric("nv_inference_exec_count", **label)
    rows = tiles.metric("nv_inference_count", **label)
    assert tiles.predict("tiles", png(page(*["green"] * 200))) == (200, ["green"] * 200)
    assert tiles.metric("nv_inference_count", **label) - rows == 200
    assert tiles.metric("nv_inference_exec_count", **label) - before == 7
    _, text = tiles.ask("/metrics")
    stages = set(re.findall(r'deploykit_pipeline_stage_seconds_count\{.*stage="(\w+)"', text))
    assert stages == {"page", "crops", "colours", "answer"}


def test_many_clients_get_their_own_answers(tiles: Client) -> None:
    names = ["red", "green", "blue"]
    pages = [[names[(n * k) % 3] for k in range(n % 7)] for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: tiles.predict("tiles", png(page(*each))), pages))
    assert found == [(200, each) for each in pages]


def test_a_pipeline_is_described_as_models_are(tiles: Client) -> None:
    status, about = tiles.ask("/v2/models/tiles")
    assert (status, about["platform"]) == (200, "deploykit_pipeline")
    assert about["inputs"] == [{"name": "page", "datatype": "BYTES", "shape": [1]}]
    assert about["parameters"]["stages"] == "crops, colours, answer"
    assert tiles.ask("/v2/models/tiles/ready") == (200, {"name": "tiles", "ready": True})
    assert tiles.ask("/v2/models/tiles/nothing", b"{}")[0] == 404
    with connect(triton, tiles) as client:
        (item,) = client.get_model_metadata("tiles").inputs
        assert (item.name, item.datatype, item.shape) == ("page", "BYTES", [1])
        assert client.get_model_config("tiles").config.max_batch_size == 0
        ready = [client.is_model_ready("tiles", version) for version in ("", "1", "2")]
        assert ready == [True, True, False]
        assert "has no version '2'" in refused(tiles, "tiles", "page", b"", model_version="2")[1]
        states = {each.name: each.state for each in client.get_model_repository_index().models}
        assert states == {"tiles": "READY", "tiles.colours": "READY"}

        def count() -> int:
            (found,) = client.get_inference_statistics("tiles").model_stats
            return int(found.inference_stats.success.count)

        before = count()
        ask(tiles, "tiles", "page", png(page("red")))
        assert count() == before + 1
    with grpc.insecure_channel(tiles.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"\x0a\x05tiles", timeout=WAIT_S) == b"\x08\x01"  # SERVING


def test_tritonclient_asks_a_pipeline_over_http_as_over_grpc(tiles: Client) -> None:
    http, image = pytest.importorskip("tritonclient.http"), png(page("red", "blue"))
    with connect(http, tiles) as client:
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
        (b"--XX\r\n", FORM, 400, "ends before"),
        (b"data", "multipart/form-data", 400, "has no boundary"),
        (b"data", FORM, 400, "does not begin with the boundary"),
        (b"paeg=x", "application/x-www-form-urlencoded", 400, "has 1 fields, one 'page' is"),
        (b"a", "text/plain; charset=klingon", 415, "the charset 'klingon' is not offered"),
        (FIELD * 2 + b"--XX--\r\n", FORM, 400, "has 2 fields, one 'page' is"),
    ],
)
def test_bodies_that_cannot_be_read(
    tiles: Client, body: bytes, kind: str, status: int, message: str
) -> None:
    got, error = tiles.predict("tiles", body, Content_Type=kind)
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
    request: Any, pipeline: str, name: str, value: Any, code: str, message: str
) -> None:
    server = request.getfixturevalue("words" if pipeline == "words" else "tiles")
    failed = {"pipeline": pipeline, "outcome": "bad_request"}
    before = server.metric("deploykit_pipeline_requests_total", **failed)
    found = refused(server, pipeline, name, value)
    assert (found[0], message in found[1]) == (code, True), found
    after = server.metric("deploykit_pipeline_requests_total", **failed)
    assert after == before + (code == "INVALID_ARGUMENT")


def test_two_pipelines_at_once(words: Client) -> None:
    body = json.dumps({"row": [1, 2, 3, 4], "id": "a"})
    status, found = words.predict("echo", body.encode())
    assert (status, found["id"], len(found["y"])) == (200, "a", 3)
    assert json.loads(ask(words, "echo", "request", body)) == found
    assert words.predict("words", b"two words") == (200, {"done": ["two", "words"]})
    assert json.loads(ask(words, "words", "text", "two words")) == {"done": ["two", "words"]}
    as_json = {"Content_Type": "application/json"}
    assert words.predict("words", b'"json"', **as_json) == (200, {"done": ["json"]})
    assert words.predict("words", b"bytes") == (200, "%PDF")
    assert ask(words, "words", "text", "bytes") == b"%PDF"
    assert words.predict("words", b"huge") == (200, "x" * (8 << 20))


@pytest.mark.parametrize(
    ("pipeline", "body", "status", "code", "message"),
    [
        ("words", b"raise", 500, "INTERNAL", "stage 'slow' failed: ValueError"),
        ("words", b"exit", 500, "INTERNAL", "stage 'slow' failed: SystemExit"),
        ("words", b"string", 500, "INTERNAL", "stage 'slow' gave str, its annotation is int"),
        ("words", b"refuse", 400, "INVALID_ARGUMENT", "stage 'slow': no such word"),
        ("words", b"set", 500, "INTERNAL", "stage 'answer': a set has no JSON form"),
        ("words", b"long", 500, "INTERNAL", "stage 'answer' failed: TypeError"),
        ("words", b"\xff", 400, "INVALID_ARGUMENT", "stage 'text': the text is not UTF-8"),
        ("echo", b'{"row": "a"}', 500, "INTERNAL", "stage 'row' failed: ValueError"),
        ("echo", b"[1]", 400, "INVALID_ARGUMENT", "stage 'request': the input is a JSON list of"),
    ],
)
def test_an_error_names_its_stage_and_nothing_else(
    words: Client,
    caplog: pytest.LogCaptureFixture,
    pipeline: str,
    body: bytes,
    status: int,
    code: str,
    message: str,
) -> None:
    name = {"words": "text", "echo": "request"}[pipeline]
    got, error = words.predict(pipeline, body)
    assert got == status
    assert message in error["error"]
    assert "secret" not in error["error"]
    assert refused(words, pipeline, name, body) == (code, error["error"])
    if pipeline == "words":
        outcome = "failed" if status == 500 else "bad_request"
        assert outcomes(words, message.split("'")[1], outcome) == 2
    if body == b"raise":
        lines = [each for each in caplog.messages if "slow" in each]
        assert all("a secret of the server (words.py, line" in line for line in lines)
        assert "Traceback" not in caplog.text
        with caplog.at_level(logging.DEBUG):
            words.predict("words", b"raise")
        assert "Traceback" in caplog.text
    assert words.predict("words", b"again") == (200, {"done": ["again"]})


def test_json_has_the_limit_that_it_has_over_http(words: Client) -> None:
    body = json.dumps({"row": [1] * MOST_JSON_VALUES, "id": "a"})
    code, message = refused(words, "echo", "request", body)
    assert code == "RESOURCE_EXHAUSTED"
    assert message.startswith(f"stage 'request': the JSON has more than {MOST_JSON_VALUES} values")


def test_messages_of_a_stream_are_answered_in_their_order(tiles: Client) -> None:
    found: list[Any] = []
    done = threading.Event()

    def take(result: Any, error: Any) -> None:
        found.append(json.loads(result.as_numpy("answer")[0]) if result else str(error))
        if len(found) == 3:
            done.set()

    with connect(triton, tiles) as client:
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


def test_a_request_that_hangs_is_answered_in_time(tmp_path: Path) -> None:
    def hangs_in_slow() -> bool:  # on a busy machine its time may be over before that
        status, error = words.predict("words", b"wait")
        assert status == 504
        assert "not ended within the request's time limit of 200 ms" in error["error"]
        return "stage 'slow': " in error["error"]

    with serving_words(tmp_path, timeout_ms=200) as words:
        words.until(lambda: hangs_in_slow() and words.metric(STAGE_IN_FLIGHT, stage="slow"))
        assert words.metric(IN_FLIGHT, pipeline="words") == 0


def test_stages_that_are_slow_together_are_answered_in_time(tmp_path: Path) -> None:
    """None of them takes as long as a request may."""
    path, slow = tmp_path / "steps.py", "def {1}({0}: str) -> str: time.sleep(0.1); return {0}\n"
    steps = ["text a", "a b", "b c", "c d"]
    path.write_text("import time\n" + "".join(slow.format(*names.split()) for names in steps))
    with served(path, timeout_ms=300) as client:
        status, error = client.predict("steps", b"x")
        assert status == 504
        assert "not ended within the request's time limit of 300 ms" in error["error"]
        name = "deploykit_pipeline_stage_requests_total"
        assert client.metric(name, stage="d", outcome="success") == 0
        client.until(lambda: client.metric(STAGE_IN_FLIGHT) == 0)


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


def test_the_deadline_of_a_call_ends_its_request(words: Client) -> None:
    def ended_in_slow() -> bool:  # on a busy machine its time may be over before that
        code, _ = refused(words, "words", "text", "wait", client_timeout=0.05)
        assert code == "DEADLINE_EXCEEDED"
        words.until(lambda: words.metric(IN_FLIGHT, pipeline="words") == 0)
        return outcomes(words, "slow", "expired") + outcomes(words, "slow", "cancelled") == 1

    words.until(ended_in_slow)
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
