"""A bundle for one machine: a container that builds its engine, proves it and serves it."""

from __future__ import annotations

import json
import platform
import re
import shutil
from pathlib import Path
from typing import Any

from deploykit.bundling.contents import Contents, fill_templates
from deploykit.bundling.folder import TIMING_CACHE
from deploykit.bundling.image import Image, choose_image, dockerfile
from deploykit.bundling.samples import raw_bytes, sample_rows
from deploykit.bundling.sbom import sbom
from deploykit.bundling.wheels import lock_text, read_lock, write_requirements
from deploykit.core.containers import container_file
from deploykit.core.files import sha256
from deploykit.core.profile import Profile
from deploykit.core.tensors import BATCH, PROTOCOL_NAMES

_START_PERIOD = {True: "30m", False: "15m"}  # on a Jetson, elsewhere: as the Dockerfiles have it


def write(folder: Path, contents: Contents) -> None:
    """Fill an empty folder. Raises BadInput for a model that changed meanwhile.

    Raises Unsupported where wheels are asked for and cannot be downloaded.
    """
    image = choose_image(contents.profile, contents.release, platform.machine())
    image = image.with_extras(contents.extras)
    model = folder / "model" / f"{contents.name}.onnx"
    model.parent.mkdir()
    contents.copy_model(model)
    if contents.timing_cache is not None:
        shutil.copyfile(contents.timing_cache, folder / TIMING_CACHE)
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
    fill_templates("docker", folder, _placeholders(contents, image, header_bytes))


def _placeholders(contents: Contents, image: Image, header_bytes: int) -> dict[str, str]:
    """What the templates name as @KEY@."""
    profile, digest = contents.profile, contents.manifest.sha256
    on_gpu = profile.device == "cuda"
    return {
        "NAME": contents.name,
        "PROJECT": project_name(contents.name),
        "TAG": digest[:12],
        "SHA256": digest,
        "TARGET": profile.summary,
        "PROFILE": profile.name,
        "POWER_MODE": profile.power_mode or "",
        "RELEASE": image.release,
        "BASE": image.base,
        "PYTHON": image.python,
        "PRECISION": ", ".join(f"{key} {n}" for key, n in contents.manifest.precision.items()),
        "BATCH": ",".join(map(str, contents.batch)),
        "START_PERIOD": _START_PERIOD[image.on_jetson],
        "HEADER_BYTES": str(header_bytes),
        "JETSON": "yes" if image.on_jetson else "",
        "GPU": "yes" if on_gpu and not image.on_jetson else "",
        "ENGINE": "yes" if profile.runtime == "tensorrt" else "",
        "ONLINE": "" if contents.wheels else "yes",
        "OFFLINE": "yes" if contents.wheels else "",
        "MEMORY": _memory(profile),
        "IMAGES": "yes" if "images" in image.extras else "",
        "TEXT": "yes" if "text" in image.extras else "",
    }


def _memory(profile: Profile) -> str:
    return f"{profile.memory_bytes / 1e9:.0f} GB" if profile.memory_bytes else "its memory"


def project_name(name: str) -> str:
    """A model's name as container images and compose projects are named."""
    return "deploykit-" + (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model")


def smoke_request(contents: Contents, model: Path) -> tuple[bytes, int]:
    """The body of one inference over HTTP, with the first golden sample, and its header's length.

    The Open Inference Protocol with binary tensors: JSON, then the bytes of each input.
    """
    inputs, blobs = list[dict[str, Any]](), list[bytes]()
    specs = contents.manifest.inputs
    joined = all(spec.shape[:1] == (BATCH,) for spec in specs)
    samples = sample_rows(contents, model, joined=joined)
    for spec in specs:
        array = samples[spec.name]
        blobs.append(raw_bytes(array, spec.dtype))
        row = {"name": spec.name, "shape": array.shape, "datatype": PROTOCOL_NAMES[spec.dtype]}
        inputs.append({**row, "parameters": {"binary_data_size": len(blobs[-1])}})
    document = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    header = json.dumps(document, separators=(",", ":")).encode()
    return header + b"".join(blobs), len(header)
