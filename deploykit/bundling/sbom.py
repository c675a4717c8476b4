"""A bundle's software bill of materials as CycloneDX 1.6 JSON.

What is installed on the target: the lock file's packages for its Python, deploykit, the model and
the image that the container starts from. The same bundle gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote as percent

from deploykit import __version__
from deploykit.bundling.contents import Contents
from deploykit.bundling.folder import epoch_s
from deploykit.bundling.image import Image
from deploykit.bundling.wheels import Locked
from deploykit.core.containers import pin


def sbom(contents: Contents, image: Image, packages: Sequence[Locked], wheel_sha256: str) -> str:
    """The document. `wheel_sha256`: of deploykit's own wheel."""
    model = _component(
        "machine-learning-model", contents.name, contents.manifest.sha256[:12], "model"
    )
    model["hashes"] = _hashes(contents.manifest.sha256)
    own = _package("deploykit", __version__)
    own |= {"hashes": _hashes(wheel_sha256), "licenses": [{"license": {"id": "Apache-2.0"}}]}
    listed = [own, *(_package(each.name, each.version) for each in packages)]
    if image.tensorrt:
        listed.append(_package(image.lock, image.tensorrt))
    components = [_base_image(image), *sorted(listed, key=lambda each: str(each["bom-ref"]))]
    refs = [str(each["bom-ref"]) for each in components]
    document: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": model},
        "components": components,
        "dependencies": [
            {"ref": model["bom-ref"], "dependsOn": sorted(refs)},
            *({"ref": ref} for ref in sorted(refs)),
        ],
    }
    if os.environ.get("SOURCE_DATE_EPOCH"):
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch_s()))
        document["metadata"]["timestamp"] = stamp
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).digest()
    document["serialNumber"] = f"urn:uuid:{uuid.UUID(bytes=digest[:16], version=4)}"
    return json.dumps(document, indent=2) + "\n"


def _component(kind: str, name: str, version: str, ref: str) -> dict[str, Any]:
    return {"type": kind, "bom-ref": ref, "name": name, "version": version}


def _package(name: str, version: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{percent(version)}"
    return {**_component("library", name, version, purl), "purl": purl}


def _base_image(image: Image) -> dict[str, Any]:
    repository, _, tag = image.base.rpartition(":")
    digest = pin(image.base).partition("@")[2]
    version = percent(digest, safe="") if digest else tag
    name = repository.rpartition("/")[2]
    purl = f"pkg:docker/{name}@{version}?repository_url={percent(repository, safe='')}"
    return {**_component("container", repository, tag, purl), "purl": purl}


def _hashes(digest: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest}]
