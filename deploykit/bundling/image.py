"""The container that a bundle builds: Dockerfile, base, Python and packages of a target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deploykit.core.containers import container_file, pin
from deploykit.core.errors import BadInput, quote
from deploykit.core.jetpack import jetpack_of, release_numbers
from deploykit.core.profile import Profile

_CPU_BASE = "docker.io/library/debian:bookworm-slim"
_PYTHONS = {"ubuntu22.04": "3.10", "bookworm": "3.11", "ubuntu24.04": "3.12"}  # of the base images
_JETPACKS = ("6.1", "6.2", "7.0", "7.1", "7.2")  # the stages of Dockerfile.jetson
TENSORRT = "10.16.1.11"  # an engine belongs to one version; Dockerfile.x86 has the same


@dataclass(frozen=True)
class Image:
    """`release`: of the host, "jetpack-6.2" or "cuda-13", empty for a CPU. `lock`: in `locks/`.

    `machine`: "x86_64" or "aarch64", as wheels name it. `tensorrt`: the version that `pip` installs
    of `tensorrt-cu13`, say; empty where there is none or the base brings it. `arguments`: values of
    the Dockerfile's. `extras`: of the model's task, each with a lock of its own.
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
    """The image for a host of `release`, by default the profile's usual one.

    `machine`: what a profile for any architecture is bundled for. Raises BadInput for a release
    that the profile has no image for.
    """
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
    if kind == "jetpack" and base is not None:
        return _for_jetson(wanted, base, version)
    common = ("Dockerfile.x86", wanted)
    if profile.runtime != "tensorrt":
        base = base or _CPU_BASE
        arguments = {"BASE": pin(base), "EXTRAS": "cpu,serve", "TENSORRT": ""}
        return Image(*common, base, python_of(base), machine, "cpu", arguments=arguments)
    if base is None:
        raise BadInput(
            f"profile '{profile.name}': names no container image to start from",
            hint='add to the file: [container_base] and cuda-13 = "REPOSITORY:TAG"',
        )
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
    """The Python of a base image, by the distribution in its tag; 3.12 for one that names none."""
    return next((python for name, python in _PYTHONS.items() if name in base), "3.12")


def dockerfile(image: Image) -> str:
    """Our Dockerfile with the arguments of this target as its defaults, ending at `bundle`."""
    text = container_file(image.dockerfile).read_text(encoding="utf-8")
    for name, value in image.arguments.items():
        text, count = re.subn(rf"(?m)^ARG {name}=.*$", f"ARG {name}={value}", text, count=1)
        if not count:
            raise AssertionError(f"{image.dockerfile} has no argument {name}")
    return text + "\nFROM bundle\n"
