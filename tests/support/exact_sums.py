"""A mark for tests of models whose INT8 sums an older ONNX Runtime cuts on a CPU without VNNI."""

from __future__ import annotations

import pytest

from deploykit.engines.onnxruntime.file import cuts_sums

try:
    from onnxruntime import __version__ as VERSION
except ImportError:
    VERSION = "99"

needs_exact_sums = pytest.mark.skipif(
    cuts_sums(VERSION), reason="this ONNX Runtime cuts sums on a CPU without VNNI: refused"
)
