"""The training loop: a recipe in, a trained module and its figures out.

Adam with the recipe's loss. On a GPU mixed precision is on unless refused. The same seed on the
same CPU gives the same weights, also when the run stopped and went on from its checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import platform
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deploykit.core.errors import BadInput, Unsupported, first_line, users_code
from deploykit.core.extras import require
from deploykit.core.files import check_readable, make_folder, write_errors
from deploykit.core.json_value import json_value
from deploykit.core.machine import memory_errors
from deploykit.core.recipe import Recipe, Split, Splits
from deploykit.engines.data.folders import large_array
from deploykit.engines.torch.files import list_names, module_errors
from deploykit.engines.torch.loaded import before
from deploykit.engines.torch.open import copy_weights, load_weights, save_whole
from deploykit.evaluation.artefacts import Progress, no_progress
from deploykit.training.data import choose_batches, tensors
from deploykit.training.distributed import Processes, measure_scaling, parallel, whole_state
from deploykit.training.options import (
    Settings,
    Trained,
    TrainingOptions,
    build_from_recipe,
    check_outputs,
    check_recipe,
    check_splits,
    score_samples,
    settle,
)

_SAMPLES = 256  # at once


def run_batches(
    run: Any, split: Split, device: torch.device, size: int
) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
    """Yield the rows of each batch of `split`, and the outputs of `run` for them."""
    inputs, _ = tensors(split, torch.device("cpu"))
    for start in range(0, len(split.labels), size):
        rows = slice(start, start + size)
        values = run(*(each[rows].to(device) for each in inputs))
        yield rows, values if isinstance(values, tuple) else (values,)


def score_module(module: torch.nn.Module, recipe: Recipe, split: Split) -> np.ndarray:
    """Return the recipe's metric for each sample of `split`, computed where `module` is."""
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    run = before(module, recipe.inputs, recipe.preprocess).to(device)
    training = module.training
    run.eval()
    scores = []
    with torch.inference_mode(), memory_errors(f"{device}: scoring {_SAMPLES} samples at once"):
        for rows, values in run_batches(run, split, device, _SAMPLES):
            named = {
                spec.name: value.float().cpu().numpy()
                for spec, value in zip(recipe.outputs, values, strict=True)
            }
            scores.append(score_samples(recipe, named, split.labels[rows]))
    run.train(training)
    return np.concatenate(scores) if scores else np.zeros(0)


# A run resumes from its state file exactly as if it had not stopped. The file is replaced whole
# after each epoch: a run that is killed while it writes leaves the state of the epoch before. It
# holds tensors, numbers and strings; opening it runs no code.

VERSION = 4
KEY = "deploykit_training_state"


def load_state(path: Path, run: dict[str, Any]) -> dict[str, Any] | None:
    """Read the state in `path`; None if there is no file. Raises BadInput for another run's."""
    if not path.exists():
        return None
    check_readable(path)
    reason = "it was not written by `checkpoint`, or by that of another version"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as exc:  # noqa: BLE001 - torch's reader of damaged files raises anything
        state, reason = None, first_line(exc).rstrip(".")
    if not isinstance(state, dict) or state.get(KEY) != VERSION:
        raise BadInput(
            f"{path}: is not the state of a training run: {reason}",
            hint="name a file that does not exist yet as `checkpoint`",
        )
    done, constant = len(state["state"]["history"]), run["schedule"] == "constant"
    for name, value in run.items():
        before = state["run"].get(name)
        if before == value or (name == "epochs" and constant and done <= value):
            continue  # with a constant rate each epoch is what it would be in a run of any length
        longer = " (only a recipe with schedule='constant' can be lengthened)" * (name == "epochs")
        raise BadInput(
            f"{path}: is the state of another run: its {name} is {before}, here it is {value}",
            hint=f"repeat that run's options{longer}, or name another `checkpoint`",
        )
    return dict(state)


# The head of a frozen backbone learns on standardised features: those of a backbone differ in scale
# by orders of magnitude, and one step of the optimiser suits them all only when they are alike. The
# scales are folded into the head's first layer at the end, so that the model stays what the recipe
# builds.

