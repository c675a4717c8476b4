"""The server's options: their names, types and defaults in Python, and their bounds.

`deploykit serve` has them as flags, keys of a file and environment variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from deploykit.core.arguments import check_arguments
from deploykit.core.artefact import ArtefactLike
from deploykit.core.errors import BadInput
from deploykit.core.files import StrPath, read_text

VERSION = "1"  # every model has one version
_RULE = "the token must have at least 16 printable characters"
_ROOT = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")
_BUCKETS = re.compile(r"([^=]+)=(\d{1,9}(?:,\d{1,9})*)(?::(.+))?")
_NUMBER = re.compile(r"[-+]?(inf|nan|(\d+\.?\d*|\.\d+)(e[-+]?\d+)?)", re.I)
_P = ParamSpec("_P")
_S = TypeVar("_S")
_R = TypeVar("_R")

Models = ArtefactLike | Sequence[ArtefactLike] | Mapping[str, ArtefactLike]


def bounded(default: Any, low: float, high: float) -> Any:
    """Define a field whose value, unless it is None, is between these."""
    return field(default=default, metadata={"bounds": (low, high)})


@dataclass(frozen=True)
class ServeOptions:
    """The models to serve, and the server's settings. Raises BadInput.

    `models`, `pipelines`: a file, several, or files by name. `buckets`: axis -> sizes, or strings
    as on the command line; `pad`: input -> value to pad with. `shadows`: by model, a file that
    repeats some requests. `token`: what clients send as `Authorization: Bearer`; `token_file` has
    it on its first line. Files of the token and of TLS are read again when they change. Port 0: a
    free one; `grpc_port` None: HTTP alone.
    """

    models: Models = ()
    _: KW_ONLY
    pipelines: Models = ()
    device: str = "auto"
    trust: bool = False
    host: str = "127.0.0.1"
    http_port: int = bounded(0, 0, 65535)
    grpc_port: int | None = bounded(0, 0, 65535)
    max_batch: int = bounded(32, 1, 1 << 20)
    assume_batched: bool = False
    max_delay_us: int = bounded(0, 0, 60_000_000)
    slo_ms: float | None = bounded(None, 0.1, 3_600_000)
    buckets: Mapping[str, Sequence[int]] | Sequence[str] = ()
    pad: Mapping[str, float] = field(default_factory=dict)
    queue: int = bounded(1024, 1, 1 << 20)
    stall_s: float = bounded(30.0, 0.1, 86_400)
    idle_s: float = bounded(75.0, 0.1, 86_400)
    max_connection_age_s: float | None = bounded(None, 1, 31_536_000)
    timeout_ms: int = bounded(30_000, 1, 86_400_000)
    drain_s: float = bounded(0.0, 0, 3600)
    max_body_bytes: int = bounded(64 << 20, 1, 1 << 40)
    max_pixels: int = bounded(25_000_000, 1, 178_000_000)
    max_held_bytes: int | None = bounded(None, 1, 1 << 50)
    instances: int = 1
    threads: int | None = bounded(None, 1, 4096)
    workers: int | str = 1
    cpu_fallback: bool = False
    reload: bool = True
    shared_memory: bool = False
    token: str | None = None
    token_file: StrPath | None = None
    tls_cert: StrPath | None = None
    tls_key: StrPath | None = None
    tls_client_ca: StrPath | None = None
    allowed_hosts: Sequence[str] = ()
    root_path: str = ""
    origins: Sequence[str] = ()
    shadows: Mapping[str, ArtefactLike] | Sequence[str] = ()
    access_log: bool = False
    otlp: str | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            low, high = each.metadata.get("bounds", (None, None))
            if low is not None and value is not None and not low <= value <= high:
                raise BadInput(f"`{each.name}` must be between {low} and {high}, got {value}")
        if self.token_file is not None:
            object.__setattr__(self, "token", read_token(self.token_file))
        if not isinstance(self.buckets, Mapping):
            sizes, values = _parse_buckets(self.buckets)
            object.__setattr__(self, "buckets", sizes)
            object.__setattr__(self, "pad", {**self.pad, **values})
        if self.pad and not self.buckets:
            hint = "`buckets` T=16,32:ids=1 pads axis T to 16, 32"
            raise BadInput("`pad` has no effect without `buckets`", hint=hint)
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
        most = self.max_batch
        return tuple(sorted({most, *(1 << n for n in range(most.bit_length()))}))


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
    """Return the token in the first line of the file. Raises NotFound or BadInput."""
    first = read_text(Path(file)).partition("\n")[0].strip()
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
            form = "AXIS=16,32,64 or AXIS=16,32,64:INPUT=VALUE is needed, each name once"
            hint = "deploykit inspect shows the names of the axes and inputs"
            raise BadInput(f"`buckets` {text}: {form}", hint=hint)
        sizes[axis] = tuple(map(int, numbers.split(",")))
        values |= {name: float(value) for name, value in pads.items()}
    return sizes, values
