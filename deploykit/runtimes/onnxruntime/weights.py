"""Read the external weights of an `.onnx` file, each file whole."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from deploykit.core.errors import BadInput, os_reason, quote
from deploykit.core.files import check_data_file, open_readable
from deploykit.runtimes.onnxruntime.file import external_spans, stored_twice

_NUMBER = re.compile(r"[0-9]{1,18}")


def external_weights(path: Path) -> dict[str, np.ndarray]:
    """The bytes of each external weights file, by its location in the model.

    ONNX Runtime would map the file, and truncating it would end the process (SIGBUS).
    """
    found = {}
    twice = stored_twice(path)
    if twice:
        raise BadInput(
            f"{path}: two initializers have the name '{twice}'",
            hint="which of them counts is not defined: rename one, or export it again",
        )
    # ONNX Runtime 1.23 reads any file, later ones follow hard links
    for location, offset, length in external_spans(path):
        where = f"{path}: its weights"
        size = check_data_file(path, location, where).st_size
        numbers = [offset or "0", length or "0"]
        if not all(_NUMBER.fullmatch(each) for each in numbers) or sum(map(int, numbers)) > size:
            raise BadInput(
                f"{where}: {quote(location)} has {size} bytes, the model wants offset "
                f"{quote(offset)}, length {quote(length)}"
            )
        if location in found:
            continue
        try:
            with open_readable(path.parent / location) as handle:
                found[location] = np.fromfile(handle, np.uint8)
        except OSError as exc:
            raise BadInput(f"{where}: {location}: {os_reason(exc)}") from exc
    return found
