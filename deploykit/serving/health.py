"""Ask a running server whether it is ready, for health checks of containers."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from deploykit.core.errors import (
    BadInput,
    DeploykitError,
    GateFailed,
    first_line,
    os_reason,
    without_secrets,
)
from deploykit.core.files import StrPath
from deploykit.core.json_value import Record

_MOST_BYTES = 1 << 16  # the most bytes of an answer that are read
_LONGEST_S = 3600
_WAIT_S = 5.0  # how long to wait for an answer
_FORM = "write it as http://HOST:PORT, with the path of a proxy if there is one"
_OWN_CERT = "it may want a client certificate: dk.client(url, cert='cert.pem', key='key.pem')"
_HOST = re.compile(r"[A-Za-z0-9.:_%-]+")
_PATH = re.compile(r"(/[A-Za-z0-9._~%-]+)*")


@dataclass(frozen=True)
class Readiness(Record):
    """The result of `health`: a server that is ready to answer for all its models."""

    url: str
    ready: bool = True


def health(url: str = "http://127.0.0.1:8000") -> Readiness:
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
    return Readiness(url)


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
