"""The whole state of a run in one file, from which it goes on exactly as if it had not stopped.

The file is replaced whole after each epoch: a run that is killed while it writes leaves the state
of the epoch before. It holds tensors, numbers and strings; opening it runs no code.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch

from deploykit.core.errors import BadInput, first_line
from deploykit.core.files import check_readable
from deploykit.core.recipe import Splits
from deploykit.runtimes.torch.open import save_whole

VERSION = 1
KEY = "deploykit_training_state"


def describe_run(recipe: str, splits: Splits, chosen: dict[str, Any]) -> dict[str, Any]:
    """What a run must have in common with the one whose state it goes on from."""
    labels = splits.train.labels
    data = f"{splits.source}, {len(labels)} samples, checksum {zlib.crc32(labels.tobytes()):08x}"
    return {"recipe": recipe, **chosen, "data": data}


def save_state(path: Path, run: dict[str, Any], state: dict[str, Any]) -> None:
    save_whole({KEY: VERSION, "run": run, **state}, path)


def load_state(path: Path, run: dict[str, Any]) -> dict[str, Any] | None:
    """The state in `path`, None where there is no such file yet.

    Raises BadInput for a file that is no state, or is that of another run, naming the difference.
    """
    if not path.exists():
        return None
    check_readable(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as exc:  # torch's reader of damaged files raises anything
        raise _no_state(path, first_line(exc)) from exc
    if not isinstance(state, dict) or KEY not in state:
        raise _no_state(path, "it was not written by `checkpoint`")
    if state[KEY] != VERSION:
        raise BadInput(f"{path}: is a state of version {state[KEY]}, this is {VERSION}")
    for name, value in run.items():
        if state["run"].get(name) != value:
            raise BadInput(
                f"{path}: is the state of another run: its {name} is "
                f"{state['run'].get(name)}, here it is {value}",
                hint="repeat that run's options, or name another `checkpoint`",
            )
    return dict(state)


def _no_state(path: Path, reason: str) -> BadInput:
    return BadInput(
        f"{path}: is not the state of a training run: {reason.rstrip('.')}",
        hint="name a file that does not exist yet as `checkpoint`",
    )


def random_state(device: torch.device, shuffle: torch.Generator) -> dict[str, Any]:
    """The state of all generators of random numbers that a run draws from."""
    states = {"shuffle": shuffle.get_state(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(
    states: dict[str, Any], device: torch.device, shuffle: torch.Generator
) -> None:
    shuffle.set_state(states["shuffle"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
