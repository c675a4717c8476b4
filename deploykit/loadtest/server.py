"""Find a server, connect to it as it asks for, and question it about its models."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from deploykit.core.errors import BadInput, os_reason, without_secrets
from deploykit.loadtest.wire import AnswerCheck, Http1, NotHttpError, Wire, one_line

TIMEOUT_S = 10.0  # for a request before the run
PORTS = {"http": 80, "https": 443, "grpc": 8001, "grpcs": 443}
_LISTENS = "0A"  # state of a socket in /proc/net/tcp
_ACCEPTS = "00010000"  # flags of a socket in /proc/net/unix
_HINT = (
    "write it as http://HOST:PORT[/PATH], grpc://HOST:PORT, or with TLS https:// and grpcs://; a "
    "Unix socket as unix:FILE, or grpc://unix:FILE"
)
_UNIX = re.compile(r"(?:(https?|grpcs?)://)?unix:(?://)?(.*[^/])")
_NAME = re.compile(r"(?:[A-Za-z0-9:_%-]{1,63}(?:\.|\Z))+")
_QUESTIONS: Mapping[str, tuple[str, str, str]] = {  # -> gRPC method, HTTP verb and path after /v2
    "about": ("ServerMetadata", "GET", ""),
    "about/": ("", "GET", "/"),
    "index": ("RepositoryIndex", "POST", "/repository/index"),
    "models": ("", "GET", "/models"),
    "metadata": ("ModelMetadata", "GET", "/models/{}"),
    "config": ("ModelConfig", "GET", "/models/{}/config"),
}
# status -> how to go on, where the server refuses whatever it is asked for
_REDIRECTS = (301, 302, 303, 307, 308)
_CURES: Mapping[int, str] = {
    **dict.fromkeys(_REDIRECTS, "load the URL that it redirects to"),
    **dict.fromkeys((401, 403), "the server wants a token: --token-file FILE, in Python `token`"),
    **dict.fromkeys((407, 421, 426), "load the server itself, at a host that it knows"),
    **dict.fromkeys((429, 502, 503, 504), "it is starting or overloaded: try again later"),
}


@dataclass(frozen=True)
class Server:
    """A server. `address`: what to connect to, an IP address or the path of a Unix socket.

    `host`: the `Host:` header. `prefix`: the path before /v2. `ca_file`: whose certificates are
    trusted in place of the system's. `cert_file`: the client's certificate and its
    private key. `token`: sent as `Authorization: Bearer`.
    """

    url: str
    host: str
    address: str
    port: int
    grpc: bool = False
    tls: bool = False
    prefix: str = ""
    ca_file: str | None = None
    cert_file: str | None = None
    token: str | None = None

    @property
    def unix(self) -> bool:
        return self.address.startswith("/")

    @property
    def loopback(self) -> bool:
        local = self.unix or self.address == "localhost"
        return local or ipaddress.ip_address(self.address).is_loopback

    @property
    def context(self) -> ssl.SSLContext:
        """Return the TLS context of all connections. Raises BadInput for its files."""
        protocol = "h2" if self.grpc else "http/1.1"
        return tls_context(self.ca_file, self.cert_file, protocol)

    def secure(self, connection: socket.socket, *, handshake: bool) -> ssl.SSLSocket:
        """Begin TLS on a connected socket; the certificate must be for the name in the URL."""
        name = "localhost" if self.unix else urlsplit(self.url).hostname
        return self.context.wrap_socket(
            connection, server_hostname=name, do_handshake_on_connect=handshake
        )

    def new_socket(self) -> tuple[socket.socket, Any]:
        """Return a socket, not yet connected, and the address to connect it to."""
        if self.unix:
            return socket.socket(socket.AF_UNIX), self.address
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        return socket.socket(family), (self.address, self.port)

    def connect(self) -> socket.socket:
        """Return a connection. Raises OSError, of which TimeoutError and ssl.SSLError are kinds."""
        if self.unix:
            connection, path = self.new_socket()
            try:
                connection.settimeout(TIMEOUT_S)
                connection.connect(path)
            except OSError:
                connection.close()
                raise
        else:
            connection = socket.create_connection((self.address, self.port), TIMEOUT_S)
        return self.secure(connection, handshake=True) if self.tls else connection

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
        lines.append("Accept-Encoding: identity")
        if self.token is not None:
            lines.append(f"Authorization: Bearer {self.token}")
        lines += [f"{name}: {value}" for name, value in (fields or {}).items()]
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body

    def exchange(self, wire: Wire) -> int:
        """Send the first request; return the answer's status. Raises OSError and NotHttpError."""
        until_s = time.monotonic() + TIMEOUT_S
        with self.connect() as connection:
            connection.sendall(wire.greeting + wire.request(0))
            while time.monotonic() < until_s:
                data = connection.recv(1 << 16)
                if not data:
                    raise ConnectionAbortedError(errno.ECONNABORTED, "it closed the connection")
                if (status := wire.feed(data)) is not None:
                    return status
                control, wire.control = wire.control, b""
                connection.sendall(control)
        raise TimeoutError

    def ask(self, what: str, model: str = "") -> tuple[int, Any, str]:
        """Ask one of the questions; return status, JSON value and error."""
        method, verb, path = _QUESTIONS[what]
        if self.grpc:
            from deploykit.loadtest import grpc

            wire = self.wire([grpc.question(method, model)], method=method)
        else:
            path = path.format(quote(model, safe=""))
            wire = self.wire([self.request(verb, path, {"Connection": "close"})])
        try:
            status = self.exchange(wire)
        except TimeoutError as exc:
            why = f"{what}: no answer within {TIMEOUT_S:g} s"
            raise BadInput(f"{self.url}: {why}") from exc
        except (OSError, NotHttpError) as exc:
            if self.tls and isinstance(exc, OSError):
                raise self.no_tls(exc) from exc
            why = os_reason(exc) if isinstance(exc, OSError) else f"it {one_line(str(exc))}"
            raise self.not_oip(f"{what}: {why}") from exc
        if what == "about" and status in _REDIRECTS and f"{wire.error}".endswith("/v2/"):
            return self.ask("about/")
        if status in _CURES:
            raise self.refused(status, f"{what}: {wire.error}")
        if status != 200:
            return status, None, wire.error or ""
        if self.grpc:
            return status, grpc.answer_value(method, wire.body), ""
        with suppress(ValueError, RecursionError):
            return status, json.loads(wire.body), ""
        return status, None, ""

    def refused(self, status: int, why: str) -> BadInput:
        return BadInput(f"{self.url}: {why}", hint=_CURES.get(status))

    def no_tls(self, exc: OSError) -> BadInput:
        reason = tls_reason(exc)
        hint = "the server may want a certificate that it trusts: `cert_file`"
        if isinstance(exc, ssl.SSLCertVerificationError):
            hint = "`ca_file` FILE, of the authority that signed the server's certificate"
        elif isinstance(exc, ssl.SSLError) and "alert" not in reason.lower():
            hint = "is it http:// or grpc://, without TLS?"
        return BadInput(f"{self.url}: TLS: {reason}", hint=hint)

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
        tables = ("unix",) if self.unix else ("tcp", "tcp6") if self.loopback else ()
        for name in tables:
            with suppress(OSError, UnicodeError):
                for line in (proc / "net" / name).read_text(encoding="utf-8").splitlines()[1:]:
                    fields = line.split(None, 7) if self.unix else line.split()
                    if self.unix and fields[3:4] + fields[7:] == [_ACCEPTS, self.address]:
                        links.add(f"socket:[{fields[6]}]")
                    elif fields[3] == _LISTENS and fields[1].endswith(f":{self.port:04X}"):
                        links.add(f"socket:[{fields[9]}]")
        for file in proc.glob("[0-9]*/fd/*") if links else ():  # other users' processes are skipped
            with suppress(OSError):
                if str(file.readlink()) in links:
                    found.add(int(file.parts[-3]))
        return tuple(sorted(found))


