"""Reloading a model's file while it serves, also files that hang."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from deploykit.core.artefact import Manifest, write_manifest
from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.files import sha256
from deploykit.engines.engine import Engine, load
from deploykit.engines.oip import message_from
from deploykit.serving.batching.queue import Pending
from deploykit.serving.models.reload import Reloader, Source
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip.request import Request
from deploykit.serving.options import ServeOptions
from deploykit.serving.serve import open_engines
from tests.support.serving.reloading import LIMIT_S, model, replace
from tests.support.serving.running import Running, running

Eventually = Callable[[Callable[[], bool]], None]
FEEDS = {"x": np.ones((1, 4), np.float32)}
KEY = (("x", "FP32", (4,)),)


class Serving:
    """A ModelRepository of one ONNX file, called all the time by two threads, and its Reloader."""

    def __init__(self, path: Path, *, limit_s: float = LIMIT_S) -> None:
        self.path = path
        self.loaded: list[Engine] = []
        self.source = Source(path, self.load)
        first = load(path, "cpu", threads=1)
        self.repository = ModelRepository({"m": first}, ServeOptions())
        self.repository.warm_up()
        self.reloader = Reloader(self.repository, {"m": self.source}, poll_s=3600, limit_s=limit_s)
        self._ended = threading.Event()
        self.failures: list[DeploykitError] = []
        self.seen: set[float] = set()
        self._threads = [threading.Thread(target=self._send_requests) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def load(self) -> list[Engine]:
        self.loaded.append(load(self.path, "cpu", threads=1))
        return self.loaded[-1:]

    def ask(self) -> float | DeploykitError:
        answered = threading.Event()
        found: list[Pending] = []

        def done(pending: Pending) -> None:
            found.append(pending)
            answered.set()

        request = Request(FEEDS, 1, KEY, ())
        self.repository.find("m").submit(request, done)
        assert answered.wait(LIMIT_S)
        return found[0].error or float(found[0].outputs["y"][0, 0])

    def _send_requests(self) -> None:
        while not self._ended.is_set():
            answer = self.ask()
            if isinstance(answer, DeploykitError):
                self.failures.append(answer)
            else:
                self.seen.add(answer)

    def renew(self, value: float) -> float | DeploykitError:
        """Replace the file by one with `value`, reload, and ask."""
        replace(model(self.path.with_name("new"), value), self.path)
        self.poll_twice()
        return self.ask()

    def poll_twice(self) -> None:
        """A file is loaded when it is unchanged between two polls."""
        self.reloader.poll()
        self.reloader.poll()

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self.reloader.close()
        self.repository.close()


@contextlib.contextmanager
def serving_with(path: Path, limit_s: float = LIMIT_S, **options: Any) -> Iterator[Serving]:
    with contextlib.closing(Serving(model(path, 1.0, **options), limit_s=limit_s)) as serving:
        yield serving


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with serving_with(tmp_path / "m.onnx") as serving:
        yield serving


def load_all(path: Path) -> list[Engine]:
    return [load(path, "cpu")]


@contextlib.contextmanager
def reloading(
    *paths: Path, again: Callable[[Path], list[Engine]] = load_all, **options: Any
) -> Iterator[Reloader]:
    """A server's reloading as it is, of models with the names of their files, every 10 ms."""
    with contextlib.ExitStack() as stack:
        engines = {path.stem: stack.enter_context(load(path, "cpu")) for path in paths}
        repository = ModelRepository(engines, ServeOptions())
        stack.callback(repository.close)
        sources = {path.stem: Source(path, partial(again, path)) for path in paths}
        yield stack.enter_context(Reloader(repository, sources, poll_s=0.01, **options))


def counts(reloader: Reloader) -> tuple[float, float]:
    """Reloads and failures, of all models."""
    total = Counter[str]()
    for name, labels, value in reloader.samples():
        assert labels.keys() == {"model", "version"}
        total[name] += value
    return total["deploykit_reloads_total"], total["deploykit_reload_failed"]


