"""A file of weights alone, the first thing that an engineer has: the error names the model."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli.command import Run

torch = pytest.importorskip("torch")
if not find_spec("torchvision"):
    pytest.skip("torchvision is not installed", allow_module_level=True)

from deploykit.engines.torch.files import read  # noqa: E402
from deploykit.engines.torch.open import build_module, copy_weights  # noqa: E402
from deploykit.engines.torch.presets import build_named  # noqa: E402

pytestmark = pytest.mark.torch


KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "bare": lambda weights: weights,
    "of DataParallel": lambda weights: {f"module.{key}": each for key, each in weights.items()},
    "with own classes": lambda weights: (
        weights | {key: weights[key][:3] for key in list(weights)[-2:]}
    ),
}


@pytest.fixture(scope="module")
def weights() -> dict[str, dict[str, Any]]:
    return {name: build_named(name, {}).state_dict() for name in ("resnet18", "shufflenet_v2_x0_5")}


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_of_a_file_of_weights_is_named(
    run: Run, tmp_path: Path, kind: str, weights: dict[str, dict[str, Any]]
) -> None:
    name = "resnet18" if kind != "of DataParallel" else "shufflenet_v2_x0_5"
    path = tmp_path / "best.pth"
    torch.save(KINDS[kind](weights[name]), path)
    ran = run("export", path, *(["--task", "classify"] if kind == "bare" else []))
    assert ran.code == 2
    assert f"these are the weights of torchvision's {name}" in ran.error()
    assert ran.err.endswith(f"hint: --arch {name}\n")
    content = read(path, allow_pickle=False)
    module, _ = build_module(name, None, content.value)
    copy_weights(path, module, content.value)  # what the hint says, fits


def test_a_wrong_architecture_gets_the_right_one_and_a_server_says_to_export_it_first(
    run: Run, tmp_path: Path, weights: dict[str, dict[str, Any]]
) -> None:
    path = tmp_path / "best.pth"
    torch.save(weights["resnet18"], path)
    ran = run("export", path, "--arch", "resnet50")
    assert ran.code == 2
    assert len(ran.error()) - len(str(path)) < 400
    assert "hint: these are the weights of torchvision's resnet18: --arch resnet18" in ran.err
    ran = run("serve", path)
    assert ran.code == 2
    assert f"deploykit export {path} --arch resnet18" in ran.err


def test_weights_of_no_known_model_get_the_ways_to_name_one(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.pth"
    torch.save({"body.weight": torch.zeros(3, 4)}, path)
    ran = run("export", path)
    assert ran.code == 2
    assert "resnet50, timm:NAME, pkg.mod:callable or ./file.py:callable" in ran.err
