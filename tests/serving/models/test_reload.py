"""Reloading a model's file while it serves: faults F4 and F5."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.files import sha256
from deploykit.core.manifest import Manifest, write_manifest
from deploykit.engines.engine import Engine, load
from deploykit.engines.oip.protobuf import message_from
from deploykit.serving.models.reload import Reloader, Source
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.options import ServeOptions
from deploykit.serving.serve import open_engines
from tests.support.serving.reloading import FEEDS, LIMIT_S, Serving, model, replace
from tests.support.serving.running import Running, running


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(model(tmp_path / "m.onnx", 1.0))
    with contextlib.closing(serving):
        yield serving


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
    assert [record.getMessage() for record in caplog.records] == [
        "model 'm': m.onnx was replaced and is in use"
    ] * 4
    assert counts(serving.reloader) == (4, 0)


def test_replaced_engines_are_closed_once_idle(serving: Serving, tmp_path: Path) -> None:
    for number in (2, 3):
        replace(model(tmp_path / "new.onnx", number), serving.path)
        serving.poll_twice()
    serving.close()
    for engine in serving.loaded:
        with pytest.raises(DeploykitError, match="closed"):
            engine(FEEDS)


def counts(reloader: Reloader) -> tuple[float, float]:
    """Reloads and failures, of all models."""
    total = Counter[str]()
    for name, labels, value in reloader.samples():
        assert labels.keys() == {"model", "version"}
        total[name] += value
    return total["deploykit_reloads_total"], total["deploykit_reload_failed"]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


BAD = {
    "truncated": cut,
    "emptied": lambda path: os.truncate(path, 0),
    "deleted": lambda path: path.unlink(),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 64),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "other inputs": lambda path: model(path, 2.0, width=5),
}
WHY = {
    "deleted": "the file is gone",
    "a folder": "is a folder",
    "emptied": "the file is empty",
    "other inputs": r"x:float32\[N,5\]",
}


@pytest.mark.parametrize("fault", BAD)
def test_f5_a_bad_new_file_leaves_the_old_engine_serving_and_is_reported_once(
    serving: Serving, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    BAD[fault](serving.path)
    for _ in range(5):
        serving.poll_twice()
    assert serving.ask() == 2.0
    assert len(caplog.records) == 1  # reported once
    reason = serving.reloader.error("m")
    assert reason is not None
    assert reason in caplog.messages[0]
    assert str(tmp_path) not in reason
    assert len(reason.splitlines()) == 1
    if fault in WHY:
        assert caplog.records[0].levelno == logging.ERROR
        assert re.search(WHY[fault], reason), reason
    assert counts(serving.reloader)[1] == 1

    if fault == "a folder":
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


def test_a_change_during_the_start_is_not_missed(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", 1.0)
    source = Source(path, lambda: [load(path, "cpu")])
    with (
        load(path, "cpu") as first,
        contextlib.closing(ModelRepository({"m": first}, ServeOptions())) as repository,
    ):
        replace(model(tmp_path / "new.onnx", 2.0), path)
        with Reloader(repository, {"m": source}, poll_s=3600) as reloader:
            reloader.poll()
            reloader.poll()
            assert counts(reloader) == (1, 0)


@pytest.mark.parametrize("changed", ["w.bin", "m.onnx.json"])
def test_a_change_of_weights_or_manifest_is_a_change_of_the_model(
    tmp_path: Path, changed: str
) -> None:
    path = model(tmp_path / "m.onnx", 1.0, external=True)
    source = Source(path, list)
    before = source.files()
    (tmp_path / changed).write_bytes(b"\0" * 100)
    assert source.files() != before


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
    serving = Serving(model(tmp_path / "m.onnx", 1.0, external=True))
    with contextlib.closing(serving):
        other = tmp_path / "other"
        other.mkdir()
        model(other / "m.onnx", 5.0, external=True)
        replace(other / "w.bin", tmp_path / "w.bin")
        serving.poll_twice()
        assert serving.ask() == 6.0


def test_the_reload_thread_polls_and_ends_on_close(tmp_path: Path, eventually) -> None:
    path = model(tmp_path / "m.onnx", 1.0)
    source = Source(path, lambda: [load(path, "cpu")])
    with (
        load(path, "cpu") as first,
        contextlib.closing(ModelRepository({"m": first}, ServeOptions())) as repository,
    ):
        with Reloader(repository, {"m": source}, poll_s=0.01) as reloader:
            replace(model(tmp_path / "new.onnx", 2.0), path)
            eventually(lambda: counts(reloader)[0] == 1)
        assert not [each for each in threading.enumerate() if each.name == "reload"]


def test_an_unexpected_error_in_the_loader_keeps_the_old_engine(
    serving: Serving, tmp_path: Path
) -> None:
    def broken() -> list[Engine]:
        raise ZeroDivisionError("division by zero")

    serving.source.load = broken
    replace(model(tmp_path / "new.onnx", 2.0), serving.path)
    serving.poll_twice()
    assert serving.reloader.error("m") == "ZeroDivisionError: division by zero"
    assert serving.ask() == 2.0


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


@pytest.mark.skipif(
    not hasattr(onnxruntime.SessionOptions, "add_external_initializers_from_files_in_memory"),
    reason=f"onnxruntime {onnxruntime.__version__} maps the weights itself",
)
def test_f4_truncated_weights_do_not_end_the_process(tmp_path: Path) -> None:
    """ONNX Runtime maps external weights: reading truncated ones was a SIGBUS (-7)."""
    table = np.random.default_rng(0).standard_normal((1000, 2000), dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["w", "i"], ["y"])],
        "g",
        [helper.make_tensor_value_info("i", TensorProto.INT64, ["N"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2000])],
        [numpy_helper.from_array(table, "w")],
    )
    found = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(found, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin")
    ran = subprocess.run(
        [sys.executable, "-c", TRUNCATED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "alive"), ran.stderr


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(8 << 20))


def _sparse(path: Path) -> None:
    with path.open("wb") as handle:
        handle.truncate(1 << 30)


def _sparse_after_a_header(path: Path) -> None:
    with path.open("wb") as handle:
        handle.write(b"\x08\x0a\x12\x03abc")  # begins as an ONNX file does
        handle.truncate(1 << 30)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


HOSTILE = {
    "a FIFO": os.mkfifo,
    "zeros": _zeros,
    "a sparse file": _sparse,
    "a sparse file that begins as a model": _sparse_after_a_header,
    "a folder": Path.mkdir,
    "a socket": _socket,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_a_model_is_rejected_soon_and_a_good_file_is_served_next(
    serving: Serving, tmp_path: Path, name: str
) -> None:
    read: list[int] = []
    pread = os.pread

    def counted(file: int, size: int, at: int) -> bytes:
        read.append(size)
        return pread(file, size, at)

    serving.path.unlink()
    HOSTILE[name](serving.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", counted)
        serving.poll_twice()
    assert sum(read) < 1 << 20
    assert serving.reloader.error("m")
    assert serving.ask() == 2.0
    serving.path.rmdir() if serving.path.is_dir() else serving.path.unlink()
    model(serving.path, 5)
    serving.poll_twice()
    assert serving.reloader.error("m") is None
    assert serving.ask() == 6.0


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


def test_a_file_name_that_is_not_utf_8_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"m\xff.onnx")
    try:
        model(tmp_path / "m.onnx", 1.0).rename(path)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    with pytest.raises(BadInput, match="the path is not UTF-8"):
        open_engines(path, OPTIONS)
