"""Export a bare module, without what `dk.export` reads of a file and proves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploykit.core.tensors import TensorSpec


def export_module(
    module: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], out: Path, **more: Any
) -> Any:
    from deploykit.engines.torch.loaded import Loaded
    from deploykit.exporting import onnx

    return onnx.export_module(Loaded(module, tuple(inputs), tuple(outputs), "module"), out, **more)
