"""The server's options, each defined once for Python, the command line, a file and variables.

A field has the type and the default that Python sees; `option` adds its line of the help page, its
bounds, and its type and default on the command line where they differ.
"""

# ruff: noqa: RUF009 - `option` makes fields

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from deploykit.core.arguments import check_arguments
from deploykit.core.artefact import ArtefactLike
from deploykit.core.errors import BadInput, os_reason
from deploykit.core.files import StrPath, check_readable

VERSION = "1"  # every model has one version
_RULE = "the token must have at least 16 printable characters"
_ROOT = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")
_BUCKETS = re.compile(r"([^=]+)=(\d{1,9}(?:,\d{1,9})*)(?::(.+))?")
_NUMBER = re.compile(r"[-+]?(inf|nan|(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)", re.I)
_P = ParamSpec("_P")
_S = TypeVar("_S")
_R = TypeVar("_R")

Models = ArtefactLike | Sequence[ArtefactLike] | Mapping[str, ArtefactLike]


def option(
    default: Any,
    line: str = "",
    low: float = -math.inf,
    high: float = math.inf,
    *,
    section: str = "",
    typed: Any = None,
    shown: Any = None,
) -> Any:
    """Define a field. `line` is its help; an option without one is for Python alone.

    `section`: starts a section of the help page. `typed`: another type for the command line, with
    the default `shown`.
    """
    about = {
        "line": line,
        "bounds": (low, high),
        "section": section,
        "typed": typed,
        "shown": shown,
    }
    if callable(default):
        return field(default_factory=default, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class ServeOptions:
    """The models to serve, and the server's settings. Raises BadInput.

    `models`, `pipelines`: a file, several, or files by name. `buckets`: axis -> sizes, or strings
    as on the command line; `pad`: input -> value to pad with. `shadows`: by model, a file that
    repeats some requests. `token`: what clients send as `Authorization: Bearer`; `token_file` has
    it on its first line. Files of the token and of TLS are read again when they change. Port 0: a
    free one; `grpc_port` None: HTTP alone.
    """

    models: Models = option(())
    _: KW_ONLY
    pipelines: Models = option(
        (),
        "--pipeline [NAME=]FILE  A .py or .toml file: models with steps around them; may be "
        "repeated",
        typed=list[str],
    )
    device: str = option("auto", "--device auto|cpu|cuda|cuda:N  Where the model runs")
    trust: bool = option(
        False,
        "--trust  Also run a TensorRT engine whose results cannot be verified here, or one that "
        "brings code from elsewhere",
    )
    host: str = option(
        "127.0.0.1",
        "--host ADDRESS|unix:FILE  Address to listen on; unix:FILE is a socket for HTTP, with one "
        "for gRPC at FILE.grpc",
        section="Address",
    )
    http_port: int = option(
        0, "--http-port PORT  Port for HTTP; 0 picks a free one", 0, 65535, shown=8000
    )
    grpc_port: int | None = option(
        0,
        "--grpc-port PORT|none  Port for gRPC; 0 picks a free one, none serves HTTP alone",
        0,
        65535,
        typed=str,
        shown="8001",
    )
    max_batch: int = option(
        32,
        "--max-batch N  Largest number of samples per call; 1 never joins requests",
        1,
        1 << 20,
        section="Batching",
    )
    assume_batched: bool = option(
        False, "--assume-batched  Join requests without a trial that answers stay the same"
    )
    max_delay_us: int = option(
        0, "--max-delay-us MICROSECONDS  How long to wait for more requests", 0, 60_000_000
    )
    slo_ms: float | None = option(
        None, "--slo-ms MS  Adapt batch and delay to keep p99 below this", 0.1, 3_600_000
    )
    buckets: Mapping[str, Sequence[int]] | Sequence[str] = option(
        (),
        "--buckets AXIS=16,32,64[:INPUT=VALUE]  Pad a dynamic axis to these sizes, to share "
        "batches, and an input with VALUE instead of 0; may be repeated",
        typed=list[str],
    )
    pad: Mapping[str, float] = option(dict)
    queue: int = option(
        1024,
        "--queue N  Requests that may wait, per model; more are answered 503",
        1,
        1 << 20,
        section="Limits",
    )
    stall_s: float = option(
        30.0,
        "--stall-s SECONDS  Longest pause of a client that sends a request or reads an answer",
        0.1,
        86_400,
    )
    idle_s: float = option(
        75.0, "--idle-s SECONDS  How long a connection without a request is kept", 0.1, 86_400
    )
    max_connection_age_s: float | None = option(
        None,
        "--max-connection-age-s SECONDS  Then a gRPC client is asked to connect again, so that new "
        "replicas get a share of the load [never]",
        1,
        31_536_000,
    )
    timeout_ms: int = option(
        30_000,
        "--timeout-ms MS  Longest wait of a request; then it is answered 504",
        1,
        86_400_000,
    )
    drain_s: float = option(
        0.0,
        "--drain-s SECONDS  How long to go on answering after SIGTERM, not ready, so that load "
        "balancers notice",
        0,
        3600,
    )
    max_body_bytes: int = option(64 << 20, "--max-body-bytes BYTES  Largest request", 1, 1 << 40)
    max_pixels: int = option(
        25_000_000,
        "--max-pixels N  Largest image; decoding takes 8 bytes for each pixel",
        1,
        178_000_000,
    )
    max_held_bytes: int | None = option(
        None,
        "--max-held-bytes BYTES  Memory for all large requests and answers together "
        "[a quarter of the memory]",
        1,
        1 << 50,
    )
    instances: int = option(1, "--instances N  Engines per model", section="Engines")
    threads: int | None = option(None, "--threads N  CPU threads per call [one per core]", 1, 4096)
    workers: int | str = option(
        1,
        "--workers N|shared:N|auto  Processes behind the same ports, each with its own engines; "
        "with shared:N, or N and a GPU, one more process runs the engines of all; auto measures "
        "and chooses",
        typed=str,
        shown="1",
    )
    cpu_fallback: bool = option(
        False, "--cpu-fallback  Run an ONNX model on the CPU if the GPU cannot"
    )
    reload: bool = option(True, "--reload/--no-reload  Load a model again when its file changes")
    shared_memory: bool = option(
        False, "--shared-memory  Let clients pass tensors in shared memory"
    )
    token: str | None = option(None)
    token_file: StrPath | None = option(
        None,
        "--token-file FILE  The first line is the token that clients must send",
        section="Security",
    )
    tls_cert: StrPath | None = option(None, "--tls-cert FILE.pem  Certificate for HTTPS")
    tls_key: StrPath | None = option(None, "--tls-key FILE.pem  Its private key")
    tls_client_ca: StrPath | None = option(
        None, "--tls-client-ca FILE.pem  Only clients with a certificate of this CA may connect"
    )
    allowed_hosts: Sequence[str] = option(
        (),
        "--allowed-host NAME  Also answer requests for this host, as a proxy in front passes them "
        "on: example.org, *.example.org or *; may be repeated",
        typed=list[str],
    )
    root_path: str = option(
        "", "--root-path PATH  The path at which a proxy in front offers this server"
    )
    origins: Sequence[str] = option(
        (),
        "--origin URL  Web pages from there may call this server; may be repeated",
        typed=list[str],
    )
    shadows: Mapping[str, ArtefactLike] | Sequence[str] = option(
        (),
        "--shadow [NAME=]FILE  Run some live requests again on this model and compare the answers",
        typed=list[str],
        section="Monitoring",
    )
    access_log: bool = option(
        False, "--access-log  Log one line for each request: client, route, status and time"
    )
    otlp: str | None = option(None, "--otlp URL  Send OpenTelemetry traces to http(s)://HOST:PORT")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            low, high = each.metadata["bounds"]
            if high < math.inf and value is not None and not low <= value <= high:
                raise BadInput(f"`{each.name}` must be between {low} and {high}, got {value}")
        if self.token_file is not None:
            object.__setattr__(self, "token", read_token(self.token_file))
            if not Path(self.token_file).is_file():  # a pipe can be read once
                object.__setattr__(self, "token_file", None)
        if not isinstance(self.buckets, Mapping):
            sizes, values = _parse_buckets(self.buckets)
            object.__setattr__(self, "buckets", sizes)
            object.__setattr__(self, "pad", {**self.pad, **values})
        if self.pad and not self.buckets:
            raise BadInput(
                "`pad` has no effect without `buckets`",
                hint="`buckets` T=16,32:ids=1 pads axis T to 16, 32",
            )
        if not _ROOT.fullmatch(self.root_path):
            raise BadInput(f"`root_path` {self.root_path}: must begin with /, such as /models")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise BadInput("`tls_client_ca` needs `tls_cert` and `tls_key`")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadInput("`tls_cert` and `tls_key` must be given together")
        if self.token is not None and (len(self.token) < 16 or not self.token.isprintable()):
            raise BadInput(f"`token`: {_RULE}")
        if self.http_port and self.http_port == self.grpc_port:
            raise BadInput(f"`http_port` and `grpc_port` are both {self.http_port}")

    @property
    def lengths(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of each axis in `buckets`."""
        assert isinstance(self.buckets, Mapping)
        return {axis: tuple(sizes) for axis, sizes in self.buckets.items()}

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Return batch sizes to capture as CUDA graphs; smaller batches are padded to the next."""
        return tuple(
            sorted({self.max_batch, *(1 << n for n in range(self.max_batch.bit_length()))})
        )


def addresses(host: str, port: int, grpc_port: int | None) -> tuple[str, str | None]:
    """Return where clients find a server that listens there, over HTTP and over gRPC."""
    if host.startswith("unix:"):
        return host, None if grpc_port is None else f"{host}.grpc"
    place = f"[{host}]" if ":" in host else host
    return f"{place}:{port}", None if grpc_port is None else f"{place}:{grpc_port}"


def takes(kind: Callable[_P, _S]) -> Callable[[Callable[[_S], _R]], Callable[_P, _R]]:
    """Make a function of one dataclass a function of its fields, and check their types."""

    def decorate(function: Callable[[_S], _R]) -> Callable[_P, _R]:
        parameters = signature(kind)

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            given = parameters.bind(*args, **kwargs).arguments
            check_arguments(kind.__init__, given)
            return function(kind(*args, **kwargs))

        call.__signature__ = parameters  # type: ignore[attr-defined]
        return call

    return decorate


def read_token(file: StrPath) -> str:
    """Return the token in the first line of the file. Raises BadInput."""
    try:
        first = check_readable(Path(file)).read_text("utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = os_reason(exc) if isinstance(exc, OSError) else "is not text"
        raise BadInput(f"`token_file` {file}: {reason}") from exc
    if len(first) < 16 or not first.isprintable():
        raise BadInput(f"`token_file` {file}: {_RULE}")
    return first


def _parse_buckets(
    buckets: Sequence[str],
) -> tuple[dict[str, tuple[int, ...]], dict[str, float]]:
    """Parse AXIS=16,32:INPUT=VALUE,... into sizes by axis and padding values by input."""
    sizes, values = dict[str, tuple[int, ...]](), dict[str, float]()
    for text in buckets:
        match = _BUCKETS.fullmatch(text)
        axis, numbers, more = match.groups() if match else ("", "", None)
        parts = [each.rpartition("=") for each in more.split(",")] if more else []
        pads = {name: value for name, _, value in parts}
        known = axis in sizes or values.keys() & pads.keys() or len(pads) < len(parts)
        if not axis or known or "" in pads or not all(map(_NUMBER.fullmatch, pads.values())):
            raise BadInput(
                f"`buckets` {text}: AXIS=16,32,64 or AXIS=16,32,64:INPUT=VALUE is needed, "
                "each name once",
                hint="deploykit inspect shows the names of the axes and inputs",
            )
        sizes[axis] = tuple(map(int, numbers.split(",")))
        values |= {name: float(value) for name, value in pads.items()}
    return sizes, values
