"""Write a Ray Serve application: app.py, serve.yaml, the model and a README.

`app.py` names the model; all else is in deploykit, which every node of the cluster needs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit import __version__
from deploykit.core.files import StrPath
from deploykit.evaluation.bundle_folder import Contents, fill_templates
from deploykit.serving.opening import open_engines
from deploykit.serving.options import ServeOptions

if TYPE_CHECKING:
    from deploykit.serving.hosted import HostedApp


_CORES = 2  # of a replica on a CPU


def write(folder: Path, contents: Contents) -> None:
    """Fill an empty folder. Raises BadInput for a model that changed meanwhile."""
    (folder / "model").mkdir()
    contents.copy_model(folder / "model" / f"{contents.name}.onnx")
    _, usual, largest = contents.batch
    gpu = contents.profile.device == "cuda"
    known = {
        "NAME": contents.name,
        "PROFILE": contents.profile.name,
        "VERSION": __version__,
        "EXTRAS": ",".join(("serve", "ray", "gpu" if gpu else "cpu", *contents.extras)),
        "DEVICE": "cuda" if gpu else "cpu",
        "THREADS": str(None if gpu else _CORES),
        "CORES": str(_CORES),
        "BATCH": str(largest),
        "USUAL": str(usual),
        "REQUESTS": str(2 * largest),
        "GPU": "yes" if gpu else "",
        "CPU": "" if gpu else "yes",
    }
    fill_templates("ray", folder, known)


# Serve a model on a Ray cluster: what `app.py` of a Ray bundle calls.


def ray_application(open_service: Callable[[], HostedApp]) -> Any:
    """A Ray Serve application; each replica runs what `open_service` returns: `open_replica`.

    Ray passes the function by its name: its module must be importable on every node.
    """
    from deploykit.deploying.ray_app import application

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

    options = ServeOptions(device=device, threads=threads, max_batch=max_batch)
    engines = open_engines(Path(model), options)
    app = HostedApp({name: engines}, options)
    app.start()
    return app
