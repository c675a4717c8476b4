"""Turn sentences into a model's token ids with its Hugging Face `tokenizers` file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deploykit.core.errors import BadInput, first_line
from deploykit.core.extras import require
from deploykit.core.files import check_inside, check_readable
from deploykit.core.task import TextInput
from deploykit.core.tensors import Bytes

tokenizers = require("tokenizers")

_BYTES = 100  # per token of the model; an English token has about four


@dataclass(frozen=True)
class Encoded:
    """The token ids of one sentence, special ones included, and the segment of each."""

    ids: Sequence[int]
    types: Sequence[int]


class Tokens:
    """Encodes sentences for one model. Raises BadInput for a file that is not the model's own."""

    def __init__(self, text: TextInput, folder: Path) -> None:
        self._text = text
        path = folder / text.tokenizer
        check_inside(folder, text.tokenizer, str(path))
        data = check_readable(path).read_bytes()
        if hashlib.sha256(data).hexdigest() != text.sha256:
            raise BadInput(
                f"{path}: is not the tokenizer that the model was exported with",
                hint="copy it again together with the model",
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as exc:  # the library raises no type of its own
            raise BadInput(f"{path}: is not a tokenizer: {first_line(exc)}") from exc
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def largest_id(self) -> int:
        return max(self._tokenizer.get_vocab().values(), default=0)

    def encode(self, text: str | Bytes, where: str = "the text") -> Encoded:
        """Encode a string. Raises BadInput if it is empty, not UTF-8 or too long for the model."""
        most = self._text.max_length
        too_long = BadInput(
            f"{where}: is above {_BYTES * most} bytes, the model takes {most} tokens"
        )
        if len(text) > _BYTES * most:  # of 60 MB each step would hold up other threads
            raise too_long
        try:
            characters = text if isinstance(text, str) else bytes(text).decode("utf-8-sig")
            size = len(characters.encode())  # half a surrogate pair, as in JSON, has no encoding
        except UnicodeError:
            raise BadInput(f"{where}: is not UTF-8") from None
        if not characters.strip():
            raise BadInput(f"{where}: is empty")
        if size > _BYTES * most:
            raise too_long
        found = self._tokenizer.encode_batch([characters])[0]  # unlike `encode` without the GIL
        if len(found.ids) > most:
            raise BadInput(f"{where}: has {len(found.ids)} tokens, the model takes {most}")
        return Encoded(found.ids, found.type_ids)

    def feeds(self, rows: Sequence[Encoded], length: int | None = None) -> dict[str, np.ndarray]:
        """Return the int64 inputs [rows, length] by name; `length` None: the longest row's."""
        text, length = self._text, length or max(len(row.ids) for row in rows)
        ids = np.full((len(rows), length), text.pad_id, np.int64)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        for at, row in enumerate(rows):
            count = len(row.ids)
            ids[at, :count], mask[at, :count], types[at, :count] = row.ids, 1, row.types
        named = {text.ids: ids, text.mask: mask, text.types: types}
        return {name: array for name, array in named.items() if name}
