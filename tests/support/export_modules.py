"""Export a bare module, without what `dk.export` reads of a file and proves."""

from __future__ import annotations

from typing import Any


def export_module(module: Any, inputs: Any, outputs: Any, *places: Any, **options: Any) -> Any:
    from deploykit.engines.torch.loaded import Loaded
    from deploykit.exporting import onnx

    loaded = Loaded(module, tuple(inputs), tuple(outputs), "module")
    return onnx.export_module(loaded, *places, **options)
