"""How a text becomes a model's tokens, as its tokenizer and the files next to it say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.files import read_json, sha256
from deploykit.core.task import TextInput

_IDS = ("input_ids", "ids", "tokens")
_NO_LIMIT = 1 << 20  # what a tokenizer's configuration writes for none is far above
_USUAL_LENGTH = 512
_POSITIONS_AFTER_PADDING = ("roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "mpnet")


def ids_of(names: Sequence[str]) -> str | None:
    """Which of the inputs `names` takes token ids; None for none."""
    return next((name for name in names if name in _IDS), None)


def read_settings(folder: Path | None, name: str) -> dict[str, Any]:
    """What the JSON file `name` of `folder` holds; nothing where it is absent or no object."""
    path = folder / name if folder else None
    found = read_json(path) if path is not None and path.is_file() else {}
    return found if isinstance(found, dict) else {}


def describe_text(
    tokenizer: Path, names: Sequence[str], max_length: int | None, config: dict[str, Any]
) -> TextInput:
    """The inputs `names` of a model with this `config`, filled by `tokenizer`.

    `max_length`: the user's. Raises BadInput for a file that is no tokenizer or not the model's,
    MissingExtra without the package that opens it.
    """
    text = TextInput(
        ids=ids_of(names) or "",
        tokenizer=tokenizer.name,
        sha256=sha256(tokenizer),
        max_length=_max_length(max_length, tokenizer.parent, _positions(config)),
        mask=next((name for name in names if "mask" in name), ""),
        types=next((name for name in names if "type" in name), ""),
        pad_id=_pad_id(_read_tokenizer(tokenizer), config),
    )
    _check_vocabulary(text, tokenizer, config.get("vocab_size"))
    return text


def _check_vocabulary(text: TextInput, tokenizer: Path, size: object) -> None:
    """Raise BadInput where a text may have tokens that the model, with `size` of them, has not."""
    from deploykit.runtimes.tasks.texts import Tokens

    largest = max(Tokens(text, tokenizer.parent).largest_id, text.pad_id)
    if isinstance(size, int) and largest >= size:
        raise BadInput(
            f"{tokenizer}: has token {largest}, the model's tokens are 0 to {size - 1}",
            hint="`tokenizer`: the one that the model was trained with; after added tokens, "
            "model.resize_token_embeddings(len(tokenizer))",
        )


def _read_tokenizer(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise BadInput(f"{path}: is not a tokenizer.json of Hugging Face's tokenizers")
    return found


def _positions(config: dict[str, Any]) -> int | None:
    """The longest row of tokens that the model takes; None where nothing says so."""
    found = config.get("max_position_embeddings")
    if type(found) is not int or found < 1:
        return None
    padding = config.get("pad_token_id") or 0
    after = config.get("model_type") in _POSITIONS_AFTER_PADDING
    return found - (padding + 1 if after else 0)


def _max_length(wanted: int | None, folder: Path, positions: int | None) -> int:
    if wanted is not None and positions is not None and wanted > positions:
        raise BadInput(f"`max_length` {wanted}: the model has {positions} positions")
    stated = read_settings(folder, "tokenizer_config.json").get("model_max_length")
    trained = read_settings(folder, "sentence_bert_config.json").get("max_seq_length")
    known = (stated, trained, positions)
    limits = [each for each in known if isinstance(each, int) and 1 < each < _NO_LIMIT]
    return wanted or min(limits, default=_USUAL_LENGTH)


def _pad_id(tokenizer: dict[str, Any], config: dict[str, Any]) -> int:
    padding = tokenizer.get("padding")
    found = padding.get("pad_id") if isinstance(padding, dict) else config.get("pad_token_id")
    return found if type(found) is int and found >= 0 else 0
