"""ModelInfer with one BYTES input: images or sentences, answered with BYTES of JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from deploykit.engines.oip.protobuf import MESSAGES
from tests.support.installed import needs
from tests.support.serving.grpc_cases import SERVICE, WAIT_S, Serving, serving

needs("PIL", "tokenizers", "grpc", "tritonclient")

import grpc  # noqa: E402
import tritonclient.grpc as triton  # noqa: E402

from deploykit.evaluation.verify import open_proven  # noqa: E402
from tests.support.runtimes.pictures import encoded  # noqa: E402
from tests.support.serving.task_models import HEIGHT, WIDTH, write_task_model  # noqa: E402

INVALID, LARGE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
MOST_BYTES = 1_000_000


def plain(level: int) -> bytes:
    return encoded(np.full((32, 48, 3), level, np.uint8))


LIGHT, DARK = plain(255), plain(0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("tasks")
    with ExitStack() as stack:
        models = {}
        for kind in ("classify", "text-classify"):
            (engine,) = open_proven(write_task_model(folder, kind), threads=1)
            models[kind] = stack.enter_context(engine)
        yield stack.enter_context(serving(models, max_body_bytes=MOST_BYTES, shared_memory=True))


def ask(server: Serving, model: str, name: str, items: list[Any], **options: Any) -> list[Any]:
    given = triton.InferInput(name, [len(items)], "BYTES")
    given.set_data_from_numpy(np.array(items, object))
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        reply = client.infer(model, [given], client_timeout=WAIT_S, **options)
    assert reply.get_response().id == options.get("request_id", "")
    return [json.loads(each) for each in reply.as_numpy("answer")]


def test_images_are_answered_in_their_order(served: Serving) -> None:
    found = ask(served, "classify", "image", [LIGHT, DARK, LIGHT], request_id="seven")
    assert [each["label"] for each in found] == ["light", "dark", "light"]
    assert found[0]["score"] == pytest.approx(1.0, abs=1e-5)


def test_the_answer_may_be_written_to_shared_memory(served: Serving) -> None:
    shared = Path("/dev/shm", f"test-{uuid4().hex}")
    shared.write_bytes(bytes(256))
    image = triton.InferInput("image", [1], "BYTES")
    image.set_data_from_numpy(np.array([LIGHT], object))
    wanted = triton.InferRequestedOutput("answer")
    wanted.set_shared_memory("region", 256)
    try:
        with triton.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
            client.register_system_shared_memory("region", f"/{shared.name}", 256)
            reply = client.infer("classify", [image], outputs=[wanted], client_timeout=WAIT_S)
            client.unregister_system_shared_memory("region")
        assert not reply.get_response().raw_output_contents[0]
        size = int.from_bytes(shared.read_bytes()[:4], "little")
        assert json.loads(shared.read_bytes()[4 : 4 + size])["label"] == "light"
    finally:
        shared.unlink()


def test_sentences_are_answered_in_their_order(served: Serving) -> None:
    found = ask(served, "text-classify", "text", ["good good good", "bad"])
    assert [each["label"] for each in found] == ["good", "bad"]


def test_the_image_may_be_in_typed_contents(served: Serving) -> None:
    message = MESSAGES["ModelInferRequest"](model_name="classify")
    message.inputs.add(name="image", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
        LIGHT
    )
    with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        call = channel.unary_unary(
            f"{SERVICE}/ModelInfer", None, MESSAGES["ModelInferResponse"].FromString
        )
        reply = call(message.SerializeToString(), timeout=WAIT_S)
    assert [(each.name, each.datatype, each.shape) for each in reply.outputs] == [
        ("answer", "BYTES", [1])
    ]
    assert json.loads(reply.raw_output_contents[0][4:])["label"] == "light"


def test_tensors_are_answered_with_tensors_as_before(served: Serving) -> None:
    given = triton.InferInput("image", [2, HEIGHT, WIDTH, 3], "UINT8")
    given.set_data_from_numpy(np.full((2, HEIGHT, WIDTH, 3), 255, np.uint8))
    with triton.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
        scores = client.infer("classify", [given], client_timeout=WAIT_S).as_numpy("scores")
    np.testing.assert_allclose(scores, [[0, 1]] * 2, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "name", "items", "code", "reason"),
    [
        ("classify", "image", [LIGHT, b"?"], INVALID, "image 2 of 2: is not a readable image"),
        ("classify", "picture", [LIGHT], INVALID, "unknown input 'picture'"),
        ("classify", "text", ["cat"], INVALID, "unknown input 'text'"),
        ("text-classify", "text", [b"\xff"], INVALID, "the text: is not UTF-8"),
        ("text-classify", "text", [""], INVALID, "the text: is empty"),
        ("text-classify", "text", ["good"] * 257, LARGE, "has 257 items, 256 are possible"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    served: Serving, model: str, name: str, items: list[Any], code: Any, reason: str
) -> None:
    with pytest.raises(triton.InferenceServerException) as caught:
        ask(served, model, name, items)
    assert reason in caught.value.message()
    assert caught.value.status() == str(code)
    assert ask(served, "classify", "image", [DARK])[0]["label"] == "dark"


def test_a_damaged_input_is_refused(served: Serving) -> None:
    """Field 5, an input, claims more bytes than it has."""
    name = b"classify"
    damaged = b"\x0a" + bytes([len(name)]) + name + b"\x2a\x04\x12\x09BY"
    with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        call = channel.unary_unary(f"{SERVICE}/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            call(damaged, timeout=WAIT_S)
    assert caught.value.code() is INVALID


def test_a_large_image_is_read_elsewhere(served: Serving) -> None:
    noisy = encoded(np.random.default_rng(0).integers(0, 255, (500, 500, 3), np.uint8))
    assert len(noisy) > 512 << 10
    (found,) = ask(served, "classify", "image", [noisy])
    assert found["score"] == pytest.approx(0.5, abs=0.01)


def test_several_messages_of_a_stream_are_answered_in_their_order(served: Serving) -> None:
    found: list[str] = []
    with triton.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
        done = threading.Event()

        def take(result: Any, error: Any) -> None:
            found.append(json.loads(result.as_numpy("answer")[0])["label"] if result else error)
            if len(found) == 4:
                done.set()

        client.start_stream(take)
        for image in (LIGHT, DARK, DARK, LIGHT):
            given = triton.InferInput("image", [1], "BYTES")
            given.set_data_from_numpy(np.array([image], object))
            client.async_stream_infer("classify", [given])
        assert done.wait(WAIT_S)
        client.stop_stream()
    assert found == ["light", "dark", "dark", "light"]
