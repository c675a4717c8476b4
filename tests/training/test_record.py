"""What is drawn and written of a run: the curve, and event files for TensorBoard."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.core.errors import MissingExtra, Unsupported  # noqa: E402
from deploykit.training.curve import curve_svg  # noqa: E402
from deploykit.training.loop import run_training  # noqa: E402
from deploykit.training.options import TrainingOptions  # noqa: E402
from tests.support.training import LINE, SPLITS, losses  # noqa: E402

pytestmark = pytest.mark.torch
CPU = TrainingOptions(device="cpu", epochs=4)


def test_the_curve_holds_every_epoch() -> None:
    trained = run_training(LINE, SPLITS, CPU)
    drawn = curve_svg(trained.history, "a < b", "top-1")
    assert drawn.count("<circle") == 2 * len(trained.history)
    assert "a &lt; b" in drawn
    import xml.etree.ElementTree as ET

    ET.fromstring(drawn)


def test_the_curve_of_one_epoch_with_a_loss_of_zero_is_drawn() -> None:
    entry = {"epoch": 1, "loss": 0.0, "score": None}
    assert "nan" not in curve_svg([entry], "t", "m")


def test_event_files_hold_the_history(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained = run_training(LINE, SPLITS, replace(CPU, tensorboard=tmp_path / "events"))
    read = EventAccumulator(str(tmp_path / "events"))
    read.Reload()
    assert [each.value for each in read.Scalars("loss")] == pytest.approx(losses(trained))
    assert [each.step for each in read.Scalars("score")] == [1, 2, 3, 4]


def test_a_missing_tensorboard_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises((MissingExtra, Unsupported)) as caught:
        run_training(LINE, SPLITS, replace(CPU, tensorboard=tmp_path))
    assert "[tensorboard]" in str(caught.value.hint)
