"""The digests of base images: read from a registry that wants a token, written to three files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploykit.deploying.wheels import read_digests
from scripts.pin_bases import DOCKERFILES, ROOT, digest_of, main
from tests.support.http_server import Handler, http_server

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
def test_a_tag_that_was_moved_or_is_absent_is_found_and_nothing_is_written(
    checkout: Path,
    registry: str,
    capsys: pytest.CaptureFixture[str],
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


def test_a_registry_whose_answer_has_another_digest_is_not_believed(
    registry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Registry, "lies", True)
    with pytest.raises(ValueError, match="the registry says"):
        digest_of("docker.io/library/debian:bookworm-slim", registry)