def test_a_replaced_file_serves_without_a_failed_request(
    serving: Serving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deploykit.serving.models.reload")
    serving.poll_twice()
    assert serving.loaded == []  # nothing changed
    assert serving.ask() == 2.0
    for number in (2, 3, 4, 5):
        replace(model(tmp_path / "new.onnx", number), serving.path)
        serving.reloader.poll()
        assert serving.ask() == number  # still the old model: the new file may not be complete yet
        serving.reloader.poll()
        assert serving.ask() == number + 1
        serving.poll_twice()
    serving.close()
    assert serving.failures == []
    assert serving.seen
    assert serving.seen <= {2.0, 3.0, 4.0, 5.0, 6.0}
    assert caplog.messages == ["model 'm': m.onnx was replaced and is in use"] * 4
    assert counts(serving.reloader) == (4, 0)
    for engine in serving.loaded:  # each once it was idle
        with pytest.raises(DeploykitError, match="closed"):
            engine(FEEDS)


def begin_as_a_model(path: Path) -> None:
    path.write_bytes(b"\x08\x0a\x12\x03abc")
    os.truncate(path, 1 << 30)


def instead(put: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        put(path)

    return change


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 2), ""),
    "emptied": (lambda path: os.truncate(path, 0), "the file is empty"),
    "deleted": (lambda path: path.unlink(), "the file is gone"),
    "noise": (lambda path: path.write_bytes(bytes(range(256)) * 64), ""),
    "a folder": (instead(Path.mkdir), "is a folder"),
    "other inputs": (lambda path: model(path, 2.0, width=5), r"x:float32\[N,5\]"),
    "a FIFO": (instead(os.mkfifo), ""),
    "a sparse file that begins as a model": (begin_as_a_model, ""),
    "a link to /dev/zero": (instead(lambda path: path.symlink_to("/dev/zero")), ""),
    "a link to itself": (instead(lambda path: path.symlink_to(path)), ""),
}


