"""Open what `export` takes, a live module, a file or a folder, and record where it came from."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.core.artefact import ArtefactLike, sniff, wrong_format
from deploykit.core.errors import BadInput
from deploykit.core.evidence import SourceRecord
from deploykit.core.files import check_readable, sha256
from deploykit.core.tensors import parse_spec
from deploykit.engines.data.examples import Example

if TYPE_CHECKING:
    import numpy as np
    import torch

    from deploykit.engines.torch.loaded import Loaded

    DynamicAxes = Mapping[str, Mapping[int, str]]
    Tensors = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ExportSource:
    """A model and where it came from.

    `path`: its file or folder; None for a live module.
    """

    name: str
    loaded: Loaded
    hashes: tuple[str, ...]
    record: SourceRecord
    path: Path | None = None


def check_source(model: object) -> None:
    """Look at a model's file before anything else is. Raises NotFound or BadInput."""
    if not isinstance(model, (str, os.PathLike)):
        return
    path = Path(model)
    kind = "a folder" if path.is_dir() else sniff(path)
    if kind not in ("a folder", "torch", "safetensors"):
        raise wrong_format(path, kind, "a PyTorch file or a Hugging Face folder")


def open_source(
    model: ArtefactLike | torch.nn.Module,
    example: Tensors | None,
    inputs: Sequence[str],
    dynamic_axes: DynamicAxes | None,
    arch: str | None,
    allow_pickle: bool,
) -> ExportSource:
    from deploykit.engines.torch import loaded as live
    from deploykit.engines.torch import open as runtime

    feeds: dict[str, np.ndarray] = {}
    most: dict[str, int] = {}
    specs = tuple(parse_spec(_without_most(text, most)) for text in inputs)
    if isinstance(example, (str, os.PathLike)):
        raise BadInput("`example_inputs` is a path: the file to write is `out`", hint="out=...")
    if example is not None and specs:
        raise BadInput("`example_inputs` and `inputs` both describe the inputs: give one")
    if dynamic_axes is not None and example is None:
        raise BadInput("`dynamic_axes` needs `example_inputs`", hint="`inputs` names axes itself")
    if example is not None:
        named = {
            name: {place: _without_most(axis, most) for place, axis in axes.items()}
            for name, axes in (dynamic_axes or {}).items()
        }
        specs, feeds = live.specs_from(model, example, named)
    given = Example(feeds, most)
    if not isinstance(model, (str, os.PathLike)):
        if not live.is_module(model):
            kind = type(model).__name__
            raise BadInput(f"`model` is a {kind}: a path or an nn.Module is needed")
        name, weights = live.name_of(model), live.hash_weights(model)
        loaded = live.load_live(model, specs, given)
        record = SourceRecord(loaded.source, weights, False, name, notes=loaded.notes)
        return ExportSource(name.rpartition(".")[2], loaded, (weights,), record)
    path = Path(model)
    loaded = runtime.load_module(
        path, arch=arch, inputs=specs, allow_pickle=allow_pickle, example=given
    )
    hashes = tuple(map(sha256, runtime.weight_files(path) if path.is_dir() else [path]))
    code = Path((arch or "").rpartition(":")[0])  # the user's own file; else a package's module
    record = SourceRecord(
        loaded.source,
        hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest(),
        loaded.ran_pickle,
        loaded.model_class,
        arch,
        sha256(check_readable(code)) if code.suffix == ".py" else None,
        loaded.notes,
    )
    return ExportSource(path.name, loaded, hashes, record, path)


def _without_most(text: str, most: dict[str, int]) -> str:
    """Return `text` with "T" in place of each "T<=32", and keep that size in `most`.

    Raises BadInput for a size that is not a number of 2 or more, or differs from an earlier one.
    """

    def keep(match: re.Match[str]) -> str:
        axis, size = match[1], match[2]
        known = most.setdefault(axis, int(size) if size.isdigit() else 0)
        if known < 2 or str(known) != size:
            raise BadInput(
                f"'{text}': the largest size of axis {axis} is a number of 2 or more, one for all",
                hint="'ids:int64[N,T<=512]'",
            )
        return axis

    return re.sub(r"(\w+)\s*<=\s*(\w*)", keep, text)
