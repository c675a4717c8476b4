"""A user's own recipe: what its code does wrong is named, and no bug of deploykit's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import deploykit as dk  # noqa: E402
from deploykit.core.errors import BadInput, OutOfMemory  # noqa: E402
from deploykit.training.loop import run_training  # noqa: E402
from deploykit.training.options import (  # noqa: E402
    TrainingOptions,
    read_splits,
)
from tests.support.training import LINE, SPLITS  # noqa: E402

pytestmark = pytest.mark.torch
CPU = TrainingOptions(device="cpu", epochs=1)


def fails(*_: object) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"build": fails}, "recipe's build failed: KeyError: 'mine'"),
        ({"build": lambda: 3}, "recipe's build gave a int"),
        ({"metric": fails}, "recipe's metric failed: KeyError"),
        ({"metric": lambda _outputs, _labels: 3.0}, r"gave shape \(\), one value for each of 20"),
        ({"metric": lambda _outputs, labels: labels + 2.0}, "within 0 and 1"),
        ({"metric": lambda _outputs, labels: labels * np.nan}, "within 0 and 1"),
        ({"report": fails}, "recipe's report failed: KeyError"),
        ({"report": lambda _module, _splits: {"x": {1}}}, "report failed: .* set has no JSON form"),
        ({"loss": fails}, "recipe's model or loss failed: KeyError"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_a_recipe_does_wrong_is_named(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        run_training(replace(LINE, **changed), SPLITS, CPU)


@pytest.mark.parametrize(
    ("data", "reason"),
    [(fails, "recipe's data failed: KeyError"), (lambda _: None, "a NoneType")],
    ids=["fails", "none"],
)
def test_data_that_are_no_splits_are_refused(data: Any, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        read_splits(replace(LINE, data=data), None)


def test_a_model_or_data_larger_than_the_memory_are_refused() -> None:
    def large() -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried …")

    with pytest.raises(OutOfMemory, match="the recipe's model: does not fit"):
        run_training(replace(LINE, build=large), SPLITS, CPU)
    with pytest.raises(OutOfMemory, match="the recipe's data: does not fit"):
        read_splits(replace(LINE, data=lambda _: large()), None)


def test_a_recipe_that_fails_at_its_end_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        "from tests.support.training import LINE\n"
        "RECIPE = replace(LINE, report=lambda _module, _splits: {'x': {1}})\n"
    )
    with pytest.raises(BadInput, match="report failed"):
        dk.train(str(tmp_path / "mine.py"), tmp_path / "m.pt", epochs=1, device="cpu")
    assert [each.name for each in tmp_path.glob("m*")] == ["mine.py"]
