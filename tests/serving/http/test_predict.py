"""POST .../predict: images and sentences as clients have them, answers in JSON."""

from __future__ import annotations

import base64
import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from deploykit.core.extras import missing
from tests.support.fake_engine import FakeEngine
from tests.support.installed import needs
from tests.support.serving.running import Running, request, running

needs("PIL", "tokenizers")

from deploykit.evaluation.verify import open_proven  # noqa: E402
from tests.support.runtimes.pictures import encoded  # noqa: E402
from tests.support.serving import hostile_items  # noqa: E402
from tests.support.serving.predict_requests import (  # noqa: E402
    DARK,
    LIGHT,
    REFUSED,
    as_json,
    form,
    plain,
)
from tests.support.serving.task_models import write_task_model  # noqa: E402

KINDS = ("classify", "detect", "segment", "embed", "text-classify")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tasks")
    with ExitStack() as stack:
        found = {}
        for kind in KINDS:
            (engine,) = open_proven(write_task_model(folder, kind), threads=1)
            found[kind] = stack.enter_context(engine)
        yield found


@pytest.fixture(scope="module")
def served(opened: dict[str, Any]) -> Iterator[Running]:
    with running({**opened, "plain": FakeEngine()}, max_body_bytes=4_000_000) as found:
        yield found


def post(
    server: Running, kind: str, body: bytes, content_type: str = "", **headers: str
) -> tuple[int, Any]:
    more = {"Content_Type": content_type} if content_type else {}
    reply = server.ask("POST", f"/v2/models/{kind}/predict", body, **more, **headers)
    return reply.status, reply.json


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_is_answered_with_its_label(served: Running, kind: str) -> None:
    status, found = post(served, "classify", plain(255, kind), f"image/{kind.lower()}")
    assert status == 200
    assert (found["label"], [each["index"] for each in found["top"]]) == ("light", [1, 0])
    assert found["score"] == pytest.approx(1.0, abs=1e-5)


def test_boxes_are_in_pixels_of_the_image(served: Running) -> None:
    status, found = post(served, "detect", plain(204), "image/png")
    assert status == 200
    assert (found["width"], found["height"]) == (48, 32)
    (only,) = found["boxes"]  # the other one is below the threshold
    assert (only["label"], only["box"]) == ("light", [0, 0, 24, 32])
    assert only["score"] == pytest.approx(0.8, abs=1e-5)


def test_a_client_may_ask_for_another_threshold_and_number_of_labels(served: Running) -> None:
    reply = served.ask("POST", "/v2/models/detect/predict?threshold=0.1", plain(204))
    assert [each["label"] for each in reply.json["boxes"]] == ["light", "dark"]
    reply = served.ask("POST", "/v2/models/classify/predict?top_k=1", plain(204))
    assert [each["label"] for each in reply.json["top"]] == ["light"]
    for wrong in ("threshold=2", "threshold=nan", "threshold=x", "top_k=0", "top_k=1e3"):
        reply = served.ask("POST", f"/v2/models/classify/predict?{wrong}", plain(204))
        assert (reply.status, list(reply.json)) == (400, ["error"])


def test_a_mask_is_run_lengths_or_a_png(served: Running) -> None:
    half = np.zeros((32, 48, 3), np.uint8)
    half[:, 24:] = 255
    status, found = post(served, "segment", encoded(half), "image/png")
    assert status == 200
    counts = {each["label"]: each["rle"] for each in found["segments"]}
    assert counts["dark"] == {"size": [32, 48], "counts": [0, 768, 768]}
    assert counts["light"] == {"size": [32, 48], "counts": [768, 768]}
    reply = served.ask("POST", "/v2/models/segment/predict?mask=png", encoded(half))
    assert base64.b64decode(reply.json["png"]).startswith(b"\x89PNG")
    reply = served.ask("POST", "/v2/models/segment/predict?mask=jpeg", encoded(half))
    assert (reply.status, "neither rle nor png" in reply.json["error"]) == (400, True)


