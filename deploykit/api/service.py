"""Serve engines over HTTP."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from deploykit.core.errors import BadInput

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,128})=(?P<file>.+)")


def serve(
    engines: Sequence[str],
    *,
    host: str = "127.0.0.1",
    http_port: int = 8000,
    max_batch: int = 32,
    max_delay_us: int = 0,
    queue: int = 1024,
    timeout_ms: int = 30_000,
    max_body_bytes: int = 64 << 20,
    device: str = "auto",
    threads: int | None = None,
    on_ready: Callable[[str, int, list[str]], None] | None = None,
) -> int:
    """Serve until SIGTERM or Ctrl-C; returns how many accepted requests were left unanswered.

    `engines`: `FILE` or `NAME=FILE`; a name left out is the file's, without its extension.
    `on_ready(host, port, names)` is called when requests are taken.
    """
    from deploykit.runtimes.engine import load
    from deploykit.serving import http

    options = http.ServeOptions(
        host=host,
        http_port=http_port,
        max_batch=max_batch,
        max_delay_us=max_delay_us,
        queue=queue,
        timeout_ms=timeout_ms,
        max_body_bytes=max_body_bytes,
    )
    files = _named(engines)
    with contextlib.ExitStack() as stack:
        models = {
            name: stack.enter_context(load(file, device, threads=threads))
            for name, file in files.items()
        }

        def ready(at_host: str, at_port: int) -> None:
            if on_ready is not None:
                on_ready(at_host, at_port, list(models))

        return http.run(models, options, ready)


def _named(engines: Sequence[str]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for text in engines:
        match = _NAMED.fullmatch(text)
        path = Path(match["file"] if match else text)
        name = match["name"] if match else path.stem
        if name in files:
            raise BadInput(
                f"--engine {text}: the name '{name}' is taken", hint="give it another: NAME=FILE"
            )
        files[name] = path
    if not files:
        raise BadInput("no engine to serve", hint="--engine FILE or --engine NAME=FILE")
    return files
