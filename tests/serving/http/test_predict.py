"""POST .../predict: images and sentences as clients have them, answers in JSON."""

from __future__ import annotations

import base64
import http.client
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import deploykit as dk
from deploykit.core.extras import missing
from tests.support.fake_engine import FakeEngine
from tests.support.installed import needs
from tests.support.serving.running import Running, request, running

needs("PIL", "tokenizers")

from PIL import Image  # noqa: E402

from deploykit.engines.data import images  # noqa: E402
from deploykit.evaluation.verify import open_proven  # noqa: E402
from tests.support.runtimes.pictures import encoded, noise, photo  # noqa: E402
from tests.support.serving.task_models import write_task_model  # noqa: E402

Make = Callable[[], bytes]


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has a few pixels."""
    found = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b"")):
        found += struct.pack(">I", len(data)) + kind + data
        found += struct.pack(">I", zlib.crc32(kind + data))
    return found


ANSWERED_IMAGES: dict[str, Make] = {
    "one pixel": lambda: encoded(np.zeros((1, 1, 3), np.uint8)),
    "rubbish behind it": lambda: photo() + bytes(100_000),
    "a colour profile": lambda: encoded(
        Image.fromarray(noise(9, 12)).convert("CMYK"), "JPEG", icc_profile=bytes(200_000)
    ),
}


def plain(level: int, kind: str = "PNG") -> bytes:
    """An image of 48x32 pixels."""
    return encoded(np.full((32, 48, 3), level, np.uint8), kind)


LIGHT, DARK = plain(255), plain(0)


def form(*fields: tuple[str, bytes], boundary: str = "----b") -> tuple[bytes, str]:
    """A form as browsers and curl send it: the body and its type."""
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="a b.png"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n".encode()
        + content
        + b"\r\n"
        for name, content in fields
    ]
    body = b"".join(parts) + f"--{boundary}--\r\n".encode()
    return body, f"multipart/form-data; boundary={boundary}"


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


URLENCODED = "application/x-www-form-urlencoded"
FORM = "multipart/form-data; boundary=----b"


def bad_image(make: Make, reason: str) -> tuple[str, Make, str, int, str]:
    return "classify", make, "image/jpeg", 400, reason


def bad_text(body: bytes, reason: str) -> tuple[str, bytes, str, int, str]:
    return "text-classify", body, "text/plain", 400, f"the text: {reason}"


# model, body, content type; status and reason
REFUSED: dict[str, tuple[str, bytes | Make, str, int, str]] = {
    "empty": ("classify", b"", "image/png", 400, "the body is empty; send a JPEG"),
    "type": ("classify", LIGHT, "audio/wav", 415, "'audio/wav' is not offered; send a JPEG"),
    "another field": ("text-classify", b"txet=good", URLENCODED, 400, "has a field 'txet'"),
    "no image in a form": ("classify", b"image=%3F", URLENCODED, 400, "image 1 is not base64"),
    "large form": ("text-classify", b"text=" + b"%41" * 1_300_000, URLENCODED, 400, "model takes"),
    "charset": ("text-classify", b"good", "text/plain; charset=x", 415, "the charset 'x' is"),
    "charset of a field": (
        "text-classify",
        form(("text", b"good"))[0].replace(b"octet-stream", b"x; charset=utf-16"),
        FORM,
        415,
        "the charset 'utf-16' is not offered",
    ),
    "charset of a form": (
        "text-classify",
        *form(("_charset_", b"utf-16"), ("text", b"good")),
        415,
        "the charset 'utf-16' is not offered",
    ),
    "not in its charset": ("text-classify", b"\xe9", "text/plain; charset=ascii", 400, "not UTF-8"),
    "no task": ("plain", LIGHT, "image/png", 501, "model 'plain' has no task"),
    "no model": ("absent", LIGHT, "image/png", 404, "there is no model 'absent'"),
    # forms
    "one of several": (
        "classify",
        *form(("image", LIGHT), ("image", b"?")),
        400,
        "image 2 of 2: is not a readable image",
    ),
    "no file": ("classify", *form(), 400, "the request has no items"),
    "unknown field": ("classify", *form(("x", LIGHT)), 400, "has a field 'x'; possible: image"),
    "too many files": ("classify", *form(*[("image", b"x")] * 257), 413, "more than 256 fields"),
    **{
        reason: ("classify", body, kind, 400, reason)
        for body, kind, reason in (
            (LIGHT, "multipart/form-data", "has no boundary"),
            (form()[0], "multipart/form-data; boundary=c", "does not end with the boundary"),
            (form(("image", LIGHT))[0][:-20], FORM, "does not end with the boundary"),
            (b"------b\r\nA: b\r\n\r\nx\r\n------b--\r\n", FORM, "of the form has no name"),
            (b"------b\r\nx\r\n------b--\r\n", FORM, "has no end of its headers"),
        )
    },
    # JSON
    "too many": ("text-classify", as_json(["good"] * 257), "application/json", 413, "257 items"),
    **{
        f"{kind} {body[:20]!r}": (kind, body, "", 400, reason)
        for kind, body, reason in (
            ("classify", as_json({"text": "a"}), "needs 'image'"),
            ("text-classify", as_json({"text": "a", "k": 1}), "needs 'text' and nothing else"),
            ("text-classify", as_json(["good", 5]), "text 2 must be a string, got 5"),
            ("text-classify", b"[]", "has no items"),
            ("text-classify", as_json([" "]), "the text: is empty"),
            ("text-classify", b'["\\ud83d"]', "is not valid JSON"),
            ("text-classify", b"[" * 101 + b"]" * 101, "nested more than 100 deep"),
            ("classify", as_json(["?!"]), "image 1 is not base64"),
        )
    },
    # images
    "html": bad_image(lambda: b"<html>", "is neither PNG, JPEG nor WebP"),
    "bomb": bad_image(lambda: png_header(50_000, 50_000), "has more than 25 million pixels"),
    "above": bad_image(lambda: png_header(5_001, 5_000), "is 5001x5000, above the limit of 25"),
    "cut": bad_image(lambda: photo()[:9000], "image file is truncated"),
    # text
    "too long": bad_text(b"good " * 100, "has 102 tokens, the model takes 8"),
    "4 MB": bad_text(b"good " * 790_000, "is above 800 bytes, the model takes 8 tokens"),
    "byte order mark": bad_text(b"\xef\xbb\xbf", "is empty"),
    "utf-16": bad_text("good".encode("utf-16"), "is not UTF-8"),
}

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


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        *((form, f"image/{form.lower()}") for form in ("JPEG", "PNG", "WEBP")),
        *(("PNG", kind) for kind in ("", "image/jpg", "image/*", "binary/octet-stream")),
    ],
)
def test_an_image_is_answered_with_its_label(served: Running, form: str, kind: str) -> None:
    """Its bytes say what it is."""
    status, found = post(served, "classify", plain(255, form), kind)
    assert status == 200
    assert (found["label"], [each["index"] for each in found["top"]]) == ("light", [1, 0])
    assert found["score"] == pytest.approx(1.0, abs=1e-5)


def test_an_embedding_is_a_list_and_boxes_are_in_pixels_of_the_image(served: Running) -> None:
    status, found = post(served, "detect", plain(204), "image/png")
    assert status == 200
    assert (found["width"], found["height"]) == (48, 32)
    (only,) = found["boxes"]  # the other one is below the threshold
    assert (only["label"], only["box"]) == ("light", [0, 0, 24, 32])
    assert only["score"] == pytest.approx(0.8, abs=1e-5)
    status, found = post(served, "embed", plain(9), "image/png")
    assert status == 200
    assert found["embedding"] == pytest.approx([3**-0.5] * 3, abs=1e-5)


def test_a_client_may_ask_for_another_threshold_and_number_of_labels(served: Running) -> None:
    reply = served.ask("POST", "/v2/models/detect/predict?threshold=0.1", plain(204))
    assert [each["label"] for each in reply.json["boxes"]] == ["light", "dark"]
    reply = served.ask("POST", "/v2/models/classify/predict?top_k=1", plain(204))
    assert [each["label"] for each in reply.json["top"]] == ["light"]
    for wrong, reason in (
        ("detect/predict?threshold=2", "threshold"),
        ("detect/predict?threshold=nan", "threshold"),
        ("detect/predict?threshold=x", "is not a number"),
        ("classify/predict?top_k=0", "top_k"),
        ("classify/predict?top_k=1e3", "is not a number"),
        ("classify/predict?topk=1", "'topk', which is not known here; did you mean top_k?"),
        ("classify/predict?threshold=0.1", "not known here; possible: top_k"),
        ("embed/predict?x=", "not known here; it takes no parameters"),
    ):
        reply = served.ask("POST", f"/v2/models/{wrong}", plain(204))
        assert (reply.status, list(reply.json)) == (400, ["error"])
        assert reason in reply.json["error"]


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


@pytest.mark.parametrize("coding", [None, "gzip"])
@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_sends_images_and_text_over_http_as_over_grpc(
    served: Running, binary: bool, coding: str | None
) -> None:
    triton = pytest.importorskip("tritonclient.http")

    def ask(model: str, name: str, items: list[bytes]) -> Any:
        item = triton.InferInput(name, [len(items)], "BYTES")
        item.set_data_from_numpy(np.array(items, object), binary_data=binary)
        wanted = [triton.InferRequestedOutput("answer", binary_data=binary)]
        given = {"outputs": wanted, "request_compression_algorithm": coding}
        return client.infer(model, [item], **given).as_numpy("answer")

    images = [LIGHT, DARK] if binary else [base64.b64encode(each) for each in (LIGHT, DARK)]
    with triton.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
        found = [json.loads(each) for each in ask("classify", "image", images)]
        assert [each["label"] for each in found] == ["light", "dark"]
        (text,) = ask("text-classify", "text", [b"good good good"])
        assert json.loads(text)["label"] == "good"
        with pytest.raises(triton.InferenceServerException, match="image 2 of 2"):
            ask("classify", "image", [images[0], b"?"])


SENTENCE = b"good good good"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (SENTENCE, "text/plain; charset=utf-8"),
        (as_json({"text": "good good good"}), "application/json"),
        form(("text", SENTENCE)),
        form(("_charset_", b"UTF-8"), ("text", SENTENCE)),  # by a browser
        (as_json({"text": "good good good"}), URLENCODED),  # by `curl -d`
        (b"text=good+good%20good", URLENCODED),
        (SENTENCE, URLENCODED),  # as `curl -d` sends a sentence
        (SENTENCE, 'text/plain; charset="US-ASCII"'),
        (b"old\r\n" + form(("text", SENTENCE))[0] + b"after it", FORM),
        (form(("text", SENTENCE))[0].replace(b"----b\r\n", b"----b \t\r\n"), FORM),
    ],
)
def test_a_text_is_answered_with_its_label(served: Running, body: bytes, content_type: str) -> None:
    status, found = post(served, "text-classify", body, content_type)
    assert (status, found["label"], found["score"]) == (200, "good", pytest.approx(0.6))


IN_BASE64 = [base64.b64encode(each).decode() for each in (LIGHT, DARK, LIGHT)]
SEVERAL: dict[str, tuple[bytes, str]] = {
    "form": form(("image", LIGHT), ("image", DARK), ("image", LIGHT)),
    "form of another name": form(("images[]", LIGHT), ("file", DARK), ("images", LIGHT)),
    "json": (as_json({"image": IN_BASE64}), "application/json"),
    "json without its type": (as_json(IN_BASE64), ""),
    "base64url": (
        as_json([each.replace("+", "-").replace("/", "_").rstrip("=") for each in IN_BASE64]),
        "application/vnd.api+json",
    ),
    "data urls": (
        as_json([f"data:image/png;base64,{each}" for each in IN_BASE64]),
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
        (as_json([base64.b64encode(noisy).decode(), IN_BASE64[1]]), "application/json"),
    ):
        status, found = post(served, "classify", body, kind)
        assert status == 200, found
        assert found[1]["label"] == "dark"
        assert found[0]["score"] == pytest.approx(0.5, abs=0.01)


def test_a_form_may_hold_what_looks_like_its_boundary(served: Running) -> None:
    body, kind = form(("text", b"good\r\n------bad ------b\r\n----b good"))
    status, found = post(served, "text-classify", body, kind)
    assert status == 200, found
    assert found["top"][0]["score"] == pytest.approx(5 / 7)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_answered_is_refused_in_one_line(served: Running, case: str) -> None:
    kind, body, content_type, expected, reason = REFUSED[case]
    status, found = post(served, kind, body if isinstance(body, bytes) else body(), content_type)
    assert (status, list(found)) == (expected, ["error"])
    assert reason in found["error"]
    assert "\n" not in found["error"]
    assert post(served, "classify", LIGHT, "image/png")[0] == 200


@pytest.mark.parametrize("name", ANSWERED_IMAGES)
def test_an_unusual_image_is_answered(served: Running, name: str) -> None:
    status, found = post(served, "classify", ANSWERED_IMAGES[name](), "image/jpeg")
    assert (status, len(found["top"])) == (200, 2)


def test_the_limit_of_pixels_is_an_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A phone has 48 million."""
    monkeypatch.setattr(images, "_limits", {"pixels": images.MAX_PIXELS})
    large = encoded(np.zeros((5_000, 6_000, 3), np.uint8), "JPEG")
    write_task_model(tmp_path, "classify")
    for options, status in (({}, 400), ({"max_pixels": 30_000_000}, 200)):
        with dk.serve(tmp_path / "classify.onnx", grpc_port=None, threads=1, **options) as server:
            connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
            connection.request("POST", "/v2/models/classify/predict", large)
            with connection.getresponse() as reply:
                answer = reply.read().decode()
            connection.close()
            assert reply.status == status
            assert status == 200 or "`max_pixels`" in answer


