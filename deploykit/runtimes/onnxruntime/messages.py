"""What ONNX Runtime's errors say, without its C++ functions and files."""

from __future__ import annotations

import re

from deploykit.core.errors import first_line

_NODE = re.compile(r"running (\w+) node. Name:'(.*?)' Status Message: ")
_MASK_CURE = "ONNX Runtime needs masks of [.., queries, keys]: put an Expand before the Attention"


def reason(exc: Exception) -> str:
    """Its first line; of a node that failed, its name and operator first."""
    text = first_line(exc)
    node = _NODE.search(text)
    _, checked, why = text.rpartition(" was false. ")
    if not (checked and why):
        return text
    return f"node '{node[2]}' ({node[1]}): {why}" if node else why


def cure(exc: Exception) -> str | None:
    """What to change in the model, where that is known."""
    return _MASK_CURE if "attn_mask" in str(exc) else None
