"""Serve a model on a Ray cluster: what `app.py` of a Ray bundle calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api.serve_opening import Opening
from deploykit.core.paths import StrPath

if TYPE_CHECKING:
    from deploykit.serving.hosted import HostedApp


def ray_application(open_service: Callable[[], HostedApp]) -> Any:
    """A Ray Serve application; each replica runs what `open_service` returns: `open_replica`.

    Ray passes the function by its name: its module must be importable on every node.
    """
    from deploykit.cluster.serve import application
    from deploykit.serving.options import ServeOptions

    return application(open_service, ServeOptions.max_body_bytes)


def open_replica(
    model: StrPath,
    name: str,
    *,
    device: str = "auto",
    threads: int | None = None,
    max_batch: int = 32,
) -> HostedApp:
    """Open `model` and serve it as `name` on the running event loop, once it is warm."""
    from deploykit.serving.hosted import HostedApp
    from deploykit.serving.options import ServeOptions

    options = ServeOptions(max_batch=max_batch)
    engines = Opening(device, threads, 1, trust=False, cpu_fallback=False)(Path(model), options)
    app = HostedApp({name: engines}, options)
    app.start()
    return app
