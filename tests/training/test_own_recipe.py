"""A user's own recipe: what its code does wrong is named, and no bug of deploykit's."""

from __future__ import annotations

import math
import sys
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deploykit as dk
from deploykit.cli.main import main
from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, OutOfMemory
from deploykit.core.recipe import Split, Splits
from deploykit.core.task import IMAGENET, ImageInput
from deploykit.core.tensors import TensorSpec, parse_spec
from deploykit.engines.torch.open import load_module
from deploykit.training.loop import run_training
from deploykit.training.options import TrainingOptions, read_splits
from tests.support.training import LINE, SPLITS

pytestmark = pytest.mark.torch
CPU = TrainingOptions(device="cpu", epochs=1)


def fails(*_: object) -> Any:
    raise KeyError("mine")


def lacks_memory(*_: object) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried …")


class Two(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return (super().forward(x),) * 2


def layers(**more: object) -> torch.nn.Module:
    """A body and a head, with attributes of any kind."""
    parts = OrderedDict(body=torch.nn.Linear(2, 3), head=torch.nn.Linear(3, 2))
    found = torch.nn.Sequential(parts)
    found.__dict__ |= more
    return found


def specs(*texts: str) -> Any:
    return tuple(map(parse_spec, texts))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"learning_rate": math.nan}, "`learning_rate` must be above 0, below 1e.30, got nan"),
        ({"epochs": True}, "`epochs` must be int"),
        ({"clip_norm": 0.0}, "`clip_norm` must be"),
        ({"schedule": "cosin"}, "`schedule` must be one of"),
        ({"loss": torch.nn.CrossEntropyLoss}, "`loss` must be a function, or a module: torch.nn.C"),
        ({"inputs": ("x:float32[N,2]",)}, "`inputs` must be TensorSpecs, such as"),
        ({"preprocess": "imagenet"}, "`preprocess` must be Preprocess | None, got 'imagenet'"),
        ({"preprocess": IMAGENET}, "no input uint8"),
        ({"augment": ["flip"]}, "`augment` must be Mapping[str, float] | Callable"),
        ({"backbone": ("body", "head")}, "the recipe's `backbone`: AttributeError"),
        (
            {"inputs": specs("x:float32[N,3]")},
            r"its train data: input 'x' is float32\[200,3\], got float32\[200,2\]",
        ),
        ({"inputs": specs("z:float32[N,2]")}, "hold x, the recipe's inputs are z"),
        (
            {"outputs": specs("y:float32[N,3]")},
            r"`outputs` declare y:float32\[N,3\], its model gives float32\[2, 2\]",
        ),
        ({"build": lambda: Two(2, 2)}, "model gives Tensor, Tensor, its `outputs` are y:float32"),
        ({"build": lambda: LINE.build().to("meta")}, "model cannot be moved to cpu: No"),
        ({"build": torch.nn.Identity}, "the recipe's model has no weights to train"),
        ({"build": lambda: torch.nn.Linear(3, 2)}, "model failed on its own data: RuntimeError"),
        ({"build": fails}, "recipe's build failed: KeyError: 'mine'"),
        ({"build": lambda: 3}, "recipe's build gave a int"),
        ({"build": lacks_memory}, "the recipe's model: does not fit"),
        ({"data": fails}, "recipe's data failed: KeyError"),
        ({"data": lambda _: None}, "a NoneType"),
        ({"data": lacks_memory}, "the recipe's data: does not fit"),
        ({"metric": fails}, "recipe's metric failed: KeyError"),
        ({"metric": lambda _outputs, _labels: 3.0}, r"gave shape \(\), one value for each of 20"),
        ({"metric": lambda _outputs, labels: labels * np.nan}, "within 0 and 1"),
        ({"report": fails}, "recipe's report failed: KeyError"),
        ({"report": lambda *_: {"x": {1}}}, "report failed: .* set has no JSON form"),
        ({"loss": fails}, "recipe's model or loss failed on 20 samples, cpu: KeyError"),
        ({"loss": lambda *_: sys.exit(3)}, r"model or loss failed on .*: it called exit\(3\)"),
        ({"build": layers, "backbone": ("head", "body")}, "backbone, head, failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_a_recipe_does_wrong_is_named(changed: dict[str, Any], reason: str) -> None:
    recipe = replace(LINE, **changed)
    with pytest.raises((BadInput, OutOfMemory), match=reason):
        run_training(recipe, read_splits(recipe, None), CPU)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"epochs": 0}, "`epochs`"),
        ({"learning_rate": math.nan}, "`learning_rate` must be"),
        ({"amp": "fp8"}, "unknown `amp` 'fp8'"),
        ({"seed": 2**64}, "`seed`"),
        ({"unfreeze": 0.5}, "`unfreeze`: this recipe has no frozen backbone"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        run_training(LINE, SPLITS, replace(CPU, **options))
    with pytest.raises(BadInput, match="`unfreeze` must be above 0, up to 1"):
        run_training(replace(LINE, backbone=("a", "b")), SPLITS, replace(CPU, unfreeze=2.0))


X = SPLITS.train.inputs["x"]
Y = SPLITS.train.labels
NOTHING = Split({"x": X[:0]}, X[:0, 0])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"test": NOTHING}, "holds no test data"),
        ({"calibration": NOTHING}, "`patience` needs validation data"),
        ({"train": Split({"x": X[:9]}, Y)}, r"is float32\[200,2\], got float32\[9,2\]"),
        ({"train": Split({"x": X}, np.array(["left"] * 200))}, "labels of <U4"),
        ({"train": Split({3: X}, Y)}, "data hold 3, the recipe's inputs are x"),
        ({"train": Split({"x": X * np.float32("nan")}, Y)}, "sample 0 holds NaN"),
        ({"train": Split({"x": X}, Y - 1)}, "its train data have labels from -1 to 0"),
        ({"test": Split({"x": X}, Y + 1)}, "data have labels from 1 to 2; the model has 2"),
        ({"train": (X, Y)}, "its `train` must be Split, got"),
        ({"classes": ("a", "b", "c")}, "names 3 classes, the model has 2"),
        ({"image": ImageInput("x", 4, 4)}, "`image` does not describe one of the recipe's inputs"),
    ],
    ids=str,
)
def test_data_that_do_not_fit_are_refused_before_the_first_step(
    changed: dict[str, Any], reason: str
) -> None:
    steps: list[object] = []
    recipe = replace(LINE, loss=lambda *_: steps.append(0) or 1 / 0)
    with pytest.raises(BadInput, match=reason):
        run_training(recipe, replace(SPLITS, **changed), replace(CPU, patience=2))
    assert not steps


