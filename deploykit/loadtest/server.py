"""Find a server, connect to it as it asks for, and question it about its models."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from deploykit.core.errors import BadInput, os_reason, without_secrets
from deploykit.loadtest.check import AnswerCheck, one_line
from deploykit.loadtest.http import Http1, NotHttpError, Wire

TIMEOUT_S = 10.0  # for a request before the run
PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 443}
_UNPROVEN = (401, 403)
_LISTENS = "0A"  # state of a socket in /proc/net/tcp
_HINT = "write it as http://HOST:PORT[/PATH], grpc://HOST:PORT, or with TLS https:// and grpcs://"


@dataclass(frozen=True)
class Server:
    """A server. `address`: the address to connect to. `host`: the `Host:` header.

    `prefix`: the path before /v2. `ca_file`: whose certificates are trusted in place of the
    system's. `token`: sent as `Authorization: Bearer`.
    """

    url: str
    host: str
    address: str
    port: int
    grpc: bool = False
    tls: bool = False
    prefix: str = ""
    ca_file: str | None = None
    token: str | None = None

    @property
    def loopback(self) -> bool:
        return self.address == "localhost" or ipaddress.ip_address(self.address).is_loopback

    def secure(self, connection: socket.socket, *, handshake: bool) -> ssl.SSLSocket:
        """Begin TLS on a connected socket; the certificate must be for the name in the URL."""
        context = tls_context(self.ca_file, "h2" if self.grpc else "http/1.1")
        name = urlsplit(self.url).hostname
        return context.wrap_socket(
            connection, server_hostname=name, do_handshake_on_connect=handshake
        )

    def connect(self) -> socket.socket:
        """Return a connection. Raises OSError, of which TimeoutError and ssl.SSLError are kinds."""
        connection = socket.create_connection((self.address, self.port), TIMEOUT_S)
        try:
            return self.secure(connection, handshake=True) if self.tls else connection
        except OSError:
            connection.close()
            raise

    def wire(
        self,
        requests: Sequence[bytes],
        check: AnswerCheck | None = None,
        method: str = "ModelInfer",
    ) -> Wire:
        """Return the protocol of one connection that sends `requests`; over gRPC to `method`."""
        if not self.grpc:
            return Http1(requests, check)
        from deploykit.loadtest import grpc  # needs hpack and protobuf

        fields = {":scheme": "https" if self.tls else "http", ":authority": self.host}
        return grpc.Grpc(requests, check, grpc.header_block(method, fields, self.token))

    def request(
        self, verb: str, path: str, fields: Mapping[str, str] | None = None, body: bytes = b""
    ) -> bytes:
        """Return a whole HTTP request. `path`: what follows /v2."""
        lines = [f"{verb} {self.prefix}/v2{path} HTTP/1.1", f"Host: {self.host}"]
        if self.token is not None:
            lines.append(f"Authorization: Bearer {self.token}")
        lines += [f"{name}: {value}" for name, value in (fields or {}).items()]
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body

    def exchange(self, wire: Wire) -> int:
        """Send the first request on a new connection and return the answer's status.

        Raises OSError (TimeoutError after 10 s) and NotHttpError.
        """
        until_s = time.monotonic() + TIMEOUT_S
        with self.connect() as connection:
            connection.sendall(wire.greeting + wire.request(0))
            while time.monotonic() < until_s:
                data = connection.recv(1 << 16)
                status = wire.feed(data) if data else wire.end()
                if status is not None:
                    return status
                if not data:
                    raise NotHttpError("closed the connection")
                control, wire.control = wire.control, b""
                connection.sendall(control)
        raise TimeoutError

    def ask(self, what: str, model: str = "") -> tuple[int, Any, str]:
        """Request the "index" of models, "about", or the "metadata" or "config" of a model.

        Returns the HTTP status, the answer as a JSON value (None if it is none), and the error.
        Raises BadInput if there is no answer, and where the server wants a token.
        """
        if self.grpc:
            from deploykit.loadtest import grpc

            wire = self.wire([grpc.question(what, model)], method=grpc.METHODS[what])
        else:
            verb, path = {
                "index": ("POST", "/repository/index"),
                "models": ("GET", "/models"),
                "about": ("GET", ""),
                "metadata": ("GET", f"/models/{quote(model, safe='')}"),
                "config": ("GET", f"/models/{quote(model, safe='')}/config"),
            }[what]
            wire = self.wire([self.request(verb, path, {"Connection": "close"})])
        try:
            status = self.exchange(wire)
        except TimeoutError as exc:
            why = f"{what}: no answer within {TIMEOUT_S:g} s"
            raise BadInput(f"{self.url}: {why}") from exc
        except (OSError, NotHttpError) as exc:
            why = os_reason(exc) if isinstance(exc, OSError) else f"it {one_line(str(exc))}"
            raise self.not_oip(f"{what}: {why}") from exc
        if status in _UNPROVEN:
            hint = "the server wants a token: --token-file FILE, in Python `token`"
            raise BadInput(f"{self.url}: {wire.error}", hint=hint)
        if status != 200:
            return status, None, wire.error or ""
        if self.grpc:
            return status, grpc.answer_value(what, wire.body), ""
        with suppress(ValueError, RecursionError):
            return status, json.loads(wire.body), ""
        return status, None, ""

    def not_oip(self, why: str) -> BadInput:
        kind = " over gRPC" if self.grpc else ""
        return BadInput(
            f"{self.url}: is not an Open Inference Protocol server{kind} ({why})",
            hint="http:// takes the port of its HTTP interface, 8000 by default; grpc:// that of "
            "its gRPC interface, 8001; with TLS they are https:// and grpcs://",
        )

    def processes(self) -> tuple[int, ...]:
        """Return the local processes that listen on the port; () for a remote server."""
        proc = Path(os.environ.get("HOST_PROC", "/proc"))
        links, found = set(), set()
        for name in ("tcp", "tcp6") if self.loopback else ():
            with suppress(OSError, UnicodeError):
                for line in (proc / "net" / name).read_text(encoding="utf-8").splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == _LISTENS and fields[1].endswith(f":{self.port:04X}"):
                        links.add(f"socket:[{fields[9]}]")
        for file in proc.glob("[0-9]*/fd/*") if links else ():  # other users' processes are skipped
            with suppress(OSError):
                if str(file.readlink()) in links:
                    found.add(int(file.parts[-3]))
        return tuple(sorted(found))


@cache
def tls_context(ca_file: str | None, protocol: str) -> ssl.SSLContext:
    """Return the context of all connections of a process. Raises BadInput for the file."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as exc:  # ssl.SSLError is one
        raise BadInput(
            f"`ca_file` {ca_file}: holds no certificates that can be read: {os_reason(exc)}"
        ) from exc
    context.set_alpn_protocols([protocol])
    return context


