"""Bodies of requests to /predict, and those that are refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.support.runtimes.pictures import encoded, photo


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


# model, body, content type; status and reason
REFUSED: dict[str, tuple[str, bytes, str, int, str]] = {
    "empty": ("classify", b"", "image/png", 400, "the body is empty; send image/jpeg"),
    "html": ("classify", b"<html>", "image/png", 400, "is neither PNG, JPEG nor WebP"),
    "cut": ("classify", photo()[:5000], "image/jpeg", 400, "the image: is not a readable image"),
    "type": ("classify", LIGHT, "image/gif", 415, "'image/gif' is not offered; send image/jpeg"),
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