@pytest.mark.parametrize(("fault", "why"), FAULTS.values(), ids=FAULTS)
def test_a_bad_new_file_leaves_the_old_engine_serving_and_is_reported_once(
    serving: Serving,
    tmp_path: Path,
    fault: Callable[[Path], object],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    read: list[int] = []
    pread = os.pread

    def counted(file: int, size: int, at: int) -> bytes:
        read.append(size)
        return pread(file, size, at)

    fault(serving.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", counted)
        for _ in range(5):
            serving.poll_twice()
    assert sum(read) < 1 << 20
    assert serving.ask() == 2.0
    (record,) = caplog.records  # reported once
    reason = serving.reloader.error("m")
    assert reason
    assert (record.levelno, reason in caplog.messages[0]) == (logging.ERROR, True)
    assert str(tmp_path) not in reason
    assert len(reason.splitlines()) == 1
    assert re.search(why, reason), reason
    assert counts(serving.reloader)[1] == 1

    if serving.path.is_dir():
        serving.path.rmdir()
    assert serving.renew(7.0) == 8.0
    assert serving.reloader.error("m") is None
    assert counts(serving.reloader)[1] == 0
    serving.close()
    assert serving.failures == []


def test_a_file_changed_while_it_is_loaded_is_loaded_again(
    serving: Serving, tmp_path: Path
) -> None:
    later = [model(tmp_path / "later.onnx", 9.0)]
    real = serving.load

    def slow() -> list[Engine]:
        engines = real()
        if later:
            replace(later.pop(), serving.path)
        return engines

    serving.source.load = slow
    assert serving.renew(2.0) == 2.0
    with pytest.raises(DeploykitError, match="closed"):
        serving.loaded[0](FEEDS)
    serving.poll_twice()
    assert serving.ask() == 10.0


def test_a_change_during_the_start_is_not_missed_and_the_thread_ends_on_close(
    tmp_path: Path, eventually: Eventually
) -> None:
    path = model(tmp_path / "m.onnx", 1.0)
    source = Source(path, partial(load_all, path))
    with load(path, "cpu") as first:
        repository = ModelRepository({"m": first}, ServeOptions())
        replace(model(tmp_path / "new.onnx", 2.0), path)
        with Reloader(repository, {"m": source}, poll_s=0.01) as reloader:
            eventually(lambda: counts(reloader) == (1, 0))
        repository.close()
    assert not [each for each in threading.enumerate() if each.name == "reload"]


def test_a_changed_manifest_reloads_only_a_model_that_was_refused(
    serving: Serving, tmp_path: Path
) -> None:
    """Opening a model may update its manifest, and a manifest may be copied after its model."""
    manifest = tmp_path / "m.onnx.json"
    real = serving.load

    def proven() -> list[Engine]:
        if not manifest.exists():
            raise BadInput(f"{serving.path}: its manifest is missing")
        write_manifest(serving.path, Manifest("onnx", (), (), made_with={"proven": "here"}))
        return real()

    serving.source.load = proven
    manifest.write_text("{}")
    serving.poll_twice()
    assert serving.loaded == []
    manifest.unlink()
    serving.renew(2.0)
    assert serving.reloader.error("m") == "m.onnx: its manifest is missing"
    manifest.write_text("{}")
    serving.poll_twice()
    assert serving.ask() == 3.0
    for _ in range(3):
        serving.poll_twice()
    assert len(serving.loaded) == 1


@pytest.mark.parametrize("external", [True, False])
def test_replaced_external_weights_are_reloaded(tmp_path: Path, external: bool) -> None:
    with serving_with(tmp_path / "m.onnx", external=external) as serving:
        other = tmp_path / "other"
        other.mkdir()
        if not external:  # the first version has its weights inside
            replace(model(other / "m.onnx", 3.0, external=True), tmp_path / "m.onnx")
            replace(other / "w.bin", tmp_path / "w.bin")
            serving.poll_twice()
        model(other / "m.onnx", 5.0, external=True)
        replace(other / "w.bin", tmp_path / "w.bin")
        serving.poll_twice()
        assert serving.ask() == 6.0


TRUNCATED = """
import os, sys
import numpy as np
from pathlib import Path
from deploykit.engines.engine import load

folder = Path(sys.argv[1])
engine = load(folder / "m.onnx", "cpu")
row = {"x": np.ones((1, 1 << 20), np.float32)}
for name in ("m.onnx", "w.bin"):
    os.truncate(folder / name, 0)
assert (engine(row)["y"] == 3).all()
sys.stdout.write("alive")
"""


@pytest.mark.skipif(
    not hasattr(onnxruntime.SessionOptions, "add_external_initializers_from_files_in_memory"),
    reason=f"onnxruntime {onnxruntime.__version__} maps the weights itself",
)
def test_truncated_weights_do_not_end_the_process(tmp_path: Path) -> None:
    """ONNX Runtime maps external weights: reading truncated ones was a SIGBUS (-7)."""
    model(tmp_path / "m.onnx", 2.0, width=1 << 20, external=True)
    command = [sys.executable, "-c", TRUNCATED, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (ran.returncode, ran.stdout) == (0, "alive"), ran.stderr


# -- Every place that describes a model names the file that answers now, also after a reload


OPTIONS = ServeOptions(device="cpu", threads=1)

PLACES: dict[str, Callable[[Running], str]] = {
    "metadata": lambda server: str(server.ask("GET", "/v2/models/m").json["parameters"]),
    "configuration": lambda server: str(server.ask("GET", "/v2/models/m/config").json),
    "gRPC configuration": lambda server: str(
        message_from("ModelConfigResponse", {"config": server.server.repository.find("m").config()})
    ),
    "status": lambda server: str(server.ask("GET", "/status").json["models"][0]),
    "metrics": lambda server: server.ask("GET", "/metrics").body.decode(),
}


def shown(server: Running) -> dict[str, set[str]]:
    """The hashes in each place."""
    return {name: set(re.findall("[0-9a-f]{64}", ask(server))) for name, ask in PLACES.items()}


def test_every_description_names_the_file_that_answers_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deploykit.serving.models.reload")
    path = model(tmp_path / "m.onnx", 1.0)
    first, source = sha256(path), Source(path, partial(open_engines, path, OPTIONS))
    with running({"m": source.load()}) as server:
        reloader = Reloader(server.server.repository, {"m": source}, poll_s=3600)
        path.write_bytes(b"not a model")  # before anybody looks: it never answers
        reloader.poll()
        reloader.poll()
        assert shown(server) == {place: {first} for place in PLACES}
        assert server.ask("GET", "/v2/models/m").json["parameters"]["generation"] == "1"
        replace(model(tmp_path / "new.onnx", 2.0), path)
        second = sha256(path)
        reloader.poll()
        reloader.poll()
        reloader.close()
        assert second != first
        assert shown(server) == {place: {second} for place in PLACES}
        about = server.ask("GET", "/v2/models/m").json["parameters"]
        assert (about["file"], about["generation"]) == ("m.onnx", "2")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", about["loaded"])
        assert 'deploykit_model_generation{model="m",version="1"} 2' in PLACES["metrics"](server)
    assert caplog.messages[-1].endswith(f"was replaced and is in use, SHA-256 {second}")


# -- Files that hang: the old engine serves, good files follow


@pytest.mark.parametrize("replaced", [True, False])
def test_a_load_is_given_up_for_another_file_and_for_the_end_of_the_server(
    tmp_path: Path, eventually: Eventually, replaced: bool
) -> None:
    path, release, begun = model(tmp_path / "m.onnx", 1.0), threading.Event(), list[Path]()

    def slow(path: Path) -> list[Engine]:
        begun.append(path)
        if len(begun) == 1:
            release.wait(LIMIT_S)
        return load_all(path)

    with reloading(path, again=slow) as reloader:
        replace(model(tmp_path / "new", 3.0), path)
        eventually(lambda: bool(begun))
        if replaced:
            replace(model(tmp_path / "new", 4.0), path)
            eventually(lambda: counts(reloader) == (1, 0))
    release.set()
    eventually(lambda: not any(each.name.startswith("reload") for each in threading.enumerate()))


@pytest.mark.parametrize("replaced", [True, False])
def test_a_load_that_hangs_here_is_given_up_and_never_used_later(
    tmp_path: Path, eventually: Eventually, replaced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A plan may hang in a library."""
    release = threading.Event()

    def slow() -> list[Engine]:
        release.wait(LIMIT_S)
        return serving.load()

    with serving_with(tmp_path / "m.onnx", limit_s=0.2) as serving:
        serving.source.load = slow
        serving.renew(4.0)
        assert "it was given up: not loaded within" in (serving.reloader.error("m") or "")
        assert "given up" in caplog.messages[0]
        assert [each.value for each in serving.reloader.samples()] == [0, 1, 1]
        if replaced:
            serving.source.load = serving.load
            serving.reloader.limit_s = LIMIT_S
            assert serving.renew(6.0) == 7.0
        release.set()
        loads = 1 + replaced
        eventually(lambda: len(serving.loaded) == loads and serving.loaded[-1].session is None)  # type: ignore[attr-defined]
        assert serving.ask() == (7.0 if replaced else 2.0)


def test_a_file_system_that_hangs_keeps_no_other_model_from_reloading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    good, hung = model(tmp_path / "good.onnx", 1.0), model(tmp_path / "hung.onnx", 1.0)
    release, stat = threading.Event(), Path.stat

    def slow(path: Path, **more: Any) -> os.stat_result:
        if path == hung and threading.current_thread().name == "reload":
            release.wait(LIMIT_S)
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", slow)
    with reloading(hung, good) as reloader:
        replace(model(tmp_path / "new", 4.0), good)
        eventually(lambda: counts(reloader)[0] == 1)
        release.set()
