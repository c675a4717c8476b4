"""Open a PyTorch file: as a module for `export`, and as the reference Engine for `compare`.

In: a deploykit checkpoint, bare weights together with the user's own architecture, a `.pt2`,
TorchScript or a pickled module. Out: a module in eval mode and its specs. Nothing in a file runs as
code unless `allow_pickle` says so: a checkpoint names a recipe that comes with deploykit, and no
other Python object.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.artefact import ArtefactLike, sniff, torch_kind
from deploykit.core.errors import BadInput, DeploykitError, NotFound, Unsupported
from deploykit.core.extras import require
from deploykit.core.files import atomic_write
from deploykit.core.preprocess import Preprocess, from_bytes
from deploykit.core.recipe import bundled, load_recipe
from deploykit.core.tensors import TensorSpec, parse_spec
from deploykit.runtimes.engine import Arrays, BaseEngine, check_feeds
from deploykit.runtimes.torch.describe import describe
from deploykit.runtimes.torch.files import Content, is_state_dict, read, users_code
from deploykit.runtimes.torch.outputs import adapted, binding
from deploykit.runtimes.torch.preprocess import FromBytes, before
from deploykit.runtimes.torch.programs import open_program
from deploykit.runtimes.torch.weights import build, fill

torch = require("torch")

CHECKPOINT_VERSION = 1


@dataclass(frozen=True)
class Loaded:
    """A torch module in eval mode on the CPU, its specs, and how it came out of its file.

    `module`: takes the inputs by position in the order of `inputs`, returns a tuple in the order of
    `outputs`; the names of its weights begin with "module.". `source`: "checkpoint", "state_dict",
    "safetensors", "torch.export", "TorchScript" or "pickle". `ran_pickle`: code in the file could
    run. `notes`: what was picked, dropped or converted on the way, a sentence each. `limits`: the
    smallest and largest size (None: any) of the dynamic axes of which the file says so.
    """

    module: Any
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    recipe: str | None
    source: str
    ran_pickle: bool
    notes: tuple[str, ...] = ()
    limits: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)


def save_checkpoint(
    out: Path,
    module: Any,
    recipe: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
) -> None:
    """Write weights, the recipe's name and the specs: tensors and texts only, no code."""
    document = {
        "deploykit_checkpoint": CHECKPOINT_VERSION,
        "recipe": recipe,
        "inputs": [str(spec) for spec in inputs],
        "outputs": [str(spec) for spec in outputs],
        "state_dict": module.state_dict(),
    }
    with atomic_write(out) as tmp:
        torch.save(document, tmp)


def load_weights(path: Path) -> dict[str, Any]:
    """The tensors by name in a checkpoint or in a file of bare weights. Raises BadInput."""
    content = read(path, allow_pickle=False)
    return dict(_weights_of(path, content))


def load_module(
    path: Path,
    *,
    arch: str | None = None,
    inputs: Sequence[TensorSpec] = (),
    allow_pickle: bool = False,
) -> Loaded:
    """Open `path` as a module.

    `arch`: `pkg.mod:callable` that builds the module of bare weights; `inputs`: its specs, needed
    where the file does not hold them. Raises NotFound, BadInput, MissingExtra.
    """
    content = read(path, allow_pickle=allow_pickle)
    if arch is not None and content.source in ("torch.export", "TorchScript", "pickle"):
        raise BadInput(f"{path}: holds a whole model, so --arch {arch} has nothing to build")
    if content.source == "checkpoint":
        return _from_checkpoint(path, content, arch, inputs)
    if content.source == "torch.export":
        with users_code(path):
            program = open_program(str(path), content.value, inputs)
        return Loaded(
            program.module,
            program.inputs,
            program.outputs,
            None,
            content.source,
            content.ran_pickle,
            program.notes,
            program.limits,
        )
    if content.source in ("TorchScript", "pickle"):
        with users_code(path):
            return _described(path, content.value.cpu(), inputs, content)
    if arch is None:
        raise BadInput(
            f"{path}: is a bare state_dict, which does not say what the model is",
            hint="name what builds it: --arch pkg.mod:callable or --arch ./file.py:callable",
        )
    module = build(arch)
    notes = fill(path, module, content.value)
    with users_code(path):
        return _described(path, module, inputs, content, notes)


