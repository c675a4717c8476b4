"""Write manifests for KServe: a ServingRuntime, an InferenceService, and a README.

The folder is also what a pod serves: it is put on a volume, and `deploykit boot` checks every byte,
builds the engine on the pod's own device, proves it, and only then opens the ports.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from deploykit.deploying.folder import Contents, fill_templates
from deploykit.deploying.wheels import choose_image

_NAME_LENGTH = 50  # KServe adds "-predictor" and more; 63 is a label's limit
_HASH_LENGTH = 6
_PERIOD_S = 10  # period of the probes
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write(folder: Path, contents: Contents) -> None:
    """Write manifests into an empty folder. Raises BadInput for a model that changed meanwhile."""
    contents.copy_model(folder / "model" / f"{contents.name}.onnx")
    image = choose_image(contents.profile, None, "x86_64").with_extras(contents.extras)
    gpu = contents.profile.device == "cuda"
    build_s = 1800 if gpu else 120  # longest first start, with the build
    model = contents.model.path
    weights = contents.manifest.evidence.weights
    files = [model, *([model.with_name(weights.file)] if weights else [])]
    copies_mib = 4 * sum(path.stat().st_size for path in files) // (1 << 20)
    known = {
        "LABEL": dns_label(contents.name),
        "DOCKERFILE": image.dockerfile,
        "EXTRAS": image.arguments["EXTRAS"],
        "ARCHITECTURE": _ARCHITECTURES.get(contents.profile.architecture, ""),
        "MAX_BATCH": str(contents.batch[2]),
        "MEMORY": f"{(4096 if gpu else 1024) + copies_mib}Mi",
        "BUILD_S": str(build_s),
        "BUILD_MINUTES": str(build_s // 60),
        "PERIOD_S": str(_PERIOD_S),
        "BUILD_PERIODS": str(build_s // _PERIOD_S),
    }
    fill_templates("kserve", folder, contents, known)


def dns_label(name: str) -> str:
    """Return a Kubernetes name for a model (RFC 1123), with a hash if the name had to change."""
    plain = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"m-{plain}".rstrip("-")
    if plain == name and len(plain) <= _NAME_LENGTH:
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{plain[: _NAME_LENGTH - _HASH_LENGTH - 1].rstrip('-')}-{digest}"
