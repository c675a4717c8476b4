"""Call a server's models from Python, with the standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import secrets
import ssl
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote as escape
from urllib.parse import urlencode

from deploykit.core.errors import (
    BadInput,
    DeploykitError,
    Expired,
    NotFound,
    Overloaded,
    TooLarge,
    UnknownEncoding,
    Unsupported,
)
from deploykit.core.files import StrPath, check_readable
from deploykit.core.json_value import Shown
from deploykit.serving.health import connect, reason_of, tls_error, unreachable

_ERRORS: dict[int, type[DeploykitError]] = {
    each.http_status: each
    for each in (BadInput, NotFound, TooLarge, UnknownEncoding, Unsupported, Overloaded, Expired)
}
_ITEMS, _BYTES = 64, 16 << 20  # the most items and bytes of one request
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")

OneItem = str | os.PathLike[str] | bytes | Any  # a PIL image


class ModelClient(Shown):
    """A client of the server at `url`; close it, or use it in a `with` block.

    `url` may have a path, as behind a proxy; `unix:FILE` is a server's socket on this machine.
    `ca`: a file with the certificates to trust instead of the system's, such as that of a server's
    own CA. `cert`: the client's certificate, for a server that wants one; `key`: its private key,
    if that is in a file of its own. Raises BadInput for a wrong URL or file.

    Threads may share it, and a forked process may go on with it: no connection is used by two of
    them at once. `close` ends all connections of this process: idle ones at once, a busy one as
    soon as it has its answer. A call after `close` opens a new one.
    """

    in_notebook = ("url",)

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca: StrPath | None = None,
        cert: StrPath | None = None,
        key: StrPath | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.url = url
        self._connect = partial(connect, url, timeout_s, ca=ca, cert=cert, key=key)
        self._timeout_s = timeout_s
        connection, self._base = self._connect()
        self._idle = [connection]  # of this process; `close` makes a new list
        self._process = os.getpid()
        self._headers = {} if token is None else {"Authorization": f"Bearer {token.strip()}"}
        if not all(each.isascii() and each.isprintable() for each in self._headers.values()):
            raise BadInput("`token`: has characters that no header can carry")
        self._takes: dict[str, tuple[str, bool]] = {}
        self._model: str | None = None

    def predict(
        self,
        item: OneItem | Sequence[OneItem],
        model: str | None = None,
        *,
        mask: str | None = None,
        threshold: float | None = None,
        top_k: int | None = None,
    ) -> Any:
        """Return the answer to one item, or a list of answers to a list of items.

        An item is a path, the bytes of an image file or a PIL image for a model that takes images;
        a string for one that takes sentences; JSON or bytes for a pipeline that takes those.
        `model` None: the only one that is served. `mask`: "rle" or "png"; `threshold`: the least
        score of a box; `top_k`: how many labels. Raises the server's error reply as deploykit's own
        error, and NotFound where no server answers.
        """
        options = {"mask": mask, "threshold": threshold, "top_k": top_k}
        model = model or self._only_model()
        several = isinstance(item, (list, tuple))
        items: Sequence[Any] = item if isinstance(item, (list, tuple)) else [item]
        query = urlencode({key: value for key, value in options.items() if value is not None})
        path = f"/v2/models/{escape(model, safe='')}/predict?{query}"
        takes, pipeline = self._what_it_takes(model)
        data = map(_text if takes in ("text", "json") else _image, items)
        found: list[Any] = []
        if pipeline:
            found = [self._ask("POST", path, one, any_bytes=True) for one in data]
            return found if several else found[0]
        boundary = secrets.token_hex(16)
        start = f'--{boundary}\r\nContent-Disposition: form-data; name="{takes}"\r\n\r\n'.encode()
        for group in _groups(data):
            form = b"".join([start + one + b"\r\n" for one in group]) + f"--{boundary}--".encode()
            answers = self._ask("POST", path, form, f"multipart/form-data; boundary={boundary}")
            found += answers if len(group) > 1 else [answers]
        return found if several else found[0]

    def close(self) -> None:
        idle, self._idle = self._idle, []
        _close_all(idle)

    def __enter__(self) -> ModelClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _only_model(self) -> str:
        if self._model is None:
            names = [each["name"] for each in self._ask("POST", "/v2/repository/index")]
            if len(names) != 1:
                raise BadInput(f"{self.url} serves {', '.join(names)}: `model` names one of them")
            self._model = names[0]
        return self._model

    def _what_it_takes(self, model: str) -> tuple[str, bool]:
        """Return what the model takes, and whether it is a pipeline: one item per request."""
        if model not in self._takes:
            metadata = self._ask("GET", f"/v2/models/{escape(model, safe='')}")
            takes = metadata.get("parameters", {}).get("takes")
            if takes is None:
                text = f"model '{model}' at {self.url} has no task, so it takes only tensors"
                raise Unsupported(text, hint="export it with `task`")
            self._takes[model] = takes, metadata.get("platform") == "deploykit_pipeline"
        return self._takes[model]

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        content_type: str = "",
        *,
        any_bytes: bool = False,
    ) -> Any:
        """Return the JSON of the reply, or with `any_bytes` also a body that is not JSON."""
        headers = {**self._headers, **({"Content-Type": content_type} if content_type else {})}
        try:
            status, answer = self._exchange(method, self._base + path, body, headers)
        except ssl.SSLError as exc:
            raise tls_error(self.url, exc) from exc
        except TimeoutError as exc:
            raise Expired(f"{self.url}: no answer within {self._timeout_s:g} s") from exc
        except (OSError, http.client.HTTPException) as exc:
            raise unreachable(NotFound, self.url, exc) from exc
        if status != 200:
            kind = _ERRORS.get(status, BadInput if 400 <= status < 500 else DeploykitError)
            raise kind(f"{self.url}: {reason_of(answer)}")
        try:
            return json.loads(answer)
        except ValueError:
            if any_bytes:
                return answer
            raise BadInput(
                f"{self.url}: its answer is not JSON; is it a deploykit server?"
            ) from None

    def _exchange(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        """Return the reply's status and body; its connection is out of the list until then."""
        if self._process != os.getpid():  # forked: these are copies of the parent's connections
            self.close()
            self._process = os.getpid()
        idle = self._idle
        try:
            connection = idle.pop()
        except IndexError:
            connection = self._connect()[0]
        kept = connection.sock is not None
        while True:
            try:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, path, body or None, headers)
                with connection.getresponse() as reply:  # also to a body that was refused early
                    answer = reply.status, reply.read()
                break
            except BaseException as exc:
                connection.close()
                lost = isinstance(exc, (OSError, http.client.HTTPException))
                if not (kept and lost) or isinstance(exc, TimeoutError):
                    raise
                kept = False  # the server may have closed it while it was idle
        idle.append(connection)
        if self._idle is not idle:  # `close` was called meanwhile
            _close_all(idle)
        return answer