def _weights_of(path: Path, content: Content) -> Mapping[str, Any]:
    held = content.value
    weights: Any = held.get("state_dict") if content.source == "checkpoint" else held
    if not is_state_dict(weights):
        raise BadInput(f"{path}: holds no state_dict")
    found: Mapping[str, Any] = weights
    return found


def _from_checkpoint(
    path: Path, content: Content, arch: str | None, wanted: Sequence[TensorSpec]
) -> Loaded:
    document = content.value
    name, version = document.get("recipe"), document["deploykit_checkpoint"]
    texts = [document.get("inputs"), document.get("outputs")]
    if version != CHECKPOINT_VERSION:
        raise BadInput(
            f"{path}: is a checkpoint of version {version}, this is {CHECKPOINT_VERSION}"
        )
    if not isinstance(name, str) or not all(isinstance(item, list) for item in texts):
        raise BadInput(f"{path}: is a damaged deploykit checkpoint")
    inputs, outputs = (tuple(parse_spec(str(text)) for text in item or []) for item in texts)
    if wanted and tuple(wanted) != inputs:
        raise BadInput(
            f"{path}: its inputs are {', '.join(map(str, inputs))}",
            hint="a checkpoint of deploykit says so itself: leave --input out",
        )
    preprocess = None
    if arch is not None:
        module = build(arch)
    else:
        try:
            bundled(name)  # a recipe of ours by its name: never a path or module out of a file
        except NotFound:
            raise BadInput(
                f"{path}: was trained with the recipe '{name}', which does not come with deploykit",
                hint="name what builds the model: --arch ./mine.py:callable",
            ) from None
        recipe = load_recipe(name)
        module, preprocess = recipe.build(), recipe.preprocess
    notes = fill(path, module, _weights_of(path, content))
    bind, more = binding(module, [spec.name for spec in inputs])
    if preprocess is not None:
        module, bind, more = before(module, inputs, preprocess), _by_position, notes[:0]
    module = adapted(module.eval(), bind, len(inputs))
    kind = (content.source, content.ran_pickle)
    return Loaded(module, inputs, outputs, name, *kind, notes=(*notes, *more))


def with_preprocess(loaded: Loaded, preprocess: Preprocess) -> Loaded:
    """`loaded` taking bytes. Raises BadInput unless one input is an image of these channels."""
    if loaded.source == "TorchScript":
        raise BadInput(
            "--preprocess does not go with TorchScript, whose graph is fixed",
            hint="export the state_dict with --arch instead",
        )
    place, spec = from_bytes(loaded.inputs, preprocess)
    inputs = (*loaded.inputs[:place], spec, *loaded.inputs[place + 1 :])
    module = FromBytes(loaded.module, preprocess, place).eval()
    return replace(loaded, module=adapted(module, _by_position, len(inputs)), inputs=inputs)


