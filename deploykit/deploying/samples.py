"""Golden samples as the bytes that a server takes: for warm-up and for the first request."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from deploykit.engines.data.samples import INPUTS, read_npz
from deploykit.evaluation.bundle_folder import Contents


def sample_rows(contents: Contents, model: Path, *, joined: bool) -> dict[str, np.ndarray]:
    """The golden samples next to the copied `model`, by input: one row if `joined`, else all."""
    arrays = read_npz(Path(f"{model}.golden.npz"))
    inputs = {spec.name: arrays[INPUTS + spec.name] for spec in contents.manifest.inputs}
    return {name: array[:1] for name, array in inputs.items()} if joined else inputs


def raw_bytes(array: np.ndarray, dtype: str) -> bytes:
    """An array of a model's `dtype` in the Open Inference Protocol's binary form.

    Little-endian; strings with their lengths before them; bfloat16 is the upper half of a float32.
    """
    if dtype == "string":
        values = (str(value).encode() for value in array.reshape(-1))
        return b"".join(len(value).to_bytes(4, "little") + value for value in values)
    if dtype == "bfloat16":
        return (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
