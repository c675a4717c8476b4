"""How to serve: every option of the server, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploykit.core.errors import BadInput

VERSION = "1"  # every model has one version
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "http_port": (0, 65535),
    "grpc_port": (0, 65535),
    "max_batch": (1, 1 << 20),
    "max_delay_us": (0, 60_000_000),
    "slo_ms": (0.1, 3_600_000),
    "queue": (1, 1 << 20),
    "timeout_ms": (1, 86_400_000),
    "max_body_bytes": (1, 1 << 40),
    "max_held_bytes": (1, 1 << 50),
    "shadow_rate": (0, 1),
    "shadow_alarm": (0, 1),
}


@dataclass(frozen=True)
class ServeOptions:
    """How to serve. `max_batch` in rows, `queue` in requests per model. Raises BadInput.

    `grpc_port` None: no gRPC. `slo_ms`: adapt batch size and delay to this latency; None: both are
    fixed. `token`: required from clients as `Authorization: Bearer`. `buckets`: lengths that a
    dynamic axis is padded to; `pad`: the padding value per input. `batching` False: requests are
    never joined; `assume_batched`: they are joined without the proof that this changes no answer.
    `cuda_graphs`, `overlap`: of TensorRT engines, run batches as CUDA graphs, and submit the next
    one before waiting for the last.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int | None = None
    max_batch: int = 32
    batching: bool = True
    assume_batched: bool = False
    max_delay_us: int = 0
    preferred: tuple[int, ...] = ()  # batch sizes in rows that run without further delay
    slo_ms: float | None = None
    cuda_graphs: bool = True
    overlap: bool = True
    buckets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pad: Mapping[str, float] = field(default_factory=dict)
    queue: int = 1024
    timeout_ms: int = 30_000
    max_body_bytes: int = 64 << 20
    max_held_bytes: int | None = None  # of all large requests at once; None: a quarter of memory
    token: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    origins: tuple[str, ...] = ()  # web origins that may call a server that is not on loopback
    shared_memory: bool = False
    shadow_rate: float = 0.0  # share of live requests that the shadow engine repeats
    shadow_alarm: float = 0.01  # share of disagreeing rows that raises the alarm in /metrics
    otlp: str | None = None  # OTLP collector for traces, http(s)://host:port

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Batch sizes to capture as CUDA graphs; smaller batches are padded to the next one."""
        powers = {1 << n for n in range(self.max_batch.bit_length())}
        return tuple(sorted({*powers, self.max_batch, *self.preferred} if self.cuda_graphs else ()))

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise BadInput(f"`{name}` must be between {low} and {high}, got {value}")
        if self.assume_batched and not self.batching:
            raise BadInput("`assume_batched` contradicts `batching` being off")
        for size in self.preferred:
            if not 1 <= size <= self.max_batch:
                raise BadInput(
                    f"`preferred` {size} must be between 1 and `max_batch` {self.max_batch}"
                )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadInput("`tls_cert` and `tls_key` must be given together")
        if self.token is not None and (len(self.token) < 16 or not self.token.isprintable()):
            raise BadInput("`token` must have at least 16 printable characters")
        if self.http_port and self.http_port == self.grpc_port:
            raise BadInput(f"`http_port` and `grpc_port` are both {self.http_port}")
