"""Weights that several processes map: the same outputs, one copy, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from deploykit.engines.onnxruntime import file as mapped
from deploykit.engines.onnxruntime.engine import open_engine
from deploykit.engines.onnxruntime.file import copies_folder, mapped_copy
from tests.support.runtimes.large_model import write_model

FEEDS = {"x": np.random.default_rng(1).normal(size=(2, 64, 9, 9)).astype(np.float32)}


def mappings() -> str:
    return Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "external"])
def test_mapped_weights_change_no_bit_of_an_answer(kind: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "large.onnx", kind, size=2048)
    if kind == "external":
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="large.data")
    folder = tmp_path / "copies"
    folder.mkdir()
    with open_engine(path, "cpu", 1) as usual:
        expected = usual(FEEDS)["y"]
    for _ in range(2):  # written, then found
        with open_engine(path, "cpu", 1, shared=folder) as engine:
            assert str(folder) in mappings()
            assert engine.notes == ()
            np.testing.assert_array_equal(engine(FEEDS)["y"], expected)
            assert (engine.path, engine.inputs, engine.outputs) == (
                path,
                usual.inputs,
                usual.outputs,
            )
    assert str(folder) not in mappings()


def test_what_is_small_or_cannot_be_copied_is_opened_as_usual(tmp_path: Path) -> None:
    path = write_model(tmp_path / "small.onnx", size=8)
    with open_engine(path, "cpu", 1, shared=tmp_path) as engine:
        engine(FEEDS)
    assert [each.name for each in tmp_path.iterdir()] == ["small.onnx"]
    path, folder = write_model(tmp_path / "large.onnx"), tmp_path / "absent"
    with open_engine(path, "cpu", 1, shared=folder) as engine:
        (note,) = engine.notes
        assert "its weights are not shared: " in note
        assert engine(FEEDS)["y"].shape == (2, 1024)


def test_a_file_is_copied_once_and_the_copy_of_its_successor_replaces_it(tmp_path: Path) -> None:
    path, written = tmp_path / "a.onnx", []

    def write(copy: Path) -> None:
        written.append(copy)
        copy.write_bytes(path.read_bytes())

    def fail(copy: Path) -> None:
        copy.write_bytes(b"o")
        raise OSError("no space left")

    path.write_bytes(b"one")
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
    with copies_folder() as running, copies_folder() as other:
        assert running is not None
        assert other is not None
        killed = tmp_path / f"{mapped._PREFIX}killed"
        shutil.copytree(other, killed)
        for each in (running, killed):
            os.utime(each, (0, 0))
        with copies_folder() as third:
            assert set(tmp_path.iterdir()) == {running, other, third}
    mapped._remove_unused(tmp_path)  # as another process does whose lock is gone already
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
