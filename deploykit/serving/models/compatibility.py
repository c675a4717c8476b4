"""Check whether an engine can be served, and whether it can replace another."""

from __future__ import annotations

from collections.abc import Sequence

from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.engine import Engine


def largest_batch(engine: Engine, max_batch: int) -> int:
    """Rows per batch; 0 unless every input and output has the same dynamic axis 0."""
    if not engine.inputs or not engine.outputs:
        raise Unsupported("a model without inputs or without outputs cannot be served")
    specs = [*engine.inputs, *engine.outputs]
    if not all(spec.batched for spec in specs) or len({spec.shape[0] for spec in specs}) != 1:
        return 0
    return min(max_batch, engine.max_batch or max_batch)


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
