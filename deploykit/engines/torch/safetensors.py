"""Read a `.safetensors` file: tensors by name, no code.

The library checks the header before it trusts it: its length, that each tensor's dtype, shape and
place agree, and that the places neither overlap nor leave gaps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput, first_line
from deploykit.core.extras import require

safetensors = require("safetensors")
load_file = require("safetensors.torch").load_file


def read(path: Path) -> dict[str, Any]:
    """The tensors at `path` by name. Raises BadInput for a damaged or hostile file."""
    try:
        tensors: dict[str, Any] = load_file(str(path), device="cpu")
    except (safetensors.SafetensorError, RuntimeError, ValueError, OSError, LookupError) as exc:
        raise BadInput(f"{path}: is a damaged .safetensors file: {first_line(exc)}") from exc
    if not tensors:
        raise BadInput(f"{path}: holds no tensors")
    return tensors
