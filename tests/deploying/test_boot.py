"""`deploykit boot`: which engine serves after updates, failures, damage and kills at any moment."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.core.errors import OutOfMemory
from deploykit.deploying.boot import EngineCache, boot_until_stopped
from deploykit.deploying.docker import read_lock
from tests.support.bundles import boot, copying, failing, flip, proven_model
from tests.support.campaign import only_in_a_campaign, rounds
from tests.support.installed import needs
from tests.support.runtimes.cases import AFFINE, onnx_model
from tests.support.runtimes.gpu_machine import gpu_machine

pytest.importorskip("onnxruntime")

LIMIT_S = 120.0  # against hanging, not a measure


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles `old` and `new` of one name, and the engine that a build of either would give."""
    folder = tmp_path_factory.mktemp("made")
    model = proven_model(folder / "tiny.onnx")
    dk.bundle(model, "cpu", out=folder / "old")
    dk.bundle(model, "cpu", out=folder / "new", batch="1,2,4")  # of the key, too
    dk.bundle(model, "cpu", out=folder / "another", name="another")
    boot(folder / "old", folder / "cache")
    (slot,) = (folder / "cache").glob("a-*")
    (slot / "slot.json").unlink()
    slot.rename(folder / "engine")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def run(made: Path) -> Callable[..., Any]:
    return copying(made / "engine")


def test_an_update_is_built_into_the_other_slot_and_later_starts_use_the_cache(
    made: Path, cache: Path, run: Any
) -> None:
    first = boot(made / "old", cache)
    assert (first.source, first.slot[0]) == ("build", "a")
    second = boot(made / "new", cache, run)
    assert (second.source, second.slot[0]) == ("build", "b")
    assert "batch 1,8,32 -> 1,2,4" in second.why
    for bundle, slot in (("new", second.slot), ("old", first.slot)):
        served = boot(made / bundle, cache, failing(AssertionError("built again")))
        assert (served.source, served.slot) == ("cache", slot)
    with pytest.raises(dk.BadInput, match="is the cache of 'tiny', not of 'another'"):
        boot(made / "another", cache, run)


@pytest.mark.parametrize(
    "error", [dk.GateFailed("differs"), OutOfMemory("killed"), dk.BadInput("refused")]
)
def test_a_failed_engine_leaves_the_old_one_serving(
    made: Path,
    cache: Path,
    run: Any,
    tmp_path: Path,
    error: dk.DeploykitError,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(5):  # without an old one, the error is the build's
        with pytest.raises(type(error), match=error.message):
            boot(made / "old", cache, failing(error))
    boot(made / "old", cache, run)
    for _ in range(2):  # the second time without a build
        served = boot(made / "new", cache, failing(error))
        assert (served.source, served.slot[0], served.why) == ("previous", "a", error.message)
    assert "SERVING THE PREVIOUS ENGINE" in caplog.text
    dk.bundle(made / "tiny.onnx", "cpu", out=tmp_path / "newer", batch="1,2,8")
    newer = boot(tmp_path / "newer", cache, run)  # tries of its own, not in the slot that serves
    assert (newer.source, newer.slot[0]) == ("build", "b")
    assert boot(made / "new", cache, run, retry=True).slot[0] == "a"


def test_a_rollback_stays_until_it_is_taken_back(made: Path, cache: Path, run: Any) -> None:
    boot(made / "old", cache, run)
    with pytest.raises(dk.BadInput, match="no earlier engine"):
        boot(made / "old", cache, run, rollback=True)
    boot(made / "new", cache, run)
    never = failing(AssertionError("built again"))
    for options in ({"rollback": True}, {}, {"rollback": True}):
        served = boot(made / "new", cache, never, **options)
        assert (served.source, served.slot[0], served.why) == ("previous", "a", "rolled back")
    back = boot(made / "new", cache, never, retry=True)
    assert (back.source, back.slot[0]) == ("cache", "b")


@pytest.mark.parametrize("name", ["tiny.onnx", "tiny.onnx.json", "slot.json"])
def test_a_damaged_engine_is_built_again(made: Path, cache: Path, run: Any, name: str) -> None:
    first = boot(made / "old", cache, run)
    flip(cache / first.slot / name)
    again = boot(made / "old", cache, run)
    assert again.source == "build"
    assert again.slot[0] == ("a" if name == "slot.json" else "b") or again.slot != first.slot
    assert boot(made / "old", cache, failing(AssertionError())).source == "cache"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"cache": 1, "tries": "x"}', '{"cache": 2}'])
def test_a_damaged_state_loses_no_engine(made: Path, cache: Path, run: Any, content: str) -> None:
    boot(made / "old", cache, run)
    (cache / "state.json").write_text(content)
    assert boot(made / "old", cache, failing(AssertionError())).source == "cache"


