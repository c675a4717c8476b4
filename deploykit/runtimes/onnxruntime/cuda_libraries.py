"""Load the CUDA libraries that ONNX Runtime's provider is linked to, from NVIDIA's wheels.

`onnxruntime.preload_dlls` looks next to onnxruntime's own folder, then on the loader's path. Wheels
in another folder of sys.path (`pip install --target`, a second site-packages) are loaded here.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_OF_MAJOR = ("cudart", "nvrtc", "cublasLt", "cublas")  # their file names end with CUDA's major
_OTHERS = ("nvJitLink", "curand", "cufft", "cudnn")


def preload(
    ort: Any,
    folders: Sequence[str] | None = None,
    load: Callable[[str], object] = ctypes.CDLL,
) -> None:
    """Load what is found; what is missing is reported when the provider does not load.

    `folders`: sys.path. Does nothing in an ONNX Runtime without CUDA or older than 1.21.
    """
    if not hasattr(ort, "preload_dlls"):
        return
    major = str(getattr(ort, "cuda_version", "") or "").partition(".")[0]
    next_to = Path(ort.__file__).parent.parent
    for folder in map(Path, sys.path if folders is None else folders):
        if folder != next_to:
            for library in _libraries(folder / "nvidia", major):
                with contextlib.suppress(OSError):  # another one of this name may load
                    load(str(library))
    with contextlib.redirect_stdout(sys.stderr):  # it prints what it cannot load
        ort.preload_dlls()


def _libraries(nvidia: Path, major: str) -> list[Path]:
    """In the order in which they need one another."""
    found = []
    for name in (*_OF_MAJOR, *_OTHERS):
        for path in sorted(nvidia.glob(f"*/lib/lib{name}.so.*")):
            suffix = re.fullmatch(r"(\d+)", path.name.partition(".so.")[2])
            if suffix and (name not in _OF_MAJOR or suffix[1] == major):
                found.append(path)
    return found
