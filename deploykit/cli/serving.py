"""`deploykit serve`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from deploykit.cli import output
from deploykit.cli.types import Device


def register(app: typer.Typer) -> None:
    app.command()(serve)


def serve(
    engine: Annotated[list[str], typer.Option(help="FILE or NAME=FILE; may be repeated.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="0 picks a free one.")] = 8000,
    max_batch: Annotated[int, typer.Option(help="Rows joined into one call.")] = 32,
    max_delay_us: Annotated[int, typer.Option(help="Wait for more rows, microseconds.")] = 0,
    queue: Annotated[int, typer.Option(help="Requests that may wait, per model.")] = 1024,
    timeout_ms: Annotated[int, typer.Option(help="Longest wait of a request.")] = 30_000,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request.")] = 64 << 20,
    threads: Annotated[int | None, typer.Option(help="CPU threads of one call.")] = None,
    device: Device = "auto",
) -> None:
    """Serve engines over HTTP with dynamic batching (Open Inference Protocol)."""
    from deploykit.api import service

    dropped = service.serve(
        engine,
        host=host,
        http_port=http_port,
        max_batch=max_batch,
        max_delay_us=max_delay_us,
        queue=queue,
        timeout_ms=timeout_ms,
        max_body_bytes=max_body_bytes,
        device=device,
        threads=threads,
        on_ready=_ready,
    )
    if dropped:
        output.note(f"warning: {dropped} accepted requests were not answered")
        raise typer.Exit(1)


def _ready(host: str, port: int, models: list[str]) -> None:
    output.line(json.dumps({"event": "ready", "http": f"{host}:{port}", "models": models}))