def test_a_tampered_bundle_is_refused_whichever_file_it_is(
    made: Path, cache: Path, run: Any, tmp_path: Path
) -> None:
    boot(made / "old", cache, run)
    before = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    files = [path for path in (made / "old").rglob("*") if path.is_file()]
    assert len(files) >= 5
    for path in files:
        copy = tmp_path / "copy"
        shutil.copytree(made / "old", copy)
        flip(copy / path.relative_to(made / "old"))
        with pytest.raises(dk.BadInput):
            boot(copy, cache, run)
        shutil.rmtree(copy)
    assert before == {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("kind", "says"), [("kserve", "as a folder"), ("triton", "by itself")])
def test_bundles_for_another_server_are_refused(
    made: Path, tmp_path: Path, kind: str, says: str
) -> None:
    """One that starts gets as far as the cache, which is a file here."""
    dk.bundle(made / "tiny.onnx", "cpu", out=tmp_path / "bundle", to=kind)
    with pytest.raises(dk.BadInput, match=says):
        boot_until_stopped(tmp_path / "bundle", made / "tiny.onnx")


def test_a_cache_inside_the_bundle_is_refused(made: Path, tmp_path: Path) -> None:
    """Its files would make the next start refuse the bundle."""
    shutil.copytree(made / "old", tmp_path / "bundle")
    (tmp_path / "link").symlink_to("bundle")
    for cache in ("bundle", "bundle/cache", "link/cache", "bundle/../bundle/x"):
        with pytest.raises(dk.BadInput, match="is inside the bundle"):
            boot_until_stopped(tmp_path / "bundle", tmp_path / cache)
    assert not (tmp_path / "bundle" / "cache").exists()


