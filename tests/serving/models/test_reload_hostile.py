"""Replaced files that hang, crash or use all memory: the old engine serves, good files follow."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.files import sha256
from deploykit.engines.engine import Engine, load
from deploykit.serving.models import trial
from deploykit.serving.models.reload import Reloader, Source
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.options import ServeOptions
from deploykit.serving.serve import check_file
from tests.support.serving import checks
from tests.support.serving.reloading import LIMIT_S, Serving, model, replace

Eventually = Callable[[Callable[[], bool]], None]
CHECK = partial(check_file, device="cpu")


@contextlib.contextmanager
def serving_with(path: Path, check: trial.Check, limit_s: float = LIMIT_S) -> Iterator[Serving]:
    serving = Serving(model(path, 1.0), check, limit_s=limit_s)
    with contextlib.closing(serving):
        yield serving


def sample(serving: Serving, name: str) -> float:
    return next(s.value for s in serving.reloader.samples() if s.name == f"deploykit_{name}")


def bad(path: Path) -> Path:
    """Of more than 1000 bytes: see `hangs_on_bad`."""
    path.write_bytes(b"\x08\x0a\x12\x03abc" + bytes(2000))
    return path


def test_a_file_whose_check_hangs_is_given_up_and_a_good_one_is_served_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving_with(tmp_path / "m.onnx", checks.hangs_on_bad, limit_s=1.0) as serving:
        replace(bad(tmp_path / "new"), serving.path)
        serving.poll_twice()
        assert serving.reloader.error("m") == "it was given up: not loaded within 1 s"
        assert "given up" in caplog.messages[0]
        assert sample(serving, "reloads_given_up_total") == 1
        assert sample(serving, "reload_failed") == 1
        assert serving.ask() == 2.0
        replace(model(tmp_path / "new", 4.0), serving.path)  # which `hangs_on_bad` passes
        serving.reloader.limit_s = LIMIT_S
        serving.poll_twice()
        assert serving.ask() == 5.0
        assert serving.reloader.error("m") is None
        assert sample(serving, "reload_failed") == 0


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[tuple[Path, Reloader, ModelRepository]]:
    """A server's reloading as it is, every 10 ms."""
    path = model(tmp_path / "m.onnx", 1.0)
    source = Source(path, lambda: [load(path, "cpu")], checks.hangs_on_bad)
    with (
        load(path, "cpu") as first,
        contextlib.closing(ModelRepository({"m": first}, ServeOptions())) as repository,
        Reloader(repository, {"m": source}, poll_s=0.01) as reloader,
    ):
        yield path, reloader, repository


def test_a_file_that_hangs_is_given_up_as_soon_as_another_takes_its_place(
    watching: Any, tmp_path: Path, eventually: Eventually
) -> None:
    path, reloader, _ = watching
    replace(bad(tmp_path / "new"), path)
    eventually((tmp_path / "checking").exists)
    replace(model(tmp_path / "new", 4.0), path)
    eventually(lambda: reloader.samples()[0].value == 1)
    assert reloader.error("m") is None


def test_the_end_of_the_server_does_not_wait_for_a_file_that_hangs(
    watching: Any, tmp_path: Path, eventually: Eventually
) -> None:
    path, reloader, _ = watching
    replace(bad(tmp_path / "new"), path)
    eventually(lambda: bool((tmp_path / "checking").exists() and _text(tmp_path / "checking")))
    number = int(_text(tmp_path / "checking"))
    reloader.close()
    eventually(lambda: not _runs(number))
    eventually(lambda: not any(each.name.startswith("reload") for each in threading.enumerate()))


def _text(path: Path) -> str:
    return path.read_text()