def tls_reason(exc: OSError) -> str:
    """Return why a handshake failed, such as "wrong version number"."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {exc.verify_message}"
    if isinstance(exc, TimeoutError):
        return f"no answer within {TIMEOUT_S:g} s"
    return getattr(exc, "reason", None) or os_reason(exc)


def find_server(url: str, *, token: str | None = None, ca_file: str | None = None) -> Server:
    """Resolve the host's name once and use the address that answers. Raises BadInput."""
    shown = without_secrets(url)
    try:
        parts = urlsplit(url)
        name, port = parts.hostname, parts.port or PORTS.get(parts.scheme, 0)
    except ValueError as exc:
        raise BadInput(f"'{shown}' is not a URL: {exc}", hint=_HINT) from exc
    tls, grpc = parts.scheme in ("https", "grpcs"), parts.scheme.startswith("grpc")
    named = name is not None and re.fullmatch(r"[A-Za-z0-9.:_%-]+", name)
    if parts.scheme not in PORTS or not named or not name or not url.isprintable():
        raise BadInput(f"'{shown}' is not an http:// or grpc:// URL", hint=_HINT)
    prefix = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~").removesuffix("/v2")
    if parts.query or parts.fragment or parts.username is not None or (grpc and prefix):
        more = "" if grpc else " and a path"
        raise BadInput(f"'{shown}': only a host, a port{more} are allowed", hint=_HINT)
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise BadInput("`token`: has characters that no header can carry")
    if ca_file is not None and not tls:
        raise BadInput("`ca_file` is for https:// and grpcs://")
    try:
        addresses = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise BadInput(f"{url}: no such host '{name}'", hint=_HINT) from exc
    if tls:
        tls_context(ca_file, "h2" if grpc else "http/1.1")  # refuses a file before a connection
    # localhost may resolve to ::1 first, where nothing listens
    for *_, address in addresses:
        server = Server(url, parts.netloc, str(address[0]), port, grpc, tls, prefix, ca_file, token)
        try:
            server.connect().close()
        except OSError as exc:
            if isinstance(exc, ssl.SSLError) or "handshake" in str(exc):
                hint = "is it http:// or grpc://, without TLS?"
                if isinstance(exc, ssl.SSLCertVerificationError):
                    hint = "`ca_file` FILE, of the authority that signed the server's certificate"
                raise BadInput(f"{url}: TLS: {tls_reason(exc)}", hint=hint) from exc
            reason = os_reason(exc)
            continue
        return server
    raise BadInput(
        f"{url}: no server answers there: {reason}",
        hint="start one with: deploykit serve model.onnx",
    )
