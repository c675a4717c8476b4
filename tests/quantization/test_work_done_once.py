"""What `quantize` and `build` to INT8 do once: read files, copy graphs, open sessions, hash."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
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

# Parse the source; a skeleton of it and of the result; editors to find what is scaled, to calibrate
# and to write the pairs; a session to calibrate and one for either graph. Evaluating with the
# session that calibrates would save one, but it has no optimised kernels: ResNet-18 takes 1.4 times
# as long in it for each batch, and opening one takes 0.2 s.
MOST = {"parse": 1, "skeleton": 2, "editor": 3, "session": 3, "weights": 3}
# Each calibrator of "auto" is written and run, those with the same ranges once: on so few values
# all have one. The model ran where it was calibrated. On more than FEW samples, those that gain are
# run once more.
DISTINCT = 1
TRIALS = {
    "parse": 0,
    "skeleton": 0,
    "editor": DISTINCT,
    "session": DISTINCT,
    "weights": MOST["weights"],  # once for all the trials: no calibrator changes them
}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts = Counter[str]()

    def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(validate, "parse_model", count("parse", validate.parse_model))
    monkeypatch.setattr(graph, "make_skeleton", count("skeleton", graph.make_skeleton))
    monkeypatch.setattr(editor.Editor, "__init__", count("editor", editor.Editor.__init__))
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", count("session", onnxruntime.InferenceSession)
    )
    monkeypatch.setattr(qdq, "int8_steps", count("weights", qdq.int8_steps))
    monkeypatch.setattr(os, "fsync", count("fsync", os.fsync))
    real = files.sha256

    def hashed(path: Path) -> str:
        counts[f"sha256 of {path.name}"] += 1
        return real(path)

    for module in list(sys.modules.values()):
        ours = getattr(module, "__name__", "").startswith("deploykit")
        if ours and vars(module).get("sha256") is real:
            monkeypatch.setattr(module, "sha256", hashed)
    return counts


def test_quantizing_to_int8_reads_copies_and_opens_each_graph_once(
    counts: Counter[str], tmp_path: Path
) -> None:
    model = save(mnist_like(), tmp_path / "model.onnx")
    calib = tmp_path / "calib.npz"
    images = np.random.default_rng(0).random((FEW, 1, 28, 28), dtype=np.float32)
    np.savez(calib, image=images)
    made = dk.quantize(model, "int8", tmp_path / "int8.onnx", calib=calib)
    assert {name: counts[name] for name in MOST} == {n: MOST[n] + TRIALS[n] for n in MOST}
    hashes = {name: count for name, count in counts.items() if name.startswith("sha256")}
    # what was written is hashed on the way to the disk, but for the few golden samples
    once = ("model.onnx", "calib.npz", "int8.onnx.golden.npz")
    assert hashes == {f"sha256 of {name}": 1 for name in once}
    assert made.manifest.sha256 == files.sha256(made.path)
    assert counts["fsync"] == 3  # of the model, its golden samples and its manifest: of no trial


def test_building_in_int8_opens_each_graph_once_and_the_builder_one_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = save(mnist_like(), tmp_path / "model.onnx")
    calib = tmp_path / "calib.npz"
    images = np.random.default_rng(0).random((FEW, 1, 28, 28), dtype=np.float32)
    np.savez(calib, image=images)
    opened: list[str] = []
    real = onnxruntime.InferenceSession

    def session(source: object, *args: Any, **kwargs: Any) -> Any:
        name = Path(source).name if isinstance(source, str) else "calibration"
        opened.append(
            f"{name} to write" if kwargs["sess_options"].optimized_model_filepath else name
        )
        return real(source, *args, **kwargs)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    dk.build(model, "cpu", precision="int8", calib=calib, out=tmp_path / "built.onnx")
    trials = ["tried.onnx"] * DISTINCT
    built = ["typed.onnx to write", "built.onnx", "typed.onnx", "model.onnx"]
    wanted = ["calibration", *trials, *built]
    assert opened == wanted
