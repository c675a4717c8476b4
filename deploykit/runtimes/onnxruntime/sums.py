"""Exact sums of 8-bit products: what ONNX Runtime needs for them, and where it cannot give them."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

from deploykit.core.errors import Unsupported
from deploykit.core.machine import cpu_features, file_text
from deploykit.runtimes.onnxruntime.file import multiplies_integers

# x86-64 without VNNI or AMX adds pairs of uint8 x int8 products in 16 bits and cuts what does not
# fit. With this, ONNX Runtime stores the weights as uint8 there when it optimises (seen on AVX2:
# 17 dB -> exact, 1.35 x the time). 1.32.0 does so on CPUs with VNNI too, whose sums are exact
# without it: there it cost ResNet-18 2.1 x the time for the same bits. Source: its
# onnxruntime_session_options_config_keys.h and "Quantize ONNX Models", "U8U8".
EXACT_INTEGERS = "session.x64quantprecision"
UNSHARED = "ONNX Runtime runs them in float32, or rounds their sums, on a CPU without VNNI"
# before it, not for activations that are scaled in each call (9 to 31 dB with 1.23 to 1.29)
_EXACT_FOR_ALL = (1, 30)


def cuts_sums(version: str) -> bool:
    """Whether ONNX Runtime `version`, on this CPU, adds MatMulInteger's products in 16 bits."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    return numbers < _EXACT_FOR_ALL and not adds_exactly()


def rounds_sums(options: Any) -> bool:
    """Whether a session was opened without what exact sums need on this CPU."""
    return bool(options.get_session_config_entry(EXACT_INTEGERS) == "0") and not adds_exactly()


def adds_exactly() -> bool:
    """Whether this CPU has instructions that add 8-bit products without a sum in 16 bits."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    features = cpu_features(file_text(Path("/proc/cpuinfo")))
    return not {"avx512_vnni", "avx_vnni"}.isdisjoint(features)


def check_sums(path: Path, version: str) -> None:
    """Raise Unsupported for a model whose sums would be wrong here."""
    if cuts_sums(version) and multiplies_integers(path, scaled_in_each_call=True):
        raise Unsupported(
            f"{path}: ONNX Runtime {version} cuts the sums of this model's INT8 products "
            "on a CPU without VNNI",
            hint="pip install 'onnxruntime>=1.30' (from Python 3.11 on)",
        )
