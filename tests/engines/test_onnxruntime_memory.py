"""ONNX Runtime on the CPU gives the memory of large runs back, and maps weights once.

Several processes map the weights of a file: the same outputs, one copy, and nothing left behind.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import onnxruntime as ort

from deploykit.engines.batching import prove_rows
from deploykit.engines.onnxruntime import file as mapped
from deploykit.engines.onnxruntime.engine import SHRINK_S, Arena, open_engine
from deploykit.engines.onnxruntime.file import copies_folder, mapped_copy
from deploykit.serving.models.model import warm_up
from deploykit.serving.observe.metrics import this_process
from tests.support.onnx_zoo import make, save
from tests.support.runtimes.large_model import write_model
from tests.support.serving.loops import Clock

WIDTH = 1 << 20  # float32: 4 MiB a row
ROWS = 32


class Seconds(Clock):
    def __call__(self) -> float:  # type: ignore[override]
        return self.us / 1e6


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """y[N, WIDTH] = x[N, 1] * w."""
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"])]
    weights = {"w": np.ones((1, WIDTH), np.float32)}
    model = make(nodes, {"x": ("N", 1)}, {"y": ("N", WIDTH)}, weights)
    return save(model, tmp_path_factory.mktemp("wide") / "wide.onnx")


def feeds(rows: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((rows, 1), np.float32)}


def test_a_session_does_not_keep_its_largest_outputs_for_ever(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 32 rows has outputs of 128 MiB; other tests run in this process too."""
    engine, clock = open_engine(wide, "cpu"), Seconds()
    monkeypatch.setattr(engine, "_arena", Arena(ort, clock))
    for rows in (1, 2, 4, 8, 16, ROWS):
        assert engine(feeds(rows))["y"].shape == (rows, WIDTH)
    before = this_process()["resident_bytes"]
    clock.us += int(SHRINK_S * 1e6)
    assert engine(feeds(1))["y"][0, 0] == 1
    freed = before - this_process()["resident_bytes"]
    assert freed > (ROWS - 2) * WIDTH * 4
    assert freed < ROWS * WIDTH * 4 * 1.5  # smaller runs' blocks were given back before
    engine.close()


def resident_bytes() -> int:
    """Without what malloc keeps: a server has it return large blocks (`return_large_blocks`)."""
    ctypes.CDLL(None).malloc_trim(0)
    return this_process()["resident_bytes"]


def test_a_server_that_is_ready_keeps_nothing_of_its_warm_up(wide: Path) -> None:
    """Its largest batch has outputs of 64 MiB: it kept 190 MiB, more with larger ones."""
    with open_engine(wide, "cpu") as engine:
        assert engine(feeds(1))["y"][0, 0] == 1
        before = resident_bytes()
        assert prove_rows(engine, 16).passed
        times = warm_up("m", engine, Clock(), max_batch=16)
        assert max(times) == 16
        assert resident_bytes() - before < 4 * WIDTH * 4


# mapped weights

IMAGES = {"x": np.random.default_rng(1).normal(size=(2, 64, 9, 9)).astype(np.float32)}


def mappings() -> str:
    return Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "external"])
def test_mapped_weights_change_no_bit_of_an_answer(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    write_model(path, "float32" if kind == "external" else kind, size=2048)
    folder = tmp_path / "copies"
    folder.mkdir()
    if kind == "external":
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="large.data")
    with open_engine(path, "cpu", 1) as usual:
        expected, specs = usual(IMAGES)["y"], (usual.inputs, usual.outputs)
    for _ in range(2):  # written, then found
        with open_engine(path, "cpu", 1, shared=folder) as engine:
            assert str(folder) in mappings()
            assert engine.notes == ()
            np.testing.assert_array_equal(engine(IMAGES)["y"], expected)
            assert (engine.path, (engine.inputs, engine.outputs)) == (path, specs)
    assert str(folder) not in mappings()


def test_a_small_model_or_one_that_cannot_be_copied_is_opened_as_usual(tmp_path: Path) -> None:
    path = write_model(tmp_path / "small.onnx", size=8)
    with open_engine(path, "cpu", 1, shared=tmp_path) as engine:
        engine(IMAGES)
    assert [each.name for each in tmp_path.iterdir()] == ["small.onnx"]
    path = write_model(tmp_path / "large.onnx")
    with open_engine(path, "cpu", 1, shared=tmp_path / "absent") as engine:
        (note,) = engine.notes
        assert "its weights are not shared: " in note
        assert engine(IMAGES)["y"].shape == (2, 1024)


def test_a_file_is_copied_whole_and_once_and_the_copy_of_its_successor_replaces_it(
    tmp_path: Path,
) -> None:
    path, written = tmp_path / "a.onnx", []
    path.write_bytes(b"one")

    def fail(copy: Path) -> None:
        copy.write_bytes(b"o")
        raise OSError("no space left")

    def write(copy: Path) -> None:
        written.append(copy)
        copy.write_bytes(path.read_bytes())

    with pytest.raises(OSError, match="no space"):
        mapped_copy(path, tmp_path, fail)
    (tmp_path / "new").mkdir()  # of a process that was killed
    (tmp_path / "new" / "weights").touch()
    first = mapped_copy(path, tmp_path, write)
    assert [each.name for each in first.parent.iterdir()] == ["model.onnx"]
    assert mapped_copy(path, tmp_path, write) == first
    (tmp_path / "b").write_bytes(b"two")
    (tmp_path / "b").rename(path)
    second = mapped_copy(path, tmp_path, write)
    assert (second.read_bytes(), len(written)) == (b"two", 2)
    assert list(tmp_path.glob("*/model.onnx")) == [second]


def test_the_folder_of_a_server_that_was_killed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped.tempfile, "tempdir", str(tmp_path))
    gone = 1 << 22  # above the largest number of a process
    (tmp_path / f"{mapped._PREFIX}{gone}-7-a").mkdir()
    (tmp_path / f"{mapped._PREFIX}{os.getpid()}-7-a").mkdir()  # as the same container's last start
    with copies_folder() as running, copies_folder() as other:
        assert set(tmp_path.iterdir()) == {running, other}
    assert list(tmp_path.iterdir()) == []


def test_onnx_runtime_reports_its_use_to_nobody() -> None:
    """It would do so from a thread of its own, which also makes forking a server unsafe."""
    code = (
        "import os; from deploykit.core.extras import require; require('onnxruntime'); "
        "print(len(os.listdir('/proc/self/task')))"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