def _runs(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


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
        with pytest.raises(DeploykitError, match=why):
            raise DeploykitError(serving.reloader.error("m") or "")
        assert serving.ask() == 2.0
        serving.source.check = checks.prints  # what libraries print is no result
        replace(model(tmp_path / "new", 6.0), serving.path)
        serving.poll_twice()
        assert serving.ask() == 7.0


def give_up_a_load(serving: Serving, folder: Path) -> threading.Event:
    """Replace the file by one whose load hangs until the event is set, and is given up before."""
    release = threading.Event()

    def slow() -> list[Engine]:
        release.wait(LIMIT_S)
        return serving.load()

    serving.source.load, serving.source.check = slow, None
    serving.reloader.limit_s = 0.2
    replace(model(folder / "new", 4.0), serving.path)
    serving.poll_twice()
    assert "given up" in (serving.reloader.error("m") or "")
    return release


def test_a_load_that_hangs_here_is_given_up_and_never_used_later(
    tmp_path: Path, eventually: Eventually
) -> None:
    """A plan may hang in a library, after its check."""
    with serving_with(tmp_path / "m.onnx", checks.passes) as serving:
        release = give_up_a_load(serving, tmp_path)
        serving.source.load = serving.load
        serving.reloader.limit_s = LIMIT_S
        replace(model(tmp_path / "new", 6.0), serving.path)
        serving.poll_twice()
        assert serving.ask() == 7.0
        release.set()
        eventually(lambda: len(serving.loaded) == 2 and serving.loaded[1].session is None)  # type: ignore[attr-defined]
        assert serving.ask() == 7.0


def test_a_load_that_was_given_up_is_not_used_although_the_file_is_the_same(
    tmp_path: Path, eventually: Eventually
) -> None:
    with serving_with(tmp_path / "m.onnx", checks.passes) as serving:
        release = give_up_a_load(serving, tmp_path)
        release.set()
        eventually(lambda: len(serving.loaded) == 1 and serving.loaded[0].session is None)  # type: ignore[attr-defined]
        assert serving.ask() == 2.0


def test_few_files_at_most_hang_at_once(tmp_path: Path, eventually: Eventually) -> None:
    """Each holds a thread, and perhaps memory."""
    with serving_with(tmp_path / "m.onnx", checks.passes, limit_s=0.01) as serving:
        release, begun, real = threading.Event(), [], serving.load

        def slow() -> list[Engine]:
            begun.append(1)
            release.wait(LIMIT_S)
            return real()

        serving.source.load, serving.source.check = slow, None
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
    sources = {
        "hung": Source(hung, lambda: [load(hung, "cpu")]),
        "good": Source(good, lambda: [load(good, "cpu")]),
    }
    release, stat = threading.Event(), Path.stat

    def slow(path: Path, **more: Any) -> os.stat_result:
        if path == hung and threading.current_thread().name == "reload":
            release.wait(LIMIT_S)
        return stat(path, **more)

    with (
        load(good, "cpu") as first,
        load(hung, "cpu") as second,
        contextlib.closing(
            ModelRepository({"good": first, "hung": second}, ServeOptions())
        ) as repository,
        monkeypatch.context() as patch,
    ):
        patch.setattr(Path, "stat", slow)
        with Reloader(repository, sources, poll_s=0.01, limit_s=LIMIT_S) as reloader:
            replace(model(tmp_path / "new", 4.0), good)
            eventually(lambda: reloader._watches["good"].reloads == 1)
            reloader.limit_s = 0.05
            eventually(lambda: reloader.error("hung") == "the file system does not answer")
            release.set()
            eventually(lambda: reloader.error("hung") is None)


def test_a_check_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving_with(tmp_path / "m.onnx", checks.passes) as serving:

        def full(*words: object, **options: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        replace(model(tmp_path / "new", 4.0), serving.path)
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", full)
            for _ in range(3):
                serving.poll_twice()
        assert "Too many open files" in (serving.reloader.error("m") or "")
        assert len(caplog.records) == 1
        serving.poll_twice()
        assert serving.ask() == 5.0


def _bomb(operator: str, path: Path) -> Path:
    """A model of a few bytes: to load it would take 4 TB, or to run it for ever."""
    limit = numpy_helper.from_array(np.array([1 << 40], np.int64), "limit")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])
    nodes = [helper.make_node("ConstantOfShape", ["limit"], ["much"])]
    nodes.append(helper.make_node("ReduceSum", ["much"], ["sum"]))
    if operator == "Loop":
        body = helper.make_graph(
            [
                helper.make_node("Identity", ["on"], ["on_"]),
                helper.make_node("Add", ["v", "v"], ["v_"]),
            ],
            "body",
            [
                helper.make_tensor_value_info("i", TensorProto.INT64, []),
                helper.make_tensor_value_info("on", TensorProto.BOOL, []),
                helper.make_tensor_value_info("v", TensorProto.FLOAT, None),
            ],
            [
                helper.make_tensor_value_info("on_", TensorProto.BOOL, []),
                helper.make_tensor_value_info("v_", TensorProto.FLOAT, None),
            ],
        )
        nodes = [helper.make_node("Loop", ["limit", "", "x"], ["sum"], body=body)]
    nodes.append(helper.make_node("Add", ["x", "sum"], ["y"]))
    graph = helper.make_graph(nodes, "g", [x], [y], [limit])
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


@pytest.mark.parametrize(
    ("operator", "why", "limit_s"),
    [("ConstantOfShape", "memory", LIMIT_S), ("Loop", "given up: not loaded within", 1.0)],
)
def test_a_small_model_that_would_take_all_memory_or_all_time_is_not_run_here(
    tmp_path: Path, operator: str, why: str, limit_s: float
) -> None:
    with serving_with(tmp_path / "m.onnx", CHECK, limit_s=limit_s) as serving:
        replace(_bomb(operator, tmp_path / "new"), serving.path)
        serving.poll_twice()
        assert why in (serving.reloader.error("m") or "")
        assert serving.loaded == []
        assert serving.ask() == 2.0


def test_a_file_that_becomes_a_fifo_while_it_is_opened_is_no_regular_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model(tmp_path / "m.onnx", 1.0)
    real = os.open

    def swapped(name: Any, *more: Any) -> int:
        if name == path:
            path.unlink()
            os.mkfifo(path)
        return real(name, *more)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(BadInput, match="not a regular file"):
        sha256(path)


@pytest.mark.parametrize("by", [-10, 3 << 20])
def test_a_file_that_changes_its_size_while_it_is_hashed_is_an_error(
    tmp_path: Path, by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(bytes(4 << 20))
    real, asked = os.fstat, list[int]()

    def grown(file: int) -> os.stat_result:
        found = real(file)
        asked.append(file)
        if len(asked) == 2:  # it is open, and its size known
            os.truncate(path, found.st_size + by)
        return found

    monkeypatch.setattr(os, "fstat", grown)
    with pytest.raises(BadInput, match="changed while it was read"):
        sha256(path)
