"""Write a bundle for one machine: a container that builds, proves and serves its engine.

Its Python packages are deploykit's wheel, packed from the installed package or checkout, so that
its bytes depend on nothing else, and those of `locks/NAME.lock`, pinned with the hashes of their
wheels; on request all wheels are in the bundle.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import subprocess
import time
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote as percent

from deploykit import __version__
from deploykit.core import files as paths
from deploykit.core.errors import BadInput, Unsupported, quote
from deploykit.core.files import sha256
from deploykit.core.machine import jetpack_of, release_numbers
from deploykit.core.profile import Profile
from deploykit.core.subprocesses import module_command
from deploykit.core.tensors import BATCH, PROTOCOL_NAMES
from deploykit.deploying.folder import Contents, epoch_s, fill_templates, sample_rows
from deploykit.serving.oip.request import to_bytes

# deploykit's Dockerfiles and the digests of their base images.

LOCK = "Dockerfile.lock"
UNPINNED = "unpinned"


def container_file(name: str) -> Path:
    """Return the path of a Dockerfile, `Dockerfile.lock` or `.dockerignore`."""
    packaged = paths.folder("containers") / name
    return packaged if packaged.is_file() else Path(paths.__file__).parents[2] / name


def read_digests(path: Path) -> dict[str, str | None]:
    """Return the digest `sha256:...` of each `repository:tag`, None if it is not pinned."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = (line.split(" ") for line in lines if line and not line.startswith("#"))
    return {image: None if digest == UNPINNED else digest for image, digest in rows}


def pin(image: str) -> str:
    """Append the digest to `image`, `repository:tag@sha256:...`, if the lock file has one."""
    digest = read_digests(container_file(LOCK)).get(image)
    return f"{image}@{digest}" if digest else image


# The container image of a target: Dockerfile, base image, Python and packages.

_CPU_BASE = "docker.io/library/debian:bookworm-slim"
_PYTHONS = {"ubuntu22.04": "3.10", "bookworm": "3.11", "ubuntu24.04": "3.12"}  # of the base images
_JETPACKS = ("6.1", "6.2", "7.0", "7.1", "7.2")  # stages of Dockerfile.jetson
TENSORRT = "10.16.1.11"  # engines need this version; the same as in Dockerfile.x86


@dataclass(frozen=True)
class Image:
    """A target's image. `release`: its host's, "jetpack-6.2" or "cuda-13"; empty for a CPU.

    `lock`: a name in `locks/`. `machine`: "x86_64" or "aarch64", as in wheel names. `tensorrt`: the
    version for `pip` to install; empty if none is needed or the base has it. `arguments`: build
    arguments of the Dockerfile. `extras`: those of the model's task, each with its own lock.
    """

    dockerfile: str
    release: str
    base: str
    python: str
    machine: str
    lock: str
    tensorrt: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    extras: tuple[str, ...] = ()

    @property
    def on_jetson(self) -> bool:
        return self.release.startswith("jetpack-")

    def with_extras(self, extras: tuple[str, ...]) -> Image:
        named = ",".join((self.arguments["EXTRAS"], *extras))
        return replace(self, extras=extras, arguments={**self.arguments, "EXTRAS": named})


def choose_image(profile: Profile, release: str | None, machine: str) -> Image:
    """Return the image for `release`, by default the profile's usual one. Raises BadInput."""
    wanted = release or next(iter(profile.container_base), "")
    base = profile.base_image(wanted) if wanted else None
    if wanted and base is None:
        known = f"those of '{profile.name}' are for {' and '.join(profile.container_base)}"
        raise BadInput(
            f"`release` {quote(wanted)}: profile '{profile.name}' has no image for it",
            hint=known if profile.container_base else "leave it out: this target needs none",
        )
    machine = machine if profile.architecture == "any" else profile.architecture
    kind, _, version = wanted.partition("-")
    base = base or _CPU_BASE
    if kind == "jetpack":
        return _for_jetson(wanted, base, version)
    common = ("Dockerfile.x86", wanted)
    if profile.runtime != "tensorrt":
        arguments = {"BASE": pin(base), "EXTRAS": "cpu,serve", "TENSORRT": ""}
        return Image(*common, base, python_of(base), machine, "cpu", arguments=arguments)
    lock = "tensorrt-cu12" if version.startswith("12") else "tensorrt-cu13"
    tensorrt, last = TENSORRT, profile.tensorrt_max
    if last and release_numbers(last) < release_numbers(TENSORRT):
        tensorrt = f"{last}.0"
    arguments = {"BASE": pin(base), "EXTRAS": f"{lock},serve", "TENSORRT": tensorrt}
    return Image(*common, base, python_of(base), machine, lock, tensorrt, arguments)


