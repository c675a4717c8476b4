"""Augmentation: what it does to pixels, and that a sample is the same wherever it is made."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deploykit.core.errors import BadInput, OutOfMemory
from deploykit.core.recipe import Recipe, Split, Splits
from deploykit.core.tensors import TensorSpec
from deploykit.training import data as loader
from deploykit.training.data import DRAWS, Augment, Augmentation, Batches
from deploykit.training.distributed import Processes
from deploykit.training.loop import run_training
from deploykit.training.options import Trained, TrainingOptions
from tests.support.training import LINE, losses

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
MIDDLE = 0.5  # the draw that changes nothing, but for the flip
EVERYTHING = Augment(2, flip=0.5, rotation_degrees=20, brightness=0.4, contrast=0.4, saturation=0.4)
RANDOM = np.random.default_rng(0)
BYTES = RANDOM.integers(0, 256, (40, 9, 13, 3), dtype=np.uint8)  # not square
FLOATS = RANDOM.random((40, 1, 7, 5), dtype=np.float32)
KINDS = pytest.mark.parametrize("images", [BYTES, FLOATS], ids=["bytes", "floats"])
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def random_draws(count: int) -> torch.Tensor:
    return torch.rand((count, DRAWS), generator=torch.Generator().manual_seed(5))


def draws(count: int, **fixed: float) -> torch.Tensor:
    """`fixed`: the place of a draw as `u3`, and its value; the others change nothing."""
    found = torch.full((count, DRAWS), MIDDLE)
    found[:, 1] = 1.0  # no flip
    for name, value in fixed.items():
        found[:, int(name[1:])] = value
    return found


@KINDS
@pytest.mark.parametrize("size", [1, 7, 39])
def test_a_sample_is_the_same_in_any_batch(
    images: np.ndarray, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, uniform = torch.from_numpy(images), random_draws(40)
    expected = EVERYTHING(whole, uniform)
    assert expected.dtype == whole.dtype
    assert not torch.equal(expected, whole)
    parts = zip(whole.split(size), uniform.split(size), strict=True)
    assert torch.equal(torch.cat([EVERYTHING(*part) for part in parts]), expected)
    assert torch.equal(EVERYTHING(whole, draws(40)), whole)  # in the middle they change nothing
    monkeypatch.setitem(loader._CHUNK, "cpu", size * images[0].size)
    assert torch.equal(EVERYTHING(whole, uniform), expected)


@pytest.mark.parametrize(("u", "shift"), [(0.0, -2), (0.25, -1), (MIDDLE, 0), (0.99, 2)])
def test_a_crop_is_cut_out_of_the_padded_image(u: float, shift: int) -> None:
    found = Augment(crop=2)(torch.from_numpy(BYTES), draws(40, u2=u, u3=0.99)).numpy()
    padded = np.pad(BYTES, ((0, 0), (2, 2), (2, 2), (0, 0)))
    assert (found == padded[:, 4:13, 2 + shift : 15 + shift]).all()


@KINDS
def test_a_flip_mirrors_left_to_right(images: np.ndarray) -> None:
    whole, axis = torch.from_numpy(images), 2 if images.dtype == np.uint8 else 3
    uniform = draws(40)
    uniform[::2, 1] = 0.49
    found = Augment(flip=0.5)(whole, uniform)
    assert torch.equal(found[::2], whole[::2].flip(axis))
    assert torch.equal(found[1::2], whole[1::2])


@pytest.mark.skipif(not find_spec("torchvision"), reason="torchvision is not installed")
@pytest.mark.parametrize("degrees", [-30.0, 7.0, 90.0, 180.0])
def test_it_turns_and_colours_as_torchvision_does(degrees: float) -> None:
    functional = import_module("torchvision.transforms.v2.functional")
    whole = torch.from_numpy(BYTES)
    NCHW = whole.permute(0, 3, 1, 2)
    turned = Augment(rotation_degrees=180)(whole, draws(40, u0=(1 - degrees / 180) / 2))
    bilinear = functional.InterpolationMode.BILINEAR
    # outside of the image torchvision takes 0 as well
    expected = functional.rotate(NCHW.float(), degrees, interpolation=bilinear)
    assert (turned.permute(0, 3, 1, 2).float() - expected).abs().max() <= 1
    for name, draw, change in (
        ("brightness", "u4", functional.adjust_brightness),
        ("contrast", "u5", functional.adjust_contrast),
        ("saturation", "u6", functional.adjust_saturation),
    ):
        coloured = Augment(**{name: 0.5})(whole, draws(40, **{draw: 0.9}))
        away = (coloured.permute(0, 3, 1, 2).int() - change(NCHW, 1.4).int()).abs()
        assert away.max() <= 1, name


@pytest.mark.gpu
@needs_gpu
@KINDS
def test_a_gpu_gives_the_bits_of_the_cpu(images: np.ndarray) -> None:
    whole, uniform = torch.from_numpy(images), random_draws(40)
    assert torch.equal(EVERYTHING(whole.cuda(), uniform).cpu(), EVERYTHING(whole, uniform))


def bright(images: np.ndarray) -> Splits:
    means = images.reshape(len(images), -1).mean(1)
    part = Split({"image": images}, (means > np.median(means)).astype(np.int64))
    return Splits(part, part, part, "random images")


def flat(images: np.ndarray, change: Any = EVERYTHING) -> Recipe:
    shape = images.shape[1:]

    def build() -> torch.nn.Module:
        layers = Whiten(), torch.nn.Flatten(), torch.nn.Linear(math.prod(shape), 2)
        return torch.nn.Sequential(*layers)

    specs = (TensorSpec("image", str(images.dtype), ("N", *shape)),)
    rates = {"learning_rate": 1e-3, "batch_size": 7}
    return replace(LINE, build=build, inputs=specs, augment=change, **rates)


class Whiten(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float() / 255


RECIPE, SPLITS = flat(BYTES), bright(BYTES)
ON = TrainingOptions(device="cpu", epochs=2, augment=True)


def batches(change: Any = EVERYTHING, *group: Any) -> Batches:
    augmentation = Augmentation(change, 0, CPU)
    return Batches(SPLITS.train, CPU, 7, 3, Processes(*group), augmentation)


def same(one: Trained, other: Trained) -> bool:
    weights = ([*each.module.parameters()] for each in (one, other))
    equal = all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    return equal and losses(one) == losses(other)


@pytest.mark.parametrize("workers", [3, 50])
def test_the_number_of_threads_that_make_batches_changes_no_bit(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run_training(RECIPE, SPLITS, ON)
    threads = torch.get_num_threads()
    monkeypatch.setattr(loader, "free_cores", lambda _device: workers)
    made = run_training(RECIPE, SPLITS, ON)
    assert made.figures["workers"] == workers
    assert same(alone, made)
    assert torch.get_num_threads() == threads
    assert losses(alone) != losses(run_training(RECIPE, SPLITS, replace(ON, augment=False)))


def test_a_recipe_declares_its_augmentation_in_a_line_or_by_default() -> None:
    expected = run_training(RECIPE, SPLITS, ON)
    assert same(run_training(flat(BYTES, EVERYTHING.to_dict()), SPLITS, ON), expected)
    by_default = replace(RECIPE, augmented=True)
    assert same(run_training(by_default, SPLITS, replace(ON, augment=None)), expected)
    figures = expected.figures
    assert (figures["augment"], figures["augment_on"]) == (repr(EVERYTHING), "cpu")
    assert figures["workers"] >= 1
    assert "augmentation runs on the CPU, as the training does" in expected.notes
    for recipe, augment in ((by_default, False), (RECIPE, None)):
        plain = run_training(recipe, SPLITS, replace(ON, augment=augment))
        assert plain.figures["augment"] is None
        assert losses(plain) != losses(expected)


def test_each_epoch_sees_other_changes() -> None:
    made = batches()
    first, second = (torch.cat([inputs[0] for inputs, _, _ in made]) for _ in range(2))
    assert len({image.numpy().tobytes() for image in torch.cat([first, second])}) == 80


def test_an_augmented_run_that_goes_on_equals_an_unbroken_one(tmp_path: Path) -> None:
    def stop(text: str, _share: float) -> None:
        if text.startswith("epoch 2/"):
            raise KeyboardInterrupt

    options = replace(ON, checkpoint=tmp_path / "run.ckpt")
    with pytest.raises(KeyboardInterrupt):
        run_training(RECIPE, SPLITS, options, on_progress=stop)
    resumed = run_training(RECIPE, SPLITS, options)
    assert "went on after epoch 1" in resumed.notes[0]
    assert same(resumed, run_training(RECIPE, SPLITS, ON))
    with pytest.raises(BadInput, match="its augment is"):
        run_training(RECIPE, SPLITS, replace(options, augment=False))


@pytest.mark.parametrize("size", [2, 3])
def test_processes_make_the_samples_of_one(size: int) -> None:
    whole, parts = list(batches()), [list(batches(EVERYTHING, r, size)) for r in range(size)]
    for number, (inputs, labels, _) in enumerate(whole):
        made = [part[number] for part in parts if part[number][2] > 0]
        assert torch.equal(torch.cat([each[0][0] for each in made]), inputs[0])
        assert torch.equal(torch.cat([each[1] for each in made]), labels)


@pytest.mark.parametrize(
    ("augment_s", "said"),
    [
        (1, "the steps waited for data in 6.2% of the time"),
        (10, "the steps waited for data in 40.0% of the time"),
        (30, "the data loader was the limit: the steps waited for data in 66.7% of the time"),
    ],
)
def test_a_run_says_how_long_it_waited_for_its_data(
    augment_s: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]

    def change(images: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        now_s[0] += augment_s
        return images

    def loss(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        now_s[0] += 15
        return torch.nn.functional.cross_entropy(y, labels)

    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(loader, "prefetch", lambda make, parts, _: map(make, parts))
    recipe = replace(flat(BYTES, change), loss=loss)
    trained = run_training(recipe, SPLITS, replace(ON, epochs=1))
    assert trained.figures["loader_share"] == round(augment_s / (augment_s + 15), 4)
    assert trained.notes[-1].startswith(said)


def lacking(*_: object) -> None:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...")


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (lacking, OutOfMemory, "cpu: the augmentation of 7 images"),
        (lambda images, _: images @ images, BadInput, "recipe's augment failed: RuntimeError"),
        (lambda images, _: images[:1], BadInput, "the recipe's augment gave"),
        (Augment(crop=9), BadInput, "`crop` is 9, the images are 9x13"),
        (None, BadInput, "declares no augmentation"),
        ({"flp": 0.5}, BadInput, "unknown option 'flp'"),
        ({"flip": 2}, BadInput, "`flip` must be"),
        ({"crop": 1.5}, BadInput, "`crop` must be an integer"),
    ],
)
def test_an_augmentation_that_fails_is_one_line(
    change: Any, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        run_training(flat(BYTES, change), SPLITS, ON)


NAN = np.where(FLOATS > 0.99, np.float32(math.nan), FLOATS)


@pytest.mark.parametrize(
    ("recipe", "images", "reason"),
    [
        (flat(BYTES.reshape(40, -1)), BYTES.reshape(40, -1), "one input of images, with four axes"),
        (flat(FLOATS.astype(np.float64)), FLOATS.astype(np.float64), "not in float64"),
        (flat(FLOATS), FLOATS * 2, "floats must be in 0..1"),
        (flat(FLOATS), NAN, "'image' of sample 7 holds NaN or infinity"),
        (replace(RECIPE, backbone=("0", "1")), BYTES, "`augment`: the features of a frozen"),
    ],
    ids=["axes", "dtype", "range", "nan", "frozen"],
)
def test_images_that_cannot_be_augmented_are_refused(
    recipe: Recipe, images: np.ndarray, reason: str
) -> None:
    with pytest.raises(BadInput, match=reason):
        run_training(recipe, bright(images), ON)


def slow(images: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    torch.rand(300_000).sort()
    return images


def test_the_processor_that_takes_less_time_augments() -> None:
    fast, heavy = batches(lambda images, _: images), batches(slow)
    for on_cpu, on_gpu, name in ((fast, heavy, "CPU"), (heavy, fast, "GPU")):
        chosen = loader.faster(on_cpu, lambda made=on_gpu: made)
        assert chosen is fast
        assert chosen.note.startswith(f"augmentation runs on the {name}: ")
    assert "does not fit" in loader.faster(fast, lambda: batches(lacking)).note
    assert torch.equal(next(iter(fast))[1], next(iter(batches()))[1])  # in the order as before


class Event:
    """Stands in for a GPU's: each is recorded at the next of these times."""

    times_ms = iter((1e3, 4e3, 9e3, 16e3))

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = next(self.times_ms)

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return other.at_ms - self.at_ms


def test_a_gpu_waits_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the end of a step to the arrival of a batch: (4 - 1) + (16 - 9) s."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = loader.WaitClock(torch.device("cuda"))
    for _ in range(2):
        with clock:
            pass
    assert (clock.seconds, clock.seconds) == (10.0, 10.0)


@pytest.mark.gpu
@needs_gpu
def test_training_on_a_gpu_gets_the_same_batches() -> None:
    options = replace(ON, device="cuda", amp="off", tf32=False)
    trained = run_training(RECIPE, SPLITS, options)
    assert losses(trained) == pytest.approx(losses(run_training(RECIPE, SPLITS, ON)), rel=1e-3)
    assert trained.figures["augment_on"] in ("cpu", "cuda")
