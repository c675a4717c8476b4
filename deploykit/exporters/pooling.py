"""One vector for a text of the vectors of its tokens, as sentence-transformers pools them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.files import read_json
from deploykit.core.task import CLS, MEAN
from deploykit.core.tensors import TensorSpec
from deploykit.exporters.known_outputs import TOKENS, find_answer, misfit
from deploykit.runtimes.torch.loaded import Loaded, by_position
from deploykit.runtimes.torch.outputs import adapt

torch = require("torch")


_TAKEN = ("Transformer", "Pooling", "Normalize")  # parts of such a folder
_NAMES = {"pooling_mode_mean_tokens": MEAN, "pooling_mode_cls_token": CLS}


def with_pooling(loaded: Loaded, pooling: str | None, folder: Path | None) -> Loaded:
    """`loaded` with one vector [N,size]: the mean over the mask's tokens, or the first token's.

    `pooling` None: as `folder` of sentence-transformers says, else `loaded` itself. Raises BadInput
    where no output has a vector of each token, and for what the folder asks and this does not do.
    """
    pooling = pooling or _stated(folder)
    if pooling is None:
        return loaded
    at = find_answer(loaded, TOKENS, (3,))
    if at is None:
        needs = "a vector of each token is needed, float [N,T,size]"
        raise misfit(loaded, f"`pooling` {pooling}", needs)
    masks = [place for place, spec in enumerate(loaded.inputs) if "mask" in spec.name]
    pooled = _Pooled(loaded.module, at, masks[0] if masks else None, mean=pooling == MEAN)
    batch, _, size = loaded.outputs[at].shape
    module = adapt(pooled.eval(), by_position, len(loaded.inputs))
    return replace(loaded, module=module, outputs=(TensorSpec("pooled", "float32", (batch, size)),))


class _Pooled(torch.nn.Module):  # type: ignore[misc, name-defined] # torch comes through require
    def __init__(self, module: Any, at: int, mask: int | None, *, mean: bool) -> None:
        super().__init__()
        self.module = module
        self.at = at
        self.mask = mask
        self.mean = mean

    def forward(self, *inputs: Any) -> Any:
        tokens_NTD = self.module(*inputs)[self.at].to(torch.float32)
        if not self.mean:
            return (tokens_NTD[:, 0],)
        if self.mask is None:
            return (tokens_NTD.mean(1),)
        counts_NT1 = inputs[self.mask].to(torch.float32).unsqueeze(-1)
        return ((tokens_NTD * counts_NT1).sum(1) / counts_NT1.sum(1).clamp(min=1e-9),)


def _stated(folder: Path | None) -> str | None:
    file = folder / "modules.json" if folder else None
    if folder is None or file is None or not file.is_file():
        return None
    listed, found = read_json(file), None
    for part in listed if isinstance(listed, list) else []:
        kind, place = (str(part.get(key, "")) for key in ("type", "path"))
        kind = kind.rpartition(".")[2]
        if kind == "Pooling":
            rule = read_json(folder / place / "config.json")
            found = rule.get("pooling_mode") or _only([n for n in rule if rule[n] is True])
        if kind not in _TAKEN or found not in (None, MEAN, CLS):
            raise BadInput(
                f"{folder}: its part {place or kind} is not offered: {found or kind}",
                hint=f"`pooling`: {MEAN} or {CLS} of the transformer's tokens instead",
            )
    return found


def _only(modes: list[str]) -> str:
    modes = [each for each in modes if each.startswith("pooling_mode")]
    return _NAMES.get("".join(modes), " and ".join(modes) or "none")
