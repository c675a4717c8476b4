"""A PyTorch module that is ready to export or run, and what is known of where it came from."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.preprocess import Preprocess
from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.data.preprocess import image_input
from deploykit.runtimes.torch.describe import describe
from deploykit.runtimes.torch.files import module_errors
from deploykit.runtimes.torch.outputs import adapt, binding
from deploykit.runtimes.torch.preprocess import FromBytes
from deploykit.runtimes.torch.presets import Preset

torch = require("torch")

NAME_THE_ARCHITECTURE = "`arch` builds the model: pkg.mod:callable or ./file.py:callable"
NAME_THE_INPUTS = "`inputs` describes each input, for example 'x:float32[N,3,224,224]'"


@dataclass(frozen=True)
class Loaded:
    """A torch module in eval mode on the CPU, its specs and its origin.

    `module`: takes the inputs by position in the order of `inputs`, returns a tuple in the order of
    `outputs`; the names of its weights begin with "module.". `source`: "checkpoint", "state_dict",
    "safetensors", "Lightning", "Hugging Face", "torch.export", "TorchScript", "pickle" or "module".
    `ran_pickle`: code in the file could run. `notes`: what was picked, dropped or converted on the
    way, a sentence each. `limits`: the smallest and largest size (None: any) of those dynamic axes
    for which they are known. `model_class`: of transformers, where a folder names it.
    `preset`: what its library says of it. `parts`: the same model as two in a row, the second of
    which chooses by values that may be equal, as NMS does.
    """

    module: Any
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    source: str
    recipe: str | None = None
    ran_pickle: bool = False
    notes: tuple[str, ...] = ()
    limits: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    model_class: str | None = None
    preset: Preset | None = None
    parts: tuple[Loaded, Loaded] | None = None


def undescribed(where: object, *, arch: bool = False, inputs: bool = False) -> BadInput:
    """One error for all that `where` does not contain: the architecture, the inputs or both."""
    parts = {"what the model is": arch, "what its inputs are": inputs}
    hints = {NAME_THE_ARCHITECTURE: arch, NAME_THE_INPUTS: inputs}
    return BadInput(
        f"{where}: does not say {' or '.join(part for part, lacks in parts.items() if lacks)}",
        hint="; ".join(hint for hint, lacks in hints.items() if lacks),
    )


def describe_module(
    where: object,
    module: Any,
    inputs: Sequence[TensorSpec],
    source: str,
    *,
    ran_pickle: bool = False,
    notes: Sequence[str] = (),
) -> Loaded:
    """Find the outputs of a module that came without specs, by running it. Raises BadInput."""
    if not inputs:
        raise undescribed(where, inputs=True)
    cached = _without_cache(module)
    bind, more = binding(module, [spec.name for spec in inputs])
    adapter = adapt(module.eval(), bind, len(inputs))
    outputs, feeds, limits = describe(str(where), adapter, inputs)
    if isinstance(module, torch.jit.ScriptModule):
        adapter = _trace(where, adapter, feeds)
    least = [f"the model takes axis {axis} from {low} on" for axis, (low, _) in limits.items()]
    notes = (*notes, *cached, *more, *least)
    return Loaded(
        adapter, tuple(inputs), outputs, source, ran_pickle=ran_pickle, notes=notes, limits=limits
    )


def with_preprocess(loaded: Loaded, preprocess: Preprocess) -> Loaded:
    """`loaded` taking bytes. Raises BadInput unless one input is an image of these channels."""
    if loaded.source == "TorchScript":
        raise BadInput(
            "`preprocess` does not go with TorchScript, whose graph is fixed",
            hint="export the state_dict with `arch` instead",
        )
    place, spec = image_input(loaded.inputs, preprocess)
    inputs = (*loaded.inputs[:place], spec, *loaded.inputs[place + 1 :])
    module = FromBytes(loaded.module, preprocess, place).eval()
    return replace(loaded, module=adapt(module, by_position, len(inputs)), inputs=inputs)


def by_position(inputs: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    return inputs, {}


def _without_cache(module: Any) -> tuple[str, ...]:
    """Switch off transformers' key/value cache: an object that no graph can return."""
    configs: list[Any] = [getattr(part, "config", None) for part in module.modules()]
    using = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in using:
        config.use_cache = False
    return ("switched use_cache off in the model's config",) if using else ()


def _trace(where: object, adapter: Any, feeds: Sequence[Any]) -> Any:
    """The adapter as TorchScript too: an exporter cannot follow from Python into TorchScript.

    The control flow inside is kept; only the adapter's own picking of outputs is traced.
    """
    with module_errors(where), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecated, and the only way into this format
        return torch.jit.trace(adapter, tuple(feeds), check_trace=False, strict=False)