def _for_jetson(release: str, base: str, version: str) -> Image:
    stage = ".".join(map(str, release_numbers(version)[:2]))
    row = jetpack_of(version) or jetpack_of(stage)
    if stage not in _JETPACKS or row is None:
        raise BadInput(
            f"`release` {quote(release)}: is no JetPack that Dockerfile.jetson knows",
            hint=f"jetpack-{', jetpack-'.join(_JETPACKS)}",
        )
    arguments = {"JETPACK": stage, "BASE": pin(base), "EXTRAS": "jetson,serve"}
    return Image(
        "Dockerfile.jetson", release, base, row.python, "aarch64", "jetson", arguments=arguments
    )


def python_of(base: str) -> str:
    """Return the Python of a base image by the distribution in its tag; 3.12 without one."""
    return next((python for name, python in _PYTHONS.items() if name in base), "3.12")


def dockerfile(image: Image) -> str:
    """Return our Dockerfile up to stage `bundle`, with this target's arguments as defaults."""
    text = container_file(image.dockerfile).read_text(encoding="utf-8")
    for name, value in image.arguments.items():
        text, count = re.subn(rf"(?m)^ARG {name}=.*$", f"ARG {name}={value}", text, count=1)
        if not count:
            raise AssertionError(f"{image.dockerfile} has no argument {name}")
    return text + "\nFROM bundle\n"


_PACKAGE = Path(paths.__file__).resolve().parents[1]
_DATA = ("profiles", "models", "locks")  # next to the package in a checkout, in _data/ in a wheel
_CONTAINERS = ("Dockerfile.x86", "Dockerfile.jetson", "Dockerfile.lock", ".dockerignore")
_KEPT = re.compile(r"METADATA|entry_points\.txt|licenses/.+")
_WHEEL = "Wheel-Version: 1.0\nGenerator: deploykit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_REQUIREMENT = re.compile(r"(?P<name>[a-z0-9._-]+)==(?P<version>[^\s;\\]+)(?: ; (?P<marker>.+?))?")
_MARKER = re.compile(r"python_full_version (?P<is><|>=|==) '(?P<version>[0-9.]+?)(?:\.\*)?'")
_GLIBC = {"3.10": 35, "3.11": 36, "3.12": 39}  # minor version of glibc in each Python's base image
_NVIDIA_INDEX = "https://pypi.nvidia.com"


@dataclass(frozen=True)
class Locked:
    """One pinned package of a lock file, with the hashes of its wheels."""

    name: str
    version: str
    marker: str
    sha256: tuple[str, ...]

    def is_for(self, python: str) -> bool:
        for part in filter(None, self.marker.split(" and ")):
            match = _MARKER.fullmatch(part)
            if match is None:
                raise AssertionError(f"{self.name}: marker {part}")
            here, there = (tuple(map(int, v.split("."))) for v in (python, match["version"]))
            holds = {"<": here < there, ">=": here >= there, "==": here == there}
            if not holds[match["is"]]:
                return False
        return True