def _by_position(inputs: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    return inputs, {}


def _described(
    path: Path,
    module: Any,
    inputs: Sequence[TensorSpec],
    content: Content,
    notes: Sequence[str] = (),
) -> Loaded:
    """Find the outputs of a module that came without specs, by running it."""
    if not inputs:
        raise BadInput(
            f"{path}: the file does not say what the model's inputs are",
            hint="name each: --input 'x:float32[N,3,224,224]'",
        )
    cached = _without_cache(module)
    bind, more = binding(module, [spec.name for spec in inputs])
    adapter = adapted(module.eval(), bind, len(inputs))
    outputs, feeds = describe(str(path), adapter, inputs)
    if content.source == "TorchScript":
        adapter = _traced(path, adapter, feeds)
    return Loaded(
        adapter,
        tuple(inputs),
        outputs,
        None,
        content.source,
        content.ran_pickle,
        notes=(*content.notes, *notes, *cached, *more),
    )


def _without_cache(module: Any) -> tuple[str, ...]:
    """Switch off transformers' key/value cache: an object that no graph can return."""
    configs: list[Any] = [getattr(part, "config", None) for part in module.modules()]
    using = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in using:
        config.use_cache = False
    return ("switched use_cache off in the model's config",) if using else ()


def _traced(path: Path, adapter: Any, feeds: Sequence[Any]) -> Any:
    """The adapter as TorchScript too: an exporter cannot follow from Python into TorchScript.

    The control flow inside is kept; only the adapter's own picking of outputs is traced.
    """
    with users_code(path), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # deprecated, and the only way into this format
        return torch.jit.trace(adapter, tuple(feeds), check_trace=False, strict=False)


def open_engine(
    source: ArtefactLike,
    device: str = "auto",
    threads: int | None = None,
    trust: bool = False,  # noqa: ARG001 - no code of the file runs here
) -> TorchEngine:
    """A deploykit checkpoint as an Engine. Raises BadInput for a file that does not say enough."""
    path = Path(source)
    content = read(path, allow_pickle=False)
    if content.source != "checkpoint":
        raise BadInput(
            f"{path}: is a bare state_dict, which does not say what the model is",
            hint="export it first: deploykit export FILE --arch pkg.mod:callable --input SPEC",
        )
    loaded = _from_checkpoint(path, content, None, ())
    return TorchEngine(loaded, path.name, device, threads)


class TorchEngine(BaseEngine):
    """The reference: PyTorch eager, float32."""

    def __init__(self, loaded: Loaded, where: str, device: str, threads: int | None) -> None:
        cuda = torch.cuda.is_available()
        chosen = ("cuda:0" if cuda else "cpu") if device == "auto" else device
        if chosen != "cpu" and not cuda:
            raise Unsupported(
                f"{where}: device '{device}' was asked for, but torch sees no GPU",
                hint="see: deploykit doctor",
            )
        self.inputs, self.outputs = loaded.inputs, loaded.outputs
        self.runtime = f"torch {torch.__version__}"
        self.device = chosen
        self._where = where
        with users_code(f"{where}: moving it to {chosen}"):
            self._module = loaded.module.to(chosen)
        if threads is not None:
            torch.set_num_threads(threads)  # torch keeps one number for the whole process

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if self._module is None:
            raise DeploykitError(f"{self._where}: the engine is closed")
        check_feeds(self.inputs, feeds, self._where)
        arrays = [np.require(feeds[spec.name], requirements=["C", "W"]) for spec in self.inputs]
        with users_code(f"{self._where}: the model failed"), torch.inference_mode():
            tensors = [
                torch.from_numpy(array).to(self.device, getattr(torch, spec.dtype))  # bfloat16
                for array, spec in zip(arrays, self.inputs, strict=True)
            ]
            values = [_array(value) for value in self._module(*tensors)]
        if len(values) != len(self.outputs):
            raise BadInput(
                f"{self._where}: the model returned {len(values)} tensors, "
                f"{len(self.outputs)} were announced: {', '.join(map(str, self.outputs))}"
            )
        return {spec.name: value for spec, value in zip(self.outputs, values, strict=True)}

    def close(self) -> None:
        self._module = None


def _array(tensor: Any) -> np.ndarray:
    """A copy of the caller's own; bfloat16, which numpy does not have, as float32."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    array: np.ndarray = tensor.cpu().numpy().copy()
    return array


def look(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], dict[str, Any]]:
    """Inputs and outputs, as far as the file says, and what it holds; no code of it runs.

    Raises NotFound, BadInput, MissingExtra.
    """
    if sniff(path) == "torch" and (form := torch_kind(path)) != "pickle":
        return (), (), {"kind": form, "contents": "not opened, as that may run code of the file"}
    content = read(path, allow_pickle=False)
    weights = _weights_of(path, content)
    details: dict[str, Any] = {
        "kind": content.source,
        "tensors": len(weights),
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "weight_bytes": sum(t.numel() * t.element_size() for t in weights.values()),
        "types": dict(Counter(str(t.dtype).removeprefix("torch.") for t in weights.values())),
    }
    if content.source != "checkpoint":
        return (), (), details
    loaded = load_module(path)
    return loaded.inputs, loaded.outputs, {**details, "recipe": loaded.recipe}
