"""Disk faults (F6, F7), with the real `build`.

Atomic writes are tested in tests/core/test_files.py, Ctrl-C in tests/cli/test_interrupt.py.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploykit.core.artefact import Artefact
from deploykit.engines.engine import load
from tests.support.serving.faults import LIMIT_S, REAL, ROOT, until

QUANTIZE = ("quantize", "m.onnx", "--to", "fp16", "-o", "out/m.onnx", "--force")
BUILD = ("build", "m.onnx", "--profile", "cpu", "-o", "out/m.onnx", "--force")
FULL = "mount -t tmpfs -o size={size} none out && cp before out/m.onnx && "
KEPT = "cat out/m.onnx > after; ls -A out > left; exit $code"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a model of 2 MiB."""
    weights = np.random.default_rng(0).standard_normal((512, 1024), dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 512])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 1024])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    (tmp_path / "out").mkdir()
    (tmp_path / "before").write_bytes(b"what was there before")
    return tmp_path


def start(place: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("words", "size"),
    [(BUILD, "1m"), (QUANTIZE, "1m"), (QUANTIZE, "2m")],  # 2m: fits, but not the proof's copy too
    ids=["build", "quantize", "quantize-proof"],
)
def test_f6_a_full_disk_exits_with_3_and_keeps_the_old_file(
    place: Path, words: Sequence[str], size: str
) -> None:
    alone, full = ["unshare", "--mount", "sh", "-c"], FULL.format(size=size)
    if subprocess.run([*alone, full + "true"], cwd=place, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    script = f'{full} {{ "$@"; code=$?; {KEPT}; }}'
    with start(place, [*alone, script, "sh", *REAL, *words]) as process:
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3, stderr
    assert "error: out/m.onnx: no space left on the disk" in stderr
    assert "Traceback" not in stderr
    assert (place / "after").read_bytes() == b"what was there before"
    assert (place / "left").read_text().split() == ["m.onnx"]


@pytest.mark.parametrize("written", ["*", "m.onnx"])
def test_f7_a_build_killed_at_any_time_leaves_a_whole_file_or_none(
    place: Path, written: str
) -> None:
    """Killed as soon as it has begun to write, or the file is there and its manifest may not be."""
    out = place / "out"
    with start(place, [*REAL, *BUILD]) as process:
        until(lambda: any(out.glob(written)) or process.poll() is not None)
        process.kill()
        process.communicate()
    whole = out / "m.onnx"
    assert whole.exists() or written == "*"
    if whole.exists():
        with load(whole, "cpu") as engine:
            engine({"x": np.ones((1, 512), np.float32)})
        manifest = Artefact(whole).manifest  # raises when it describes another file
        assert manifest is None or manifest.sha256 == hashlib.sha256(whole.read_bytes()).hexdigest()
    with start(place, [*REAL, *BUILD]) as process:
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert Artefact(whole).manifest is not None
