"""Training on augmented images: the same samples wherever they are made, and what is said."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from deploykit.core.errors import BadInput, OutOfMemory  # noqa: E402
from deploykit.core.recipe import Recipe, Split, Splits, load_recipe  # noqa: E402
from deploykit.core.tensors import TensorSpec  # noqa: E402
from deploykit.training import data as loader  # noqa: E402
from deploykit.training.data import (  # noqa: E402
    Augment,
    Augmentation,
    Batches,
)
from deploykit.training.distributed import Processes  # noqa: E402
from deploykit.training.loop import run_training  # noqa: E402
from deploykit.training.options import Trained, TrainingOptions  # noqa: E402
from tests.support.augmenting import BYTES, EVERYTHING, FLOATS  # noqa: E402
from tests.support.training import LINE, cut, losses  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def bright(images: np.ndarray) -> Splits:
    """Two classes of images: the lighter half and the darker."""
    means = images.reshape(len(images), -1).mean(1)
    part = Split({"image": images}, (means > np.median(means)).astype(np.int64))
    return Splits(part, part, part, "random images")


def flat(images: np.ndarray, change: Any = EVERYTHING) -> Recipe:
    shape = images.shape[1:]

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(
            Whiten(), torch.nn.Flatten(), torch.nn.Linear(math.prod(shape), 2)
        )

    specs = (TensorSpec("image", str(images.dtype), ("N", *shape)),)
    return replace(
        LINE, build=build, inputs=specs, augment=change, learning_rate=1e-3, batch_size=7
    )


class Whiten(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float() / 255


RECIPE, SPLITS = flat(BYTES), bright(BYTES)
ON = TrainingOptions(device="cpu", epochs=2, augment=True)


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


def test_a_recipe_declares_its_augmentation_in_a_line() -> None:
    declared = run_training(flat(BYTES, EVERYTHING.to_dict()), SPLITS, ON)
    assert same(declared, run_training(RECIPE, SPLITS, ON))
    assert declared.figures["augment"] == repr(EVERYTHING)
    recipe = load_recipe("cats-dogs")
    assert isinstance(loader.read_augment(recipe), Augment)


def test_a_recipe_may_augment_by_default() -> None:
    recipe = replace(RECIPE, augmented=True)
    default = run_training(recipe, SPLITS, replace(ON, augment=None))
    assert same(default, run_training(RECIPE, SPLITS, ON))
    refused = run_training(recipe, SPLITS, replace(ON, augment=False))
    assert same(refused, run_training(RECIPE, SPLITS, replace(ON, augment=None)))
    assert refused.figures["augment"] is None


def test_each_epoch_sees_other_changes() -> None:
    batches = Batches(SPLITS.train, CPU, 40, 0, None, Augmentation(EVERYTHING, 0, CPU))
    first, second = (
        inputs[0][order]
        for _ in range(2)
        for inputs, labels, _ in batches
        for order in [labels.argsort()]
    )
    assert not torch.equal(first, second)


def test_an_augmented_run_that_goes_on_equals_an_unbroken_one(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(text: str, _share: float) -> None:
        if text.startswith("epoch 2/"):
            raise StopError

    options = replace(ON, checkpoint=tmp_path / "run.ckpt")
    with pytest.raises(StopError):
        run_training(RECIPE, SPLITS, options, on_progress=stop)
    resumed = run_training(RECIPE, SPLITS, options)
    assert "went on after epoch 1" in resumed.notes[0]
    assert same(resumed, run_training(RECIPE, SPLITS, ON))
    with pytest.raises(BadInput, match="its augment is"):
        run_training(RECIPE, SPLITS, replace(options, augment=False))


@pytest.mark.parametrize("size", [2, 3])
def test_processes_make_the_samples_of_one(size: int) -> None:
    change = Augmentation(EVERYTHING, 0, CPU)
    whole = list(Batches(SPLITS.train, CPU, 7, 3, None, change))
    parts = [
        list(Batches(SPLITS.train, CPU, 7, 3, Processes(r, size), change, r)) for r in range(size)
    ]
    for number, (inputs, labels, _) in enumerate(whole):
        made = [part[number] for part in parts if part[number][2] > 0]
        assert torch.equal(torch.cat([each[0][0] for each in made]), inputs[0])
        assert torch.equal(torch.cat([each[1] for each in made]), labels)


def test_the_figures_say_what_was_done_and_where() -> None:
    trained = run_training(RECIPE, SPLITS, ON)
    figures = trained.figures
    assert figures["augment"] == repr(EVERYTHING)
    assert figures["augment_on"] == "cpu"
    assert figures["workers"] >= 1
    assert 0 <= figures["loader_share"] <= 1
    assert "augmentation runs on the CPU, as the training does" in trained.notes


def test_without_the_option_nothing_is_augmented() -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    trained = run_training(flat(BYTES, refuse), SPLITS, replace(ON, augment=False))
    assert trained.figures["augment"] is None


def slow(images: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    torch.rand(300_000).sort()
    return images


@pytest.mark.parametrize(
    ("augment_s", "share", "said"),
    [
        (0, 0.0, "the steps waited for data in 0.0% of the time"),
        (1, 1 / 16, "the steps waited for data in 6.2% of the time"),
        (10, 0.4, "the data loader was the limit: 40% of the time"),
    ],
)
def test_a_run_says_how_long_it_waited_for_its_data(
    augment_s: int, share: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only augmenting and the loss of a step move."""
    now_s = [0.0]

    def pass_time(seconds: int) -> None:
        now_s[0] += seconds

    def change(images: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        pass_time(augment_s)
        return images

    def loss(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        pass_time(15)
        return torch.nn.functional.cross_entropy(y, labels)

    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    recipe = replace(flat(BYTES, change), loss=loss)
    monkeypatch.setattr(loader, "prefetch", lambda make, parts, _: map(make, parts))
    trained = run_training(recipe, SPLITS, replace(ON, epochs=1))
    assert trained.figures["loader_share"] == round(share, 4)
    assert trained.notes[-1].startswith(said)
    assert trained.figures["augment"].startswith("test_a_run_says")


def lacking(*_: object) -> None:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...")


def failing(images: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return images @ images


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lacking, OutOfMemory, "cpu: the augmentation of 7 images"),
        (failing, BadInput, "the recipe's augment failed: RuntimeError"),
        (lambda images, _: images[:1], BadInput, "the recipe's augment gave"),
        (lambda images, _: images.numpy(), BadInput, "the recipe's augment gave"),
        (Augment(crop=9), BadInput, "`crop` is 9, the images are 9x13"),
    ],
    ids=["memory", "error", "samples", "type", "crop"],
)
def test_an_augmentation_that_fails_is_one_line(
    change: Callable[..., Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        run_training(flat(BYTES, change), SPLITS, ON)


def test_a_batch_that_does_not_fit_is_computed_in_parts_when_augmented() -> None:
    def loss(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(y) > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return torch.nn.functional.cross_entropy(y, labels)

    trained = run_training(replace(RECIPE, loss=loss), SPLITS, ON)
    assert "in 2 parts" in trained.notes[0]
    assert losses(trained) == pytest.approx(losses(run_training(RECIPE, SPLITS, ON)), abs=1e-5)


NAN = np.where(FLOATS > 0.99, np.float32(math.nan), FLOATS)


@pytest.mark.parametrize(
    ("recipe", "images", "named"),
    [
        (flat(BYTES, None), BYTES, "declares no augmentation"),
        (flat(BYTES, {"flp": 0.5}), BYTES, "unknown option 'flp'"),
        (flat(BYTES, {"flip": 2}), BYTES, "`flip` must be"),
        (flat(BYTES.reshape(40, -1)), BYTES.reshape(40, -1), "one input of images, with four axes"),
        (flat(FLOATS.astype(np.float64)), FLOATS.astype(np.float64), "not in float64"),
        (flat(FLOATS), FLOATS * 2, "floats must be in 0..1"),
        (flat(FLOATS), NAN, "'image' of sample 7 holds NaN or infinity"),
        (replace(RECIPE, backbone=("0", "1")), BYTES, "`augment`: the features of a frozen"),
    ],
    ids=["none", "name", "value", "axes", "dtype", "range", "nan", "frozen"],
)
def test_what_cannot_be_augmented_is_refused(
    recipe: Recipe, images: np.ndarray, named: str
) -> None:
    with pytest.raises(BadInput, match=named):
        run_training(recipe, bright(images), ON)


def test_the_processor_that_takes_less_time_augments() -> None:
    fast, heavy = (
        Batches(SPLITS.train, CPU, 7, 0, None, Augmentation(each, 0, CPU))
        for each in (lambda images, _: images, slow)
    )
    chosen = loader.faster(fast, lambda: heavy)
    assert chosen is fast
    assert chosen.note.startswith("augmentation runs on the CPU: ")
    assert chosen.times_ms["cpu"] < chosen.times_ms["gpu"]
    chosen = loader.faster(heavy, lambda: fast)
    assert chosen is fast
    assert chosen.note.startswith("augmentation runs on the GPU: ")
    full = Batches(SPLITS.train, CPU, 7, 0, None, Augmentation(lacking, 0, CPU))
    assert "does not fit" in loader.faster(fast, lambda: full).note


def test_timing_leaves_the_order_of_the_batches() -> None:
    one, other = (
        Batches(SPLITS.train, CPU, 7, 0, None, Augmentation(EVERYTHING, 0, CPU)) for _ in "ab"
    )
    loader.time_batches(one)
    assert torch.equal(next(iter(one))[0][0], next(iter(other))[0][0])


def test_cores_that_no_step_computes_on_make_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "usable_cores", lambda: 16)
    assert loader.free_cores(CPU) == 16 - torch.get_num_threads()
    assert loader.free_cores(torch.device("cuda")) == 15
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert loader.free_cores(torch.device("cuda")) == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert loader.free_cores(CPU) == 0


def test_batches_come_in_order_and_an_error_at_its_place() -> None:
    def made(number: int) -> int:
        if number == 5:
            raise ValueError("five")
        return number

    assert list(loader.prefetch(made, range(5), 3)) == [0, 1, 2, 3, 4]
    seen = []
    with pytest.raises(ValueError, match="five"):
        seen += [seen.append(each) for each in loader.prefetch(made, range(9), 2)]
    assert seen == [0, 1, 2, 3, 4]
    assert list(loader.prefetch(made, [], 2)) == []


class Event:
    """Stands in for a GPU's: the n-th is recorded at n * n seconds of its clock."""

    count = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.count += 1
        self.at_ms = Event.count**2 * 1e3

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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_training_on_a_gpu_gets_the_same_batches() -> None:
    options = replace(ON, device="cuda", amp="off", tf32=False)
    trained = run_training(RECIPE, cut(SPLITS, 40), options)
    alone = run_training(RECIPE, SPLITS, ON)
    assert losses(trained) == pytest.approx(losses(alone), rel=1e-3)
    assert trained.figures["augment_on"] in ("cpu", "cuda")
