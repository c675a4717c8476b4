"""POST .../predict: images and sentences as clients have them, answers in JSON."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import struct
import threading
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

_FORMATS = "is neither PNG, JPEG nor WebP"
_TURNED = Image.Exif()
_TURNED[0x0112] = 6
Make = Callable[[], bytes]


def small_image(mode: str = "RGB") -> Any:
    return Image.fromarray(noise(9, 12)).convert(mode)


def frames(kind: str, count: int) -> bytes:
    others = [Image.fromarray(noise(9, 12, seed=seed)) for seed in range(1, count)]
    return encoded(small_image(), kind, save_all=True, append_images=others)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and has a few pixels."""
    found = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b"")):
        found += struct.pack(">I", len(data)) + kind + data
        found += struct.pack(">I", zlib.crc32(kind + data))
    return found


def comments(count: int) -> bytes:
    """A PNG with so many empty comments."""
    data, comment = encoded(small_image()), b"tEXt"
    one = struct.pack(">I", 0) + comment + struct.pack(">I", zlib.crc32(comment))
    return data[:-12] + count * one + data[-12:]


def many_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan, of a few bytes, comes so many times."""
    data = encoded(small_image("L"), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + count * data[last:-2] + data[-2:]


ANSWERED_IMAGES: dict[str, Make] = {
    "cmyk": lambda: encoded(small_image("CMYK"), "JPEG"),
    "turned": lambda: encoded(small_image(), "JPEG", exif=_TURNED),
    "one pixel": lambda: encoded(np.zeros((1, 1, 3), np.uint8)),
    "alpha": lambda: encoded(small_image("RGBA")),
    "grey and alpha": lambda: encoded(small_image("LA")),
    "palette": lambda: encoded(small_image("P")),
    "one bit": lambda: encoded(small_image("1")),
    "two images of a phone": lambda: frames("MPO", 2),
    "rubbish behind it": lambda: photo() + bytes(100_000),
    "many scans": lambda: many_scans(90),
    "a colour profile": lambda: encoded(small_image("CMYK"), "JPEG", icc_profile=bytes(200_000)),
    "a long side": lambda: encoded(np.zeros((1, 60_000, 3), np.uint8)),
}
REFUSED_IMAGES: dict[str, tuple[Make, str]] = {
    "bomb": (lambda: png_header(50_000, 50_000), "has more than 25 million pixels"),
    "smaller bomb": (lambda: png_header(5_001, 5_000), "is 5001x5000, above the limit of 25"),
    "thread": (lambda: png_header(70_000, 1), "is 70000x1, a side has 65535 at most"),
    "no size": (lambda: png_header(0, 0), _FORMATS),
    "gif": (lambda: frames("GIF", 30), _FORMATS),
    "animated webp": (lambda: frames("WEBP", 20), "has 20 frames, one image per file"),
    "animated png": (lambda: frames("PNG", 5), "has 5 frames, one image per file"),
    "16 bits": (
        lambda: encoded(Image.fromarray(np.zeros((4, 4), np.uint16))),
        "has more than 8 bits per channel",
    ),
    "cut": (lambda: photo()[:9000], "image file is truncated"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", _FORMATS),
    "tiff": (lambda: encoded(small_image(), "TIFF"), _FORMATS),
    "heic": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(2000), _FORMATS),
    "too many scans": (lambda: many_scans(100), "a JPEG has 100 at most"),
    "half of a progressive one": (
        lambda: encoded(noise(90, 120), "JPEG", progressive=True)[:4000],
        "image file is truncated",
    ),
    "parts": (lambda: comments(50_000), "it has too many parts"),
}
REFUSED_TEXTS: dict[str, tuple[bytes, str]] = {
    "too long": (b"good " * 100, "has 102 tokens, the model takes 8"),
    "10 MB": (b"good " * 2_000_000, "is above 800 bytes, the model takes 8 tokens"),
    "spaces": (b" \n", "is empty"),
    "byte order mark": (b"\xef\xbb\xbf", "is empty"),
    "no utf-8": (b"\xff\xfe\0", "is not UTF-8"),
    "utf-16": ("good".encode("utf-16"), "is not UTF-8"),
    "half of a pair": (b"\xed\xa0\x80", "is not UTF-8"),
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

# model, body, content type; status and reason
REFUSED: dict[str, tuple[str, bytes, str, int, str]] = {
    "empty": ("classify", b"", "image/png", 400, "the body is empty; send a JPEG"),
    "html": ("classify", b"<html>", "image/png", 400, "is neither PNG, JPEG nor WebP"),
    "cut": ("classify", photo()[:5000], "image/jpeg", 400, "the image: is not a readable image"),
    "type": ("classify", LIGHT, "audio/wav", 415, "'audio/wav' is not offered; send a JPEG"),
    "another field": ("text-classify", b"txet=good", URLENCODED, 400, "has a field 'txet'"),
    "no image in a form": ("classify", b"image=%3F", URLENCODED, 400, "image 1 is not base64"),
    "charset": ("text-classify", b"good", "text/plain; charset=x", 415, "the charset 'x' is"),
    "codec": ("text-classify", b"x\x9c", "text/plain; charset=zlib", 415, "charset 'zlib' is not"),
    "slow codec": ("text-classify", b"good", "text/plain; charset=punycode", 415, "is not offered"),
    "large form": (
        "text-classify",
        b"text=" + b"%41" * 1_300_000,
        URLENCODED,
        400,
        "the model takes",
    ),
    "not in its charset": (
        "text-classify",
        b"\xe9",
        "text/plain; charset=ascii",
        400,
        "is not UTF-8",
    ),
    "text for images": ("classify", b"cat", "text/plain", 415, "'text/plain' is not offered"),
    "image for text": ("text-classify", LIGHT, "image/png", 415, "'image/png' is not offered"),
    "one of several": (
        "classify",
        *form(("image", LIGHT), ("image", b"?")),
        400,
        "image 2 of 2: is not a readable image",
    ),
    "no file": ("classify", *form(), 400, "the request has no items"),
    "unknown field": ("classify", *form(("x", LIGHT)), 400, "has a field 'x'; possible: image"),
    "no boundary": ("classify", LIGHT, "multipart/form-data", 400, "has no boundary"),
    "another boundary": (
        "classify",
        form(("image", LIGHT))[0],
        "multipart/form-data; boundary=c",
        400,
        "does not begin with the boundary",
    ),
    "form without its end": (
        "classify",
        form(("image", LIGHT))[0][:-20],
        form()[1],
        400,
        "ends before its last boundary",
    ),
    "field without a name": (
        "classify",
        b"------b\r\nContent-Type: image/png\r\n\r\nx\r\n------b--\r\n",
        form()[1],
        400,
        "a field of the form has no name",
    ),
    "field without headers": (
        "classify",
        b"------b\r\nx\r\n------b--\r\n",
        form()[1],
        400,
        "has no end of its headers",
    ),
    "too many": ("text-classify", as_json(["good"] * 257), "application/json", 413, "257 items"),
    "too many files": ("classify", *form(*[("image", b"x")] * 257), 413, "more than 256 fields"),
    "no json": ("classify", b"{", "application/json", 400, "is not valid JSON"),
    "json of another kind": ("classify", as_json({"text": "a"}), "", 400, "needs 'image'"),
    "two keys": (
        "text-classify",
        as_json({"text": "a", "k": 1}),
        "",
        400,
        "needs 'text' and nothing else",
    ),
    "number": ("text-classify", as_json(["good", 5]), "", 400, "text 2 must be a string, got 5"),
    "null": ("text-classify", b"null", "application/json", 400, "text 1 must be a string"),
    "empty list": ("text-classify", b"[]", "application/json", 400, "has no items"),
    "no base64": ("classify", as_json(["?!"]), "", 400, "image 1 is not base64"),
    "not ascii": ("classify", as_json(["ü"]), "", 400, "image 1 is not base64"),
    "empty text": ("text-classify", as_json([" "]), "", 400, "the text: is empty"),
    "long text": ("text-classify", b"good " * 9, "text/plain", 400, "has 11 tokens, the model"),
    "no utf-8": ("text-classify", b"\xff\xfe", "text/plain", 400, "the text: is not UTF-8"),
    "lone surrogate": ("text-classify", b'["\\ud83d"]', "", 400, "is not valid JSON"),
    "nested": ("text-classify", b"[" * 101 + b"]" * 101, "", 400, "nested more than 100 deep"),
    "no task": ("plain", LIGHT, "image/png", 501, "model 'plain' has no task"),
    "no model": ("absent", LIGHT, "image/png", 404, "there is no model 'absent'"),
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


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("kind", ["image/{}", "", "image/jpg", "image/*", "binary/octet-stream"])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_an_image_is_answered_with_its_label(served: Running, form: str, kind: str) -> None:
    """Its bytes say what it is."""
    status, found = post(served, "classify", plain(255, form), kind.format(form.lower()))
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
        tensor = triton.InferInput("image", [1, 16, 24, 3], "UINT8")
        tensor.set_data_from_numpy(np.zeros((1, 16, 24, 3), np.uint8), binary_data=binary)
        names = {each["name"] for each in client.get_model_metadata("classify")["outputs"]}
        answer = client.infer("classify", [tensor], request_compression_algorithm=coding)
        assert {each["name"] for each in answer.get_response()["outputs"]} == names


def test_an_embedding_is_a_list(served: Running) -> None:
    status, found = post(served, "embed", plain(9), "image/png")
    assert status == 200
    assert found["embedding"] == pytest.approx([3**-0.5] * 3, abs=1e-5)


UTF16 = "application/json; charset=utf-16-le"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"good good good", "text/plain; charset=utf-8"),
        (as_json({"text": "good good good"}), "application/json"),
        (form(("text", b"good good good"))[0], form()[1]),
        (b"text=good+good%20good", URLENCODED),
        (b"good good good", URLENCODED),  # as `curl -d` sends a sentence
        ("good good good".encode("utf-16"), "text/plain; charset=utf-16"),
        (as_json({"text": "good good good"}).decode().encode("utf-16-le"), UTF16),
        (b"old\r\n" + form(("text", b"good good good"))[0] + b"after it", form()[1]),
        (form(("text", b"good good good"))[0].replace(b"----b\r\n", b"----b \t\r\n"), form()[1]),
        form(("_charset_", b"utf-16-be"), ("text", "good good good".encode("utf-16-be"))),
    ],
    ids=[
        "plain",
        "json",
        "form",
        "urlencoded",
        "sentence",
        "charset",
        "charset of JSON",
        "preamble",
        "padding",
        "form charset",
    ],
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
    "base64url": (
        as_json(
            [base64.urlsafe_b64encode(each).decode().rstrip("=") for each in (LIGHT, DARK, LIGHT)]
        ),
        "application/vnd.api+json",
    ),
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


@pytest.mark.parametrize("name", ANSWERED_IMAGES)
def test_an_unusual_image_is_answered(served: Running, name: str) -> None:
    status, found = post(served, "classify", ANSWERED_IMAGES[name](), "image/jpeg")
    assert (status, len(found["top"])) == (200, 2)


@pytest.mark.parametrize("name", REFUSED_IMAGES)
def test_a_hostile_image_is_refused_in_one_line(served: Running, name: str) -> None:
    make, reason = REFUSED_IMAGES[name]
    status, found = post(served, "classify", make(), "image/jpeg")
    assert (status, list(found)) == (400, ["error"])
    assert reason in found["error"]
    assert "\n" not in found["error"]


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


@pytest.mark.parametrize("name", REFUSED_TEXTS)
def test_a_hostile_text_is_refused_in_one_line(opened: dict[str, Any], name: str) -> None:
    text, reason = REFUSED_TEXTS[name]
    with running({"text-classify": opened["text-classify"]}) as server:
        status, found = post(server, "text-classify", text, "text/plain")
    assert (status, found) == (400, {"error": f"the text: {reason}"})


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

    monkeypatch.setattr("deploykit.serving.models.model.TaskSteps", absent)
    with running({"m": opened["text-classify"]}) as server:
        status, found = post(server, "m", b"good", "text/plain")
        assert (status, "tokenizers is not installed" in found["error"]) == (501, True)
        assert "tokenizers" in server.ask("GET", "/v2/models/m").json["parameters"]["notes"]
        item = {"datatype": "INT64", "shape": [1, 2], "data": [3, 4]}
        inputs = [{"name": name, **item} for name in ("ids", "mask")]
        assert server.ask("POST", "/v2/models/m/infer", as_json({"inputs": inputs})).status == 200
