"""The command line, run in this process as `deploykit ...` would be, and artefacts to run it on."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.cli.command import Ran, Run
from tests.support.onnx_zoo import mnist_like, save


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Call the command line with these arguments; gives its exit code and both streams."""
    from deploykit.cli.main import main

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["deploykit", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Ran(ended.value.code, out, err)

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small untrained CNN: image float32[N,1,28,28] -> ten logits."""
    return save(mnist_like(), tmp_path / "model.onnx")


@pytest.fixture
def samples(tmp_path: Path, model: Path) -> Path:
    """Sixty random images, labelled with what the model itself answers: its accuracy is 1."""
    from deploykit.engines.engine import load

    with load(model, "cpu") as engine:
        name, shape = engine.inputs[0].name, (60, *engine.inputs[0].shape[1:])
        images = np.random.default_rng(0).random(shape, dtype=np.float32)
        labels = engine({name: images})[engine.outputs[0].name].argmax(1)
    path = tmp_path / "samples.npz"
    np.savez(path, **{name: images, "labels": labels})
    return path
