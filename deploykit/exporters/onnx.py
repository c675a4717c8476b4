"""Export a torch module to ONNX: torch's current exporter first, the older one only by name.

The tensors are named as the specs say and dynamic axes are dynamic; `Exported` says which exporter
wrote the file and why. A graph that would silently be wrong is refused: one that keeps a single
branch of an `if` on the data, or a single size of a dynamic axis.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from deploykit.core.errors import BadInput, GateFailed, Unsupported
from deploykit.core.extras import require
from deploykit.core.profile import Profile
from deploykit.core.tensors import TensorSpec
from deploykit.exporters.calls import check_layers
from deploykit.exporters.capture import (
    by_dynamo,
    by_torchscript,
    cutting_line,
    example_sizes,
    is_scripted,
    watch_calls,
)
from deploykit.exporters.finish import finish, save
from deploykit.exporters.reasons import FREE_HINT, NotExported, TooSmall, hint_for

torch: ModuleType = require("torch")

DEFAULT_OPSET = 20  # what torch's exporter writes itself; NVIDIA's parsers take it
OPSETS = range(18, 24)  # older ones torch's current exporter does not write
TORCHSCRIPT_OPSETS = range(18, 21)  # the older exporter stopped at 20
EXPORTERS = ("auto", "dynamo", "torchscript")
_BRANCH_HINT = (
    "torch.where computes both branches and torch.cond keeps both; else give the axis a fixed size "
    "in `inputs`"
)
MAX_BYTES = (1 << 31) - (1 << 25)  # protobuf's 2 GiB, less room for the graph itself


@dataclass(frozen=True)
class Exported:
    """What wrote the file: "dynamo" or "torchscript", and the opset that is in it.

    `fallback`: why it was not torch's current exporter; empty if it was. `decided`: lines of the
    user's code of which the graph keeps what they decided by a size, and for which sizes. `sizes`:
    what the dynamic axes were exported at.
    """

    exporter: str
    opset: int
    fallback: str
    decided: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


def opset_for(profile: Profile) -> int:
    """The opset to export with for a target: the one its profile names, else 20."""
    return profile.opset or DEFAULT_OPSET


def export_module(
    module: Any,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    out: Path,
    *,
    opset: int = DEFAULT_OPSET,
    exporter: str = "auto",
    sizes: Mapping[str, int] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Exported:
    """Write `module` to `out`; past `max_bytes` of weights, these to OUT.data next to it.

    `module.forward` takes one tensor for each of `inputs`, by position, and returns a tuple in the
    order of `outputs`. `exporter`: "auto" takes torch's current exporter, and the older one where
    that fails for a reason that does not make the older one's graph wrong. `sizes`: the size to
    export at, by axis, where the model does not run at small ones.

    Raises BadInput when torch cannot export the model, naming the reason and the line of the user's
    code that it comes from.
    """
    if exporter not in EXPORTERS:
        raise BadInput(f"exporter {exporter}: unknown", hint="one of: " + ", ".join(EXPORTERS))
    scripted = is_scripted(module)
    if exporter == "dynamo" and scripted:
        raise BadInput(
            "a TorchScript module goes through torch's older exporter only",
            hint="leave the exporter to be chosen, or export the original module",
        )
    older = scripted or exporter == "torchscript"
    offered = TORCHSCRIPT_OPSETS if older else OPSETS
    if opset not in offered:
        which = " by torch's older exporter" if older else ""
        raise BadInput(
            f"opset {opset} is not offered{which}", hint=f"{offered[0]} to {offered[-1]}"
        )
    at = example_sizes(inputs, sizes)
    decided: tuple[str, ...] = ()
    why = "the file is TorchScript" if scripted else "it was asked for" if older else ""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as folder:
        if not older:
            try:
                model, decided = _at_size_taken(module, inputs, outputs, opset, at)
            except NotExported as first:
                if exporter == "dynamo" or first.final:
                    raise _add_advice(first, module, inputs, at) from first.__cause__
                model, why = _fall_back(module, inputs, outputs, opset, at, Path(folder), first)
        else:
            model, frozen = by_torchscript(module, inputs, outputs, opset, at, Path(folder))
            if frozen:
                why += f"; it keeps what the example decided at {', '.join(frozen)}"
                decided = frozen
        _finish(model, module, inputs, outputs, at)
        save(model, out, max_bytes)
    written = model.opset_imports[""]
    if written > opset:
        raise BadInput(f"torch wrote opset {written}, {opset} was asked for")
    return Exported("torchscript" if why else "dynamo", written, why, decided, at)


def _finish(
    model: Any,
    module: Any,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    sizes: Mapping[str, int],
) -> None:
    try:
        finish(model, inputs, outputs, _parameters(module), sizes)
    except BadInput as exc:
        add_cause(exc, module, inputs, sizes)
        raise


def add_cause(
    error: BadInput | GateFailed | Unsupported,
    module: Any,
    inputs: Sequence[TensorSpec],
    sizes: Mapping[str, int],
    decided: tuple[str, ...] = (),
) -> None:
    """Name in `error` the lines by which a graph exported at `sizes` is wrong, and the rewrite."""
    if isinstance(error, Unsupported):  # ONNX Runtime has no kernel for it
        if any(str(each.dtype) == "torch.bfloat16" for each in module.parameters()):
            error.message = "the model is in bfloat16, in which ONNX Runtime's CPU cannot check it"
            error.hint = "export it in float32, `model.float()`, and quantize the graph to bf16"
        return
    if isinstance(error, GateFailed) and watch_calls(module, inputs, sizes).add_to(error):
        return
    if decided:
        error.message += f"; the graph keeps what was decided at {', '.join(decided)}"
        error.hint = _BRANCH_HINT
    elif place := cutting_line(module, inputs, sizes):
        error.message += f"; a size decides at {place}"
        error.hint = hint_for(place, FREE_HINT)


def _at_size_taken(
    module: Any,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    opset: int,
    sizes: dict[str, int],
) -> tuple[Any, tuple[str, ...]]:
    """As `by_dynamo`, exported at larger `sizes` where the model needs them."""
    while True:
        try:
            return by_dynamo(module, inputs, outputs, opset, sizes)
        except TooSmall as exc:
            if sizes[exc.axis] >= exc.least:
                raise
            sizes[exc.axis] = 2 * exc.least  # at the least itself what is left of it may be 1


def _fall_back(
    module: Any,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    opset: int,
    sizes: Mapping[str, int],
    folder: Path,
    first: NotExported,
) -> tuple[Any, str]:
    """The older exporter's graph and why it was used; raises `first` where that fails as well."""
    if opset not in TORCHSCRIPT_OPSETS:
        raise _add_advice(first, module, inputs, sizes)
    try:
        model, frozen = by_torchscript(module, inputs, outputs, opset, sizes, folder)
    except NotExported:
        raise _add_advice(first, module, inputs, sizes) from None
    if frozen and not first.captured:
        raise NotExported(
            f"{first.message}; and torch's older exporter would keep one branch at {frozen[0]}",
            hint=first.hint,
            final=True,
        )
    return model, first.message


def _add_advice(
    error: NotExported, module: Any, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]
) -> NotExported:
    """`error` with the line that calls an operator which ONNX lacks, and what to do."""
    if error.operator:
        watch_calls(module, inputs, sizes).add_operator(error, error.operator)
    check_layers(error, module)
    return error


def _parameters(module: Any) -> list[str]:
    """Names of its parameters; a TorchScript function has none."""
    if not isinstance(module, torch.nn.Module):
        return []
    return [name for name, _ in module.named_parameters()]
