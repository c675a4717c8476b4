"""A frozen backbone of five digit classes on the other five, against training from scratch.

    python benchmarks/transfer.py [--seeds 6] [--only TEXT]

Settled before the first run: the convolutions of mnist-cnn with the head of the transfer recipes
(256, then 5), on scikit-learn's digits of 28x28 pixels. The backbone is trained for 4 epochs on all
images of 0 to 4, each drawn eight times. Then 50 images of each of 5 to 9, each once, train for 30
epochs at batch 32, the transfer recipes' defaults: a head on the frozen backbone at their learning
rate of 1e-3; the backbone too, at half of that; and the whole network from scratch at mnist-cnn's
3e-3. All other images of 5 to 9 test. Settings: digits in the middle or moved by up to 4 pixels,
under no noise, noise as strong as the ink (a standard deviation of 1) and twice as strong. The one
that the bar of 5 points is for: in the middle, noise as strong as the ink.

Printed per setting: accuracies over the seeds, each with images, noise and weights of its own, and
the mean of the paired differences with its 95 % t interval. Exit 1 if that setting's lower end is
below 5 points.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from dataclasses import replace

import numpy as np
import torch

from deploykit.core.recipe import Recipe, Split, Splits, load_recipe
from deploykit.core.tensors import TensorSpec
from deploykit.evaluation.statistics import t_quantile
from deploykit.training.data import enlarged_digits
from deploykit.training.loop import run_training
from deploykit.training.options import TrainingOptions

SIDE, FEW, MOVED = 28, 50, 4
SETTINGS = tuple(itertools.product((0, MOVED), (0.0, 1.0, 2.0)))  # pixels, noise
MAIN = (0, 1.0)
BAR = 5.0


class Net(torch.nn.Module):
    """image (N, 1, 28, 28) -> five logits."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        first = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
        third = nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()
        self.backbone = nn.Sequential(*first, *second, *third)
        self.head = nn.Sequential(nn.Linear(576, 256), nn.ReLU(), nn.Linear(256, 5))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.backbone(image))
        return logits


def recipes() -> tuple[Recipe, Recipe]:
    """From scratch, and on a backbone."""
    scratch = replace(
        load_recipe("mnist-cnn"),
        build=Net,
        outputs=(TensorSpec("logits", "float32", ("N", 5)),),
        epochs=30,
        batch_size=32,
        augment=None,
        augmented=False,
    )
    return scratch, replace(scratch, backbone=("backbone", "head"), learning_rate=1e-3)


def draw(
    images: np.ndarray, labels: np.ndarray, setting: tuple[int, float], random: np.random.Generator
) -> Split:
    pixels, noise = setting
    found = np.empty((len(images), 1, SIDE, SIDE), np.float32)
    for place, image in zip(found, images, strict=True):
        row, column = random.integers(0, 2 * pixels + 1, 2)
        place[0] = np.pad(image, pixels)[row : row + SIDE, column : column + SIDE]
    found += noise * random.standard_normal(found.shape, np.float32)
    return Split({"image": found}, labels)


def run_seed(setting: tuple[int, float], seed: int) -> dict[str, float]:
    """Accuracies in per cent."""
    images, labels = enlarged_digits(SIDE)
    random = np.random.default_rng(seed)
    source = np.repeat(np.flatnonzero(labels < 5), 8)
    chosen = [random.permutation(np.flatnonzero(labels == each)) for each in range(5, 10)]
    few, others = (
        np.concatenate(part) for part in zip(*((c[:FEW], c[FEW:]) for c in chosen), strict=True)
    )

    def drawn(rows: np.ndarray) -> Split:
        return draw(images[rows], labels[rows] % 5, setting, random)

    test, nothing = drawn(others), drawn(others[:0])
    target = Splits(drawn(few), nothing, test, "5 to 9")
    from_source = Splits(drawn(source), nothing, test, "0 to 4")
    scratch, transfer = recipes()
    options = TrainingOptions(device="cpu", seed=seed)
    weights = run_training(scratch, from_source, replace(options, epochs=4)).module.state_dict()
    found = {
        "scratch": run_training(scratch, target, options),
        "frozen": run_training(transfer, target, options, weights=weights),
        "unfrozen": run_training(transfer, target, replace(options, unfreeze=0.5), weights=weights),
    }
    return {name: 100 * float(trained.scores.mean()) for name, trained in found.items()}


def gain(found: list[dict[str, float]], name: str) -> tuple[float, float, float]:
    """The mean of what `name` has more than from scratch, and its interval."""
    more = np.array([each[name] - each["scratch"] for each in found])
    half = t_quantile(len(more) - 1) * float(more.std(ddof=1)) / math.sqrt(len(more))
    middle = float(more.mean())
    return middle, middle - half, middle + half


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--only", default="", help="settings whose names hold this")
    options = parser.parse_args()
    met = True
    columns = ("setting", "scratch", "frozen", "unfrozen", "frozen wins by", "unfrozen wins by")
    print(f"| {' | '.join(columns)} |\n| --- | --: | --: | --: | --: | --: |", flush=True)
    for setting in sorted(SETTINGS, key=lambda each: each != MAIN):
        name = f"{'moved' if setting[0] else 'in the middle'}, noise {setting[1]:g}"
        if options.only not in name:
            continue
        found = [run_seed(setting, seed) for seed in range(options.seeds)]
        means = [np.mean([each[key] for each in found]) for key in found[0]]
        gains = [gain(found, key) for key in ("frozen", "unfrozen")]
        cells = [f"{mean:.1f} %" for mean in means]
        cells += [f"{value:+.1f} ({low:+.1f} to {high:+.1f})" for value, low, high in gains]
        main_one = setting == MAIN
        print(f"| {'**' * main_one}{name}{'**' * main_one} | {' | '.join(cells)} |", flush=True)
        met &= not main_one or gains[0][1] >= BAR
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
