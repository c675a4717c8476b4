"""Turn sentences into a model's token ids with its Hugging Face `tokenizers` file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from deploykit.core.errors import BadInput, first_line
from deploykit.core.extras import require
from deploykit.core.files import check_inside, check_readable
from deploykit.core.task import TextInput
from deploykit.core.tensors import Bytes

tokenizers = require("tokenizers")

_BYTES = 100  # per token of the model; an English token has about four


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

    def feeds(
        self, text: str | Bytes, where: str = "the text", length: int | None = None
    ) -> dict[str, np.ndarray]:
        """Encode a string to the int64 inputs [1, length] by name.

        `length`: the tokens that the row is filled up to, None for its own number. Raises BadInput
        if the string is empty, not UTF-8 or too long for the model.
        """
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
        names, count = self._text, len(found.ids)
        ids = np.full((1, length or count), names.pad_id, np.int64)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        ids[0, :count], mask[0, :count], types[0, :count] = found.ids, 1, found.type_ids
        arrays = {names.ids: ids, names.mask: mask, names.types: types}
        return {name: array for name, array in arrays.items() if name}
