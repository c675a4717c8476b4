"""Restrict who may call the server: token, Host and Origin, and TLS.

Any web page can send requests to localhost from the user's browser, so a server on loopback must
refuse those of other sites (DNS rebinding, cross-site forms), whatever the method.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from collections.abc import Collection, Sequence
from pathlib import Path

from deploykit.core.errors import BadInput, first_line, os_reason
from deploykit.serving.options import ServeOptions
from deploykit.serving.transport.call import Refusal

_LOCAL = re.compile(rb"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_ORIGIN = re.compile(r"https?://[^/\s@]+", re.IGNORECASE)
HEALTH = "/v2/health/"  # these paths need no token, for health checks


class Guard:
    """Checks `Authorization: Bearer TOKEN` in constant time."""

    def __init__(self, token: str | None) -> None:
        self._digest = None if token is None else hashlib.sha256(token.encode()).digest()

    def allows(self, authorization: bytes | None) -> bool:
        if self._digest is None:
            return True
        scheme, _, token = (authorization or b"").partition(b" ")
        same = hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)
        return same and scheme.lower() == b"bearer"


class AccessControl:
    """The rules of one server: its token, and the origins of pages that may call it."""

    def __init__(
        self,
        guard: Guard,
        *,
        loopback: bool,
        origins: Sequence[str] = (),
        public: Collection[str] = (),
    ) -> None:
        """Check `origins`. `public`: paths without a token, such as the dashboard's."""
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise BadInput(
                    f"`origins` {origin}: not an origin",
                    hint="scheme, host and port as a browser sends them: https://example.org:8080",
                )
        self._guard = guard
        self._public = frozenset(public)
        self._loopback = loopback
        self._origins = {origin.lower().encode() for origin in origins}

    def refusal(
        self,
        method: str,
        path: str,
        host: bytes | None,
        origin: bytes | None,
        authorization: bytes | None,
    ) -> Refusal | None:
        """Return why a request is refused; None if it is allowed."""
        if self._loopback and host is not None and not _LOCAL.fullmatch(host):
            return Refusal(403, "this server answers on localhost only; see `host`")
        if origin is not None and not self._is_known(origin, host):
            text = f"pages of {ascii(origin.decode('latin-1'))[:80]} may not call this server"
            return Refusal(403, f"{text}; see `origins`")
        open_ = path.startswith(HEALTH) or path in self._public
        # browsers send CORS preflight requests without a token
        open_ = open_ or (method == "OPTIONS" and origin is not None)
        if not open_ and not self._guard.allows(authorization):
            text = "a token is needed: send the header 'Authorization: Bearer TOKEN'"
            return Refusal(401, text, b"WWW-Authenticate: Bearer\r\n")
        return None

    def _is_known(self, origin: bytes, host: bytes | None) -> bool:
        if origin.lower() in self._origins:
            return True
        place = origin.partition(b"://")[2]
        return bool(_LOCAL.fullmatch(place)) if self._loopback else bool(place) and place == host


def allow_origin(origin: bytes) -> bytes:
    """Return the headers that let a page of `origin`, which is allowed, read a reply."""
    return (
        b"Access-Control-Allow-Origin: " + origin + b"\r\nVary: Origin\r\n"
        b"Access-Control-Expose-Headers: Inference-Header-Content-Length\r\n"
    )


PREFLIGHT = (
    b"Access-Control-Allow-Methods: GET, HEAD, POST\r\n"
    b"Access-Control-Allow-Headers: Authorization, Content-Type, Content-Encoding, "
    b"Inference-Header-Content-Length, Traceparent\r\n"
    b"Access-Control-Max-Age: 600\r\n"
)


def tls_context(options: ServeOptions, protocol: str) -> ssl.SSLContext | None:
    """Return a context for TLS 1.2 or newer with the server's certificate; None without one.

    Raises BadInput naming the invalid file.
    """
    if options.tls_cert is None or options.tls_key is None:
        return None
    cert, key = Path(options.tls_cert), Path(options.tls_key)
    for parameter, path in (("`tls_cert`", cert), ("`tls_key`", key)):
        try:
            data = path.read_bytes()
        except OSError as exc:
            raise BadInput(f"{parameter} {path}: {os_reason(exc)}") from exc
        if b"-----BEGIN " not in data:
            raise BadInput(f"{parameter} {path}: not a PEM file", hint="it begins with -----BEGIN")
        if parameter == "`tls_key`" and b"ENCRYPTED" in data:
            raise BadInput(
                f"{parameter} {path}: the key is encrypted",
                hint="openssl pkey -in KEY -out PLAIN writes it without its password",
            )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            raise BadInput(f"`tls_key` {key} does not belong to `tls_cert` {cert}") from exc
        reason = exc.reason or first_line(exc)
        raise BadInput(f"`tls_cert` {cert}, `tls_key` {key}: {reason}") from exc
    return context