@cache
def tls_context(ca_file: str | None, cert_file: str | None, protocol: str) -> ssl.SSLContext:
    """Return the context of all connections of a process. Raises BadInput for its files."""
    what, hint = f"`ca_file` {ca_file}: holds no certificates that can be read", None
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            what = f"`cert_file` {cert_file}: no certificate and its key can be read"
            hint = "a PEM file of both, one after the other; the key without a password"
            context.load_cert_chain(cert_file, password=lambda: b"")
    except OSError as exc:  # ssl.SSLError is one
        raise BadInput(f"{what}: {os_reason(exc)}", hint=hint) from exc
    context.set_alpn_protocols([protocol])
    return context


def tls_reason(exc: OSError) -> str:
    """Return why a handshake failed, such as "wrong version number"."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {exc.verify_message}"
    if isinstance(exc, TimeoutError):
        return f"no answer within {TIMEOUT_S:g} s"
    return getattr(exc, "reason", None) or os_reason(exc)


def parse_url(url: str) -> Server:
    """Return the server that a URL names; its `address` is still a name. Raises BadInput."""
    shown = without_secrets(url)
    if url.isprintable() and (unix := _UNIX.fullmatch(url)):
        scheme = unix[1] or ("grpc" if url.endswith(".grpc") else "http")
        path = Path(unix[2]).absolute().as_posix()
        tls = scheme in ("https", "grpcs")
        return Server(url, "localhost", path, 0, scheme.startswith("grpc"), tls)
    try:
        parts = urlsplit(url)
        name, port = parts.hostname, parts.port or PORTS.get(parts.scheme, 0)
    except ValueError as exc:
        raise BadInput(f"'{shown}' is not a URL: {exc}", hint=_HINT) from exc
    named = name is not None and _NAME.fullmatch(name)
    if parts.scheme not in PORTS or not named or not name or not url.isprintable():
        raise BadInput(f"'{shown}' is not an http:// or grpc:// URL", hint=_HINT)
    tls, grpc = parts.scheme in ("https", "grpcs"), parts.scheme.startswith("grpc")
    prefix = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~").removesuffix("/v2")
    if parts.query or parts.fragment or parts.username is not None or (grpc and prefix):
        more = "" if grpc else " and a path"
        raise BadInput(f"'{shown}': only a host, a port{more} are allowed", hint=_HINT)
    return Server(url, parts.netloc, name, port, grpc, tls, prefix)


def find_server(
    url: str, token: str | None = None, ca_file: str | None = None, cert_file: str | None = None
) -> Server:
    """Resolve the host's name once and use the address that answers. Raises BadInput."""
    server = replace(parse_url(url), token=token, ca_file=ca_file, cert_file=cert_file)
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise BadInput("`token`: is empty, or has characters that no header can carry")
    if not server.tls and (ca_file or cert_file):
        option = "ca_file" if ca_file else "cert_file"
        raise BadInput(f"`{option}` is for https:// and grpcs://")
    if server.tls:
        server.context  # noqa: B018 - refuses its files before a connection
    try:
        with server.connect() as connection:
            return server if server.unix else replace(server, address=connection.getpeername()[0])
    except OSError as exc:
        if isinstance(exc, ssl.SSLError) or "handshake" in str(exc):
            raise server.no_tls(exc) from exc
        hint = "start one with: deploykit serve model.onnx"
        raise BadInput(f"{url}: no server answers there: {os_reason(exc)}", hint=hint) from exc