def test_items_of_several_requests_are_joined(opened: dict[str, Any]) -> None:
    with running({"classify": opened["classify"]}, max_delay_us=100_000, max_batch=8) as server:
        body, kind = form(*[("image", LIGHT)] * 4)
        raws = [server.connect() for _ in range(4)]
        for raw in raws:
            raw.send(request("POST", "/v2/models/classify/predict", body, Content_Type=kind))
        assert [raw.status() for raw in raws] == [200] * 4
        counts = server.server.repository.models["classify"].metrics.statistics()
    assert counts["inference_count"] == 16
    assert counts["execution_count"] < 16, counts["batch_stats"]


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

    monkeypatch.setattr("deploykit.serving.models.model.TaskSteps", absent)
    with running({"m": opened["text-classify"]}) as server:
        status, found = post(server, "m", b"good", "text/plain")
        assert (status, "tokenizers is not installed" in found["error"]) == (501, True)
        assert "tokenizers" in server.ask("GET", "/v2/models/m").json["parameters"]["notes"]
        item = {"datatype": "INT64", "shape": [1, 2], "data": [3, 4]}
        inputs = [{"name": name, **item} for name in ("ids", "mask")]
        assert server.ask("POST", "/v2/models/m/infer", as_json({"inputs": inputs})).status == 200
