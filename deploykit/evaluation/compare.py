"""Compare two artefacts on the same inputs, or one with its recorded samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.core.arguments import checked
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput, GateFailed, NotFound
from deploykit.core.evidence import Parity
from deploykit.core.files import StrPath
from deploykit.core.json_value import Shown, json_value
from deploykit.core.precision import BY_NAME, CALIBRATED
from deploykit.engines.data.samples import check_finite, read_samples
from deploykit.engines.engine import Engine, load
from deploykit.evaluation import golden
from deploykit.evaluation.feeds import MOST_SAMPLES, comparison_feeds, given_sizes, rows_that_fit
from deploykit.evaluation.parity import (
    DRAWS_NUMBERS,
    add_float32_errors,
    compare_engines,
    draws_numbers,
    in_other_batches,
)

if TYPE_CHECKING:
    import numpy as np

    from deploykit.evaluation.divergence import Divergence


@dataclass(frozen=True)
class Compared(Shown):
    """The parity of two artefacts, and the first node at which two ONNX graphs differ.

    `note`: says if the inputs are not those of `data`, or fewer at once than usual.
    """

    parity: Parity
    divergence: Divergence | None = None
    note: str = ""
    unfit: str = ""  # why the comparison says nothing

    def to_dict(self) -> dict[str, Any]:
        found = {"divergence": json_value(self.divergence), "note": self.note}
        return {**self.parity.to_dict(), **found}

    def raise_if_over(self) -> None:
        """Raise GateFailed naming the worst row, and the first node that differs."""
        try:
            self.parity.raise_if_over()
        except GateFailed as exc:
            difference = self.divergence.text if self.divergence else exc.hint
            raise GateFailed(exc.message, hint=self.unfit or difference) from None


@checked
def compare(
    a: ArtefactLike,
    b: ArtefactLike | None = None,
    *,
    data: StrPath | None = None,
    batch: int | None = None,
    axis: Mapping[str, int] | None = None,
    max_error: float | None = None,
    device: str = "cpu",
    arch: str | None = None,
    allow_pickle: bool = False,
    trust: bool = False,
) -> Compared:
    """Run two artefacts on the same inputs, the samples of `data` or seeded random ones.

    `batch`, `axis`: sizes of the random inputs' batch, and of other dynamic axes by name; without
    them, of several at which `a` runs. `arch`: the function that builds the model of bare weights,
    pkg.mod:callable or ./file.py:callable; its inputs are those of the other file. `allow_pickle`:
    run code that a PyTorch file contains. `trust`: as in `load`.

    The bound is 0.001 of the output's scale, or 8 times what float32 itself gives where that is
    more; `max_error` replaces both. Random inputs saturate what was calibrated for real ones: where
    one of the two is INT8 or FP8, its golden samples and their bound take their place.

    Without `b`, `a` runs on the golden samples next to it and is compared with the recorded
    outputs; the bound is then the manifest's, else 0.001. A TensorRT engine runs on its GPU, even
    where `device` is "cpu", and random inputs are of sizes that it accepts.
    """
    first = Artefact.open(a)
    if b is None:
        if data is not None or batch is not None or axis or arch is not None or allow_pickle:
            raise BadInput(
                "`data`, `batch`, `axis`, `arch` and `allow_pickle` need two files; one alone "
                "replays its golden samples"
            )
        return Compared(_replay(first, max_error, device, trust))

    second, bound = Artefact.open(b), golden.MAX_ERROR if max_error is None else max_error
    with ExitStack() as stack:
        left, right = _open_both((first, second), device, arch, allow_pickle, trust, stack)
        task = first.task or second.task
        samples = read_samples(Path(data), left.inputs, task=task) if data else None
        sizes = given_sizes(left.inputs, batch, axis, samples)
        unfit = [each for each in (first, second) if not data and _calibrated(each)]
        recorded, why = None if sizes else _recorded(unfit, left), ""
        if recorded is not None:
            name, feeds, stored = recorded
            notes: tuple[str, ...] = (f"the inputs are the golden samples of {name}",)
            bound = stored if max_error is None else max_error
        else:
            path = next((each.path for each in (first, second) if each.format == "onnx"), None)
            feeds, notes = comparison_feeds(left, right, samples, path, sizes)
            if unfit:
                why = f"random inputs are not what {unfit[0].name} was calibrated for: give `data`"
        names, random = (first.name, second.name), samples is None
        parity = compare_engines(left, right, feeds, max_error=bound, names=names, random=random)
        if samples and any(row.floating and row.problem for row in parity.rows):
            check_finite(samples)
        if not parity.passed and not why and draws_numbers(left, feeds[-1]):
            why = DRAWS_NUMBERS
        if not parity.passed and max_error is None:
            parity = add_float32_errors(parity, left, partial(in_other_batches, left), feeds)
    difference = _first_difference(first, second, feeds, parity)
    return Compared(parity, difference, "; ".join(filter(None, (why, *notes))), why)


def _first_difference(
    first: Artefact, second: Artefact, feeds: Sequence[Mapping[str, np.ndarray]], parity: Parity
) -> Divergence | None:
    if not parity.passed and first.format == second.format == "onnx":
        from deploykit.evaluation.divergence import CHUNK, first_divergence
        from deploykit.graph.graph import Graph

        graphs = Graph.open(first.path), Graph.open(second.path)
        chunk = CHUNK * rows_that_fit(feeds[:1], first.path) // MOST_SAMPLES
        return first_divergence(*graphs, feeds[0], parity.max_error, chunk)
    return None


def _open_both(
    pair: tuple[Artefact, Artefact],
    device: str,
    arch: str | None,
    allow_pickle: bool,
    trust: bool,
    stack: ExitStack,
) -> list[Engine]:
    """Open the artefact that describes its inputs first: bare weights take the same inputs."""
    pytorch = [each for each in pair if each.runtime.name == "torch"]
    bare = []
    if pytorch:
        from deploykit.engines.torch.engine import describes_itself, open_like

        bare = [each for each in pytorch if not describes_itself(each.path)]
    elif arch is not None or allow_pickle:
        raise BadInput(f"`arch` and `allow_pickle`: neither {pair[0]} nor {pair[1]} is PyTorch's")
    if len(bare) == 2:
        raise BadInput(
            f"neither {pair[0]} nor {pair[1]} says what its inputs are",
            hint="compare each with an .onnx file, as `deploykit export` makes it",
        )
    for each in pair:
        if bare and each.task:
            raise BadInput(
                f"{each}: has a task and {bare[0]} does not, so their outputs differ",
                hint=f"PyTorch's answers to its golden samples: deploykit compare {each}",
            )
    opened: dict[Artefact, Engine] = {}
    for each in sorted(pair, key=lambda each: each in bare):
        if each in bare or (each in pytorch and arch is not None and not bare):
            inputs = next(iter(opened.values())).inputs if each in bare else ()
            engine: Engine = open_like(each, inputs, device, arch, allow_pickle)
        else:
            engine = load(each, each.runtime.usable(device), trust=trust)
        opened[each] = stack.enter_context(engine)
    return [opened[each] for each in pair]


def _calibrated(artefact: Artefact) -> bool:
    """Return whether it has scales from calibration data: other inputs saturate."""
    from deploykit.graph.graph import Graph

    counts = artefact.manifest.precision if artefact.manifest else {}
    if not counts and artefact.format == "onnx":
        counts = Graph.open(artefact.path).precision
    return any(counts.get(BY_NAME[name].dtype) for name in CALIBRATED)


def _recorded(
    artefacts: Sequence[Artefact], engine: Engine
) -> tuple[str, list[Mapping[str, np.ndarray]], float] | None:
    """Return the first golden samples next to these: the name of their file, inputs and bound."""
    for each in artefacts:
        found = golden.find_samples(each.path, each.manifest)
        if found is not None:
            feeds, _ = golden.open_samples(found, each.path, engine.inputs, engine.outputs)
            return each.name, [feeds], found.max_error
    return None


def _replay(artefact: Artefact, max_error: float | None, device: str, trust: bool) -> Parity:
    found = golden.find_samples(artefact.path, artefact.manifest)
    if found is None:
        raise NotFound(
            f"{artefact}: has no golden samples next to it",
            hint="name a second file to compare with; `deploykit export` records samples",
        )
    with load(artefact, artefact.runtime.usable(device), trust=trust) as engine:
        return golden.replay(found, artefact.path, engine, artefact.name, max_error)
