"""Find a server, ask it about its models, and open the connections that speak its protocol."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deploykit.core.errors import BadInput, os_reason, without_secrets
from deploykit.loadtest import http
from deploykit.loadtest.check import AnswerCheck, one_line
from deploykit.loadtest.http import Http1, NotHttpError, Wire

THROTTLED = 429  # does not mean that the request is wrong
_LISTENS = "0A"  # state of a socket in /proc/net/tcp
_HINT = "write it as http://HOST:PORT or grpc://HOST:PORT"


@dataclass(frozen=True)
class Server:
    """A server. `address`: the address to connect to. `host`: the `Host:` header."""

    url: str
    host: str
    address: str
    port: int
    grpc: bool = False

    @property
    def loopback(self) -> bool:
        return self.address == "localhost" or ipaddress.ip_address(self.address).is_loopback

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

        return grpc.Grpc(requests, check, grpc.header_block(self.host, method))

    def ask(self, what: str, model: str = "") -> tuple[int, Any, str]:
        """Request the "index" of models, "about", or the "metadata" or "config" of a model.

        Returns the HTTP status, the answer as a JSON value (None if it is none), and the error.
        Raises BadInput if there is no answer.
        """
        if self.grpc:
            from deploykit.loadtest import grpc

            wire = self.wire([grpc.question(what, model)], method=grpc.METHODS[what])
        else:
            wire = self.wire([http.question(self.host, what, model)])
        try:
            status = wire.exchange(self.address, self.port)
        except TimeoutError as exc:
            why = f"{what}: no answer within {http.TIMEOUT_S:g} s"
            raise BadInput(f"{self.url}: {why}") from exc
        except (OSError, NotHttpError) as exc:
            why = os_reason(exc) if isinstance(exc, OSError) else f"it {one_line(str(exc))}"
            raise self.not_oip(f"{what}: {why}") from exc
        if status != 200:
            return status, None, wire.error or ""
        if self.grpc:
            return status, grpc.answer_value(what, wire.body), ""
        with suppress(ValueError, RecursionError):
            return status, json.loads(wire.body), ""
        return status, None, ""

    def probe(self, model: str, request: bytes) -> None:
        """Send one inference. Raises BadInput when the server rejects the request (4xx)."""
        wire = self.wire([request])
        try:
            status = wire.exchange(self.address, self.port)
        except TimeoutError as exc:
            why = f"no answer to an inference within {http.TIMEOUT_S:g} s"
            raise BadInput(f"{self.url}: {model}: {why}") from exc
        except (OSError, NotHttpError):
            return  # the run will count it as a failure
        if 400 <= status < 500 and status != THROTTLED:
            raise BadInput(f"{self.url}: {model}: answered {wire.error}")

    def not_oip(self, why: str) -> BadInput:
        kind = " over gRPC" if self.grpc else ""
        return BadInput(
            f"{self.url}: is not an Open Inference Protocol server{kind} ({why})",
            hint="http:// takes the port of its HTTP interface, 8000 by default; grpc:// that of "
            "its gRPC interface, 8001",
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


def find_server(url: str) -> Server:
    """Resolve the host's name once and use the address that answers. Raises BadInput."""
    try:
        parts = urlsplit(url)
        grpc = parts.scheme == "grpc"
        name, port = parts.hostname, parts.port or (8001 if grpc else 80)
    except ValueError as exc:
        raise BadInput(f"'{without_secrets(url)}' is not a URL: {exc}", hint=_HINT) from exc
    known = parts.scheme in ("http", "grpc") and url.isprintable()
    if not known or not name or not re.fullmatch(r"[A-Za-z0-9.:_%-]+", name):
        raise BadInput(f"'{without_secrets(url)}' is not an http:// or grpc:// URL", hint=_HINT)
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise BadInput(f"'{without_secrets(url)}': only a host and a port are allowed", hint=_HINT)
    try:
        addresses = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise BadInput(f"{url}: no such host '{name}'", hint=_HINT) from exc
    # localhost may resolve to ::1 first, where nothing listens
    for *_, address in addresses:
        try:
            socket.create_connection((str(address[0]), port), http.TIMEOUT_S).close()
        except OSError as exc:
            reason = os_reason(exc)
            continue
        shown = f"[{name}]" if ":" in name else name
        return Server(url, f"{shown}:{port}", str(address[0]), port, grpc)
    raise BadInput(
        f"{url}: no server answers there: {reason}",
        hint="start one with: deploykit serve model.onnx",
    )