_BATCH = 32
_LEAST_DEVIATION = 0.1  # of a feature, by its mean; it limits the span of INT8 weights
_CLOSE = 1e-3  # relative: the head on features against the whole module, in another batch size


@dataclass(frozen=True)
class Frozen:
    """The head, and the recipe whose inputs are the backbone's features.

    `scale`: mean and deviation, of shape (features,), that the features were standardised with;
    None where the head does not begin with a dense layer.
    """

    head: torch.nn.Module
    recipe: Recipe
    train: Split
    calibration: Split
    seconds: float
    scale: tuple[np.ndarray, np.ndarray] | None

    def fold(self, head: torch.nn.Module) -> None:
        """Let a head that was trained on standardised features take those of the backbone."""
        dense = _first_dense(head)
        if dense is None or self.scale is None:
            return
        mean_D, deviation_D = map(torch.from_numpy, self.scale)
        weight_OD = dense.weight.detach().double().cpu() / deviation_D
        with torch.no_grad():
            dense.weight.copy_(weight_OD)
            dense.bias.sub_((weight_OD @ mean_D).to(dense.bias))


def start_from(module: torch.nn.Module, recipe: Recipe, where: Path) -> list[str]:
    """Copy the weights in the file `where` into the module or its backbone; returns notes."""
    weights = load_weights(where)
    if recipe.backbone is None:
        return list(copy_weights(where, module, weights))
    name = recipe.backbone[0]
    part = module.get_submodule(name)
    own = part.state_dict()
    named = {key.removeprefix(f"{name}."): value for key, value in weights.items()}
    kept = {key: value for key, value in named.items() if key in own}
    if not kept:
        raise BadInput(
            f"{where}: holds no weights of the recipe's backbone, such as {next(iter(own), name)}; "
            f"it holds {list_names(list(weights))}"
        )
    left = [key for key in named if key not in own]
    notes = list(copy_weights(where, part, kept))
    if left:
        notes.append(f"of {where.name}, {len(left)} tensors are not in the backbone: {left[0]}, …")
    return notes


def freeze(
    module: torch.nn.Module, recipe: Recipe, train: Split, calibration: Split, device: torch.device
) -> Frozen:
    """Run the backbone once. Raises BadInput unless the module computes head(backbone(x))."""
    names = recipe.backbone or ("", "")
    backbone, head = (module.get_submodule(each) for each in names)
    backbone.requires_grad_(False)
    run, whole = (
        before(each.eval(), recipe.inputs, recipe.preprocess).to(device)
        for each in (backbone, module)
    )
    started, found = time.perf_counter(), list[np.ndarray]()
    for split in (train, calibration):
        features = np.empty((0, 1), np.float32)
        with torch.inference_mode(), users_code(f"the recipe's backbone, {names[0]}, failed"):
            for rows, (values, *_) in run_batches(run, split, device, _BATCH):
                if rows.start == 0:
                    shape = (len(split.labels), *values.shape[1:])
                    features = large_array("the backbone's features", shape, np.float32)
                features[rows] = values.float().cpu().numpy()
        found.append(features)
    seconds = time.perf_counter() - started
    inputs, _ = tensors(train, torch.device("cpu"))
    with torch.inference_mode(), users_code(f"the recipe's head, {names[1]}, failed"):
        expected = whole(*(each[:2].to(device) for each in inputs))
        behind = head(torch.from_numpy(found[0][:2]).to(device))
        largest = float(expected.abs().max()) or 1.0
    if expected.shape != behind.shape or (expected - behind).abs().max() > _CLOSE * largest:
        raise BadInput(
            f"the recipe's module does not compute {names[1]}({names[0]}(x))",
            hint="its features cannot be computed once; leave the recipe's `backbone` out",
        )
    scale = _standardise(found, head)
    inner = replace(recipe, preprocess=None, inputs=(), backbone=None)
    labels = (train.labels, calibration.labels)
    first, second = (Split({"features": x}, y) for x, y in zip(found, labels, strict=True))
    return Frozen(head, inner, first, second, seconds, scale)


def _first_dense(head: torch.nn.Module) -> torch.nn.Linear | None:
    """Return the dense layer with a bias that the head, a sequence, begins with."""
    first = next(iter(head.children()), None) if isinstance(head, torch.nn.Sequential) else head
    return first if isinstance(first, torch.nn.Linear) and first.bias is not None else None


