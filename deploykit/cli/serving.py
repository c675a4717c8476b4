"""`deploykit serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deploykit.cli import output
from deploykit.cli.types import Device, Trust
from deploykit.core.errors import BadInput


def register(app: typer.Typer) -> None:
    app.command()(serve)


def serve(
    engine: Annotated[list[str], typer.Option(help="FILE or NAME=FILE; may be repeated.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="0 picks a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 picks a free one.")] = 8001,
    grpc: Annotated[bool, typer.Option("--grpc/--no-grpc", help="Serve gRPC too.")] = True,
    max_batch: Annotated[int, typer.Option(help="Rows joined into one call.")] = 32,
    max_delay_us: Annotated[int, typer.Option(help="Wait for more rows, microseconds.")] = 0,
    preferred: Annotated[
        str, typer.Option(help="Batch sizes worth waiting for, e.g. 4,8; needs --max-delay-us.")
    ] = "",
    slo_ms: Annotated[
        float | None, typer.Option(help="Steer batch and delay so that p99 stays under this.")
    ] = None,
    instances: Annotated[int, typer.Option(help="Engines of each model.")] = 1,
    buckets: Annotated[
        list[str] | None,
        typer.Option(help="AXIS=16,32,64: pad lengths so that they share batches."),
    ] = None,
    pad: Annotated[
        list[str] | None, typer.Option(help="INPUT=VALUE that fills a bucket; 0 without.")
    ] = None,
    queue: Annotated[int, typer.Option(help="Requests that may wait, per model.")] = 1024,
    timeout_ms: Annotated[int, typer.Option(help="Longest wait of a request.")] = 30_000,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request.")] = 64 << 20,
    max_held_bytes: Annotated[
        int | None,
        typer.Option(help="All large requests at once.", show_default="a quarter of the memory"),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of one call.")] = None,
    device: Device = "auto",
    cpu_fallback: Annotated[
        bool, typer.Option("--cpu-fallback", help="Run an ONNX model on the CPU if need be.")
    ] = False,
    trust: Trust = False,
    reload: Annotated[
        bool, typer.Option("--reload/--no-reload", help="Take over an engine that is replaced.")
    ] = True,
    token_file: Annotated[
        Path | None, typer.Option(help="Its first line is the token that clients must send.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM, with --tls-key.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM, with --tls-cert.")] = None,
    origin: Annotated[
        list[str] | None, typer.Option(help="A web page's origin that may call this server.")
    ] = None,
    shared_memory: Annotated[
        bool, typer.Option("--shared-memory", help="Offer system shared memory to clients.")
    ] = False,
    shadow: Annotated[
        list[str] | None, typer.Option(help="[NAME=]FILE that runs some live requests again.")
    ] = None,
    shadow_rate: Annotated[float, typer.Option(help="Share of the requests, 0 to 1.")] = 0.01,
    shadow_alarm: Annotated[float, typer.Option(help="Share that disagrees and alarms.")] = 0.01,
    log: Annotated[str, typer.Option(help="text or json lines on stderr.")] = "text",
    otlp: Annotated[
        str | None, typer.Option(help="http(s)://HOST:PORT that takes OpenTelemetry traces.")
    ] = None,
) -> None:
    """Serve engines over HTTP and gRPC with dynamic batching (Open Inference Protocol)."""
    from deploykit.api import serve as service

    dropped = service.serve(
        engine,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port if grpc else None,
        max_batch=max_batch,
        max_delay_us=max_delay_us,
        preferred=_sizes(preferred),
        slo_ms=slo_ms,
        instances=instances,
        buckets=buckets or (),
        pads=pad or (),
        queue=queue,
        timeout_ms=timeout_ms,
        max_body_bytes=max_body_bytes,
        max_held_bytes=max_held_bytes,
        threads=threads,
        device=device,
        cpu_fallback=cpu_fallback,
        trust=trust,
        reload=reload,
        token_file=token_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        origins=tuple(origin or ()),
        shared_memory=shared_memory,
        shadows=shadow or (),
        shadow_rate=shadow_rate,
        shadow_alarm=shadow_alarm,
        log_format=log,
        otlp=otlp,
        on_ready=_ready,
    )
    if dropped:
        output.note(f"warning: {dropped} accepted requests were not answered")
        raise typer.Exit(1)


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part for part in text.split(",") if part]
    if not all(part.isdigit() for part in parts):
        raise BadInput(f"--preferred {text}: whole numbers with commas between are needed")
    return tuple(map(int, parts))


def _ready(host: str, http_port: int, grpc_port: int | None, models: list[str]) -> None:
    place = f"[{host}]" if ":" in host else host
    grpc = None if grpc_port is None else f"{place}:{grpc_port}"
    ready = {"event": "ready", "http": f"{place}:{http_port}", "grpc": grpc, "models": models}
    output.line(json.dumps(ready))