def test_an_embedding_is_a_list(served: Running) -> None:
    status, found = post(served, "embed", plain(9), "image/png")
    assert status == 200
    assert found["embedding"] == pytest.approx([3**-0.5] * 3, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"good good good", "text/plain; charset=utf-8"),
        (as_json({"text": "good good good"}), "application/json"),
        (form(("text", b"good good good"))[0], form()[1]),
    ],
    ids=["plain", "json", "form"],
)
def test_a_text_is_answered_with_its_label(served: Running, body: bytes, content_type: str) -> None:
    status, found = post(served, "text-classify", body, content_type)
    assert (status, found["label"], found["score"]) == (200, "good", pytest.approx(0.6))


SEVERAL: dict[str, tuple[bytes, str]] = {
    "form": form(("image", LIGHT), ("image", DARK), ("image", LIGHT)),
    "form of another name": form(("images[]", LIGHT), ("file", DARK), ("images", LIGHT)),
    "json": (as_json({"image": [*map(base64_of, (LIGHT, DARK, LIGHT))]}), "application/json"),
    "json list": (as_json([*map(base64_of, (LIGHT, DARK, LIGHT))]), "application/json"),
    "json without its type": (as_json([*map(base64_of, (LIGHT, DARK, LIGHT))]), ""),
    "data urls": (
        as_json([f"data:image/png;base64,{base64_of(each)}" for each in (LIGHT, DARK, LIGHT)]),
        "application/json",
    ),
}


@pytest.mark.parametrize("way", SEVERAL)
def test_several_images_are_answered_in_their_order(served: Running, way: str) -> None:
    status, found = post(served, "classify", *SEVERAL[way])
    assert status == 200, found
    assert [each["label"] for each in found] == ["light", "dark", "light"]


def test_a_list_of_one_is_answered_with_a_list_and_a_form_of_one_is_not(served: Running) -> None:
    text = {"text": ["good"]}
    status, found = post(served, "text-classify", as_json(text), "application/json")
    assert (status, len(found)) == (200, 1)
    status, found = post(served, "classify", *form(("image", LIGHT)))
    assert (status, found["label"]) == (200, "light")


def test_a_large_form_and_large_json_are_taken_apart_elsewhere(served: Running) -> None:
    """Noise does not compress: 1.2 MB, which the event loop leaves to a thread."""
    noisy = encoded(np.random.default_rng(0).integers(0, 255, (640, 640, 3), np.uint8))
    assert len(noisy) > 1 << 20
    for body, kind in (
        form(("image", noisy), ("image", DARK)),
        (as_json([base64_of(noisy), base64_of(DARK)]), "application/json"),
    ):
        status, found = post(served, "classify", body, kind)
        assert status == 200, found
        assert found[1]["label"] == "dark"
        assert found[0]["score"] == pytest.approx(0.5, abs=0.01)


def test_a_compressed_body_is_read(served: Running) -> None:
    body = gzip.compress(as_json(["good", "bad"]))
    status, found = post(served, "text-classify", body, "application/json", Content_Encoding="gzip")
    assert (status, [each["label"] for each in found]) == (200, ["bad", "bad"])


def test_a_form_may_hold_what_looks_like_its_boundary(served: Running) -> None:
    body, kind = form(("text", b"good\r\n------bad\r\n----b good"))
    status, found = post(served, "text-classify", body, kind)
    assert status == 200, found
    assert found["top"][0]["score"] == pytest.approx(4 / 6)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_answered_is_refused_in_one_line(served: Running, case: str) -> None:
    kind, body, content_type, expected, reason = REFUSED[case]
    status, found = post(served, kind, body, content_type)
    assert (status, list(found)) == (expected, ["error"])
    assert reason in found["error"]
    assert "\n" not in found["error"]
    assert post(served, "classify", LIGHT, "image/png")[0] == 200


@pytest.mark.parametrize("name", hostile_items.ANSWERED)
def test_an_unusual_image_is_answered(served: Running, name: str) -> None:
    status, found = post(served, "classify", hostile_items.ANSWERED[name](), "image/jpeg")
    assert (status, len(found["top"])) == (200, 2)


@pytest.mark.parametrize("name", hostile_items.REFUSED)
def test_a_hostile_image_is_refused_in_one_line(served: Running, name: str) -> None:
    make, reason = hostile_items.REFUSED[name]
    status, found = post(served, "classify", make(), "image/jpeg")
    assert (status, list(found)) == (400, ["error"])
    assert reason in found["error"]
    assert "\n" not in found["error"]


