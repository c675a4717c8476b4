"""The zoo: models of every kind that deploykit must export and quantize, with data for each.

    from tests.support.zoo.members import ZOO, prepare
    python -m tests.support.zoo.members resnet18 FOLDER --samples 256  writes files, prints JSON

Weights are random with sane statistics, or trained in seconds on scikit-learn's digits; nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from deploykit.core.files import import_object
from deploykit.engines.data.samples import LABELS, write_npz
from tests.support.zoo import models, weights
from tests.support.zoo.weights import Labelled

HERE = Path(__file__).resolve().parent
STEPS = 24  # of the sequences; their axis T is dynamic
SEED_TUNE, SEED_CALIBRATION, SEED_TEST = 1, 2, 3

Arrays = Mapping[str, np.ndarray]
Splits = list[Labelled]  # to train, to calibrate, to test
IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
IMAGENET_STD = np.array([0.229, 0.224, 0.225], np.float32)
DIGITS_TRAIN, DIGITS_CALIBRATION = 597, 100  # the other 1,100 of 1,797 test


@dataclass(frozen=True)
class Member:
    """One model. `large`: too slow for the tests, `benchmarks/zoo.py` runs it.

    `arch`: what `--arch` takes; `inputs`: what `--input` takes; `sample(count, seed)`: inputs by
    name; `tune(module, sample)` gives the fresh module its weights; `labelled`: calibration and
    test data, for models of one input whose answers mean something.
    """

    name: str
    arch: str
    inputs: tuple[str, ...]
    sample: Callable[[int, int], Arrays]
    tune: Callable[[nn.Module, Callable[[int, int], Arrays]], object]
    needs: tuple[str, ...] = ()
    large: bool = False
    labelled: Callable[[], Splits] | None = None

    @property
    def missing(self) -> str:
        """Why it cannot be built here; empty if it can."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{', '.join(absent)} not installed" if absent else ""

    def build(self) -> nn.Module:
        """The module with its weights, in eval mode: the same ones each time."""
        if "torchvision" in self.needs:
            models.register_torchvision()
        create = import_object(self.arch)
        assert callable(create)
        module = weights.seeded(create)
        self.tune(module, self.sample)
        return module


@dataclass(frozen=True)
class Files:
    """What a member is on disk; `data` holds labels, and is None for random weights."""

    model: Path
    calib: Path
    data: Path | None
    arch: str
    inputs: tuple[str, ...]
    parameters: int

    def to_dict(self) -> dict[str, Any]:
        texts = {key: str(value) for key, value in vars(self).items() if isinstance(value, Path)}
        return {**vars(self), **texts}


def prepare(member: Member, folder: Path, *, samples: int = 64, kind: str = "safetensors") -> Files:
    """Write NAME.safetensors (or `kind` "pt": a state dict of torch.save), and its data as .npz."""
    module = member.build()
    model = folder / f"{member.name}.{kind}"
    state = {name: value.contiguous() for name, value in module.state_dict().items()}
    if kind == "safetensors":
        from safetensors.torch import save_file

        save_file(state, model)
    else:
        torch.save(state, model)
    calib, test = folder / f"{member.name}.calib.npz", None
    if member.labelled is None:
        write_npz(calib, dict(member.sample(samples, SEED_CALIBRATION)))
    else:
        test = folder / f"{member.name}.test.npz"
        name = member.inputs[0].partition(":")[0]
        for path, part in zip((calib, test), member.labelled(), strict=True):
            write_npz(path, {name: part.x, LABELS: part.labels})
    count = sum(parameter.numel() for parameter in module.parameters())
    return Files(model, calib, test, member.arch, member.inputs, count)


def photos(count: int, seed: int, side: int = 224) -> np.ndarray:
    """float32 (count, 3, side, side), normalised as torchvision's models want it."""
    random = np.random.default_rng(seed)
    images = np.empty((count, side, side, 3), np.float32)
    sources = _photographs()
    for at in range(count):
        crop = _crop(sources[at % len(sources)], random, side)
        gain, lift = random.uniform(0.5, 1.3, 3), random.uniform(-0.15, 0.15, 3)
        images[at] = np.clip(crop * gain + lift, 0, 1)
    return np.ascontiguousarray(((images - IMAGENET_MEAN) / IMAGENET_STD).transpose(0, 3, 1, 2))