def _standardise(
    features: list[np.ndarray], head: torch.nn.Module
) -> tuple[np.ndarray, np.ndarray] | None:
    """Standardise the arrays in place by the first one's mean and deviation, and return these."""
    dense, (train, *_) = _first_dense(head), features
    if dense is None or train.ndim != 2:
        return None
    mean: np.ndarray = train.mean(axis=0, dtype=np.float64)
    deviation: np.ndarray = train.std(axis=0, dtype=np.float64)
    deviation = np.maximum(deviation, _LEAST_DEVIATION * deviation.mean())
    deviation[deviation == 0] = 1.0
    for array in features:
        if len(array):
            array -= mean.astype(np.float32)
            array /= deviation.astype(np.float32)
    return mean, deviation


def append_events(path: Path, entry: Mapping[str, Any]) -> None:
    """Write an epoch's figures for TensorBoard; its own writer loses an error in a thread."""
    figures = {name: value for name, value in entry.items() if value is not None}
    epoch = figures.pop("epoch")
    values = [{"tag": name, "simple_value": value} for name, value in figures.items()]
    event = require("tensorboard.compat.proto.event_pb2").Event(
        wall_time=time.time(), step=epoch, summary={"value": values}
    )
    with path.open("ab") as file:
        writer = require("tensorboard.summary.writer.record_writer").RecordWriter(file)
        writer.write(event.SerializeToString())


_REPORT_S = 0.5  # between two reports of progress within an epoch
_log = logging.getLogger(__name__)


def run_training(
    recipe: Recipe,
    splits: Splits,
    options: TrainingOptions,
    *,
    name: str = "",
    on_progress: Progress | None = None,
    group: Processes | None = None,
) -> Trained:
    """Train `recipe` on `splits.train`, then score it on `splits.test`.

    `splits.calibration` scores each epoch. `name`: of the recipe, for its checkpoint. `group`: the
    processes that train together; all get the result. Raises BadInput for options out of range,
    Unsupported for a device that is not there or a loss that is not finite, OutOfMemory.
    """
    check_recipe(recipe)
    recipe = recipe.sized_for(splits.build_with)
    settings = settle(recipe, options)
    recipe = replace(recipe, learning_rate=options.learning_rate or recipe.learning_rate)
    splits = check_splits(recipe, splits)
    if options.patience and not len(splits.calibration.labels):
        raise BadInput("`patience` needs validation data: the recipe's calibration split is empty")
    if options.weights is None and recipe.needs_weights:
        raise BadInput("this recipe needs `weights` to start from", hint=recipe.needs_weights)
    torch.manual_seed(options.seed)
    module = build_from_recipe(recipe)
    notes = start_from(module, recipe, options.weights) if options.weights else []
    with use_tf32(settings.tf32):
        run = Run(recipe, splits, settings, module, name, group or Processes())
        run.notes += notes
        run.train(on_progress or no_progress)
    module = run.module
    if run.group.size > 1:  # its layers may have been replaced by those that several processes use
        state = run.group.share(whole_state(module)) if options.fsdp else module.state_dict()
        module = build_from_recipe(recipe)
        module.load_state_dict(state)
    layout: Any = {"device": "cpu", "memory_format": torch.contiguous_format}
    module = module.eval().to(**layout)
    if run.frozen is not None and recipe.backbone is not None:
        run.frozen.fold(module.get_submodule(recipe.backbone[1]))
    scores = score_module(module, recipe, splits.test)
    figures = run.figures() | run.measure_scaling()
    if recipe.report is not None:
        with users_code("the recipe's report failed"):
            report = json_value(dict(recipe.report(module, splits)))
            shown = [f"{k} {v:.4g}" for k, v in report.items() if type(v) in (int, float)]
        run.notes += [f"on the test data: {', '.join(shown)}".replace("_", " ")] if shown else []
        figures |= report
    return Trained(module, scores, figures, recipe, splits, tuple(run.history), tuple(run.notes))


