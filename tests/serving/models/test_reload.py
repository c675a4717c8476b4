"""Reloading a model's file while it serves, also files that hang, crash or use all memory."""

from __future__ import annotations

import contextlib
import errno
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
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.files import sha256
from deploykit.core.manifest import Manifest, write_manifest
from deploykit.engines.engine import Engine, load
from deploykit.engines.oip.protobuf import message_from
from deploykit.serving.models import trial
from deploykit.serving.models.reload import Reloader, Source
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.options import ServeOptions
from deploykit.serving.serve import check_file, open_engines
from tests.support.serving import checks
from tests.support.serving.reloading import FEEDS, LIMIT_S, Serving, model, replace
from tests.support.serving.running import Running, running

Eventually = Callable[[Callable[[], bool]], None]


@contextlib.contextmanager
def serving_with(
    path: Path, check: trial.Check | None = None, limit_s: float = LIMIT_S, **options: Any
) -> Iterator[Serving]:
    serving = Serving(model(path, 1.0, **options), check, limit_s=limit_s)
    with contextlib.closing(serving):
        yield serving


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with serving_with(tmp_path / "m.onnx") as serving:
        yield serving


@contextlib.contextmanager
def reloading(
    *paths: Path, check: trial.Check | None = None, **options: Any
) -> Iterator[tuple[Reloader, ModelRepository]]:
    """A server's reloading as it is, of models with the names of their files, every 10 ms."""
    with contextlib.ExitStack() as stack:
        engines = {path.stem: stack.enter_context(load(path, "cpu")) for path in paths}
        repository = ModelRepository(engines, ServeOptions())
        stack.callback(repository.close)
        sources = {path.stem: Source(path, partial(load_all, path), check) for path in paths}
        reloader = Reloader(repository, sources, **{"poll_s": 0.01, **options})
        yield stack.enter_context(reloader), repository


def load_all(path: Path) -> list[Engine]:
    return [load(path, "cpu")]


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
    replace(model(tmp_path / "new.onnx", 7.0), serving.path)
    serving.poll_twice()
    assert serving.ask() == 8.0
    assert serving.reloader.error("m") is None
    assert counts(serving.reloader)[1] == 0
    serving.close()
    assert serving.failures == []


