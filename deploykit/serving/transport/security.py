"""Restrict who may call the server: token, Host and Origin, and TLS.

Any web page can send requests to localhost from the user's browser, so a server on loopback must
refuse those of other sites (DNS rebinding, cross-site forms), whatever the method.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import ssl
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from deploykit.core.artefact import file_stamp
from deploykit.core.errors import BadInput, quote
from deploykit.core.files import StrPath, check_readable
from deploykit.serving.options import ServeOptions
from deploykit.serving.transport.connection import Refusal
from deploykit.serving.transport.listener import reason_of

log = logging.getLogger(__name__)

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s@]+", re.IGNORECASE)  # apps have their own schemes
_PLACE = re.compile(rb"(\[[0-9a-f:.]+\]|[^:\[\]@\s]+)(?::(\d*))?")  # host and port
_HOST = re.compile(
    r"\*|(\*?\.)?([A-Za-z0-9_-]+\.)*[A-Za-z0-9_-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?"
)
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2048}")
_UNRESERVED = re.compile(r"%(2[DdEe]|3[0-9]|[46][1-9A-Fa-f]|[57][0-9Aa]|5[Ff]|7[Ee])")
HEALTH = "/v2/health/"  # these paths need no token, for health checks


class AccessControl:
    """The rules of one server: its token, its names, and the origins of pages that may call it."""

    def __init__(
        self, options: ServeOptions, *, loopback: bool, public: Collection[str] = ()
    ) -> None:
        """Check the options. `public`: paths without a token, such as the dashboard's."""
        for parameter, pattern, hint in (
            ("origins", _ORIGIN, "as a browser sends it: https://example.org:8080"),
            ("allowed_hosts", _HOST, "example.org, example.org:8080, *.example.org or *"),
        ):
            for value in getattr(options, parameter):
                if not pattern.fullmatch(value):
                    raise BadInput(f"`{parameter}` {value}: cannot be used", hint=hint)
        self.set_token(options.token)
        self._root = options.root_path.rstrip("/")
        self._public = {*public, self._root}  # which is answered with its folder, the dashboard
        self._loopback = loopback
        self._origins = {origin.lower().encode() for origin in options.origins}
        hosts = {host.lower().encode() for host in options.allowed_hosts}
        self._any_host = b"*" in hosts or not (hosts or loopback)
        self._hosts = {host for host in hosts if host[:1] not in (b"*", b".")}
        self._domains = tuple(host.lstrip(b"*") for host in hosts - self._hosts - {b"*"})

    def set_token(self, token: str | None) -> None:
        self._digest = None if token is None else hashlib.sha256(token.encode()).digest()

    def allows(self, authorization: bytes | None) -> bool:
        """Check `Authorization: Bearer TOKEN` in constant time."""
        if self._digest is None:
            return True
        scheme, _, token = (authorization or b"").partition(b" ")
        same = hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)
        return same and scheme.lower() == b"bearer"

    def path_of(self, target: str) -> str:
        """Return the path of a target, below `root_path`, as the routes are written."""
        path = target.partition("?")[0]
        if "%" in path:
            path = _UNRESERVED.sub(lambda match: unquote(match[0]), path)
        if self._root and path.startswith(self._root + "/"):
            path = path[len(self._root) :]
        return path

    def refusal(
        self, method: str, path: str, host: bytes | None, headers: Mapping[bytes, bytes]
    ) -> Refusal | None:
        """Return why a request is refused; None if it is allowed."""
        health, origin = path.startswith(HEALTH), headers.get(b"origin")
        checked = health and not self._loopback  # the checks of a cluster name an address
        if host is not None and not (checked or self._any_host or self._is_own(host)):
            text = f"this server does not answer as {quote(host.decode('latin-1'))}"
            return Refusal(403, f"{text}; see `host` and `allowed_hosts`")
        if origin is not None and not self.is_known(origin, host):
            text = f"pages of {ascii(origin.decode('latin-1'))[:80]} may not call this server"
            return Refusal(403, f"{text}; see `origins`")
        # browsers send CORS preflight requests without a token
        free = health or path in self._public or (method == "OPTIONS" and origin is not None)
        if not (free or self.allows(headers.get(b"authorization"))):
            text = "a token is needed: send the header 'Authorization: Bearer TOKEN'"
            return Refusal(401, text, b"WWW-Authenticate: Bearer\r\n")
        return None

    def is_known(self, origin: bytes, host: bytes | None) -> bool:
        """Return whether pages of this origin may call a server that was asked as `host`."""
        place = origin.partition(b"://")[2]
        return origin.lower() in self._origins or place == host != b"" or self._is_own(place)

    def _is_own(self, host: bytes) -> bool:
        """Return whether a host, with or without a port, is this machine's or an allowed one."""
        match = _PLACE.fullmatch(host.lower())
        if match is None:
            return False
        name, port = match.groups()
        bare = name.removesuffix(b".")  # as Kubernetes writes a whole name
        names = (bare + b":" + port, bare) if port else (bare,)
        known = any(each in self._hosts or each.endswith(self._domains) for each in names)
        return known or (self._loopback and _is_local(name))

    def cors_headers(self, host: bytes | None, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the headers that let a page of another origin read the reply, if it may."""
        origin = headers.get(b"origin")
        if origin is None or not self.is_known(origin, host):
            return b""
        found = (
            b"Access-Control-Allow-Origin: " + origin + b"\r\nVary: Origin\r\n"
            b"Access-Control-Allow-Credentials: true\r\n"
            b"Access-Control-Expose-Headers: Inference-Header-Content-Length, Retry-After\r\n"
        )
        asked = headers.get(b"access-control-request-headers", b"")
        if _HEADER_NAMES.fullmatch(asked):
            found += b"Access-Control-Allow-Headers: " + asked + b"\r\n"
        private = b"access-control-request-private-network" in headers
        return found + b"Access-Control-Allow-Private-Network: true\r\n" * private


def _is_local(name: bytes) -> bool:
    """Return whether no DNS server decides where this host is: it is always this machine."""
    if name == b"localhost" or name.endswith(b".localhost"):
        return True
    try:
        address: Any = ipaddress.ip_address(name.strip(b"[]").decode("ascii"))
    except ValueError:
        return False
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


PREFLIGHT = b"Access-Control-Allow-Methods: GET, HEAD, POST\r\nAccess-Control-Max-Age: 600\r\n"


class Watched:
    """Files that are read again when they change; until they are valid, what was read stays."""

    def __init__(self, read: Callable[[], None], *files: StrPath | None) -> None:
        self._read = read
        self._files = [Path(file) for file in files if file is not None]
        self._seen = [*map(file_stamp, self._files)]

    def check(self) -> None:
        """Read the files if they have changed. Called often: it takes microseconds."""
        stamps = [*map(file_stamp, self._files)]
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._read()
        except BadInput as exc:
            log.error("%s; what was read before stays in use", exc)
        else:
            log.info("%s: changed, and read again", ", ".join(map(str, self._files)))


def tls_context(options: ServeOptions, protocol: str) -> ssl.SSLContext | None:
    """Return a context for TLS 1.2 or newer; None without a certificate. BadInput names a file."""
    cert, key, authority = options.tls_cert, options.tls_key, options.tls_client_ca
    if cert is None or key is None:
        return None
    for each in (cert, key):
        check_readable(Path(each))  # it names the file, as OpenSSL does not
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    named = f"`tls_cert` {cert}, `tls_key` {key}"
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # no question at the terminal
        if authority is not None:
            named = f"`tls_client_ca` {authority}"
            context.load_verify_locations(authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as exc:  # which ssl.SSLError is
        hint = "PEM files are needed; openssl pkey -in KEY -out PLAIN writes one without a password"
        raise BadInput(f"{named}: {reason_of(exc)}", hint=hint) from exc
    return context