def test_an_image_needs_the_models_files_alone(
    made: Path, cache: Path, run: Any, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    image.mkdir()
    for name in ("bundle.json", "SHA256SUMS"):
        shutil.copyfile(made / "old" / name, image / name)
    with pytest.raises(dk.BadInput, match="is missing from this bundle"):
        boot(image, cache, run)
    shutil.copytree(made / "old" / "model", image / "model")
    assert boot(image, cache, run).source == "build"


def test_a_cache_without_write_access_still_serves(
    made: Path, cache: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot(made / "old", cache, run)
    (cache / "state.json").unlink()  # so that there is something to save
    real = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).startswith(str(cache)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    for _ in range(2):
        assert boot(made / "old", cache, failing(AssertionError())).source == "cache"
    with pytest.raises(dk.BadInput, match="Read-only file system"):
        boot(made / "old", cache / "fresh", run)


# Every file operation of a start is a place where it may be killed, or fail

STRIDE = rounds(6, 1)
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


class Operations:
    """Counts what touches `folder`, and calls `act` at operation number `at`."""

    def __init__(self) -> None:
        self.stop()
        self.count = 0
        sys.addaudithook(self)

    def start(self, folder: Path, at: int, act: Callable[[], object]) -> None:
        self.folder, self.at, self.act, self.count = str(folder), at, act, 0

    def stop(self) -> None:
        self.folder, self.at, self.act = "", -1, lambda: None

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.folder or event not in OPERATIONS or not isinstance(arguments[0], (str, Path)):
            return
        if str(arguments[0]).startswith(self.folder):
            self.count += 1
            if self.count == self.at:
                self.act()


@pytest.fixture(scope="module")
def operations() -> Operations:
    return Operations()  # a hook cannot be removed: one for all tests, and idle between them


def in_a_fork(work: Callable[[], None]) -> int:
    """How a forked process ended that did `work`: 0, or the negative number of a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def lose_unsynced(folder: Path, synced: set[int]) -> None:
    """Empty what was written and not synced, as a power cut may."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_ino not in synced:
            path.write_bytes(b"")


def track_syncs(folder: Path) -> set[int]:
    """The inodes below `folder` that are on the disk: those there now, and what is synced later."""
    synced, real = {path.stat().st_ino for path in folder.rglob("*")}, os.fsync

    def fsync(handle: int) -> None:
        real(handle)
        synced.add(os.fstat(handle).st_ino)

    os.fsync = fsync
    return synced


@pytest.mark.parametrize("power_cut", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize("update", [False, True], ids=["first start", "update"])
def test_a_start_that_is_killed_at_any_operation_is_recovered_from(
    made: Path,
    cache: Path,
    run: Any,
    tmp_path: Path,
    operations: Operations,
    update: bool,
    power_cut: bool,
) -> None:
    if update:
        boot(made / "old", cache, run)
    else:
        cache.mkdir()
    pristine, bundle, at, ended = tmp_path / "pristine", made / ("new" if update else "old"), 0, -9
    cache.rename(pristine)

    def start() -> None:
        synced = track_syncs(cache)

        def die() -> None:
            operations.stop()
            if power_cut:
                lose_unsynced(cache, synced)
            os.kill(os.getpid(), signal.SIGKILL)

        operations.start(cache, at, die)
        boot(bundle, cache, run)
        assert {cache.stat().st_ino, *(each.stat().st_ino for each in cache.glob("a-*"))} <= synced
        lose_unsynced(cache, synced)

    while ended:
        at += STRIDE
        shutil.copytree(pristine, cache)
        ended = in_a_fork(start)
        assert ended in (0, -signal.SIGKILL)
        if update:  # whatever happened, the old engine is whole
            old = boot(made / "old", cache, failing(AssertionError("lost")))
            assert old.source == "cache"
        served = boot(bundle, cache, run)
        assert served.source in (("build", "cache") if ended else ("cache",))
        assert EngineCache(cache).check(served.slot).is_file()
        assert json.loads((cache / "state.json").read_text())["active"] == served.slot
        assert not list(cache.rglob(".*"))
        shutil.rmtree(cache)
    assert at > 20


def test_an_operation_that_fails_is_an_error_that_damages_nothing(
    made: Path, cache: Path, run: Any, tmp_path: Path, operations: Operations
) -> None:
    boot(made / "old", cache, run)
    pristine, at, over = tmp_path / "pristine", 0, False
    cache.rename(pristine)

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(cache))

    while not over:
        at += STRIDE
        shutil.copytree(pristine, cache)
        operations.start(cache, at, fail)
        with contextlib.suppress(dk.BadInput, dk.Unsupported):
            assert boot(made / "new", cache, run).source in ("build", "previous")
        over = operations.count < at
        operations.stop()
        assert boot(made / "old", cache, failing(AssertionError("lost"))).source == "cache"
        shutil.rmtree(cache)
    assert at > 20


# -- TensorRT, on a machine with an NVIDIA L4 that is made of Python


def test_an_engine_of_tensorrt_is_built_for_this_gpu_and_then_cached(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = proven_model(tmp_path / "affine.onnx", onnx_model(AFFINE))
    bundle = tmp_path / "bundle"
    dk.bundle(model, "l4", out=bundle, batch="1,4,8")
    with gpu_machine(tmp_path, monkeypatch):
        first = boot(bundle, cache, device="auto")
        again = boot(bundle, cache, failing(AssertionError("built again")), device="auto")
    assert (first.source, again.source) == ("build", "cache")
    found = json.loads((cache / first.slot / "slot.json").read_text())
    gpu = {"gpu": "NVIDIA L4", "sm_count": 58, "compute_capability": "8.9", "batch": "1,4,8"}
    assert gpu.items() <= found["key"].items()
    assert found["engine"] == "affine.trt"


# -- As a process: twice on one cache, and without a network


class Device:
    """A process of `deploykit boot`."""

    def __init__(self, bundle: Path, cache: Path, *before: str, after: Sequence[str] = ()) -> None:
        command = (sys.executable, "-m", "deploykit", "boot", bundle, "--cache", cache)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ports = {"DEPLOYKIT_HTTP_PORT": "0", "DEPLOYKIT_GRPC_PORT": "none"}
        self.popen = subprocess.Popen(
            (*before, *command, *after), text=True, env=os.environ | ports, **pipes
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


def test_two_processes_build_one_engine_and_both_serve_it(made: Path, tmp_path: Path) -> None:
    with (
        device(made / "old", tmp_path / "cache") as one,
        device(made / "old", tmp_path / "cache") as two,
    ):
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


def test_metrics_and_notes_say_that_the_previous_engine_serves(made: Path, tmp_path: Path) -> None:
    cache = tmp_path / "a\nfolder ü $(x)=y"
    boot(made / "old", cache)
    boot(made / "new", cache)
    for option, previous in (("--rollback", True), ("--retry", False)):
        with device(made / "new", cache, after=[option]) as running:
            address = running.ready()["http"]
            metrics, about = get(address, "/metrics"), json.loads(get(address, "/v2/models/tiny"))
        value = f'deploykit_previous_engine{{model="tiny",version="1"}} {float(previous)}'
        assert value in metrics.splitlines()
        notes = "the previous engine serves: rolled back" if previous else ""
        assert about["parameters"]["notes"] == notes


@only_in_a_campaign
def test_no_network_is_needed(made: Path, tmp_path: Path) -> None:
    without = ("unshare", "--net", "--map-root-user")
    if subprocess.run([*without, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespace without a network can be made here")
    with device(made / "old", tmp_path / "cache", *without) as running:
        assert running.ready()["models"] == ["tiny"]
