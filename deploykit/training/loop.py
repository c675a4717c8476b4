"""The training loop: a recipe in, a trained module and its figures out.

Adam with the recipe's loss. On a GPU mixed precision is on unless refused. The same seed on the
same CPU gives the same weights, also when the run stopped and went on from its checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.recipe import Recipe, Splits
from deploykit.runtimes.torch.preprocess import before
from deploykit.training.augment import describe_augment
from deploykit.training.batches import check_labels
from deploykit.training.curve import EventFile
from deploykit.training.distributed import Processes, measure_scaling, parallel, whole_state
from deploykit.training.features import Frozen, freeze, start_from
from deploykit.training.loader import make_loader
from deploykit.training.options import Progress, Settings, Trained, TrainingOptions, settle
from deploykit.training.recipes import build_from_recipe, report_figures
from deploykit.training.score import score_module
from deploykit.training.state import (
    describe_run,
    load_state,
    random_state,
    save_state,
    set_random_state,
)
from deploykit.training.step import Stepper

_REPORT_S = 0.5  # between two reports of progress within an epoch
_log = logging.getLogger(__name__)


def run_training(
    recipe: Recipe,
    splits: Splits,
    options: TrainingOptions,
    *,
    name: str = "",
    weights: dict[str, torch.Tensor] | None = None,
    weights_from: Path = Path("weights"),
    on_progress: Progress | None = None,
    group: Processes | None = None,
) -> Trained:
    """Train `recipe` on `splits.train`, then score it on `splits.test`.

    `splits.calibration` scores each epoch. `name`: of the recipe, for its checkpoint. `weights`:
    to start from, read from the file `weights_from`. `group`: the processes that train together;
    all get the result. Raises BadInput for options out of range, Unsupported for a device that is
    not there or a loss that is not finite, OutOfMemory.
    """
    recipe = recipe.sized_for(splits.build_with)
    settings = settle(recipe, options)
    check_labels(recipe, splits)
    torch.manual_seed(options.seed)
    module = build_from_recipe(recipe)
    if weights is None and recipe.needs_weights:
        raise BadInput("this recipe needs `weights` to start from", hint=recipe.needs_weights)
    notes = start_from(module, recipe, weights, weights_from) if weights is not None else []
    with use_tf32(settings.tf32):
        run = Run(recipe, splits, settings, module, name, group or Processes())
        run.notes += notes
        run.train(on_progress or (lambda _text, _share: None))
    if options.fsdp:
        module = build_from_recipe(recipe)
        module.load_state_dict(run.group.share(whole_state(run.module)))
        module.eval()
    else:
        module = copy.deepcopy(run.module).cpu().eval()
    layout: Any = {"memory_format": torch.contiguous_format}
    module = module.to(**layout)
    if run.frozen is not None and recipe.backbone is not None:
        run.frozen.fold(module.get_submodule(recipe.backbone[1]))
    scores = score_module(module, recipe, splits.test)
    figures = run.figures() | run.measure_scaling()
    figures |= report_figures(recipe, module, splits)
    return Trained(module, scores, figures, tuple(run.history), tuple(run.notes))


@contextlib.contextmanager
def use_tf32(on: bool) -> Iterator[None]:
    """Let float32 products on the GPU use TF32, or not; the settings of the process come back."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    previous = [each.allow_tf32 for each in backends]
    try:
        for each in backends:
            each.allow_tf32 = on
        yield
    finally:
        for each, value in zip(backends, previous, strict=True):
            each.allow_tf32 = value


