"""The module `tensorrt` of the rig: TensorRT for RTX under TensorRT's name.

`rig.py` copies this file to `tensorrt/__init__.py`. The version is that of the TensorRT whose
classes and members these are, but for plugins of users, DLA and auto-tuning, which RTX lacks.
"""

from __future__ import annotations

from tensorrt_rtx_bindings import *  # noqa: F403 - what NVIDIA's own package does

IS_RTX_RIG = True
__version__ = "11.4.0.106"