@contextlib.contextmanager
def use_tf32(on: bool) -> Iterator[None]:
    """Let float32 products on the GPU use TF32, or not; the settings of the process come back.

    torch has two switches, and both are set, so that a library may read either. Where the newer
    one was set by itself, torch refuses to read the older one.
    """
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    switches = [(place, "allow_tf32") for place in (matmul, cudnn)]
    switches += [(place, "fp32_precision") for place in (matmul, cudnn.conv, cudnn.rnn)]
    previous: list[tuple[Any, str, Any]] = []
    for place, name in switches:
        with contextlib.suppress(RuntimeError):
            previous.append((place, name, getattr(place, name)))
    try:
        for place, name in switches:
            setattr(place, name, on if name == "allow_tf32" else "tf32" if on else "ieee")
        yield
    finally:
        for place, name, value in previous:
            setattr(place, name, value)


class Run:
    """One run: the module, what updates it, and what is known of each epoch.

    `history`: one entry per epoch. `best`: score, epoch and weights. `waited_s`: of the `seconds`,
    those in which steps waited for data. `skipped`: of the steps `tried`, those whose float16
    gradients overflowed, so that loss scaling left the weights as they were. `amp`: whether
    precision is mixed. A checkpoint keeps these next to weights and random numbers.
    """

    _kept = ("history", "notes", "best", "seconds", "waited_s", "tried", "skipped", "amp")

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
        last = device.type == "cuda"  # its convolutions want the channels of images last in memory
        layout = torch.channels_last if last else torch.contiguous_format
        memory: Any = {"device": device, "memory_format": layout}
        where = f"the recipe's model cannot be moved to {device}"
        with users_code(where), memory_errors(where):
            self.module = module.to(**memory)
        self.frozen: Frozen | None = None
        self.backbone: torch.nn.Module | None = None
        with users_code("the recipe's `backbone`"):
            for name_of_part in reversed(recipe.backbone or ()):  # the backbone last
                self.backbone = module.get_submodule(name_of_part)
        run: Any = before(self.module, recipe.inputs, recipe.preprocess).to(device)
        check_outputs(recipe, run, splits.train, device)
        train = splits.train
        if self.backbone is not None and options.unfreeze is None:
            self.frozen = freeze(module, recipe, train, splits.calibration, device)
            run, train = self.frozen.head, self.frozen.train
        self.batches = choose_batches(recipe, train, settings, group)
        run = parallel(run, group, device, shard=options.fsdp)
        run = torch.compile(run) if options.compile else run
        torch.manual_seed(options.seed + group.rank)  # for dropout: each process draws its own
        self.history, self.notes = list[dict[str, Any]](), list[str]()
        self.best: tuple[float, int, dict[str, Any]] | None = None
        self.seconds = self.waited_s = 0.0
        self.tried = self.skipped = 0
        self.amp, self.run = settings.amp_dtype is not None, run
        self._make_optimiser()
        self.unsaved = dict[Path, str]()
        if settings.amp_dtype == torch.float16 and device.type == "cpu":
            self.notes.append("fp16 is much slower on a CPU than float32 or bf16")
        if group.size > 1 and device.type == "cpu" and self._has_batch_norm():
            self.notes.append(
                "BatchNorm in several processes on CPUs: each normalises its part of a batch by "
                "itself, so the gradients are not those of one process (on GPUs they are)"
            )
        labels, checksum = splits.train.labels, 0
        for array in (labels, *splits.train.inputs.values()):
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            checksum = zlib.crc32(flat.data, checksum)
        self.described = {  # all that a run has in common with the one whose state it goes on from
            "recipe": name,
            "epochs": settings.epochs,
            "batch_size": settings.batch_size,
            "seed": options.seed,
            "schedule": recipe.schedule,
            "clip_norm": recipe.clip_norm,
            "patience": options.patience,
            "precision": settings.precision,
            "learning_rate": recipe.learning_rate,
            "unfreeze": options.unfreeze,
            "processes": group.size,
            "augment": self.batches.figures["augment"],
            "classes": list(splits.classes),
            "image": splits.image.to_dict() if splits.image else None,
            "preprocess": recipe.preprocess.to_dict() if recipe.preprocess else None,
            "data": f"{splits.source}, {len(labels)} samples, checksum {checksum:08x}",
        }

    def _make_optimiser(self) -> None:
        """Let a backbone that trains, too, learn at the share `unfreeze` of the rate."""
        recipe, steps = self.recipe, self.settings.epochs * len(self.batches)
        self.weights = [each for each in self.run.parameters() if each.requires_grad]
        if not self.weights:
            raise BadInput("the recipe's model has no weights to train")
        own = self.backbone.parameters() if self.backbone is not None else ()
        slow, rate = set(map(id, own)), recipe.learning_rate
        rates = {False: rate, True: rate * (self.settings.options.unfreeze or 1)}
        parts = [(lr, [p for p in self.weights if (id(p) in slow) == k]) for k, lr in rates.items()]
        groups = [{"params": weights, "lr": lr} for lr, weights in parts if weights]
        self.optimiser = torch.optim.Adam(groups, lr=recipe.learning_rate)
        kinds: Any = torch.optim.lr_scheduler
        highest = [group["lr"] for group in groups]
        self.schedule = {
            "cosine": lambda: kinds.CosineAnnealingLR(self.optimiser, steps),
            "linear": lambda: kinds.LinearLR(self.optimiser, 1.0, 0.0, steps),
            # one step more: it is also asked for the rate after the last one
            "one-cycle": lambda: kinds.OneCycleLR(self.optimiser, highest, steps + 1),
            "constant": lambda: kinds.ConstantLR(self.optimiser, 1.0, 1),
        }[recipe.schedule]()
        self._make_scaler()

    def _make_scaler(self) -> None:
        half = self.amp and self.settings.amp_dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.settings.device.type, enabled=half)

    def step(
        self, inputs: Sequence[torch.Tensor], labels: torch.Tensor, weight: float = 1.0
    ) -> torch.Tensor:
        """Update the weights; return the batch's mean loss, not yet read from the device.

        `weight`: that of the loss, where other processes average their gradients with these.
        Raises OutOfMemory, Unsupported for a failed compilation, BadInput where the recipe fails.
        """
        loss = self.gradients(inputs, labels, weight)
        if self.recipe.clip_norm is not None:
            self.scaler.unscale_(self.optimiser)
            torch.nn.utils.clip_grad_norm_(self.weights, self.recipe.clip_norm)
        self.tried += 1
        before = self.scaler.get_scale()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        if self.scaler.get_scale() < before:  # the gradients overflowed: no step was made
            self.skipped += 1
        else:
            self.schedule.step()
        return loss

    def gradients(
        self, inputs: Sequence[torch.Tensor], labels: torch.Tensor, weight: float = 1.0
    ) -> torch.Tensor:
        """Compute the gradients, leave the weights, and return the mean loss. Raises as `step`."""
        self.optimiser.zero_grad(set_to_none=True)
        device, amp_dtype = self.settings.device, self.settings.amp_dtype
        try:
            where = f"the recipe's model or loss failed on {len(labels)} samples, {device}"
            with module_errors(where):
                with torch.autocast(device.type, amp_dtype, enabled=self.amp):
                    loss: torch.Tensor = self.recipe.loss(self.run(*inputs), labels)
                scaled: Any = self.scaler.scale(loss * weight)
                scaled.backward()
        except BadInput as exc:
            cause = exc.__cause__
            if not type(cause).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            raise Unsupported(
                f"torch.compile failed: {type(cause).__name__}: {first_line(cause or exc)}",
                hint="leave `compile` out",
            ) from cause
        return loss.detach()

    def _has_batch_norm(self) -> bool:
        """Return whether a layer that trains normalises by the statistics of its batch."""
        kind = torch.nn.modules.batchnorm._BatchNorm
        fixed = set(self.backbone.modules()) if self.backbone is not None else ()
        return any(isinstance(each, kind) and each not in fixed for each in self.module.modules())

    def train(self, on_progress: Progress) -> None:
        """Run the epochs that are left."""
        options, events = self.settings.options, None
        if options.tensorboard is not None:
            require("tensorboard")
            name = f"events.out.tfevents.{time.time():.0f}.{platform.node()}"
            events = make_folder(options.tensorboard) / name
        if options.checkpoint is not None:
            state = load_state(options.checkpoint, self.described)
            if state is not None:
                self._restore(state)
                self.notes.append(f"went on after epoch {len(self.history)}: {options.checkpoint}")
        if self.batches.note:
            on_progress(self.batches.note, 0.0)
        while len(self.history) < self.settings.epochs and not self._stalled():
            self._train_epoch(on_progress)
            state = self._save_state() if options.checkpoint is not None else {}
            if options.checkpoint is not None and self.group.first:
                with self._goes_on(options.checkpoint):
                    save_whole({KEY: VERSION, "run": self.described, **state}, options.checkpoint)
            if events is not None and self.group.first:
                with self._goes_on(events), write_errors(events):
                    append_events(events, self.history[-1])
        self._conclude()

    @contextlib.contextmanager
    def _goes_on(self, path: Path) -> Iterator[None]:
        """Let the run go on where `path` cannot be written, as on a full disk, and remember it."""
        self.unsaved.pop(path, None)
        try:
            yield
        except (BadInput, Unsupported) as exc:
            self.unsaved[path] = f"epoch {len(self.history)} is not saved: {exc.message}"
            _log.warning(self.unsaved[path])

    def _train_epoch(self, on_progress: Progress) -> None:
        """Run one epoch, again in float32 if mixed precision gave a loss that is not finite.

        Raises Unsupported if the loss is not finite in float32 either, or with FSDP.
        """
        samples, epochs = len(self.batches.labels), self.settings.epochs
        epoch, skipped, both = len(self.history) + 1, self.skipped, ""
        again = self.amp and not self.settings.options.fsdp
        start = copy.deepcopy(self._save_state()) if again else None
        started, waited_s = time.perf_counter(), self.batches.waited.seconds
        loss = self._run_epoch(on_progress)
        if start is not None and not math.isfinite(loss):
            start["state"]["amp"], both = False, ", in mixed precision and in float32"
            self._restore(start)
            self.notes.append(
                f"{self.settings.precision} gave a loss of {loss} in epoch {epoch}; from its start "
                "on the run is in float32"
            )
            _log.warning(self.notes[-1])
            loss = self._run_epoch(on_progress)
        seconds = max(time.perf_counter() - started, 1e-9)
        waited_s = self.batches.waited.seconds - waited_s
        if not math.isfinite(loss):
            mixed = "compute in float32 (`amp` off), " if self.amp else ""
            raise Unsupported(
                f"training diverged: the loss is {loss} in epoch {epoch}{both}",
                hint=f"{mixed}lower `learning_rate`, limit the gradients (the recipe's clip_norm), "
                "or look for NaN in the labels and the loss",
            )
        self.seconds += seconds
        self.waited_s += waited_s
        module, recipe, part = self.module, self.recipe, self.splits.calibration
        if self.frozen is not None:
            module, recipe, part = self.frozen.head, self.frozen.recipe, self.frozen.calibration
        score = None
        if len(part.labels):  # shared: statistics of batches differ between processes
            score = float(self.group.share(float(score_module(module, recipe, part).mean())))
        self.history.append(
            {
                "epoch": epoch,
                "loss": loss,
                "score": score,
                "learning_rate": self.schedule.get_last_lr()[0],
                "samples_per_s": round(samples / seconds, 1),
                "loader_share": round(waited_s / seconds, 4),
                "skipped_steps": self.skipped - skipped,
            }
        )
        text = f"epoch {epoch}/{epochs}, loss {loss:.4f}, {samples / seconds:,.0f} samples/s"
        on_progress(text, epoch / epochs)

    def _run_epoch(self, on_progress: Progress) -> float:
        """Return the mean loss of the epoch."""
        batches, epochs, epoch = self.batches, self.settings.epochs, len(self.history) + 1
        samples, count, size, done = len(batches.labels), len(batches), self.group.size, 0
        self.module.train()
        if self.backbone is not None:
            self.backbone.eval()  # its statistics stay those of the weights it came with
        total = torch.zeros((), device=self.settings.device)
        started = reported = time.perf_counter()
        for number, (inputs, labels, share) in enumerate(batches, 1):
            whole = min(batches.batch_size, samples - done)
            total += self.step(inputs, labels, share * size) * (share * whole)
            done += whole
            now = time.perf_counter()
            if now - reported > _REPORT_S and number < count:
                reported = now
                text = f"epoch {epoch}/{epochs}, {number}/{count} steps"
                text += f", {done / (now - started):,.0f} samples/s"
                on_progress(text, (epoch - 1 + number / count) / epochs)
        return float(sum(self.group.gather(float(total))) / samples)

    def _stalled(self) -> bool:
        """Keep the best epoch's weights, and say whether `patience` has run out."""
        patience = self.settings.options.patience
        if patience is None or not self.history or self.history[-1]["score"] is None:
            return False
        score, epoch = self.history[-1]["score"], self.history[-1]["epoch"]
        best = self.best
        if best is None or score > best[0]:
            best = self.best = score, epoch, copy.deepcopy(self.module.state_dict())
        return bool(epoch - best[1] >= patience)

    def _conclude(self) -> None:
        if self._stalled():
            self.notes.append(
                f"stopped after epoch {len(self.history)}: no better score on the validation data "
                f"for {self.settings.options.patience} epochs"
            )
        if self.best is not None:
            self.module.load_state_dict(self.best[2])
            self.notes.append(f"the weights are those of epoch {self.best[1]}, the best one")
        if self.skipped:
            self.notes.append(
                f"loss scaling skipped {self.skipped} of {self.tried} steps, whose float16 "
                "gradients overflowed"
            )
        self.notes += self.unsaved.values()
        self.notes += self.batches.conclude(self.waited_s / max(self.seconds, 1e-9))

    def _parts(self) -> dict[str, Any]:
        own = {"module": self.module, "optimiser": self.optimiser}
        return {**own, "schedule": self.schedule, "scaler": self.scaler}

    def _save_state(self) -> dict[str, Any]:
        random = {"shuffle": self.batches.shuffle.get_state(), "torch": torch.get_rng_state()}
        if self.settings.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.settings.device)
        parts = {name: each.state_dict() for name, each in self._parts().items()}
        state = {name: getattr(self, name) for name in self._kept}
        return {"parts": parts, "random": self.group.gather(random), "state": state}

    def _restore(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved["state"])
        self._make_scaler()  # mixed precision may have been given up
        for name, each in self._parts().items():
            each.load_state_dict(saved["parts"][name])
        random = saved["random"][self.group.rank]
        self.batches.shuffle.set_state(random["shuffle"])
        torch.set_rng_state(random["torch"])
        if "cuda" in random and self.settings.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], self.settings.device)

    def measure_scaling(self) -> dict[str, Any]:
        """Return what the other processes cost; measured after the weights were copied."""
        if self.group.size == 1:
            return {}
        if self.settings.options.fsdp:
            return {"processes": self.group.size, "fsdp": True}
        inputs, labels, _ = next(iter(self.batches))
        found = measure_scaling(
            self.run, lambda: self.gradients(inputs, labels), self.group, self.settings.device
        )
        self.notes.append(
            f"{self.group.size} processes: scaling efficiency "
            f"{found['scaling_efficiency']:.1%}, communication {found['communication_share']:.1%} "
            "of a step"
        )
        return found

    def figures(self) -> dict[str, Any]:
        """Return how it was trained, and each epoch, for the manifest."""
        settings, epochs, seconds = self.settings, len(self.history), max(self.seconds, 1e-9)
        samples = len(self.batches.labels)
        shared = ("batch_size", "precision", "schedule", "clip_norm", "learning_rate", "seed")
        images = ("classes", "image", "preprocess")
        return {
            "epochs": epochs,
            **{key: self.described[key] for key in shared},
            "device": str(settings.device),
            "threads": torch.get_num_threads(),
            "amp": self.amp,
            "tf32": settings.tf32,
            "compile": settings.options.compile,
            "channels_last": settings.device.type == "cuda",
            "train_samples": samples,
            "train_seconds": round(self.seconds, 3),
            "samples_per_s": round(samples * epochs / seconds, 1),
            "skipped_steps": self.skipped,
            "loader_share": round(self.waited_s / seconds, 4),
            **self.batches.figures,
            "final_loss": self.history[-1]["loss"] if self.history else None,
            "data": self.splits.source,
            **{key: self.described[key] for key in images if self.described[key]},
            **({"feature_seconds": round(self.frozen.seconds, 3)} if self.frozen else {}),
            "history": list(self.history),
        }
