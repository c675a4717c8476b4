"""The command line, run in this process as `deploykit ...` would be, and artefacts to run it on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.onnx_zoo import mnist_like, save


@dataclass(frozen=True)
class Ran:
    """What a command gave back."""

    code: int
    out: str
    err: str

    def error(self) -> str:
        """The one `error:` line; asserts that there is exactly one, and no traceback."""
        assert "Traceback" not in self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0]


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Call the command line with these arguments; gives its exit code and both streams."""
    from deploykit.cli.main import main

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["deploykit", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Ran(ended.value.code, out, err)

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small untrained CNN: image float32[N,1,28,28] -> ten logits."""
    return save(mnist_like(), tmp_path / "model.onnx")


@pytest.fixture
def samples(tmp_path: Path, model: Path) -> Path:
    """Sixty random images, labelled with what the model itself answers: its accuracy is 1."""
    from deploykit.runtimes.engine import load

    with load(model, "cpu") as engine:
        name, shape = engine.inputs[0].name, (60, *engine.inputs[0].shape[1:])
        images = np.random.default_rng(0).random(shape, dtype=np.float32)
        labels = engine({name: images})[engine.outputs[0].name].argmax(1)
    path = tmp_path / "samples.npz"
    np.savez(path, **{name: images, "labels": labels})
    return path