def test_inputs_are_passed_in_the_order_of_the_recipe_whatever_that_of_the_data() -> None:
    class Minus(torch.nn.Linear):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return super().forward(a - b)

    swapped = Split({"b": X[:, 1:], "a": X[:, :1]}, torch.from_numpy(SPLITS.train.labels))
    specs = tuple(TensorSpec(name, "float32", ("N", 1)) for name in "ab")
    recipe = replace(LINE, build=lambda: Minus(1, 2), inputs=specs)
    trained = run_training(
        recipe, Splits(swapped, swapped, swapped, "points"), replace(CPU, epochs=9)
    )
    ahead = trained.module(torch.ones(1, 1), torch.zeros(1, 1)).argmax()
    assert (int(ahead), trained.scores.mean() > 0.95) == (1, True)


@pytest.mark.parametrize(
    "changed",
    [
        {"build": lambda: layers(lock=threading.Lock(), rows=(i for i in X))},
        {"data": lambda _: replace(SPLITS, train=Split({"x": X.astype(">f4")}, Y.astype(">i8")))},
        {"data": lambda _: replace(SPLITS, train=Split({"x": X[::-1]}, Y[::-1]))},
    ],
    ids=["attributes", "byte order", "strides"],
)
def test_an_odd_recipe_is_trained(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploykit.training.train.load_recipe", lambda _: replace(LINE, **changed))
    made = dk.train("./mine.py", tmp_path / "m.pt", epochs=9, device="cpu")
    assert made.accuracy.value > 0.5
    assert Artefact(tmp_path / "m.pt").manifest.evidence.training is not None


def write_recipe(where: Path, change: str, body: str = "") -> str:
    text = f"""
import numpy as np, torch
from dataclasses import replace
from deploykit.core.recipe import Split, Splits
from tests.support.training import LINE, SPLITS
{body}
RECIPE = replace(LINE, {change})
"""
    (where / "mine.py").write_text(text)
    return str(where / "mine.py")


def test_names_and_sizes_that_numpy_made_can_be_read_from_the_checkpoint(tmp_path: Path) -> None:
    body = """
splits = replace(SPLITS, classes=np.array(["left", "right"]), build_with={"n": np.int64(2)})
"""
    change = "data=lambda _: splits, build=lambda n: torch.nn.Linear(2, n)"
    recipe = write_recipe(tmp_path, change, body)
    dk.train(recipe, tmp_path / "m.pt", epochs=1, device="cpu")
    loaded = load_module(tmp_path / "m.pt", arch=recipe)
    assert loaded.preset.labels == ("left", "right")
    with pytest.raises(BadInput, match=r"m\.pt: the recipe's build failed with the sizes"):
        load_module(tmp_path / "m.pt", arch=write_recipe(tmp_path, "epochs=1"))


@pytest.mark.parametrize(
    ("change", "body", "expected"),
    [
        (
            "data=lambda _: replace(SPLITS, test=SPLITS.train)",
            "",
            "200 samples of the test data are also in the train data, the first is number 0",
        ),
        ("metric=lambda _, labels: (labels == 0) * 1.0", "", "always answering '"),
        (
            "data=lambda _: replace(SPLITS, test=few)",
            "few = Split({'x': np.float32([[3, 0]] * 9 + [[0, 3]])}, np.array([1] * 9 + [0]))",
            "the test data have 1 of '0': too few to conclude from",
        ),
        ("report=lambda *_: {'perplexity': 3.784}", "", "on the test data: perplexity 3.784"),
    ],
    ids=["shared", "chance", "few", "report"],
)
def test_a_note_says_what_a_score_does_not_show(
    tmp_path: Path, change: str, body: str, expected: str
) -> None:
    made = dk.train(write_recipe(tmp_path, change, body), tmp_path / "m.pt", device="cpu")
    assert any(note.startswith(expected) for note in made.notes), made.notes


def test_a_score_of_shares_has_the_interval_of_their_spread(tmp_path: Path) -> None:
    change = "metric=lambda outputs, labels: 0.6 + 0.1 * (outputs['y'].argmax(1) == labels)"
    made = dk.train(write_recipe(tmp_path, change), tmp_path / "m.pt", device="cpu")
    assert made.accuracy.high - made.accuracy.low < 0.05  # Wilson's is 0.17


def test_a_checkpoint_and_its_manifest_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: Path) -> str:
        raise KeyboardInterrupt

    recipe = write_recipe(tmp_path, "epochs=1")
    monkeypatch.setattr("deploykit.training.train.sha256", stop)
    with pytest.raises(KeyboardInterrupt):
        dk.train(recipe, tmp_path / "m.pt", device="cpu")
    recipe = write_recipe(tmp_path, "report=lambda _module, _splits: {'x': {1}}")
    with pytest.raises(BadInput, match="report failed"):
        dk.train(recipe, tmp_path / "m.pt", epochs=1, device="cpu")
    assert not [*tmp_path.glob("*m.pt*")]


def test_an_interrupted_run_names_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
steps = []
def loss(y, labels):
    steps.append(0)
    if len(steps) > 15:
        raise KeyboardInterrupt
    return LINE.loss(y, labels)
"""
    words = ["train", write_recipe(tmp_path, "loss=loss", body), "-o", "m.pt", "--device", "cpu"]
    monkeypatch.chdir(tmp_path)
    for options, expected in (
        (["--checkpoint", "run.ckpt"], "interrupted: the same command goes on from run.ckpt"),
        ([], "interrupted: no epoch was kept; --checkpoint FILE.ckpt keeps each"),
    ):
        monkeypatch.setattr(sys, "argv", ["deploykit", *words, *options])
        with pytest.raises(SystemExit, match="130"):
            main()
        assert expected in capfd.readouterr().err