def own_wheel(folder: Path) -> Path:
    name, info = f"deploykit-{__version__}", f"deploykit-{__version__}.dist-info"
    members = dict(sorted(_members(info)))
    members[f"{info}/WHEEL"] = _WHEEL.encode()
    rows = []
    for path, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}")
    members[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    out = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(out, "w") as archive:  # not compressed: versions of zlib differ
        for path, data in members.items():
            entry = zipfile.ZipInfo(path, time.gmtime(epoch_s())[:6])
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return out


def _members(info: str) -> Iterator[tuple[str, bytes]]:
    data = {f"deploykit/_data/{name}": paths.folder(name) for name in _DATA}
    for place, folder in {"deploykit": _PACKAGE, **data}.items():
        for path in folder.rglob("*"):
            inside = path.relative_to(folder)
            left_out = "__pycache__" in inside.parts or inside.parts[0] == "_data"
            if path.is_file() and not left_out:
                yield f"{place}/{inside.as_posix()}", path.read_bytes()
    for name in _CONTAINERS:
        yield f"deploykit/_data/containers/{name}", container_file(name).read_bytes()
    try:
        installed = metadata.distribution("deploykit")
    except metadata.PackageNotFoundError as exc:
        raise Unsupported(
            "deploykit is not installed here, so its wheel cannot be packed",
            hint="pip install . in the checkout",
        ) from exc
    for file in installed.files or ():
        inner = re.sub(r"^deploykit-[^/]+\.dist-info/", "", str(file))
        if inner != str(file) and _KEPT.fullmatch(inner):
            yield f"{info}/{inner}", Path(str(file.locate())).read_bytes()


def read_lock(text: str) -> list[Locked]:
    """Parse a lock file that `scripts/lock_wheels.py` wrote."""
    found = []
    for block in re.sub(r"(?m)^#.*\n", "", text).replace(" \\\n    ", " ").splitlines():
        head, *hashes = block.split(" --hash=sha256:")
        match = _REQUIREMENT.fullmatch(head.strip())
        if match is None:
            raise AssertionError(f"a line of a lock file: {head}")
        found.append(Locked(match["name"], match["version"], match["marker"] or "", tuple(hashes)))
    return found


def lock_text(image: Image) -> str:
    """Return the lock files of an image's packages, without deploykit."""
    files = [paths.folder("locks") / f"{name}.lock" for name in (image.lock, *image.extras)]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def _download(place: Path, image: Image, pinned: Sequence[Locked]) -> str:
    """Download the wheels for the image's Python; return lines for those that no lock pins."""
    lines = (
        " ".join([f"{each.name}=={each.version}", *(f"--hash=sha256:{h}" for h in each.sha256)])
        for each in pinned
    )
    listed = place / "listed.txt"
    listed.write_text("\n".join(lines), encoding="utf-8")
    _pip(place, image, "--no-deps", "--require-hashes", "--requirement", str(listed))
    listed.unlink()
    if not image.tensorrt:
        return ""
    before = set(place.iterdir())
    _pip(place, image, "--extra-index-url", _NVIDIA_INDEX, f"{image.lock}=={image.tensorrt}")
    known = {each.name for each in pinned}
    added = []
    for path in sorted(set(place.iterdir()) - before):
        name, version = path.name.split("-")[:2]
        name = name.replace("_", "-").lower()
        if name not in known:
            added.append(f"{name}=={version} \\\n    --hash=sha256:{sha256(path)}\n")
    return "".join(added)


def _pip(place: Path, image: Image, *arguments: str) -> None:
    newest = _GLIBC.get(image.python, 28)
    tags = [f"manylinux_2_{minor}_{image.machine}" for minor in range(newest, 16, -1)]
    tags += [f"manylinux2014_{image.machine}", f"linux_{image.machine}"]
    options = [option for tag in tags for option in ("--platform", tag)]
    options += ["--only-binary=:all:", "--python-version", image.python, "--implementation", "cp"]
    command = module_command("pip", "--disable-pip-version-check", "--no-input")
    command += ["download", "--quiet", "--dest", str(place), *options, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        errors = errors or done.stderr.splitlines()[-1:]
        reason = errors[-1].removeprefix("ERROR: ") if errors else "no message"
        raise Unsupported(
            f"`wheels`: pip could not download them for {image.machine}, Python {image.python}: "
            f"{reason}",
            hint="it needs a package index; without `wheels` the image's build does instead",
        )


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
    wheels = folder / "wheels"
    wheels.mkdir()
    own, lock = own_wheel(wheels), lock_text(image)
    packages = [each for each in read_lock(lock) if each.is_for(image.python)]
    lock += _download(wheels, image, packages) if contents.wheels else ""
    own_line = f"deploykit=={__version__} \\\n    --hash=sha256:{sha256(own)}\n"
    files = {
        "requirements.lock": lock + own_line,
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
