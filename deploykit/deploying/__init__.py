"""Write what a device or a cluster needs to serve a model, and start it there."""

from __future__ import annotations

WRITERS = {  # kind of bundle -> the function that fills its folder
    "docker": "deploykit.deploying.docker:write",
    "triton": "deploykit.deploying.clusters:write_triton",
    "kserve": "deploykit.deploying.clusters:write_kserve",
    "ray": "deploykit.deploying.clusters:write_ray",
}
STARTED = ("docker", "kserve")  # kinds that `deploykit boot` starts; others have their own server
