"""One training step: forward, loss, backward, update; in mixed precision, and in less memory.

A batch that does not fit into memory is computed in 2, 4, 8 … parts whose gradients add up to
those of the whole, so that the batch size of the run stays what it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from deploykit.core.errors import BadInput, Unsupported, first_line
from deploykit.core.memory import does_not_fit, lacks_memory
from deploykit.core.recipe import Recipe
from deploykit.training.options import Settings


class Stepper:
    """Updates the weights of `run`, a module on the device, with one batch per call.

    `parts`: how many parts a batch is computed in. `skipped`: steps whose float16 gradients
    overflowed, so that loss scaling left the weights as they were. `slowly`: the weights that
    learn at the share `unfreeze` of the rate.
    """

    def __init__(
        self,
        run: torch.nn.Module,
        recipe: Recipe,
        settings: Settings,
        steps: int,
        slowly: Iterable[torch.nn.Parameter] = (),
        *,
        alone: bool = True,
    ) -> None:
        self.alone = alone  # else the other processes would wait for the parts of a batch
        self.run, self.loss, self.settings = run, recipe.loss, settings
        self.device, slower = settings.device, settings.options.unfreeze or 1.0
        self.weights = [each for each in run.parameters() if each.requires_grad]
        slow = {id(each) for each in slowly}
        groups = [
            {"params": [p for p in self.weights if (id(p) in slow) == part], "lr": rate}
            for part, rate in ((False, recipe.learning_rate), (True, recipe.learning_rate * slower))
        ]
        groups = [group for group in groups if group["params"]]
        self.optimiser = torch.optim.Adam(groups, lr=recipe.learning_rate)
        self.schedule = make_schedule(settings.schedule, self.optimiser, steps)
        self.parts, self.tried, self.updated = 1, 0, 0
        self.optimiser.register_step_post_hook(self._count)
        self.use(settings.amp_dtype)

    def use(self, amp_dtype: torch.dtype | None) -> None:
        """Compute in this type from now on; None is float32."""
        self.amp_dtype = amp_dtype
        half = amp_dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half)

    @property
    def skipped(self) -> int:
        return self.tried - self.updated

    def _count(self, *_: object) -> None:
        self.updated += 1

    def __call__(
        self, inputs: Sequence[torch.Tensor], labels: torch.Tensor, weight: float = 1.0
    ) -> torch.Tensor:
        """Update the weights; the mean loss of the batch, not yet read from the device.

        `weight`: of the loss, where other processes average their gradients with these.
        Raises OutOfMemory where not even one sample fits, BadInput where the recipe fails.
        """
        while True:
            try:
                loss = self.gradients(inputs, labels, weight)
                break
            except Exception as exc:
                if not isinstance(exc, torch.OutOfMemoryError) and not lacks_memory(exc):
                    what = f"{type(exc).__name__}: {first_line(exc)}"
                    if type(exc).__module__.startswith(("torch._dynamo", "torch._inductor")):
                        raise Unsupported(
                            f"torch.compile failed: {what}", hint="leave `compile` out"
                        ) from exc
                    raise BadInput(f"the recipe's model or loss failed: {what}") from exc
                reason = first_line(exc)
            # outside of `except`: its traceback would keep the tensors
            if self.parts >= len(labels) or not self.alone:
                what = "a single sample" if self.alone else "a process's part of a batch"
                raise does_not_fit(f"{self.device}: training on {what}", reason)
            self.parts *= 2
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        self._update()
        return loss

    def gradients(
        self, inputs: Sequence[torch.Tensor], labels: torch.Tensor, weight: float = 1.0
    ) -> torch.Tensor:
        """Compute the gradients, and leave the weights; the mean loss."""
        self.optimiser.zero_grad(set_to_none=True)
        if self.parts == 1:
            loss = self._loss(inputs, labels)
            self._backward(loss * weight if weight != 1.0 else loss)
            return loss.detach()
        total = torch.zeros((), device=self.device)
        size = -(-len(labels) // self.parts)
        for start in range(0, len(labels), size):
            part = slice(start, start + size)
            share = len(labels[part]) / len(labels)
            loss = self._loss([each[part] for each in inputs], labels[part]) * share
            self._backward(loss)
            total += loss.detach()
        return total

    def _loss(self, inputs: Sequence[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            loss: torch.Tensor = self.loss(self.run(*inputs), labels)
        return loss

    def _backward(self, loss: torch.Tensor) -> None:
        scaled: Any = self.scaler.scale(loss)
        scaled.backward()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.amp_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.amp_dtype)

    def _update(self) -> None:
        if self.settings.clip_norm is not None:
            self.scaler.unscale_(self.optimiser)
            torch.nn.utils.clip_grad_norm_(self.weights, self.settings.clip_norm)
        before = self.updated
        self.tried += 1
        self.scaler.step(self.optimiser)
        self.scaler.update()
        if self.updated > before:
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        return {
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "amp": self.amp_dtype is not None,
            "counts": [self.parts, self.tried, self.updated],
        }

    def restore(self, state: dict[str, Any]) -> None:
        if not state["amp"]:  # mixed precision was given up
            self.use(None)
        self.optimiser.load_state_dict(state["optimiser"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        self.parts, self.tried, self.updated = state["counts"]


def make_schedule(
    name: str, optimiser: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate over `steps` updates: one of `SCHEDULES`."""
    kinds = torch.optim.lr_scheduler
    if name == "cosine":
        return kinds.CosineAnnealingLR(optimiser, T_max=steps)
    if name == "linear":
        return kinds.LinearLR(optimiser, start_factor=1.0, end_factor=0.0, total_iters=steps)
    if name == "one-cycle":  # one step more: it is also asked for the rate after the last one
        highest = [group["lr"] for group in optimiser.param_groups]
        return kinds.OneCycleLR(optimiser, max_lr=highest, total_steps=steps + 1)
    return kinds.ConstantLR(optimiser, factor=1.0, total_iters=1)