client = ModelClient  # `dk.client(url).predict("cat.jpg")`


def _close_all(idle: list[http.client.HTTPConnection]) -> None:
    while idle:
        with contextlib.suppress(IndexError):  # another thread took the last one
            idle.pop().close()


def _text(item: OneItem) -> bytes:
    if isinstance(item, (str, bytes)):  # the server refuses what is not UTF-8
        return item if isinstance(item, bytes) else item.encode("utf-8", "surrogatepass")
    raise BadInput(f"the model takes text, and the item is a {type(item).__name__}")


def _image(item: OneItem) -> bytes:
    if isinstance(item, (bytes, bytearray, memoryview)):
        return bytes(item)
    if isinstance(item, (str, os.PathLike)):
        return check_readable(Path(item)).read_bytes()
    if not hasattr(item, "save") or not hasattr(item, "mode"):
        text = f"the model takes images, and the item is a {type(item).__name__}"
        raise BadInput(text, hint="give a path, the bytes of an image file or a PIL image")
    if item.mode[0] in "IF":  # rejected as on the server: conversion to bytes would clip
        raise BadInput(f"the image has more than 8 bits per channel ({item.mode})")
    data = io.BytesIO()
    (item if item.mode in _PNG_MODES else item.convert("RGB")).save(data, "PNG")
    return data.getvalue()


def _groups(images: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Group as many images together as one request may hold."""
    group: list[bytes] = []
    for image in images:
        if group and (len(group) == _ITEMS or sum(map(len, group)) + len(image) > _BYTES):
            yield group
            group = []
        group.append(image)
    if group:
        yield group
