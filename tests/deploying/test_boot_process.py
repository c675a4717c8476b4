"""`deploykit boot` as a process: killed, twice on one cache, without a network, on a full disk."""

from __future__ import annotations

import json
import subprocess
import sys
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
from tests.support.campaign import only_in_a_campaign
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
        command = (*before, *command, "--http-port", "0", "--grpc-port=none", *after)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.popen = subprocess.Popen(command, text=True, **pipes)

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


def test_a_bundle_of_a_task_answers_an_image(tmp_path: Path) -> None:
    """It has the packages for that; where they are absent none of its servers gets ready."""
    needs("PIL", "tokenizers")
    from tests.support.runtimes.pictures import encoded
    from tests.support.serving.task_models import write_task_model

    bundle, cache = tmp_path / "bundle", tmp_path / "cache"
    dk.bundle(write_task_model(tmp_path, "classify"), "cpu", out=bundle, name="m")
    locked = {each.name for each in read_lock((bundle / "requirements.lock").read_text())}
    assert {"pillow", "tokenizers"} & locked == {"pillow"}
    text = dk.bundle(write_task_model(tmp_path, "text-classify"), "cpu", out=tmp_path / "text")
    assert (text.path / f"{text.bundle.model}.tokenizer.json").is_file()
    with device(bundle, cache) as running:
        url = f"http://{running.ready()['http']}/v2/models/m/predict"
        image = encoded(np.full((9, 9, 3), 255, np.uint8), "JPEG")
        request = urllib.request.Request(url, image, {"Content-Type": "image/jpeg"})
        with urllib.request.urlopen(request) as answer:
            assert json.loads(answer.read())["label"] == "light"
    (tmp_path / "PIL.py").write_text("raise ModuleNotFoundError('PIL', name='PIL')")
    with device(bundle, cache, "env", f"PYTHONPATH={tmp_path}") as running:
        assert running.ready() == {}
        code, log = running.stop()
    assert (code, log.splitlines()[-2]) == (3, "error: pillow is not installed")


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


@only_in_a_campaign
def test_no_network_is_needed(bundle: Path, tmp_path: Path) -> None:
    without = ("unshare", "--net", "--map-root-user")
    if subprocess.run([*without, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespace without a network can be made here")
    with device(bundle, tmp_path / "cache", *without) as running:
        assert running.ready()["models"] == ["tiny"]
