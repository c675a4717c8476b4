"""Check whether an engine can be served, and whether it can replace another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.evidence import RowIndependence
from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.batching import prove_rows, why_no_batch
from deploykit.runtimes.engine import Engine
from deploykit.serving.options import ServeOptions


def why_not_batched(engine: Engine, options: ServeOptions) -> str:
    """Why requests are not joined, as far as it is known without a run; empty if they may be."""
    if not engine.inputs or not engine.outputs:
        raise Unsupported("a model without inputs or without outputs cannot be served")
    if not options.batching:
        return "`batching` is off"
    return why_no_batch(engine.inputs, engine.outputs)


def largest_batch(engine: Engine, max_batch: int) -> int:
    """Rows per batch of a model that is batched."""
    return min(max_batch, engine.max_batch or max_batch)


def prove_batching(
    engine: Engine, options: ServeOptions, sizes: Mapping[str, int], times_us: dict[int, int]
) -> RowIndependence:
    """Whether requests may be joined: by the engine's manifest, else by running it.

    `sizes`: of the axes that have buckets. `times_us` gets what `prove_rows` measured.
    """
    rows, known = largest_batch(engine, options.max_batch), engine.batching
    if options.assume_batched:
        return RowIndependence(True, "`assume_batched` is on")
    if known is not None and (not known.passed or rows <= max(known.rows, default=0)):
        return known
    return prove_rows(engine, rows, sizes=sizes, samples=engine.examples, times_us=times_us)


def check_compatible(name: str, served: Engine, other: Engine) -> None:
    """Raise BadInput unless both have the same inputs and outputs."""
    for kind, have, got in (
        ("input", served.inputs, other.inputs),
        ("output", served.outputs, other.outputs),
    ):
        if tuple(have) != tuple(got):
            raise BadInput(
                f"model '{name}': the {kind}s of one engine are {_list_specs(have)}, "
                f"those of another {_list_specs(got)}",
                hint="serve another model under another name",
            )


def _list_specs(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs)) or "none"
