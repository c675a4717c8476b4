"""The Python packages of a bundle: deploykit's own wheel, the lock file, and all wheels on request.

deploykit's wheel is packed from the installed package, or from the checkout that is installed, and
its bytes depend on nothing else. `locks/NAME.lock` pins the others with the hashes of their wheels.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from deploykit import __version__
from deploykit.bundling.folder import epoch_s
from deploykit.bundling.image import Image
from deploykit.core import paths
from deploykit.core.apart import module_command
from deploykit.core.containers import container_file
from deploykit.core.errors import Unsupported
from deploykit.core.files import sha256

_PACKAGE = Path(paths.__file__).resolve().parents[1]
_DATA = ("profiles", "models", "locks")  # next to the package in a checkout, in _data/ in a wheel
_CONTAINERS = ("Dockerfile.x86", "Dockerfile.jetson", "Dockerfile.lock", ".dockerignore")
_KEPT = re.compile(r"METADATA|entry_points\.txt|licenses/.+")
_WHEEL = "Wheel-Version: 1.0\nGenerator: deploykit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_REQUIREMENT = re.compile(r"(?P<name>[a-z0-9._-]+)==(?P<version>[^\s;\\]+)(?: ; (?P<marker>.+?))?")
_MARKER = re.compile(r"python_full_version (?P<is><|>=|==) '(?P<version>[0-9.]+?)(?:\.\*)?'")
_GLIBC = {"3.10": 35, "3.11": 36, "3.12": 39}  # minor version of the glibc of each base's release
_NVIDIA_INDEX = "https://pypi.nvidia.com"


@dataclass(frozen=True)
class Locked:
    """One pinned package of a lock file, with the hashes of its wheels."""

    name: str
    version: str
    marker: str
    sha256: tuple[str, ...]

    def is_for(self, python: str) -> bool:
        """Whether Python MAJOR.MINOR installs it."""
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
    """Write deploykit's wheel into `folder`."""
    name, info = f"deploykit-{__version__}", f"deploykit-{__version__}.dist-info"
    members = dict(sorted(_members(info)))
    members[f"{info}/WHEEL"] = _WHEEL.encode()
    rows = [f"{path},sha256={_urlsafe(data)},{len(data)}" for path, data in members.items()]
    members[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    out = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(out, "w") as archive:  # stored: versions of zlib pack differently
        for path, data in members.items():
            entry = zipfile.ZipInfo(path, time.gmtime(epoch_s())[:6])
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return out


def _members(info: str) -> Iterator[tuple[str, bytes]]:
    """The files of the wheel, but for WHEEL and RECORD."""
    for path in _PACKAGE.rglob("*"):
        inside = path.relative_to(_PACKAGE)
        if path.is_file() and "__pycache__" not in inside.parts and inside.parts[0] != "_data":
            yield f"deploykit/{inside.as_posix()}", path.read_bytes()
    for name in _DATA:
        folder = paths.folder(name)
        for path in folder.rglob("*"):
            inside = path.relative_to(folder)
            if path.is_file() and "__pycache__" not in inside.parts:
                yield f"deploykit/_data/{name}/{inside.as_posix()}", path.read_bytes()
    for name in _CONTAINERS:
        yield f"deploykit/_data/containers/{name}", container_file(name).read_bytes()
    for file in _distribution().files or ():
        inner = re.sub(r"^deploykit-[^/]+\.dist-info/", "", str(file))
        if inner != str(file) and _KEPT.fullmatch(inner):
            yield f"{info}/{inner}", Path(str(file.locate())).read_bytes()


def _distribution() -> metadata.Distribution:
    try:
        return metadata.distribution("deploykit")
    except metadata.PackageNotFoundError as exc:
        raise Unsupported(
            "deploykit is not installed here, so its wheel cannot be packed",
            hint="pip install . in the checkout",
        ) from exc


def _urlsafe(data: bytes) -> str:
    digest = hashlib.sha256(data).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def read_lock(text: str) -> list[Locked]:
    """The packages of a lock file as `scripts/lock_wheels.py` writes them."""
    found = []
    for block in re.sub(r"(?m)^#.*\n", "", text).replace(" \\\n    ", " ").splitlines():
        head, *hashes = block.split(" --hash=sha256:")
        match = _REQUIREMENT.fullmatch(head.strip())
        if match is None:
            raise AssertionError(f"a line of a lock file: {head}")
        found.append(Locked(match["name"], match["version"], match["marker"] or "", tuple(hashes)))
    return found


def lock_text(image: Image) -> str:
    """The lock files of an image's packages, without deploykit."""
    files = [paths.folder("locks") / f"{name}.lock" for name in (image.lock, *image.extras)]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def write_requirements(folder: Path, image: Image, *, wheels: bool) -> None:
    """Write `requirements.lock` and `wheels/`: deploykit's own, and with `wheels` all others.

    Raises Unsupported where these cannot be downloaded.
    """
    place = folder / "wheels"
    place.mkdir()
    own, text = own_wheel(place), lock_text(image)
    if wheels:
        text += _download(place, image, text)
    line = f"deploykit=={__version__} \\\n    --hash=sha256:{sha256(own)}\n"
    (folder / "requirements.lock").write_text(text + line, encoding="utf-8")


def _download(place: Path, image: Image, text: str) -> str:
    """Fetch the wheels for the image's Python; returns lines for those that no lock pins."""
    pinned = [each for each in read_lock(text) if each.is_for(image.python)]
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
