"""Write a Ray Serve application: app.py, serve.yaml, the model and a README.

`app.py` names the model; all else is in deploykit, which every node of the cluster needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploykit import __version__
from deploykit.bundling.contents import Contents
from deploykit.bundling.yaml_text import Commented, yaml_document

_QUEUE = 1024  # requests that wait for a replica, of each front; more are refused with 503
_CORES = 2.0  # of a replica on a CPU

_APP = '''\
"""A Ray Serve application, written by deploykit: see README.md."""

from pathlib import Path

from deploykit.api.ray_serve import open_replica, ray_application

HERE = Path(__file__).resolve().parent


def replica():  # runs in each replica, on its node
    return open_replica(
        HERE / "model" / "{file}", "{name}", device="{device}", threads={threads}, max_batch={batch}
    )


app = ray_application(replica)
'''

_README = """\
# {name} on Ray Serve

A Ray Serve application, written by deploykit {version} for the profile `{profile}`.

On one machine: `pip install '.[{extras}]'` in a checkout of deploykit, and in this folder

```sh
serve run serve.yaml
```

It is ready when `curl -f localhost:8000/v2/health/ready` exits 0, and speaks the Open Inference
Protocol over HTTP: `deploykit load http://localhost:8000` measures it.

On a cluster, each node needs deploykit, and this folder at one path that is in `PYTHONPATH`, as in
a container image; then `serve deploy serve.yaml`, or with KubeRay `serve.yaml` as `serveConfigV2`
of a RayService. Without such an image, zip the folder, put it where all nodes can fetch it, and add
to the application in `serve.yaml`: `runtime_env: {{working_dir: "https://.../{name}.zip"}}`.

- `front`: takes requests from the proxy of its node. Set `num_replicas` to the number of nodes that
  take requests. It asks once more if a replica, or its node, is lost.
- `model`: one engine with a batcher of its own per replica, {resources}. Ray starts and
  ends replicas by `target_ongoing_requests`.
- A request is lost only with the node that its client is connected to.
- `/metrics`, `/v2/models/{name}/stats` and the dashboard are those of the replica that answers;
  Ray's own metrics and dashboard cover all. Only HTTP is offered: no gRPC, no token; put a gateway
  before it where strangers can connect.
- Files: `sha256sum -c SHA256SUMS` checks them.

{gpu}
"""


def write(folder: Path, contents: Contents) -> None:
    """Fill an empty folder. Raises BadInput for a model that changed meanwhile."""
    (folder / "model").mkdir()
    file = f"{contents.name}.onnx"
    contents.copy_model(folder / "model" / file)
    gpu = contents.profile.device == "cuda"
    app = _APP.format(
        file=file,
        name=contents.name,
        device="cuda" if gpu else "cpu",
        threads=None if gpu else int(_CORES),
        batch=contents.batch[2],
    )
    (folder / "app.py").write_text(app, encoding="utf-8")
    (folder / "serve.yaml").write_text(yaml_document(_config(contents)), encoding="utf-8")
    readme = _README.format(
        name=contents.name,
        version=__version__,
        profile=contents.profile.name,
        extras=",".join(("serve", "ray", "gpu" if gpu else "cpu", *contents.extras)),
        resources="one GPU each" if gpu else f"{_CORES:g} CPU cores each",
        gpu="Not yet run on a GPU." if gpu else "Run by deploykit's tests on two nodes, with CPUs.",
    )
    (folder / "README.md").write_text(readme, encoding="utf-8")


def _config(contents: Contents) -> dict[str, Any]:
    """Ray Serve's configuration file, version 2."""
    _, usual, largest = contents.batch
    gpu = contents.profile.device == "cuda"
    model = {
        "name": "model",
        Commented("max_ongoing_requests", "in one replica: enough for the next batch to wait"): (
            2 * largest
        ),
        "max_queued_requests": _QUEUE,
        "autoscaling_config": {
            "min_replicas": 1,
            "max_replicas": 8,
            Commented("target_ongoing_requests", "per replica; above it, Ray starts more"): usual,
        },
        "ray_actor_options": {"num_gpus": 1} if gpu else {"num_cpus": _CORES},
    }
    front = {
        "name": "front",
        Commented("num_replicas", "as many as nodes that take requests"): 1,
        "max_replicas_per_node": 1,
        "max_ongoing_requests": 10 * _QUEUE,
        "ray_actor_options": {"num_cpus": 0},
    }
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000},  # noqa: S104 - a cluster's nodes
        "applications": [
            {
                "name": contents.name,
                "route_prefix": "/",
                "import_path": "app:app",
                "logging_config": {"enable_access_log": False},  # two lines for each request
                "deployments": [front, model],
            }
        ],
    }
