"""ModelInfer with one BYTES input: images or sentences, answered with BYTES of JSON."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.installed import needs
from tests.support.serving.grpc_cases import WAIT_S, Serving, serving

needs("PIL", "tokenizers", "grpc", "tritonclient")

import tritonclient.grpc as triton  # noqa: E402
from tritonclient.grpc import service_pb2  # noqa: E402

from deploykit.evaluation.verify import open_proven  # noqa: E402
from tests.support.runtimes.pictures import encoded  # noqa: E402
from tests.support.serving.task_models import HEIGHT, WIDTH, write_task_model  # noqa: E402

INVALID, LARGE = "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"


def plain(level: int) -> bytes:
    return encoded(np.full((32, 48, 3), level, np.uint8))


LIGHT, DARK = plain(255), plain(0)
NOISY = encoded(np.random.default_rng(0).integers(0, 255, (500, 500, 3), np.uint8))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("tasks")
    with ExitStack() as stack:
        models = {}
        for kind in ("classify", "text-classify"):
            (engine,) = open_proven(write_task_model(folder, kind), threads=1)
            models[kind] = stack.enter_context(engine)
        yield stack.enter_context(serving(models, max_body_bytes=1_000_000, shared_memory=True))


@pytest.fixture
def client(served: Serving) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
        yield client


def items(name: str, values: list[Any]) -> list[Any]:
    given = triton.InferInput(name, [len(values)], "BYTES")
    given.set_data_from_numpy(np.array(values, object))
    return [given]


def answers(result: Any) -> list[Any]:
    return [json.loads(each) for each in result.as_numpy("answer")]


def test_items_are_answered_in_their_order(client: Any) -> None:
    for model, name, values, labels in (
        ("classify", "image", [LIGHT, DARK, LIGHT], ["light", "dark", "light"]),
        ("text-classify", "text", ["good good good", "bad"], ["good", "bad"]),
    ):
        result = client.infer(model, items(name, values), request_id="7", client_timeout=WAIT_S)
        assert [each["label"] for each in answers(result)] == labels
        assert result.get_response().id == "7"


def test_the_answer_may_be_written_to_shared_memory(client: Any, shared: str) -> None:
    wanted = triton.InferRequestedOutput("answer")
    wanted.set_shared_memory("region", 256)
    region = Path("/dev/shm", shared[1:])
    region.write_bytes(bytes(256))
    client.register_system_shared_memory("region", shared, 256)
    reply = client.infer("classify", items("image", [LIGHT]), outputs=[wanted])
    client.unregister_system_shared_memory("region")
    assert not reply.get_response().raw_output_contents[0]
    size = int.from_bytes(region.read_bytes()[:4], "little")
    assert json.loads(region.read_bytes()[4 : 4 + size])["label"] == "light"


def test_the_image_may_be_large_or_in_typed_contents_or_a_tensor(client: Any) -> None:
    assert len(NOISY) > 512 << 10  # it is read elsewhere
    message = service_pb2.ModelInferRequest(model_name="classify")
    image = message.inputs.add(name="image", datatype="BYTES", shape=[1])
    image.contents.bytes_contents.append(NOISY)
    (typed,) = answers(triton.InferResult(client._client_stub.ModelInfer(message)))
    (found,) = answers(client.infer("classify", items("image", [NOISY]), client_timeout=WAIT_S))
    assert found == typed
    assert found["score"] == pytest.approx(0.5, abs=0.01)
    given = triton.InferInput("image", [2, HEIGHT, WIDTH, 3], "UINT8")
    given.set_data_from_numpy(np.full((2, HEIGHT, WIDTH, 3), 255, np.uint8))
    scores = client.infer("classify", [given]).as_numpy("scores")
    np.testing.assert_allclose(scores, [[0, 1]] * 2, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "name", "values", "status", "reason"),
    [
        ("classify", "image", [LIGHT, b"?"], INVALID, "image 2 of 2: is not a readable image"),
        ("classify", "picture", [LIGHT], INVALID, "unknown input 'picture'"),
        ("text-classify", "text", [b"\xff"], INVALID, "the text: is not UTF-8"),
        ("text-classify", "text", ["good"] * 257, LARGE, "has 257 items, 256 are possible"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    client: Any, model: str, name: str, values: list[Any], status: str, reason: str
) -> None:
    with pytest.raises(triton.InferenceServerException) as caught:
        client.infer(model, items(name, values))
    assert reason in caught.value.message()
    assert caught.value.status() == f"StatusCode.{status}"
    assert answers(client.infer("classify", items("image", [DARK])))[0]["label"] == "dark"


def test_several_messages_of_a_stream_are_answered_in_their_order(client: Any) -> None:
    found: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: found.put(error or answers(result)[0]["label"]))
    for image in (LIGHT, DARK, DARK, LIGHT):
        client.async_stream_infer("classify", items("image", [image]))
    assert [found.get(timeout=WAIT_S) for _ in range(4)] == ["light", "dark", "dark", "light"]
    client.stop_stream()
