"""What `quantize` and `build` to INT8 do once: read files, copy graphs, open sessions, hash."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import deploykit as dk

# a module that a test imports first would keep that test's counter
import deploykit.quantization.quantize
from deploykit.core import files
from deploykit.graph import edit as editor
from deploykit.graph import graph, validate
from deploykit.quantization import qdq
from deploykit.quantization.scales import FEW
from tests.support.onnx_zoo import mnist_like, save

# Parse the source; a skeleton of it and of the result; editors to find what is scaled, calibrate,
# try the calibrators (on so few values all have the same ranges) and write the pairs; a session to
# calibrate, one for the trial and one for either graph. Evaluating with the session that calibrates
# would save one, but it has no optimised kernels: ResNet-18 takes 1.4 times as long in it for each
# batch, and opening one takes 0.2 s. Weights: once for all trials, once for the file.
MOST = {"parse": 1, "skeleton": 2, "editor": 4, "session": 4, "weights": 6}


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    images = np.random.default_rng(0).random((FEW, 1, 28, 28), dtype=np.float32)
    np.savez(tmp_path / "calib.npz", image=images)
    return save(mnist_like(), tmp_path / "model.onnx"), tmp_path / "calib.npz"


def test_quantizing_to_int8_reads_copies_and_opens_each_graph_once(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counter[str]()

    def count(owner: Any, function: str, name: str) -> None:
        real = getattr(owner, function)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name.format(args[0].name if "{" in name else "")] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, function, counted)

    real = files.sha256
    for module in list(sys.modules.values()):
        ours = getattr(module, "__name__", "").startswith("deploykit")
        if ours and vars(module).get("sha256") is real:
            count(module, "sha256", "sha256 of {}")
    count(validate, "parse_model", "parse")
    count(graph, "make_skeleton", "skeleton")
    count(editor.Editor, "__init__", "editor")
    count(onnxruntime, "InferenceSession", "session")
    count(qdq, "int8_steps", "weights")
    count(os, "fsync", "fsync")
    model, calib = paths
    made = dk.quantize(model, "int8", calib=calib)
    assert {name: counts[name] for name in MOST} == MOST
    hashes = {name: count for name, count in counts.items() if name.startswith("sha256")}
    # what was written is hashed on the way to the disk, but for the few golden samples
    once = ("model.onnx", "calib.npz", f"{made.path.name}.golden.npz")
    assert hashes == {f"sha256 of {name}": 1 for name in once}
    assert made.manifest.sha256 == real(made.path)
    assert counts["fsync"] == 3  # of the model, its golden samples and its manifest: of no trial


def test_building_in_int8_opens_each_graph_once_and_the_builder_one_more(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = onnxruntime.InferenceSession

    def session(source: object, *args: Any, **kwargs: Any) -> Any:
        name = Path(source).name if isinstance(source, str) else "calibration"
        written = kwargs["sess_options"].optimized_model_filepath
        opened.append(f"{name} to write" if written else name)
        return real(source, *args, **kwargs)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    model, calib = paths
    dk.build(model, "cpu", precision="int8", calib=calib, out=model.with_name("built.onnx"))
    built = ["typed.onnx to write", "built.onnx", "typed.onnx", "model.onnx"]
    assert opened == ["calibration", "tried.onnx", *built]
