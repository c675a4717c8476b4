"""The zoo: models of every kind that deploykit must export and quantize, with data for each.

    from tests.support.zoo.members import ZOO, prepare
    python -m tests.support.zoo.members resnet18 FOLDER --samples 256  writes files, prints JSON

Weights are random with sane statistics, or trained in seconds on scikit-learn's digits; nothing is
downloaded.
"""

from __future__ import annotations

import argparse
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
from tests.support.zoo import data, models, weights
from tests.support.zoo.data import Labelled

HERE = Path(__file__).resolve().parent
STEPS = 24  # of the sequences; their axis T is dynamic
SEED_TUNE, SEED_CALIBRATION, SEED_TEST = 1, 2, 3

Arrays = Mapping[str, np.ndarray]


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
    labelled: Callable[[], tuple[Labelled, Labelled]] | None = None

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


def _own(name: str) -> str:
    return f"{HERE / 'models.py'}:{name}"


def _photos(count: int, seed: int, side: int = 224) -> Arrays:
    return {"image": data.photos(count, seed, side)}


def _ids(count: int, seed: int) -> Arrays:
    return {"ids": data.word_ids(count, seed, STEPS, models.WORDS)}


def _ids_and_mask(count: int, seed: int, names: tuple[str, str] = ("ids", "mask")) -> Arrays:
    mask = data.lengths_mask(count, seed, STEPS).astype(np.int64)
    return dict(zip(names, (_ids(count, seed)["ids"], mask), strict=True))


def _signals(count: int, seed: int) -> Arrays:
    return {"x": data.signals(count, seed, STEPS, models.WIDTH)}


def _signals_and_mask(count: int, seed: int) -> Arrays:
    return {**_signals(count, seed), "keep": data.lengths_mask(count, seed, STEPS)}


def _digits(count: int, seed: int, name: str, scale: float, flat: bool) -> Arrays:
    x = data.digits()[1].x[np.random.default_rng(seed).permutation(data.DIGITS_CALIBRATION)[:count]]
    return {name: _digits_input(x, scale, flat)}


def _digits_input(x: np.ndarray, scale: float, flat: bool) -> np.ndarray:
    return np.asarray((x.reshape(len(x), -1) if flat else x) * np.float32(scale))


def _labelled_digits(scale: float, flat: bool) -> tuple[Labelled, Labelled]:
    _, calibration, test = (
        Labelled(_digits_input(part.x, scale, flat), part.labels) for part in data.digits()
    )
    return calibration, test


def _mnist(count: int, seed: int) -> Arrays:
    return {"image": _mnist_splits()[1].x[:count]}


def _mnist_splits() -> tuple[Labelled, Labelled, Labelled]:
    from deploykit.core.recipe import load_recipe

    splits: Any = load_recipe("mnist-cnn").data(None)
    train, calibration, test = (
        Labelled(part.inputs["image"], part.labels)
        for part in (splits.train, splits.calibration, splits.test)
    )
    return train, calibration, test


def _labelled_mnist() -> tuple[Labelled, Labelled]:
    return _mnist_splits()[1:]


def _train_mnist(module: nn.Module, _: object) -> None:
    weights.fit(module, _mnist_splits()[0], epochs=8, rate=3e-3)


def _train_overflow(module: nn.Module, _: object) -> None:
    part = data.digits()[0]
    scaled = Labelled(_digits_input(part.x, 255, True), part.labels)
    weights.fit(module, scaled, epochs=40, rate=5e-3)


def _train_bad_int8(module: nn.Module, _: object) -> None:
    weights.fit(module, data.digits()[0], epochs=40, rate=3e-3, noise=0.2)
    weights.massive_feature(module, "dense1", "dense2", 4000.0)


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


def _fan_in(module: nn.Module, _: object) -> None:
    weights.fan_in(module)


# torchvision's classifiers: their heads, what their weights need, and samples to set them by
_VISION: dict[str, tuple[str, Callable[..., object], int]] = {
    "resnet18": ("fc", weights.batch_norms, 32),
    "vgg16": ("classifier.6", _fan_in, 12),
    "mobilenet_v3_small": ("classifier.3", weights.batch_norms, 32),
    "efficientnet_b0": ("classifier.1", weights.batch_norms, 32),
    "convnext_tiny": ("classifier.2", _fan_in, 16),
    "vit_b_16": ("heads.head", _fan_in, 16),
    "swin_t": ("head", _fan_in, 16),
}

_MEMBERS = (
    Member(
        "mnist-cnn",
        f"{HERE.parents[2] / 'models' / 'mnist_cnn.py'}:MnistCnn",
        ("image:float32[N,1,28,28]",),
        _mnist,
        _train_mnist,
        needs=("sklearn",),
        labelled=_labelled_mnist,
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
        partial(_ids_and_mask, names=("input_ids", "attention_mask")),
        partial(_tune, head="", steps=(_fan_in,)),
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
    Member(
        "masked-ids",
        _own("MaskedIds"),
        ("ids:int64[N,T]", "mask:int64[N,T]"),
        _ids_and_mask,
        _tune,
    ),
    Member(
        "overflow",
        _own("Overflow"),
        ("pixels:float32[N,64]",),
        partial(_digits, name="pixels", scale=255.0, flat=True),
        _train_overflow,
        needs=("sklearn",),
        labelled=partial(_labelled_digits, scale=255.0, flat=True),
    ),
    Member(
        "bad-int8",
        _own("BadInt8"),
        ("image:float32[N,1,8,8]",),
        partial(_digits, name="image", scale=1.0, flat=False),
        _train_bad_int8,
        needs=("sklearn",),
        labelled=partial(_labelled_digits, scale=1.0, flat=False),
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
