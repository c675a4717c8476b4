"""`deploykit boot` as a process: killed, twice on one cache, without a network, on a full disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.deploying.wheels import read_lock
from tests.support.bundles import boot, proven_model
from tests.support.campaign import only_in_a_campaign, rounds
from tests.support.installed import needs

pytest.importorskip("onnxruntime")

LIMIT_S = 120.0  # against hanging, not a measure


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    dk.bundle(proven_model(folder / "tiny.onnx"), "cpu", out=folder / "bundle")
    return folder / "bundle"


class Device:
    """A process of `deploykit boot`."""

    def __init__(self, bundle: Path, cache: Path, *before: str, after: Sequence[str] = ()) -> None:
        command = (sys.executable, "-m", "deploykit", "boot", bundle, "--cache", cache)
        self.popen = subprocess.Popen(
            [*before, *command, "--http-port", "0", "--grpc-port=none", *after],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> dict[str, Any]:
        """The ready line; an empty dict where the process ended without one."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        return dict(json.loads(line)) if line else {}

    def stop(self) -> tuple[int, str]:
        """End it as `docker stop` does; its exit code and its log."""
        self.popen.terminate()
        _, log = self.popen.communicate(timeout=LIMIT_S)
        return self.popen.returncode, log


@contextmanager
def device(bundle: Path, cache: Path, *before: str, after: Sequence[str] = ()) -> Iterator[Device]:
    running = Device(bundle, cache, *before, after=after)
    try:
        yield running
    finally:
        running.popen.kill()
        running.popen.communicate()


@pytest.mark.parametrize("kind", ["classify", "text-classify"])
def test_a_bundle_of_a_task_answers_an_image_or_a_text(kind: str, tmp_path: Path) -> None:
    """It has the packages for that; where they are absent none of its servers gets ready."""
    needs("PIL", "tokenizers")
    from tests.support.runtimes.pictures import encoded
    from tests.support.serving.task_models import write_task_model

    bundle, cache = tmp_path / "bundle", tmp_path / "cache"
    dk.bundle(write_task_model(tmp_path, kind), "cpu", out=bundle, name="m")
    package, module, body, sort, label = {
        "classify": (
            "pillow",
            "PIL",
            encoded(np.full((9, 9, 3), 255, np.uint8), "JPEG"),
            "image/jpeg",
            "light",
        ),
        "text-classify": ("tokenizers", "tokenizers", b"good good good", "text/plain", "good"),
    }[kind]
    locked = {each.name for each in read_lock((bundle / "requirements.lock").read_text())}
    assert {"pillow", "tokenizers"} & locked == {package}
    with device(bundle, cache) as running:
        url = f"http://{running.ready()['http']}/v2/models/m/predict"
        request = urllib.request.Request(url, body, {"Content-Type": sort})
        with urllib.request.urlopen(request) as answer:
            assert json.loads(answer.read())["label"] == label
    absent = f"raise ModuleNotFoundError({module!r}, name={module!r})"
    (tmp_path / f"{module}.py").write_text(absent)
    with device(bundle, cache, "env", f"PYTHONPATH={tmp_path}") as running:
        assert running.ready() == {}
        code, log = running.stop()
    assert (code, log.splitlines()[-2]) == (3, f"error: {package} is not installed")


def test_two_processes_build_one_engine_and_both_serve_it(bundle: Path, tmp_path: Path) -> None:
    with device(bundle, tmp_path / "cache") as one, device(bundle, tmp_path / "cache") as two:
        lines = [each.ready() for each in (one, two)]
        for line in lines:
            with urllib.request.urlopen(f"http://{line['http']}/v2/health/ready") as answer:
                assert answer.status == 200
        engines = [line["engine"] for line in lines]
        for each, engine in zip((one, two), engines, strict=True):
            maps = Path(f"/proc/{each.popen.pid}/maps").read_text()
            assert "/torch/" not in maps
            assert "/onnx/" not in maps, engine  # a build is another process, too
        ended = [each.stop() for each in (one, two)]
    assert sorted(engine["source"] for engine in engines) == ["build", "cache"]
    assert len({engine["slot"] for engine in engines}) == 1
    assert [code for code, _log in ended] == [0, 0]
    assert sum("another process uses the cache" in log for _code, log in ended) <= 1


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=LIMIT_S) as answer:
        return str(answer.read().decode())


def test_metrics_and_notes_say_that_the_previous_engine_serves(
    bundle: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "a\nfolder ü $(x)=y"
    boot(bundle, cache)
    dk.bundle(bundle / "model" / "tiny.onnx", "cpu", out=tmp_path / "new", batch="1,2,4")
    boot(tmp_path / "new", cache)
    for option, previous in (("--rollback", True), ("--retry", False)):
        with device(tmp_path / "new", cache, after=[option]) as running:
            address = running.ready()["http"]
            metrics, about = get(address, "/metrics"), json.loads(get(address, "/v2/models/tiny"))
        value = f'deploykit_previous_engine{{model="tiny",version="1"}} {float(previous)}'
        assert value in metrics.splitlines()
        notes = "the previous engine serves: rolled back" if previous else ""
        assert about["parameters"]["notes"] == notes


def test_a_start_that_is_killed_is_recovered_from(bundle: Path, tmp_path: Path) -> None:
    """At moments from the first import to the open port; a first start takes about 2 s."""
    cache, count = tmp_path / "cache", rounds(2, 30)
    for number in range(count):
        with device(bundle, cache) as running:
            time.sleep((number + 1) * 2.0 / count)  # of a process: its moments have no names
            running.popen.kill()
        if number % 3 == 2:
            shutil.rmtree(cache, ignore_errors=True)  # most rounds go on where the last one ended
    with device(bundle, cache) as running:
        assert running.ready()["engine"]["source"] in ("build", "cache")
        assert running.stop()[0] == 0
    assert not list(cache.rglob(".*"))


@only_in_a_campaign
@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system, which root alone may")
@pytest.mark.parametrize("size_kib", [4, 8, 12, 16, 20, 24])
def test_a_disk_that_is_full_is_one_error(bundle: Path, tmp_path: Path, size_kib: int) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with device(bundle, disk / "cache") as running:
            if not running.ready():
                _, log = running.popen.communicate()
                assert running.popen.returncode == 3
                assert "no space left on the disk" in log
                assert sum(line.startswith("error:") for line in log.splitlines()) == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@only_in_a_campaign
def test_no_network_is_needed(bundle: Path, tmp_path: Path) -> None:
    without = ("unshare", "--net", "--map-root-user")
    if subprocess.run([*without, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespace without a network can be made here")
    with device(bundle, tmp_path / "cache", *without) as running:
        assert running.ready()["models"] == ["tiny"]
