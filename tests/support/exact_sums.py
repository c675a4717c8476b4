"""A mark for tests of models whose INT8 sums an older ONNX Runtime cuts on a CPU without VNNI."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from deploykit.runtimes.onnxruntime.sums import cuts_sums

needs_exact_sums = pytest.mark.skipif(
    cuts_sums(version("onnxruntime")),
    reason="this ONNX Runtime cuts sums on a CPU without VNNI: refused",
)