@functools.cache
def _photographs() -> tuple[np.ndarray, ...]:
    from sklearn.datasets import load_sample_images

    return tuple(image.astype(np.float32) / 255 for image in load_sample_images().images)


def _crop(source: np.ndarray, random: np.random.Generator, side: int) -> np.ndarray:
    """A square of 15 to 100 % of the height, mirrored or not, by the nearest pixels."""
    height, width = source.shape[:2]
    size = int(random.uniform(0.15, 1.0) * min(height, width))
    top, left = random.integers(0, height - size + 1), random.integers(0, width - size + 1)
    at = np.arange(side) * size // side
    crop = source[top + at][:, left + at]
    return np.asarray(crop[:, ::-1] if random.random() < 0.5 else crop)


def signals(count: int, seed: int, steps: int, width: int) -> np.ndarray:
    """float32 (count, steps, width): each step is 0.8 of the last and 0.6 of new noise."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((count, steps, width)).astype(np.float32)
    values += random.standard_normal((count, 1, width)).astype(np.float32)  # what the sample is of
    for step in range(1, steps):
        values[:, step] = 0.8 * values[:, step - 1] + 0.6 * values[:, step]
    return values


def lengths_mask(count: int, seed: int, steps: int) -> np.ndarray:
    """Bool (count, steps): true up to a length of its own, at least 1."""
    lengths = np.random.default_rng(seed).integers(1, steps + 1, count)
    return np.arange(steps) < lengths[:, None]


@functools.cache
def digits() -> list[Labelled]:
    """scikit-learn's 8x8 digits in 0..1, (samples, 1, 8, 8): to train, to calibrate, to test."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    order = np.random.RandomState(0).permutation(len(loaded.images))
    images = (loaded.images[order] / 16).astype(np.float32)[:, None]
    labels = loaded.target[order].astype(np.int64)
    ends = (DIGITS_TRAIN, DIGITS_TRAIN + DIGITS_CALIBRATION)
    parts = [np.split(array, ends) for array in (images, labels)]
    return [Labelled(x, y) for x, y in zip(*parts, strict=True)]


def _own(name: str) -> str:
    return f"{HERE / 'models.py'}:{name}"


def _photos(count: int, seed: int, side: int = 224) -> Arrays:
    return {"image": photos(count, seed, side)}


def _ids(count: int, seed: int) -> Arrays:
    """The frequent ones are small, as in text (Zipf's law)."""
    drawn = np.random.default_rng(seed).zipf(1.3, (count, STEPS))
    return {"ids": np.minimum(drawn - 1, models.WORDS - 1).astype(np.int64)}


def _text(count: int, seed: int) -> Arrays:
    mask = lengths_mask(count, seed, STEPS).astype(np.int64)
    return {"input_ids": _ids(count, seed)["ids"], "attention_mask": mask}


def _signals(count: int, seed: int) -> Arrays:
    return {"x": signals(count, seed, STEPS, models.WIDTH)}


def _signals_and_mask(count: int, seed: int) -> Arrays:
    return {**_signals(count, seed), "keep": lengths_mask(count, seed, STEPS)}


def _mnist() -> Splits:
    from deploykit.core.recipe import load_recipe

    splits: Any = load_recipe("mnist-cnn").data(None)
    parts = (splits.train, splits.calibration, splits.test)
    return [Labelled(part.inputs["image"], part.labels) for part in parts]


def _flat_digits() -> Splits:
    return [Labelled(part.x.reshape(len(part.x), -1) * 255, part.labels) for part in digits()]