class Run:
    """One run: the module, what updates it, and what is known of each epoch."""

    def __init__(
        self,
        recipe: Recipe,
        splits: Splits,
        settings: Settings,
        module: torch.nn.Module,
        name: str,
        group: Processes,
    ) -> None:
        self.group = group
        self.recipe, self.splits, self.settings = recipe, splits, settings
        options, device = settings.options, settings.device
        layout = torch.channels_last if settings.channels_last else torch.contiguous_format
        memory: Any = {"device": device, "memory_format": layout}
        self.module = module.to(**memory)
        self.frozen: Frozen | None = None
        self.backbone = module.get_submodule(recipe.backbone[0]) if recipe.backbone else None
        if self.backbone is not None and options.unfreeze is None:
            self.frozen = freeze(module, recipe, splits.train, splits.calibration, device)
        run: Any
        if self.frozen is not None:
            run, train = self.frozen.head, self.frozen.train
        else:
            run, train = before(self.module, recipe.inputs, recipe.preprocess), splits.train
        self.loader = make_loader(recipe, train, settings, group)
        self.batches = self.loader.batches
        run = parallel(run.to(device), group, device, shard=options.fsdp)
        run = torch.compile(run) if options.compile else run
        torch.manual_seed(options.seed + group.rank)  # of dropout: each process draws its own
        steps = settings.epochs * len(self.batches)
        slowly = self.backbone.parameters() if self.backbone is not None else ()
        self.stepper = Stepper(run, recipe, settings, steps, slowly, alone=group.size == 1)
        self.history: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.best: tuple[float, int, dict[str, Any]] | None = None  # score, epoch, weights
        self.seconds = 0.0
        self.described = describe_run(
            name,
            splits,
            {
                "epochs": settings.epochs,
                "batch_size": settings.batch_size,
                "seed": options.seed,
                "schedule": settings.schedule,
                "clip_norm": settings.clip_norm,
                "patience": options.patience,
                "precision": settings.precision,
                "learning_rate": recipe.learning_rate,
                "unfreeze": options.unfreeze,
                "processes": group.size,
                "augment": describe_augment(recipe) if settings.augment else None,
            },
        )

    def train(self, on_progress: Progress) -> None:
        """All epochs that are left."""
        options = self.settings.options
        first = self.group.first
        events = EventFile(options.tensorboard) if options.tensorboard and first else None
        if options.checkpoint is not None:
            state = load_state(options.checkpoint, self.described)
            if state is not None:
                self._restore(state)
                self.notes.append(f"went on after epoch {len(self.history)}: {options.checkpoint}")
        if self.loader.note:
            on_progress(self.loader.note, 0.0)
        try:
            while len(self.history) < self.settings.epochs and not self._stalled():
                self._train_epoch(on_progress)
                if events is not None:
                    events.write(self.history[-1])
                if options.checkpoint is not None:
                    state = self._state()
                    if first:
                        save_state(options.checkpoint, self.described, state)
        finally:
            if events is not None:
                events.close()
        self._conclude()

    def _train_epoch(self, on_progress: Progress) -> None:
        """One epoch; once more in float32 where mixed precision gave a loss that is not finite."""
        again = self.stepper.amp_dtype is not None and not self.settings.options.fsdp
        start = self._state() if again else None
        skipped = self.stepper.skipped
        loss, seconds, waited_s = self._run_epoch(on_progress)
        if start is not None and not math.isfinite(loss):
            self._give_up_half(start, loss)
            loss, more_s, waited_s = self._run_epoch(on_progress)
            seconds += more_s
        if not math.isfinite(loss):
            both = ", in mixed precision and in float32" if start is not None else ""
            raise Unsupported(
                f"training diverged: the loss is {loss} in epoch {len(self.history) + 1}{both}",
                hint="lower the recipe's learning rate, or limit the gradients (`clip_norm`)",
            )
        self.seconds += seconds
        score = self._validate()
        self.history.append(
            {
                "epoch": len(self.history) + 1,
                "loss": loss,
                "score": score,
                "learning_rate": self.stepper.schedule.get_last_lr()[0],
                "samples_per_s": round(len(self.batches.labels) / max(seconds, 1e-9), 1),
                "loader_share": round(waited_s / max(seconds, 1e-9), 4),
                "skipped_steps": self.stepper.skipped - skipped,
            }
        )
        text = f"epoch {len(self.history)}/{self.settings.epochs}, loss {loss:.4f}"
        text += f", {self.history[-1]['samples_per_s']:,.0f} samples/s"
        on_progress(text, len(self.history) / self.settings.epochs)

    def _run_epoch(self, on_progress: Progress) -> tuple[float, float, float]:
        """The mean loss of the epoch, its seconds, and those spent waiting for batches."""
        count, epochs, done = len(self.batches), self.settings.epochs, len(self.history)
        parts, waited_s = self.stepper.parts, self.batches.waited.seconds
        self.module.train()
        if self.backbone is not None:
            self.backbone.eval()  # its statistics stay those of the weights it came with
        total = torch.zeros((), device=self.settings.device)
        started = reported = time.perf_counter()
        samples = 0
        size = self.group.size
        for number, (inputs, labels, share) in enumerate(self.batches, 1):
            whole = min(self.settings.batch_size, len(self.batches.labels) - samples)
            total += self.stepper(inputs, labels, share * size) * (share * whole)
            samples += whole
            now = time.perf_counter()
            if now - reported > _REPORT_S and number < count:
                reported = now
                on_progress(
                    f"epoch {done + 1}/{epochs}, {number}/{count} steps, "
                    f"{samples / (now - started):,.0f} samples/s",
                    (done + number / count) / epochs,
                )
        loss = sum(self.group.gather(float(total))) / samples
        if self.stepper.parts > parts:
            self.notes.append(
                f"too little memory for a batch of {self.settings.batch_size}: each is computed "
                f"in {self.stepper.parts} parts, with the gradients of the whole"
            )
        seconds = time.perf_counter() - started
        return loss, seconds, self.batches.waited.seconds - waited_s

    def _give_up_half(self, start: dict[str, Any], loss: float) -> None:
        self._restore(start)
        self.notes.append(
            f"{self.settings.precision} gave a loss of {loss} in epoch {len(self.history) + 1}; "
            "from its start on the run is in float32"
        )
        _log.warning(self.notes[-1])
        self.stepper.use(None)

    def _validate(self) -> float | None:
        if not len(self.splits.calibration.labels):
            return None
        if self.frozen is not None:
            found = score_module(self.frozen.head, self.frozen.recipe, self.frozen.calibration)
        else:
            found = score_module(self.module, self.recipe, self.splits.calibration)
        # statistics of batches differ between processes
        return float(self.group.share(float(found.mean())))

    def _stalled(self) -> bool:
        """Keep the best epoch's weights, and say whether `patience` has run out."""
        patience = self.settings.options.patience
        if patience is None or not self.history or self.history[-1]["score"] is None:
            return False
        score, epoch = self.history[-1]["score"], self.history[-1]["epoch"]
        if self.best is None or score > self.best[0]:
            self.best = (score, epoch, copy.deepcopy(self.module.state_dict()))
        return bool(epoch - self.best[1] >= patience)

    def _conclude(self) -> None:
        if self._stalled():
            self.notes.append(
                f"stopped after epoch {len(self.history)}: no better score on the validation data "
                f"for {self.settings.options.patience} epochs"
            )
        if self.best is not None:
            self.module.load_state_dict(self.best[2])
            self.notes.append(f"the weights are those of epoch {self.best[1]}, the best one")
        if self.stepper.skipped:
            self.notes.append(
                f"loss scaling skipped {self.stepper.skipped} of {self.stepper.tried} steps, whose "
                "float16 gradients overflowed"
            )
        self.notes += self.loader.conclude(self.loader_share)

    @property
    def loader_share(self) -> float:
        """The share of the time of all epochs in which the steps waited for data."""
        seconds = [1 / max(each["samples_per_s"], 1e-9) for each in self.history]
        waited = (e["loader_share"] * s for e, s in zip(self.history, seconds, strict=True))
        return float(sum(waited) / max(sum(seconds), 1e-9))

    def _state(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "module": self.module.state_dict(),
                "stepper": self.stepper.state(),
                "random": self.group.gather(
                    random_state(self.settings.device, self.batches.shuffle)
                ),
                "history": self.history,
                "notes": self.notes,
                "best": self.best,
                "seconds": self.seconds,
            }
        )

    def _restore(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.stepper.restore(state["stepper"])
        random = state["random"][self.group.rank]
        set_random_state(random, self.settings.device, self.batches.shuffle)
        self.history, self.notes = list(state["history"]), list(state["notes"])
        self.best, self.seconds = state["best"], state["seconds"]

    def measure_scaling(self) -> dict[str, Any]:
        """What the other processes cost; measured after the weights were copied."""
        if self.group.size == 1:
            return {}
        if self.settings.options.fsdp:
            return {"processes": self.group.size, "fsdp": True}
        inputs, labels, _ = next(iter(self.batches))
        batch = (inputs, labels)
        found = measure_scaling(
            self.stepper.run, self.stepper.gradients, batch, self.group, self.settings.device
        )
        self.notes.append(
            f"{self.group.size} processes: scaling efficiency "
            f"{found['scaling_efficiency']:.1%}, communication {found['communication_share']:.1%} "
            "of a step"
        )
        return found

    def figures(self) -> dict[str, Any]:
        """For the manifest: how it was trained, and each epoch."""
        settings = self.settings
        samples = len(self.batches.labels)
        return {
            "epochs": len(self.history),
            "batch_size": settings.batch_size,
            "device": str(settings.device),
            "threads": torch.get_num_threads(),
            "precision": settings.precision,
            "amp": self.stepper.amp_dtype is not None,
            "tf32": settings.tf32,
            "compile": settings.options.compile,
            "channels_last": settings.channels_last,
            "schedule": settings.schedule,
            "clip_norm": settings.clip_norm,
            "seed": settings.options.seed,
            "train_samples": samples,
            "train_seconds": round(self.seconds, 3),
            "samples_per_s": round(samples * len(self.history) / max(self.seconds, 1e-9), 1),
            "skipped_steps": self.stepper.skipped,
            "loader_share": round(self.loader_share, 4),
            "augment": self.described["augment"],
            **self.loader.figures(),
            "final_loss": self.history[-1]["loss"] if self.history else None,
            "data": self.splits.source,
            **({"classes": list(self.splits.classes)} if self.splits.classes else {}),
            **({"image": self.splits.image.to_dict()} if self.splits.image else {}),
            **({"preprocess": self.recipe.preprocess.to_dict()} if self.recipe.preprocess else {}),
            **({"feature_seconds": round(self.frozen.seconds, 3)} if self.frozen else {}),
            "history": list(self.history),
        }
