"""Write a Ray Serve application: app.py, serve.yaml, the model and a README.

`app.py` names the model; all else is in deploykit, which every node of the cluster needs.
"""

from __future__ import annotations

from pathlib import Path

from deploykit.deploying.folder import Contents, fill_templates

_CORES = 2  # per replica on a CPU


def write(folder: Path, contents: Contents) -> None:
    """Write the files into an empty folder. Raises BadInput for a model that changed meanwhile."""
    contents.copy_model(folder / "model" / f"{contents.name}.onnx")
    _, usual, largest = contents.batch
    gpu = contents.profile.device == "cuda"
    known = {
        "EXTRAS": ",".join(("serve", "ray", "gpu" if gpu else "cpu", *contents.extras)),
        "DEVICE": "cuda" if gpu else "cpu",
        "THREADS": str(None if gpu else _CORES),
        "CORES": str(_CORES),
        "BATCH": str(largest),
        "USUAL": str(usual),
        "REQUESTS": str(2 * largest),
    }
    fill_templates("ray", folder, contents, known)
