"""A vector of each image or text becomes an embedding of length 1.

The vectors of a text's tokens are pooled into one as sentence-transformers does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.files import read_json
from deploykit.core.task import CLASSIFY, CLS, EMBED, MEAN
from deploykit.core.tensors import TensorSpec
from deploykit.engines.torch.loaded import Loaded
from deploykit.exporting.heads.classify import SCORES
from deploykit.exporting.heads.head import INSIDE, AnswerRule, HeadRequest, TaskHead

torch = require("torch")


_VECTORS = AnswerRule(
    ("embedding", "embeddings", "image_embeds", "text_embeds", "pooler_output", "pooled"),
)
_TOKENS = AnswerRule(
    ("last_hidden_state", "token_embeddings"), f"{INSIDE}|pooler_output", by_name=False
)
_VECTOR = "embed needs one vector for each sample, float [N,size]"
_PARTS = ("Transformer", "Pooling", "Normalize")  # modules in a folder of sentence-transformers
_NAMES = {"pooling_mode_mean_tokens": MEAN, "pooling_mode_cls_token": CLS}


def add_embedding(request: HeadRequest) -> TaskHead:
    """Add the normalisation to length 1. Raises BadInput."""
    scores = request.preset.task == CLASSIFY
    at = request.find(SCORES if scores else _VECTORS, (2, 4), _VECTOR)
    notes = request.left_out(at)
    if scores:
        notes += ("the embedding is a classifier's scores: build it without its last layer",)
    batch, size, *rest = request.loaded.outputs[at].shape
    if not isinstance(size, int) or any(each != 1 for each in rest):
        raise request.misfit(_VECTOR)

    def unit(values: Any) -> Any:
        return (torch.nn.functional.normalize(values.flatten(1).to(torch.float32), dim=1),)

    out = TensorSpec("embedding", "float32", (batch, size))
    return request.head(unit, [at], [out], notes=notes)


def with_pooling(loaded: Loaded, pooling: str | None, folder: Path | None) -> Loaded:
    """Pool the vectors of a text's tokens: the mean over the mask's tokens, or the first token's.

    If `pooling` is None, a `folder` of sentence-transformers decides, else nothing is pooled.
    Raises BadInput where no output has a vector of each token, and for an unsupported folder.
    """
    pooling = pooling or _stated_pooling(folder)
    if pooling is None:
        return loaded
    request, at = HeadRequest(loaded, EMBED), _TOKENS.find(loaded, (3,))
    if at is None:
        needs = "a vector of each token is needed, float [N,T,size]"
        raise request.misfit(needs, f"`pooling` {pooling}")
    inputs = enumerate(loaded.inputs, len(loaded.outputs))
    masks = [place for place, spec in inputs if "mask" in spec.name]

    def pool(tokens_NTD: Any, *mask_NT: Any) -> Any:
        tokens_NTD = tokens_NTD.to(torch.float32)
        if pooling == CLS:
            return (tokens_NTD[:, 0],)
        if not mask_NT:
            return (tokens_NTD.mean(1),)
        counts_NT1 = mask_NT[0].to(torch.float32).unsqueeze(-1)
        return ((tokens_NTD * counts_NT1).sum(1) / counts_NT1.sum(1).clamp(min=1e-9),)

    batch, _, size = loaded.outputs[at].shape
    out = TensorSpec("pooled", "float32", (batch, size))
    return request.head(pool, [at, *masks[:1]], [out]).loaded


def _stated_pooling(folder: Path | None) -> str | None:
    if folder is None or not (folder / "modules.json").is_file():
        return None
    listed, found = read_json(folder / "modules.json"), None
    for part in listed if isinstance(listed, list) else []:
        kind, place = (str(part.get(key, "")) for key in ("type", "path"))
        kind = kind.rpartition(".")[2]
        if kind == "Pooling":
            rule = read_json(folder / place / "config.json")
            modes = [key for key in rule if rule[key] is True and key.startswith("pooling_mode")]
            several = " and ".join(modes) or "none"
            found = rule.get("pooling_mode") or _NAMES.get("".join(modes), several)
        if kind not in _PARTS or found not in (None, MEAN, CLS):
            raise BadInput(
                f"{folder}: its part {place or kind} is not offered: {found or kind}",
                hint=f"`pooling`: {MEAN} or {CLS} of the transformer's tokens instead",
            )
    return found