def test_a_file_being_written_is_not_loaded_until_it_is_complete(
    serving: Serving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `cp` writes it: longer at each poll."""
    whole = model(tmp_path / "new.onnx", 2.0).read_bytes()
    with serving.path.open("wb") as file:
        for at in range(0, len(whole), 40):
            file.write(whole[at : at + 40])
            file.flush()
            serving.reloader.poll()
    assert caplog.records == []
    assert serving.ask() == 2.0
    serving.poll_twice()
    assert serving.ask() == 3.0


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
    replace(model(tmp_path / "new.onnx", 2.0), serving.path)
    serving.poll_twice()
    assert serving.ask() == 2.0
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
    replace(model(tmp_path / "new.onnx", 2.0), serving.path)
    serving.poll_twice()
    assert serving.reloader.error("m") == "m.onnx: its manifest is missing"
    manifest.write_text("{}")
    serving.poll_twice()
    assert serving.ask() == 3.0
    for _ in range(3):
        serving.poll_twice()
    assert len(serving.loaded) == 1


def test_a_file_that_is_not_its_manifests_waits_for_the_manifest(
    serving: Serving, tmp_path: Path
) -> None:
    """A model and its manifest are copied one after the other."""
    write_manifest(serving.path, Manifest("onnx", (), (), sha256=sha256(serving.path)))
    replace(model(tmp_path / "new.onnx", 2.0), serving.path)
    serving.poll_twice()
    assert "SHA-256 differs" in (serving.reloader.error("m") or "")
    assert serving.ask() == 2.0
    write_manifest(serving.path, Manifest("onnx", (), (), sha256=sha256(serving.path)))
    serving.poll_twice()
    assert serving.reloader.error("m") is None
    assert serving.ask() == 3.0


def test_replaced_external_weights_are_reloaded(tmp_path: Path) -> None:
    with serving_with(tmp_path / "m.onnx", external=True) as serving:
        other = tmp_path / "other"
        other.mkdir()
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
rows = {"i": np.arange(4, dtype=np.int64) * 250}
before = engine(rows)["y"]
for name in ("m.onnx", "w.bin"):
    os.truncate(folder / name, 0)
assert np.array_equal(engine(rows)["y"], before)
sys.stdout.write("alive")
"""
HEADER = '<ir_version: 10, opset_import: ["" : 18]> g '


@pytest.mark.skipif(
    not hasattr(onnxruntime.SessionOptions, "add_external_initializers_from_files_in_memory"),
    reason=f"onnxruntime {onnxruntime.__version__} maps the weights itself",
)
def test_truncated_weights_do_not_end_the_process(tmp_path: Path) -> None:
    """ONNX Runtime maps external weights: reading truncated ones was a SIGBUS (-7)."""
    text = "(int64[N] i) => (float[N,2000] y) { y = Gather (w, i) }"
    found = onnx.parser.parse_model(HEADER + text)
    table = np.random.default_rng(0).standard_normal((1000, 2000), dtype=np.float32)
    found.graph.initializer.append(numpy_helper.from_array(table, "w"))
    onnx.save(found, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin")
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
    "docs": lambda server: server.ask("GET", "/docs").body.decode(),
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


# -- Files that hang, crash or use all memory: the old engine serves, good files follow


def bad(path: Path) -> Path:
    """Of more than 1000 bytes: see `hangs_on_bad`."""
    path.write_bytes(b"\x08\x0a\x12\x03abc" + bytes(2000))
    return path


def test_a_file_whose_check_hangs_is_given_up_and_a_good_one_is_served_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def sample(name: str) -> float:
        found = serving.reloader.samples()
        return next(each.value for each in found if each.name == f"deploykit_{name}")

    with serving_with(tmp_path / "m.onnx", checks.hangs_on_bad, limit_s=1.0) as serving:
        replace(bad(tmp_path / "new"), serving.path)
        serving.poll_twice()
        assert serving.reloader.error("m") == "it was given up: not loaded within 1 s"
        assert "given up" in caplog.messages[0]
        assert (sample("reloads_given_up_total"), sample("reload_failed")) == (1, 1)
        assert serving.ask() == 2.0
        replace(model(tmp_path / "new", 4.0), serving.path)  # which `hangs_on_bad` passes
        serving.reloader.limit_s = LIMIT_S
        serving.poll_twice()
        assert serving.ask() == 5.0
        assert serving.reloader.error("m") is None
        assert sample("reload_failed") == 0


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_that_hangs_is_given_up_for_another_and_for_the_end_of_the_server(
    tmp_path: Path, eventually: Eventually, replaced: bool
) -> None:
    path, checking = model(tmp_path / "m.onnx", 1.0), tmp_path / "checking"
    with reloading(path, check=checks.hangs_on_bad) as (reloader, _):
        replace(bad(tmp_path / "new"), path)
        eventually(lambda: checking.exists() and bool(checking.read_text()))
        if replaced:
            replace(model(tmp_path / "new", 4.0), path)
            eventually(lambda: reloader.samples()[0].value == 1)
            assert reloader.error("m") is None
    number = int(checking.read_text())
    eventually(lambda: not Path(f"/proc/{number}").exists())
    eventually(lambda: not any(each.name.startswith("reload") for each in threading.enumerate()))


@pytest.mark.parametrize(
    ("check", "why"),
    [
        (checks.dies, "its process ended with code -6"),
        (checks.leaves_at_once, "its process ended with code 3"),
        (checks.fills_memory, "MemoryError"),
    ],
)
def test_what_ends_the_process_that_checks_a_file_does_not_end_ours(
    tmp_path: Path, check: trial.Check, why: str
) -> None:
    with serving_with(tmp_path / "m.onnx", check) as serving:
        replace(model(tmp_path / "new", 4.0), serving.path)
        serving.poll_twice()
        assert why in (serving.reloader.error("m") or "")
        assert serving.ask() == 2.0
        serving.source.check = checks.prints  # what libraries print is no result
        replace(model(tmp_path / "new", 6.0), serving.path)
        serving.poll_twice()
        assert serving.ask() == 7.0


@pytest.mark.parametrize("replaced", [True, False])
def test_a_load_that_hangs_here_is_given_up_and_never_used_later(
    tmp_path: Path, eventually: Eventually, replaced: bool
) -> None:
    """A plan may hang in a library, after its check."""
    release = threading.Event()

    def slow() -> list[Engine]:
        release.wait(LIMIT_S)
        return serving.load()

    with serving_with(tmp_path / "m.onnx", limit_s=0.2) as serving:
        serving.source.load = slow
        replace(model(tmp_path / "new", 4.0), serving.path)
        serving.poll_twice()
        assert "given up" in (serving.reloader.error("m") or "")
        if replaced:
            serving.source.load = serving.load
            serving.reloader.limit_s = LIMIT_S
            replace(model(tmp_path / "new", 6.0), serving.path)
            serving.poll_twice()
            assert serving.ask() == 7.0
        release.set()
        loads = 1 + replaced
        eventually(lambda: len(serving.loaded) == loads and serving.loaded[-1].session is None)  # type: ignore[attr-defined]
        assert serving.ask() == (7.0 if replaced else 2.0)


def test_few_files_at_most_hang_at_once(tmp_path: Path, eventually: Eventually) -> None:
    """Each holds a thread, and perhaps memory."""
    with serving_with(tmp_path / "m.onnx", limit_s=0.01) as serving:
        release, begun, real = threading.Event(), [], serving.load

        def slow() -> list[Engine]:
            begun.append(1)
            release.wait(LIMIT_S)
            return real()

        serving.source.load = slow
        for number in range(9):
            replace(model(tmp_path / "new", number), serving.path)
            serving.poll_twice()
        eventually(lambda: len(begun) == 4)
        assert serving.reloader.error("m") == "4 earlier files are still being loaded"
        release.set()
        serving.source.load = serving.load
        serving.reloader.limit_s = LIMIT_S
        eventually(lambda: serving.poll_twice() or serving.ask() == 9.0)


def test_a_file_system_that_hangs_keeps_no_other_model_from_reloading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    good, hung = model(tmp_path / "good.onnx", 1.0), model(tmp_path / "hung.onnx", 1.0)
    release, stat = threading.Event(), Path.stat

    def slow(path: Path, **more: Any) -> os.stat_result:
        if path == hung and threading.current_thread().name == "reload":
            release.wait(LIMIT_S)
        return stat(path, **more)

    with monkeypatch.context() as patch, reloading(hung, good, limit_s=LIMIT_S) as (reloader, _):
        patch.setattr(Path, "stat", slow)
        replace(model(tmp_path / "new", 4.0), good)
        eventually(lambda: counts(reloader)[0] == 1)
        reloader.limit_s = 0.05
        eventually(lambda: reloader.error("hung") == "the file system does not answer")
        release.set()
        eventually(lambda: reloader.error("hung") is None)


def test_a_check_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*words: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with serving_with(tmp_path / "m.onnx", checks.passes) as serving:
        replace(model(tmp_path / "new", 4.0), serving.path)
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", full)
            for _ in range(3):
                serving.poll_twice()
        assert "Too many open files" in (serving.reloader.error("m") or "")
        assert len(caplog.records) == 1
        serving.poll_twice()
        assert serving.ask() == 5.0


BOMBS = {
    "memory": "much = ConstantOfShape (limit)\n sum = ReduceSum (much)",
    "time": """sum = Loop <body = body (int64 i, bool on, float v) => (bool on_, float v_) {
        on_ = Identity (on) v_ = Add (v, v) }> (limit, , x)""",
}


@pytest.mark.parametrize(
    ("bomb", "why", "limit_s"),
    [("memory", "memory", LIMIT_S), ("time", "given up: not loaded within", 1.0)],
)
def test_a_small_model_that_would_take_all_memory_or_all_time_is_not_run_here(
    tmp_path: Path, bomb: str, why: str, limit_s: float
) -> None:
    """To load it would take 4 TB, or to run it for ever."""
    head = "(float[N,4] x) => (float[N,4] y) <int64[1] limit = {1099511627776}>"
    text = f"{HEADER} {head} {{ {BOMBS[bomb]} y = Add (x, sum) }}"
    with serving_with(tmp_path / "m.onnx", partial(check_file, device="cpu"), limit_s) as serving:
        onnx.save(onnx.parser.parse_model(text), tmp_path / "new")
        replace(tmp_path / "new", serving.path)
        serving.poll_twice()
        assert why in (serving.reloader.error("m") or "")
        assert serving.loaded == []
        assert serving.ask() == 2.0


def test_a_file_that_changes_its_size_while_it_is_hashed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole, later = tmp_path / "m.onnx", 4 << 20, list[int]()
    real, asked = os.fstat, list[int]()

    def fstat(file: int) -> os.stat_result:
        found = real(file)
        asked.append(file)
        if len(asked) == 2:  # it is open, and its size known
            os.truncate(path, later[0])
        return found

    monkeypatch.setattr(os, "fstat", fstat)
    for size in (whole - 10, whole + (3 << 20)):
        path.write_bytes(bytes(whole))
        later[:] = [size]
        asked.clear()
        with pytest.raises(BadInput, match="changed while it was read"):
            sha256(path)
