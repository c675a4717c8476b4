"""TensorRT's timing cache: what was measured of kernels, kept between builds.

In: which TensorRT, GPU and driver. Out: a file in the cache folder, read with tolerance and
replaced whole. Two builds that start from the same cache choose the same kernels, unless they meet
one that was not timed before.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.builders.tensorrt.errors import NO_DRIVER
from deploykit.builders.tensorrt.module import collected, maybe
from deploykit.core.errors import BadInput, DeploykitError, os_reason
from deploykit.core.files import atomic_write, cache_folder, make_folder
from deploykit.core.machine import Machine

if TYPE_CHECKING:
    import tensorrt as trt


def cache_path(tensorrt: str, here: Machine) -> Path | None:
    """Where the cache of this TensorRT, GPU and driver is kept; None where there is no GPU."""
    gpu = here.gpus[0] if here.gpus else None
    name = gpu.name if gpu else here.board  # nvidia-smi came late to Jetson
    driver = gpu.driver if gpu else here.l4t
    if name is None or driver is None:
        return None
    parts = (tensorrt, name, driver, here.power_mode or "")
    file = "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts if part)
    return cache_folder() / "timing" / f"{file}.cache"


def use_cache(nv: Any, config: trt.IBuilderConfig, path: Path) -> tuple[bool, str, tuple[str, ...]]:
    """Give `config` the cache at `path`, an empty one if there is none.

    Returns whether what it holds after the build is to be kept, the SHA-256 of what was taken
    (empty if nothing was), and what to note: a file that was refused is replaced, unless it was
    refused for want of a driver. Raises BadInput when the file is there and cannot be read.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as exc:
        raise BadInput(f"{path}: the timing cache cannot be read: {os_reason(exc)}") from exc
    with collected(nv) as lines:
        cache = maybe(config.create_timing_cache(content))
        taken = cache is not None and config.set_timing_cache(cache, False)
        if not taken and content:
            config.set_timing_cache(config.create_timing_cache(b""), False)
    if not content or (taken and not told_of_cache(lines.errors + lines.warnings)):
        return True, hashlib.sha256(content).hexdigest() if content else "", ()
    if any(NO_DRIVER in line for line in lines.errors):
        return (
            False,
            "",
            (f"{path}: the timing cache is not used: no NVIDIA driver on this machine",),
        )
    why = "damaged, or of another TensorRT or GPU"
    return True, "", (f"{path}: the timing cache was refused ({why}), started with an empty one",)


def told_of_cache(log: Sequence[str]) -> bool:
    """Whether the log complains of the timing cache: it is told nowhere else."""
    return any("timing cache" in line.lower() for line in log)


def keep_cache(config: trt.IBuilderConfig, path: Path) -> tuple[str, tuple[str, ...]]:
    """Write what the build has timed to `path`; returns its SHA-256 and what to note.

    A cache that cannot be written spoils no build: it is noted, and the hash is of what would be.
    """
    cache = maybe(config.get_timing_cache())
    if cache is None:
        return "", ()
    content = bytes(memoryview(cache.serialize()))
    digest = hashlib.sha256(content).hexdigest()
    try:
        make_folder(path.parent)
        with atomic_write(path) as tmp:
            tmp.write_bytes(content)
    except DeploykitError as exc:
        return digest, (f"the timing cache was not kept: {exc.message}",)
    return digest, ()
