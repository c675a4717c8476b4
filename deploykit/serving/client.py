"""Ask a running server with the standard library alone: its models, or whether it is ready.

`health` is the health check of containers.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import socket
import ssl
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote as escape
from urllib.parse import urlencode, urlsplit

from deploykit.core.errors import (
    BadInput,
    DeploykitError,
    Expired,
    GateFailed,
    NotFound,
    Overloaded,
    TooLarge,
    UnknownEncoding,
    Unsupported,
    first_line,
    os_reason,
    without_secrets,
)
from deploykit.core.files import StrPath, check_readable
from deploykit.core.json_value import Shown

_ERRORS: dict[int, type[DeploykitError]] = {
    each.http_status: each
    for each in (BadInput, NotFound, TooLarge, UnknownEncoding, Unsupported, Overloaded, Expired)
}
_ITEMS, _BYTES = 64, 16 << 20  # the most items and bytes of one request
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
_MOST_BYTES = 1 << 16  # the most bytes of an answer that are read
_LONGEST_S = 3600
_WAIT_S = 5.0  # how long to wait for an answer
_FORM = "write it as http://HOST:PORT, with the path of a proxy if there is one"
_OWN_CERT = "it may want a client certificate: dk.client(url, cert='cert.pem', key='key.pem')"
_HOST = re.compile(r"[A-Za-z0-9.:_%-]+")
_PATH = re.compile(r"(/[A-Za-z0-9._~%-]+)*")

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
        boundary = os.urandom(16).hex()
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


# -- connections, and the health check -------------------------------------------------------------


def health(url: str) -> None:
    """Ask the server at `url`, or unix:FILE, for /v2/health/ready, which needs no token.

    With https:// the certificate is not checked: it names the server as its clients see it, not as
    localhost. Raises BadInput on a wrong URL, GateFailed unless all models there are ready.
    """
    connection, base = connect(url, _WAIT_S, verify=False)
    try:
        connection.request("GET", f"{base}/v2/health/ready")
        with connection.getresponse() as answer:
            status, body = answer.status, answer.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException, UnicodeError) as exc:
        raise unreachable(GateFailed, url, exc) from exc
    finally:
        connection.close()
    if status != 200:
        raise GateFailed(f"{url}: not ready: it answered {status}: {reason_of(body)}")


def connect(
    url: str,
    timeout_s: float,
    *,
    verify: bool = True,
    ca: StrPath | None = None,
    cert: StrPath | None = None,
    key: StrPath | None = None,
) -> tuple[http.client.HTTPConnection, str]:
    """Return an unopened connection to the server, and the path below which it is.

    `url`: http://..., https://..., or unix:FILE for a socket. `verify`: check an https certificate;
    `ca`: a file of certificates to trust instead of the system's. `cert`: the client's own, and
    `key` its private key, if that is in another file. Raises BadInput on a wrong URL or file.
    """
    what = next((name for name, file in [("ca", ca), ("cert", cert), ("key", key)] if file), None)
    if what is not None and not url.startswith("https:"):
        raise BadInput(f"`{what}` is for https://, and the server is {without_secrets(url)}")
    if not 0 < timeout_s <= _LONGEST_S:
        raise BadInput(f"`timeout_s` must be above 0 and at most {_LONGEST_S}, got {timeout_s:g}")
    if url.startswith("unix:"):
        return _UnixConnection(url.removeprefix("unix:"), timeout_s), ""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as exc:
        raise BadInput(f"'{without_secrets(url)}' is not a URL: {exc}") from exc
    more = parts.query or parts.fragment or parts.username is not None
    path = parts.path.rstrip("/")
    valid = _HOST.fullmatch(host) and _PATH.fullmatch(path) and not more
    if parts.scheme not in ("http", "https") or not valid:
        raise BadInput(f"'{without_secrets(url)}' is not a server's URL", hint=_FORM)
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=timeout_s), path
    what = f"`ca` {ca}: holds no certificate"
    try:
        context = ssl.create_default_context(cafile=ca)
        if own := cert or key:
            what = f"`cert` {cert}, `key` {key}: no certificate and its key without a password"
            context.load_cert_chain(own, key, password=lambda: b"")  # no question at the terminal
    except OSError as exc:
        raise BadInput(f"{what}: {os_reason(exc)}") from exc
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context), path


class _UnixConnection(http.client.HTTPConnection):
    """A connection to the socket at a path."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def unreachable(kind: type[DeploykitError], url: str, exc: Exception) -> DeploykitError:
    reason = getattr(exc, "strerror", None) or reason_of(first_line(exc).encode())
    closed = url.startswith("https:") and isinstance(exc, ConnectionResetError)
    hint = _OWN_CERT if closed else "start one with: deploykit serve model.onnx"
    return kind(f"{url}: no server answers there: {reason}", hint=hint)


def tls_error(url: str, exc: ssl.SSLError) -> BadInput:
    """Return the error for a TLS connection that cannot be made."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        cure = "trust its CA: dk.client(url, ca='ca.pem'), or set SSL_CERT_FILE"
        return BadInput(f"{url}: its certificate is not trusted: {exc.verify_message}", hint=cure)
    reason = (exc.reason or "no reason given").lower().replace("_", " ")
    hint = "is it a server without TLS? then write http://" if "version" in reason else None
    if "alert" in reason:
        hint = _OWN_CERT
    return BadInput(f"{url}: no TLS connection can be made: {reason}", hint=hint)


def reason_of(body: bytes) -> str:
    """Return the `error` of an answer, else its start, as one line that a terminal can show."""
    text = body[:300].decode("utf-8", "replace")
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if isinstance(found, dict) and isinstance(found.get("error"), str):
        text = found["error"][:300]
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
