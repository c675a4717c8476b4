"""`deploykit health`: the health check of a container."""

from __future__ import annotations

import os

from deploykit.cli import output
from deploykit.cli.options import JSON, described


@described(f"""
URL                    The server; without it 127.0.0.1, port $DEPLOYKIT_HTTP_PORT or 8000
--timeout SECONDS      Longest wait for its answer
{JSON}""")
def health(url: str | None = None, timeout_s: float = 5.0, as_json: bool = False) -> None:
    """Ask a running server whether it is ready; exit 1 if not.

    Example: deploykit health http://127.0.0.1:8000
    """
    from deploykit.api import health as probe

    port = os.environ.get("DEPLOYKIT_HTTP_PORT", "8000")
    result = probe.health(url or f"http://127.0.0.1:{port}", timeout_s=timeout_s)
    output.show(result, [f"{result.url} is ready"], as_json=as_json)
