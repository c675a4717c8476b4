"""Pipelines over gRPC, asked by tritonclient: answers, errors, deadlines, cancellation, streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from tests.support.installed import needs
from tests.support.runtimes.tiles import page, png, write_pipeline
from tests.support.serving.pipelines import WAIT_S, Client, outcomes, served, serving_words

needs("PIL", "onnxruntime", "grpc", "tritonclient")

import grpc  # noqa: E402
import tritonclient.grpc as triton  # noqa: E402

from deploykit.core.json_value import MOST_JSON_VALUES  # noqa: E402
from deploykit.engines.oip.protobuf import MESSAGES  # noqa: E402

INFER = "/inference.GRPCInferenceService/ModelInfer"
IN_FLIGHT = "deploykit_pipeline_in_flight"


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with served(write_pipeline(tmp_path_factory.mktemp("tiles")), grpc_port=0) as client:
        yield client


@pytest.fixture
def words(tmp_path: Path) -> Iterator[Client]:
    with serving_words(tmp_path, grpc_port=0) as client:
        yield client


def given(name: str, value: Any) -> triton.InferInput:
    """One BYTES element, or an image as a tensor."""
    array = value if isinstance(value, np.ndarray) else np.array([value], object)
    kind = "UINT8" if isinstance(value, np.ndarray) else "BYTES"
    found = triton.InferInput(name, list(array.shape), kind)
    found.set_data_from_numpy(array)
    return found


def ask(server: Client, model: str, name: str, value: Any, **options: Any) -> Any:
    with triton.InferenceServerClient(server.grpc) as client:
        reply = client.infer(model, [given(name, value)], **{"client_timeout": WAIT_S, **options})
    (output,) = reply.get_response().outputs
    found = reply.as_numpy(output.name)
    assert found.shape == (1,)
    return found[0]


def refused(server: Client, *what: Any, **options: Any) -> tuple[str, str]:
    """The status and the message of an error."""
    with pytest.raises(triton.InferenceServerException) as caught:
        ask(server, *what, **options)
    return caught.value.status().removeprefix("StatusCode."), caught.value.message()


def test_an_image_is_answered_as_its_bytes_and_as_pixels(tiles: Client) -> None:
    pixels = page("red", "", "blue")
    for image in (png(pixels), pixels):
        assert json.loads(ask(tiles, "tiles", "page", image)) == ["red", "blue"]
    assert tiles.predict("tiles", png(pixels)) == (200, ["red", "blue"])


def test_text_json_and_bytes_are_answered_as_over_http(words: Client) -> None:
    assert json.loads(ask(words, "words", "text", "two words")) == {"done": ["two", "words"]}
    assert ask(words, "words", "text", "bytes") == b"%PDF"
    body = json.dumps({"row": [1, 2, 3, 4], "id": "a"})
    found = json.loads(ask(words, "echo", "request", body))
    assert (200, found) == words.predict("echo", body.encode())


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


@pytest.fixture(params=["http", "grpc"])
def kit(request: pytest.FixtureRequest) -> ModuleType:
    """NVIDIA's client library of a protocol."""
    return triton if request.param == "grpc" else pytest.importorskip("tritonclient.http")


def connect(kit: ModuleType, server: Client) -> Any:
    return kit.InferenceServerClient(server.grpc if kit is triton else server.place)


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


def test_a_pipeline_is_described_as_models_are(tiles: Client) -> None:
    with triton.InferenceServerClient(tiles.grpc) as client:
        about = client.get_model_metadata("tiles")
        assert [(each.name, each.datatype, each.shape) for each in about.inputs] == [
            ("page", "BYTES", [1])
        ]
        assert client.get_model_config("tiles").config.max_batch_size == 0
        assert client.is_model_ready("tiles")
        assert client.is_model_ready("tiles", "1")
        assert not client.is_model_ready("tiles", "2")
        states = {each.name: each.state for each in client.get_model_repository_index().models}
        assert states == {"tiles": "READY", "tiles.colours": "READY"}
        before = statistics(client)
        ask(tiles, "tiles", "page", png(page("red")))
        assert statistics(client) == before + 1
    with grpc.insecure_channel(tiles.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"\x0a\x05tiles", timeout=WAIT_S) == b"\x08\x01"  # SERVING


def statistics(client: triton.InferenceServerClient) -> int:
    (found,) = client.get_inference_statistics("tiles").model_stats
    count: int = found.inference_stats.success.count
    return count


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("raise", 500, "INTERNAL"),
        ("exit", 500, "INTERNAL"),
        ("string", 500, "INTERNAL"),
        ("set", 500, "INTERNAL"),
        ("refuse", 400, "INVALID_ARGUMENT"),
        (b"\xff", 400, "INVALID_ARGUMENT"),
        ("hang", 504, "DEADLINE_EXCEEDED"),
    ],
)
def test_an_error_has_the_same_message_as_over_http(
    tmp_path: Path, text: str | bytes, status: int, code: str
) -> None:
    brief_ms = 50 if text == "hang" else 60_000
    with serving_words(tmp_path, brief_ms, grpc_port=0) as words:
        got, reply = words.predict("words", text.encode() if isinstance(text, str) else text)
        assert got == status
        assert refused(words, "words", "text", text) == (code, reply["error"])
    assert "stage '" in reply["error"]