def _trained(
    name: str,
    arch: str,
    spec: str,
    splits: Callable[[], Splits],
    *steps: Callable[[nn.Module], object],
    **fit: Any,
) -> Member:
    """A member that is trained on the first of its splits, and then changed by `steps`."""

    def sample(count: int, seed: int) -> Arrays:
        x = splits()[1].x
        return {spec.partition(":")[0]: x[np.random.default_rng(seed).permutation(len(x))[:count]]}

    def tune(module: nn.Module, _: object) -> None:
        weights.fit(module, splits()[0], **fit)
        for step in steps:
            step(module)

    needs = ("sklearn",)
    return Member(name, arch, (spec,), sample, tune, needs, labelled=lambda: splits()[1:])


def _tune(
    module: nn.Module,
    sample: Callable[[int, int], Arrays],
    *,
    head: str = "head",
    steps: tuple[Callable[..., object], ...] = (),
    count: int = 32,
) -> None:
    """Run `steps` and then give the logits a spread; `head` "" is a model without logits."""
    inputs = [torch.from_numpy(array) for array in sample(count, SEED_TUNE).values()]
    for step in steps:
        step(module, inputs)
    if head:
        weights.spread_logits(module, head, inputs)


# torchvision's classifiers: their heads, what their weights need, and samples to set them by
_VISION: dict[str, tuple[str, Callable[..., object], int]] = {
    "resnet18": ("fc", weights.batch_norms, 32),
    "vgg16": ("classifier.6", weights.fan_in, 12),
    "mobilenet_v3_small": ("classifier.3", weights.batch_norms, 32),
    "efficientnet_b0": ("classifier.1", weights.batch_norms, 32),
    "convnext_tiny": ("classifier.2", weights.fan_in, 16),
    "vit_b_16": ("heads.head", weights.fan_in, 16),
    "swin_t": ("head", weights.fan_in, 16),
}

_MEMBERS = (
    _trained(
        "mnist-cnn",
        f"{HERE.parents[2] / 'models' / 'mnist_cnn.py'}:MnistCnn",
        "image:float32[N,1,28,28]",
        _mnist,
        epochs=8,
        rate=3e-3,
    ),
    Member("lstm", _own("Lstm"), ("ids:int64[N,T]",), _ids, _tune),
    Member("encoder", _own("Encoder"), ("x:float32[N,T,64]",), _signals, _tune),
    Member(
        "encoder-masked",
        _own("MaskedEncoder"),
        ("x:float32[N,T,64]", "keep:bool[N,T]"),
        _signals_and_mask,
        _tune,
    ),
    *(
        Member(
            name.replace("_", "-"),
            f"torchvision.models:{name}",
            ("image:float32[N,3,224,224]",),
            _photos,
            partial(_tune, head=head, steps=(step,), count=count),
            needs=("torchvision", "PIL", "sklearn"),
            large=name != "resnet18",
        )
        for name, (head, step, count) in _VISION.items()
    ),
    Member(
        "bert-tiny",
        _own("bert_tiny"),
        ("input_ids:int64[N,T]", "attention_mask:int64[N,T]"),
        _text,
        partial(_tune, head="", steps=(weights.fan_in,)),
        needs=("transformers",),
    ),
    Member(
        "detector",
        _own("Detector"),
        ("image:float32[N,3,64,64]",),
        partial(_photos, side=64),
        partial(_tune, head="", steps=(weights.batch_norms,)),
        needs=("PIL", "sklearn"),
    ),
    _trained(
        "overflow",
        _own("Overflow"),
        "pixels:float32[N,64]",
        _flat_digits,
        epochs=40,
        rate=5e-3,
    ),
    _trained(
        "bad-int8",
        _own("BadInt8"),
        "image:float32[N,1,8,8]",
        digits,
        partial(weights.massive_feature, before="dense1", after="dense2", size=4000.0),
        epochs=40,
        rate=3e-3,
        noise=0.2,
    ),
)
ZOO: Mapping[str, Member] = {member.name: member for member in _MEMBERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ZOO)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=64)
    options = parser.parse_args()
    member = ZOO[options.name]
    if member.missing:
        answer: dict[str, Any] = {"missing": member.missing}
    else:
        answer = prepare(member, options.folder, samples=options.samples).to_dict()
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