@pytest.mark.parametrize("name", hostile_items.TEXTS)
def test_a_hostile_text_is_refused_in_one_line(opened: dict[str, Any], name: str) -> None:
    text, reason = hostile_items.TEXTS[name]
    with running({"text-classify": opened["text-classify"]}) as server:
        status, found = post(server, "text-classify", text, "text/plain")
    assert (status, found) == (400, {"error": f"the text: {reason}"})


def test_a_client_that_dies_in_its_upload_leaves_nothing(
    served: Running, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    memory = served.server._listener.memory
    before = served.server.repository.models["classify"].metrics.status()["runs"]
    for sent in (10, 100_000):
        raw = served.connect()
        head = request("POST", "/v2/models/classify/predict", Content_Length="3000000")
        raw.send(head + bytes(sent))
        raw.close()
    eventually(lambda: not memory.bytes and not served.server._listener.unanswered)
    assert served.server.repository.models["classify"].metrics.status()["runs"] == before


def test_a_client_that_leaves_is_not_waited_for(
    opened: dict[str, Any], eventually: Callable[[Callable[[], bool]], None]
) -> None:
    with running({"classify": opened["classify"]}) as server:
        body, kind = form(*[("image", LIGHT)] * 50)
        for _ in range(3):
            raw = server.connect()
            raw.send(request("POST", "/v2/models/classify/predict", body, Content_Type=kind))
            raw.close()
        eventually(lambda: not server.server._listener.memory.bytes)
        assert post(server, "classify", LIGHT, "image/png")[0] == 200


def test_items_of_several_requests_are_joined(opened: dict[str, Any]) -> None:
    with running({"classify": opened["classify"]}, max_delay_us=100_000, max_batch=8) as server:
        body, kind = form(*[("image", LIGHT)] * 4)
        threads = [
            threading.Thread(target=post, args=(server, "classify", body, kind)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = server.server.repository.models["classify"].metrics.statistics()
    sizes = {each["batch_size"] for each in counts["batch_stats"]}
    assert counts["inference_count"] == 16
    assert counts["execution_count"] < 16, sizes


def test_a_full_queue_refuses_the_whole_request(opened: dict[str, Any]) -> None:
    with running({"classify": opened["classify"]}, queue=1, max_delay_us=500_000) as server:
        status, found = post(server, "classify", *form(*[("image", LIGHT)] * 60))
        assert status == 503, found


def test_the_memory_budget_counts_what_was_decoded(
    opened: dict[str, Any], eventually: Callable[[Callable[[], bool]], None]
) -> None:
    """Each image becomes 16x24 pixels of three bytes."""
    body, kind = form(*[("image", LIGHT)] * 100)
    with running({"classify": opened["classify"]}, max_held_bytes=150_000) as server:
        memory, other = server.server._listener.memory, server.connect()
        other.send(request("POST", "/v2/models/classify/predict", Content_Length="300000"))
        other.send(bytes(150_000))  # so that the request is not alone
        eventually(lambda: memory.bytes > 80_000)
        status, found = post(server, "classify", body, kind)
        assert (status, "too many bytes" in found["error"]) == (503, True)
        other.close()
        eventually(lambda: not memory.bytes)
        assert post(server, "classify", body, kind)[0] == 200


def test_metadata_names_the_task(served: Running) -> None:
    found = served.ask("GET", "/v2/models/text-classify").json["parameters"]
    assert (found["task"], found["takes"]) == ("text-classify", "text")
    assert "task" not in served.ask("GET", "/v2/models/plain").json["parameters"]


def test_without_its_package_a_model_still_takes_tensors(
    opened: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: object) -> None:
        raise missing("tokenizers")

    monkeypatch.setattr("deploykit.serving.models.task.TaskSteps", absent)
    with running({"m": opened["text-classify"]}) as server:
        status, found = post(server, "m", b"good", "text/plain")
        assert (status, "tokenizers is not installed" in found["error"]) == (501, True)
        assert "tokenizers" in server.ask("GET", "/v2/models/m").json["parameters"]["notes"]
        item = {"datatype": "INT64", "shape": [1, 2], "data": [3, 4]}
        inputs = [{"name": name, **item} for name in ("ids", "mask")]
        assert server.ask("POST", "/v2/models/m/infer", as_json({"inputs": inputs})).status == 200