@pytest.mark.parametrize(
    ("model", "name", "value", "code", "message"),
    [
        ("words", "txt", "a", "INVALID_ARGUMENT", "unknown input 'txt'"),
        ("words", "text", np.zeros((2, 2, 3), np.uint8), "INVALID_ARGUMENT", "is BYTES, got"),
        ("tiles", "page", np.zeros((2, 2), np.uint8), "INVALID_ARGUMENT", "uint8[H,W,3]"),
        ("tiles", "page", np.zeros((0, 2, 3), np.uint8), "INVALID_ARGUMENT", "has no pixels"),
        ("tiles", "page", "no image", "INVALID_ARGUMENT", "stage 'page': the image"),
        ("tile", "page", "", "NOT_FOUND", "there is no model 'tile'"),
    ],
)
def test_a_wrong_request_is_refused(
    tmp_path: Path, tiles: Client, model: str, name: str, value: Any, code: str, message: str
) -> None:
    if model == "words":
        with serving_words(tmp_path, grpc_port=0) as words:
            found = refused(words, model, name, value)
    else:
        found = refused(tiles, model, name, value)
    assert found[0] == code
    assert message in found[1]


def test_json_has_the_limit_that_it_has_over_http(words: Client) -> None:
    body = json.dumps({"row": [1] * MOST_JSON_VALUES, "id": "a"})
    code, message = refused(words, "echo", "request", body)
    assert code == "RESOURCE_EXHAUSTED"
    assert message.startswith(f"stage 'request': the JSON has more than {MOST_JSON_VALUES} values")


def test_two_elements_and_another_version_are_refused(tiles: Client) -> None:
    two = triton.InferInput("page", [2], "BYTES")
    two.set_data_from_numpy(np.array([b"a", b"b"], object))
    failed = {"pipeline": "tiles", "outcome": "bad_request"}
    before = tiles.metric("deploykit_pipeline_requests_total", **failed)
    with triton.InferenceServerClient(tiles.grpc) as client:
        with pytest.raises(triton.InferenceServerException, match=r"shape \[1\]|\[2\]"):
            client.infer("tiles", [two], client_timeout=WAIT_S)
        with pytest.raises(triton.InferenceServerException, match="has no version '2'"):
            client.infer("tiles", [two], "2", client_timeout=WAIT_S)
    assert tiles.metric("deploykit_pipeline_requests_total", **failed) == before + 1


def test_a_request_may_have_a_timeout_of_its_own(words: Client, kit: ModuleType) -> None:
    item = kit.InferInput("text", [1], "BYTES")
    item.set_data_from_numpy(np.array([b"wait"], object))

    def hangs_in_slow() -> bool:  # on a busy machine its time may be over before that
        with (
            connect(kit, words) as client,
            pytest.raises(triton.InferenceServerException) as caught,
        ):
            client.infer("words", [item], timeout=50_000)
        assert "not ended within the request's time limit of 50 ms" in caught.value.message()
        return "stage 'slow': " in caught.value.message()

    words.until(hangs_in_slow)
    assert outcomes(words, "slow", "expired") == 1
    assert outcomes(words, "answer", "success") == 0


def test_the_deadline_of_a_call_ends_its_request(words: Client) -> None:
    def ended_in_slow() -> bool:  # on a busy machine its time may be over before that
        code, _ = refused(words, "words", "text", "wait", client_timeout=0.05)
        assert code == "DEADLINE_EXCEEDED"
        words.until(lambda: words.metric(IN_FLIGHT, pipeline="words") == 0)
        return outcomes(words, "slow", "expired") + outcomes(words, "slow", "cancelled") == 1

    words.until(ended_in_slow)
    assert outcomes(words, "answer", "success") == 0


def test_a_cancelled_call_ends_its_request_before_the_next_stage(words: Client) -> None:
    ended = threading.Event()
    with triton.InferenceServerClient(words.grpc) as client:
        call = client.async_infer(
            "words", [given("text", "wait")], callback=lambda **_: ended.set()
        )
        words.until(lambda: words.metric(IN_FLIGHT, pipeline="words") == 1)
        call.cancel()
        assert ended.wait(WAIT_S)
    cancelled = {"pipeline": "words", "outcome": "cancelled"}
    words.until(lambda: words.metric("deploykit_pipeline_requests_total", **cancelled) == 1)
    assert outcomes(words, "answer", "success") == 0


def test_messages_of_a_stream_are_answered_in_their_order(tiles: Client) -> None:
    found: list[Any] = []
    done = threading.Event()

    def take(result: Any, error: Any) -> None:
        found.append(json.loads(result.as_numpy("answer")[0]) if result else str(error))
        if len(found) == 3:
            done.set()

    with triton.InferenceServerClient(tiles.grpc) as client:
        client.start_stream(take)
        for image in (page(*["red"] * 50), np.zeros((0, 1, 3), np.uint8), page("blue")):
            client.async_stream_infer("tiles", [given("page", image)])
        assert done.wait(WAIT_S)
        client.stop_stream()
    assert found[0] == ["red"] * 50
    assert "has no pixels" in found[1]
    assert found[2] == ["blue"]
