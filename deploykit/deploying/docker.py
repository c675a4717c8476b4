"""Write a bundle for one machine: a container that builds, proves and serves its engine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote as percent

from deploykit import __version__
from deploykit.core.files import sha256
from deploykit.core.tensors import BATCH, PROTOCOL_NAMES
from deploykit.deploying.folder import Contents, epoch_s, fill_templates, sample_rows
from deploykit.deploying.wheels import (
    Image,
    Locked,
    choose_image,
    container_file,
    dockerfile,
    lock_text,
    pin,
    read_lock,
    write_requirements,
)
from deploykit.serving.oip.request import to_bytes


def sbom(contents: Contents, image: Image, packages: Sequence[Locked], wheel_sha256: str) -> str:
    """Return the bill of materials, CycloneDX 1.6 JSON. `wheel_sha256`: of deploykit's own."""
    model = _component(
        "machine-learning-model", contents.name, contents.manifest.sha256[:12], "model"
    )
    model["hashes"] = [{"alg": "SHA-256", "content": contents.manifest.sha256}]
    own = _package("deploykit", __version__)
    own["hashes"] = [{"alg": "SHA-256", "content": wheel_sha256}]
    own["licenses"] = [{"license": {"id": "Apache-2.0"}}]
    listed = [own, *(_package(each.name, each.version) for each in packages)]
    if image.tensorrt:
        listed.append(_package(image.lock, image.tensorrt))
    repository, _, tag = image.base.rpartition(":")
    digest, name = pin(image.base).partition("@")[2], repository.rpartition("/")[2]
    version = percent(digest, safe="") if digest else tag
    purl = f"pkg:docker/{name}@{version}?repository_url={percent(repository, safe='')}"
    base = {**_component("container", repository, tag, purl), "purl": purl}
    components = [base, *sorted(listed, key=lambda each: str(each["bom-ref"]))]
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
    number = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).digest()[:16]
    document["serialNumber"] = f"urn:uuid:{uuid.UUID(bytes=number, version=4)}"
    return json.dumps(document, indent=2) + "\n"


def _component(kind: str, name: str, version: str, ref: str) -> dict[str, Any]:
    return {"type": kind, "bom-ref": ref, "name": name, "version": version}


def _package(name: str, version: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{percent(version)}"
    return {**_component("library", name, version, purl), "purl": purl}


def write(folder: Path, contents: Contents) -> None:
    """Write the bundle into an empty folder. Raises Unsupported if wheels cannot be downloaded."""
    image = choose_image(contents.profile, contents.release, platform.machine())
    image = image.with_extras(contents.extras)
    model = folder / "model" / f"{contents.name}.onnx"
    contents.copy_model(model)
    request, header_bytes = smoke_request(contents, model)
    (folder / "smoke-test.request").write_bytes(request)
    write_requirements(folder, image, wheels=contents.wheels)
    own = next((folder / "wheels").glob("deploykit-*.whl"))
    packages = [each for each in read_lock(lock_text(image)) if each.is_for(image.python)]
    files = {
        "Dockerfile": dockerfile(image),
        ".dockerignore": container_file(".dockerignore").read_text(encoding="utf-8"),
        "sbom.cdx.json": sbom(contents, image, packages, sha256(own)),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    fill_templates("docker", folder, contents, _placeholders(contents, image, header_bytes))


def _placeholders(contents: Contents, image: Image, header_bytes: int) -> dict[str, str]:
    profile, digest = contents.profile, contents.manifest.sha256
    on_gpu, memory_bytes = profile.device == "cuda", profile.memory_bytes
    plain_name = re.sub(r"[^a-z0-9]+", "-", contents.name.lower()).strip("-") or "model"
    return {
        "PROJECT": f"deploykit-{plain_name}",  # as images and compose projects may be named
        "TAG": digest[:12],
        "SHA256": digest,
        "TARGET": profile.summary,
        "POWER_MODE": profile.power_mode or "",
        "RELEASE": image.release,
        "BASE": image.base,
        "PYTHON": image.python,
        "PRECISION": ", ".join(f"{key} {n}" for key, n in contents.manifest.precision.items()),
        "BATCH": ",".join(map(str, contents.batch)),
        "START_PERIOD": "30m" if image.on_jetson else "15m",  # the same as in the Dockerfiles
        "HEADER_BYTES": str(header_bytes),
        "JETSON": "yes" if image.on_jetson else "",
        "GPU": "yes" if on_gpu and not image.on_jetson else "",
        "ENGINE": "yes" if profile.runtime == "tensorrt" else "",
        "ONLINE": "" if contents.wheels else "yes",
        "OFFLINE": "yes" if contents.wheels else "",
        "MEMORY": f"{memory_bytes / 1e9:.0f} GB" if memory_bytes else "its memory",
        "IMAGES": "yes" if "images" in image.extras else "",
        "TEXT": "yes" if "text" in image.extras else "",
    }


def smoke_request(contents: Contents, model: Path) -> tuple[bytes, int]:
    """Return an inference's body with the first golden sample, binary, and its header's length."""
    inputs, blobs = list[dict[str, Any]](), list[bytes]()
    specs = contents.manifest.inputs
    joined = all(spec.shape[:1] == (BATCH,) for spec in specs)
    samples = sample_rows(contents, model, joined=joined)
    for spec in specs:
        array, datatype = samples[spec.name], PROTOCOL_NAMES[spec.dtype]
        blobs.append(bytes(to_bytes(array, datatype)))
        row = {"name": spec.name, "shape": array.shape, "datatype": datatype}
        inputs.append({**row, "parameters": {"binary_data_size": len(blobs[-1])}})
    document = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    header = json.dumps(document, separators=(",", ":")).encode()
    return header + b"".join(blobs), len(header)
